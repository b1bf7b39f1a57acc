"""Rows of a step to the micro-batches of one rank: packed, shared among context ranks, with the global weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from core.context import Share, share
from core.pack import plan
from system.model import rope_tables
from system.trainer.megatron.attention import Segments
from system.trainer.megatron.head import Labels
from system.trainer.megatron.ranks import context_group
from system.trainer.megatron.shape import Shape
from system.trainer.parallel import Parallel
from system.trainer.step import StepRow


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    """A row with a trained token, and where those are.

    Args:
        index: its place in the step.
        trained: places of the trained tokens, as a tensor on the CPU.
        length: inputs up to the one that predicts the last of them.
        weight: one per trained token, of the whole step.
    """

    row: StepRow
    index: int
    trained: Tensor
    length: int
    weight: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward computes on this rank.

    Args:
        token_ids: [1, T], the tokens of this context rank, padding included.
        row, place: of each label that is here, on the CPU.
        tokens: without padding, over all context ranks.
    """

    token_ids: Tensor
    segments: Segments
    labels: Labels
    row: Tensor
    place: Tensor
    tokens: int


class Batches:
    """Makes micro-batches one after the other, so that the next is made while the GPU computes."""

    def __init__(self, shape: Shape, parallel: Parallel, *, token_budget: int, device: torch.device) -> None:
        self.shape, self.parallel, self.token_budget, self.device = shape, parallel, token_budget, device
        self.dtype = torch.float32 if parallel.dtype == "float32" else torch.bfloat16
        self._tables = rope_tables(shape.base, 1, device=device)

    def planned(
        self, rows: Sequence[LiveRow], *, data_rank: int, data_ranks: int
    ) -> tuple[tuple[int, ...], ...]:
        """Places of the rows in this data rank's micro-batches; every rank has as many of those."""
        base = self.shape.base
        return plan(
            [row.length for row in rows],
            token_budget=self.token_budget,
            ranks=data_ranks,
            per_token=2.0 * self.shape.active_parameters,
            per_square=2.0 * base.num_hidden_layers * base.num_attention_heads * base.head_dim,
        )[data_rank]

    def made(self, rows: Sequence[LiveRow], planned: Sequence[Sequence[int]]) -> Iterator[MicroBatch]:
        """Each micro-batch when it is asked for."""
        return (self._micro_batch([rows[place] for place in places]) for places in planned)

    def _micro_batch(self, rows: list[LiveRow]) -> MicroBatch:
        """No row at all is one token without a label: the others wait for this rank."""
        own = share(
            [row.length for row in rows] or [1],
            ranks=self.parallel.context,
            rank=context_group().rank(),
            multiple=self.parallel.tensor if self.parallel.sequence else 1,
        )
        starts = [0, *accumulate(own.padded)]
        flat = torch.zeros(starts[-1], dtype=torch.long)
        for row, start in zip(rows, starts):
            flat[start : start + row.length] = tensor_of(row.row.token_ids, np.int64)[: row.length]
        take = torch.arange(len(flat)) if self.parallel.context == 1 else tensor_of(own.take, np.int64)
        here = torch.full((len(flat),), -1).index_copy(0, take, torch.arange(len(take)))
        none = torch.zeros(0, dtype=torch.long)
        before = torch.cat([none, *(start + row.trained - 1 for row, start in zip(rows, starts))])
        before = here[before]
        kept = before >= 0
        return MicroBatch(
            token_ids=self._send(flat[take][None]),
            segments=self._segments(own),
            labels=self._labels(rows, before, kept),
            row=torch.cat([none, *(torch.full_like(row.trained, row.index) for row in rows)])[kept],
            place=torch.cat([none, *(row.trained for row in rows)])[kept],
            tokens=sum(row.length for row in rows),
        )

    def _labels(self, rows: list[LiveRow], before: Tensor, kept: Tensor) -> Labels:
        def here(values: list[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
            return self._send(torch.cat([torch.zeros(0, dtype=dtype), *values])[kept])

        return Labels(
            before=self._send(before[kept]),
            label=here([tensor_of(row.row.token_ids, np.int64)[row.trained] for row in rows], torch.long),
            field=(
                here([tensor_of(row.row.rollout_logprob, np.float32)[row.trained] for row in rows]),
                here([torch.full(row.trained.shape, float(row.row.advantage)) for row in rows]),
                here([row.weight for row in rows]),
            ),
        )

    def _segments(self, own: Share) -> Segments:
        position = self._send(tensor_of(own.position, np.int64))
        cosine, sine = self._rotation(max(own.key_length))
        return Segments(
            cosine=cosine[position][:, None].to(self.dtype),
            sine=sine[position][:, None].to(self.dtype),
            query_length=own.query_length,
            key_length=own.key_length,
            query_end=self._ends(own.query_length),
            key_end=self._ends(own.key_length),
            key=self._send(tensor_of(own.key, np.int64)) if own.key else None,
            ranks=context_group(),
        )

    def _ends(self, lengths: Sequence[int]) -> Tensor:
        return self._send(tensor_of([0, *accumulate(lengths)], np.int32))

    def _rotation(self, length: int) -> tuple[Tensor, Tensor]:
        if len(self._tables[0]) < length:
            self._tables = rope_tables(self.shape.base, length, device=self.device)
        return self._tables

    def _send(self, value: Tensor) -> Tensor:
        """To where the model is, without waiting for what is computed there."""
        if self.device.type == "cpu":
            return value
        return value.pin_memory().to(self.device, non_blocking=True)


def tensor_of(values: Sequence[float], kind: type) -> Tensor:
    """A list as a tensor; several times faster than torch's own way."""
    return torch.from_numpy(np.array(values, dtype=kind))
