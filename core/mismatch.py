"""How far the trainer's logprobs are from the sampler's on the same tokens, in sums that add up over a split.

Reduce the sums over micro-batches and ranks first, divide once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .shapes import check_float, check_record
from .surrogate import check_shapes, detached_log_ratio


class MismatchSums(NamedTuple):
    """Sums over the usable tokens: in the mask, two finite logprobs, a ratio that does not overflow.

    d = logprob - rollout_logprob. What an engine writes for no logprob at all, such as -9999, has no such ratio.

    Args:
        token_count: usable tokens.
        unusable_count: the other tokens in the mask.
        absolute: |d|.
        k1: -d, whose mean estimates KL(rollout || trainer).
        k3: exp(d) - 1 - d, the same with less variance, never negative.
        ratio: exp(d).
        ratio_square: exp(2d).
        multiplicative: exp(|d|).
        probability: |exp(logprob) - exp(rollout_logprob)|.
        logprob: of the trainer.
        rollout_logprob: of the sampler.
    """

    token_count: Tensor
    unusable_count: Tensor
    absolute: Tensor
    k1: Tensor
    k3: Tensor
    ratio: Tensor
    ratio_square: Tensor
    multiplicative: Tensor
    probability: Tensor
    logprob: Tensor
    rollout_logprob: Tensor


class Mismatch(NamedTuple):
    """Means over tokens, and what follows from them.

    Args:
        effective_share: (sum of ratio)^2 / (count * sum of ratio^2), 1 when all ratios agree.
        perplexity: exp(-mean logprob) of the trainer; the sampler's beside it.
    """

    absolute: Tensor
    k1: Tensor
    k3: Tensor
    ratio: Tensor
    multiplicative: Tensor
    probability: Tensor
    effective_share: Tensor
    perplexity: Tensor
    rollout_perplexity: Tensor


def mismatch_sums(logprob: Tensor, rollout_logprob: Tensor, loss_mask: Tensor) -> MismatchSums:
    """The sums of one micro-batch, any shape. Nothing is read where `loss_mask` is False.

    Raises:
        ValueError: if the three differ in shape, or the mask is not bool.
    """
    check_shapes(logprob=logprob, rollout_logprob=rollout_logprob, loss_mask=loss_mask)
    d, usable = _difference(logprob, rollout_logprob, loss_mask)
    trainer, sampler = (torch.where(usable, x, 0.0).detach().to(d.dtype) for x in (logprob, rollout_logprob))

    def total(term: Tensor) -> Tensor:
        return torch.where(usable, term, 0.0).sum()

    return MismatchSums(
        token_count=usable.sum().to(d.dtype),
        unusable_count=(loss_mask & ~usable).sum().to(d.dtype),
        absolute=total(d.abs()),
        k1=total(-d),
        k3=total(torch.expm1(d) - d),
        ratio=total(d.exp()),
        ratio_square=total((2 * d).exp()),
        multiplicative=total(d.abs().exp()),
        probability=total((trainer.exp() - sampler.exp()).abs()),
        logprob=total(trainer),
        rollout_logprob=total(sampler),
    )


def add_sums(one: MismatchSums, other: MismatchSums) -> MismatchSums:
    """The sums of two parts together."""
    check_record(MismatchSums, one=one, other=other)
    check_float(**one._asdict())
    check_float(**other._asdict())
    return MismatchSums(*(a + b for a, b in zip(one, other, strict=True)))


def mismatch(sums: MismatchSums) -> Mismatch:
    """Means of what was summed; NaN, not 0, where there was no token."""
    check_record(MismatchSums, sums=sums)
    check_float(**sums._asdict())
    count = torch.where(sums.token_count > 0, sums.token_count, torch.nan)
    return Mismatch(
        absolute=sums.absolute / count,
        k1=sums.k1 / count,
        k3=sums.k3 / count,
        ratio=sums.ratio / count,
        multiplicative=sums.multiplicative / count,
        probability=sums.probability / count,
        effective_share=sums.ratio.square() / (count * sums.ratio_square),
        perplexity=(-sums.logprob / count).exp(),
        rollout_perplexity=(-sums.rollout_logprob / count).exp(),
    )


def is_healthy(gap: Mismatch, *, bound: float) -> Tensor:
    """Whether the mean of |d| stays below the bound (the article's is 0.03): bool; False where there was no token."""
    if not 0 < bound < math.inf:
        raise ValueError(f"bound must be positive and finite, got {bound}")
    check_record(Mismatch, gap=gap)
    check_float(absolute=gap.absolute)
    return gap.absolute < bound


class WorstTokens(NamedTuple):
    """The tokens with the largest |d|, largest first, equal ones in the order of their index.

    Args:
        token_index: into the flattened batch; -1 where there are fewer tokens than places.
        difference: d of each; 0 where there is none.
    """

    token_index: Tensor
    difference: Tensor


def worst_tokens(logprob: Tensor, rollout_logprob: Tensor, loss_mask: Tensor, *, count: int) -> WorstTokens:
    """The `count` tokens on which trainer and sampler differ most, of those that `mismatch_sums` counts.

    Nothing is read where `loss_mask` is False. The worst of several micro-batches are the worst of their worst.

    Raises:
        ValueError: as `mismatch_sums`, or if count does not lie between 1 and the number of entries.
    """
    check_shapes(logprob=logprob, rollout_logprob=rollout_logprob, loss_mask=loss_mask)
    if not 1 <= count <= loss_mask.numel():
        raise ValueError(f"count must lie between 1 and {loss_mask.numel()}, got {count}")
    d, usable = (x.flatten() for x in _difference(logprob, rollout_logprob, loss_mask))
    size = torch.where(usable, d.abs(), -1.0)
    index = size.argsort(descending=True, stable=True)[:count]
    present = usable[index]
    return WorstTokens(torch.where(present, index, -1), torch.where(present, d[index], 0.0))


def _difference(logprob: Tensor, rollout_logprob: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    return detached_log_ratio(logprob, rollout_logprob, loss_mask & logprob.isfinite())
