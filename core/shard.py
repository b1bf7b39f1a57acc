"""A softmax over a vocabulary that may lie in several places: its sums, its gradient, and what shards must share.

The caller brings the reduction, so there is no collective in here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .shapes import PerToken


class Sums(NamedTuple):
    """What a softmax needs to know about its logits z, per token.

    Args:
        maximum: about max z: any number that keeps the others in range.
        total: sum of exp(z - maximum).
        weighted: sum of exp(z - maximum) * (z - maximum).
        target: z of the label; 0 in a shard that does not hold it.
        held: 1 where a shard holds the label, 0 where none does.
    """

    maximum: PerToken
    total: PerToken
    weighted: PerToken
    target: PerToken
    held: PerToken


class Shard(NamedTuple):
    """Which rows of the head are here, and how the sums of all shards come together.

    Args:
        first_id: token id of the first row.
        combine: from the sums of this shard to those of all: gather, then `combine_sums`.
    """

    first_id: int
    combine: Callable[[Sums], Sums]


def combine_sums(parts: Sequence[Sums]) -> Sums:
    """The sums over all shards from those of each."""
    stacked = Sums(*(torch.stack(column) for column in zip(*parts)))
    softmax = _combined(stacked.maximum, stacked.total, stacked.weighted, dim=0)
    return Sums(*softmax, stacked.target.sum(0), stacked.held.sum(0))


def _all_here(sums: Sums) -> Sums:
    return sums


WHOLE = Shard(first_id=0, combine=_all_here)
"""The whole vocabulary in one place."""


def logprob_and_entropy(sums: Sums) -> tuple[PerToken, PerToken]:
    """Of the label, NaN where no shard holds it, and of the whole distribution in nats, from the sums of all."""
    spread = sums.total.log()
    logprob = (sums.target - sums.maximum - spread).clamp(max=0)
    return torch.where(sums.held > 0, logprob, torch.nan), spread - sums.weighted / sums.total


def shard_sums(logits: Tensor, hidden: Tensor, head: Tensor, place: Tensor, temperature: float) -> Sums:
    """The sums of this shard, with the label's own logit in a wide dtype whatever that of the others.

    Args:
        logits: `[T, V]` of the shard, not yet over the temperature.
        hidden, head: what they were made from.
        place: row of the label in `head`, outside of it where another shard has it.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    column = place.clamp(0, logits.shape[1] - 1)
    rounded = logits.gather(1, column[:, None]).squeeze(1).to(wide)
    exact = (hidden.to(wide) * head[column].to(wide)).sum(1)
    plain = _softmax_sums(logits, temperature=temperature, dtype=wide)
    return _with_exact_label(plain, rounded / temperature, exact / temperature, column == place)


def log2_total(sums: Sums) -> PerToken:
    """log2 of the sum of exp(z), from the sums over all shards: powers of two are what a GPU computes."""
    return sums.maximum / math.log(2) + sums.total.log2()


def softmax_gradient(
    logits: Tensor, total: PerToken, weight: PerToken, temperature: float, dtype: torch.dtype
) -> Tensor:
    """-weight * softmax, `[T, V]`; the label's own column is still to be set.

    Args:
        total: `log2_total`, computed beforehand, or a compiler would repeat it for every logit.
        weight: slope over temperature.
    """
    share = (logits.to(total.dtype) * (1 / (temperature * math.log(2))) - total[:, None]).exp2()
    return (share * -weight[:, None]).to(dtype)


def overwrite_by_gradient(logits: Tensor, *facts: Any) -> Tensor:
    """`softmax_gradient` in the place of the logits."""
    return logits.copy_(softmax_gradient(logits, *facts))


def set_label_gradient(gradient: Tensor, place: Tensor, logprob: Tensor, weight: Tensor) -> None:
    """weight * (1 - share) in the label's column, where this shard holds it."""
    column = place.clamp(0, gradient.shape[1] - 1)[:, None]
    own = (-torch.expm1(logprob) * weight).to(gradient.dtype)[:, None]
    gradient.scatter_(1, column, torch.where(column == place[:, None], own, gradient.gather(1, column)))


def _softmax_sums(logits: Tensor, *, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, total and weighted of `[T, V]` logits over the temperature, as in `Sums`.

    Each logit is read once: in blocks that a compiler can hold in registers, whose sums are then combined.
    """
    tokens, vocabulary = logits.shape
    block = _block(vocabulary)
    scaled = (logits.to(dtype) * (1 / (temperature * math.log(2)))).reshape(
        tokens, vocabulary // block, block
    )
    maximum = scaled.amax(2)
    below = scaled - maximum[:, :, None]
    share = below.exp2()
    maximum, total, weighted = _combined(
        maximum * math.log(2), share.sum(2), (share * below).sum(2) * math.log(2), dim=1
    )
    return maximum, total, weighted


def _with_exact_label(
    sums: tuple[Tensor, Tensor, Tensor], rounded: PerToken, exact: PerToken, held: PerToken
) -> Sums:
    """The sums with the label's logit as it is, in the place of the one that its dtype rounded.

    Args:
        rounded, exact: the label's logit over the temperature.
        held: whether this shard has the label.
    """
    maximum, total, weighted = sums
    new, old = exact - maximum, rounded - maximum
    higher = new.clamp(min=0)
    # Without the label nothing is negative but by rounding; where it is all there is, the rest is that rounding.
    rest, rest_weighted = (total - old.exp()).clamp(min=0), weighted - old * old.exp()
    rest_weighted = (rest_weighted - rest * higher) * (-higher).exp()
    own = (new - higher).exp()
    return Sums(
        maximum=torch.where(held, maximum + higher, maximum),
        total=torch.where(held, rest * (-higher).exp() + own, total),
        weighted=torch.where(held, rest_weighted + own * (new - higher), weighted),
        target=torch.where(held, exact, 0.0),
        held=held.to(maximum.dtype),
    )


def _combined(maximum: Tensor, total: Tensor, weighted: Tensor, *, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of parts, each relative to its own maximum, brought to one maximum and added up."""
    highest = maximum.amax(dim)
    below = maximum - highest.unsqueeze(dim)
    share = below.exp()
    return highest, (total * share).sum(dim), ((weighted + total * below) * share).sum(dim)


def _block(vocabulary: int) -> int:
    """The largest power of two up to 1024 that divides the vocabulary, or all of it if that is below 32."""
    power = math.gcd(vocabulary, 1024)
    return power if power >= 32 else vocabulary
