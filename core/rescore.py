"""Which rescorings of the same tokens close a gap: the trainer's logprobs under another hypothesis, in its place."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from .shapes import PerToken


class Rescored(NamedTuple):
    """The set of rescorings that leaves least of the gap.

    Args:
        residual: what is left of each difference.
        share: [1 + n], the part of sum |difference| that each closes, the fitted one first; 0 if unused.
        shift: [1 + n, T], what each adds to a difference; 0 if unused.
        slope: of the fitted one, 0 if unused.
    """

    residual: PerToken
    share: Tensor
    shift: Tensor
    slope: Tensor


def rescored(
    difference: PerToken, shift: Tensor, direction: PerToken, fit: Tensor, *, min_share: float
) -> Rescored:
    """Every set of given shifts, with and without one fitted along a direction: least sum |what is left|.

    A rescoring enters when it closes at least `min_share` of the gap beyond what the others close. Shifts add
    up, which is exact to first order. What several close together is dealt out in proportion to what each
    closes last.

    Args:
        difference: logprob - rollout_logprob, 0 where unusable.
        shift: [n, T], logprob under each hypothesis - logprob.
        direction: derivative of the difference with respect to what is fitted.
        fit: bool scalar, whether fitting is allowed.
        min_share: of sum |difference|.
    """
    count = len(shift)
    # Row k of `used` is k in binary, so that leaving out what column j stands for is k - 2^(count - j).
    used = difference.new_tensor(list(product((0, 1), repeat=count + 1)))
    plain = difference + used[: 2**count, 1:] @ shift
    slope = weighted_median(plain, direction)
    along = -slope[:, None] * direction
    left = torch.cat([plain, plain + along])
    total, whole = left.abs().sum(1), difference.abs().sum()
    price = torch.where((used[:, 0] > 0) & ~fit, torch.inf, min_share * whole * used.sum(1))
    best = (total + price).argmin()[None]
    chosen = used[best].squeeze(0)
    step = torch.tensor([2 ** (count - j) for j in range(count + 1)], device=best.device)
    last = total[best - step * chosen.long()] - total[best]
    closed = last * (whole - total[best]) / torch.where(last.sum() > 0, last.sum(), 1.0)
    fitted = best % 2**count
    return Rescored(
        residual=left[best].squeeze(0),
        share=closed / torch.where(whole > 0, whole, 1.0),
        shift=torch.where(chosen[:, None] > 0, torch.cat([along[fitted], shift]), 0.0),
        slope=torch.where(chosen[0] > 0, slope[fitted].squeeze(0), 0.0),
    )


def weighted_median(value: Tensor, direction: Tensor) -> Tensor:
    """The slope a that makes sum |value - a * direction| least: the median of value / direction, weighted.

    It is 0 as soon as tokens with more than half of sum |direction| have no difference: what hits a part of the
    tokens never looks like what hits all.

    Args:
        value: [K, T].
        direction: [T]; a token where it is 0 has no say.
    """
    direction = direction.expand_as(value)
    ordered, order = torch.where(direction != 0, value / direction, 0.0).sort(dim=1)
    weight = direction.abs().gather(1, order).cumsum(1)
    middle = (weight < weight[:, -1:] / 2).sum(1, keepdim=True)
    return ordered.gather(1, middle).squeeze(1)
