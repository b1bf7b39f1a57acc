"""A softmax over a vocabulary that may lie in several places: what each shard must tell the others.

The caller brings the reduction, so there is no collective in here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .shapes import Head, Hidden, PerToken


class Sums(NamedTuple):
    """What a softmax needs to know about its logits z, per token.

    Args:
        maximum: max z.
        total: sum of exp(z - maximum).
        target: z of the label; 0 in a shard that does not hold it.
    """

    maximum: PerToken
    total: PerToken
    target: PerToken


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
    maximum = torch.stack([part.maximum for part in parts]).amax(0)
    total = torch.stack([part.total * (part.maximum - maximum).exp() for part in parts]).sum(0)
    return Sums(maximum, total, torch.stack([part.target for part in parts]).sum(0))


def _all_here(sums: Sums) -> Sums:
    return sums


WHOLE = Shard(first_id=0, combine=_all_here)
"""The whole vocabulary in one place."""


def label_logit(hidden: Hidden, head: Head, place: PerToken, *, dtype: torch.dtype) -> PerToken:
    """The label's own logit in a wide dtype; anything where another shard holds it.

    Args:
        place: row of the label in `head`, outside of it where another shard has it.
    """
    row = head[place.clamp(0, head.shape[0] - 1)]
    return (hidden.to(dtype) * row.to(dtype)).sum(1)


def label_column(logits: Tensor, place: PerToken) -> Tensor:
    """True where a column of `[T, V]` is the label's."""
    return torch.arange(logits.shape[1], device=logits.device) == place[:, None]


def softmax_sums(
    logits: Tensor, label: PerToken, place: PerToken, *, temperature: float, shard: Shard
) -> tuple[Tensor, Sums]:
    """Logits over the temperature, in the dtype of `label`, and the sums over all shards.

    Args:
        logits: of one chunk, in any dtype.
        label: the label's own logit, which replaces the one in `logits`.
        place: column of the label.
    """
    scaled = torch.where(label_column(logits, place), label[:, None], logits.to(label.dtype)) / temperature
    maximum = scaled.amax(1)
    held = (place >= 0) & (place < logits.shape[1])
    target = torch.where(held, label / temperature, 0.0)
    return scaled, shard.combine(Sums(maximum, (scaled - maximum[:, None]).exp().sum(1), target))
