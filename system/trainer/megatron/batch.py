"""Rows of a step to the micro-batches of one rank: packed, shared among context ranks, with the global weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from core.context import share
from core.pack import plan
from system.model import rope_tables
from system.trainer.megatron.attention import Segments
from system.trainer.megatron.head import Labels
from system.trainer.megatron.shape import Shape
from system.trainer.parallel import Parallel
from system.trainer.step import StepRow


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward computes on this rank.

    Args:
        token_ids: [1, T], the tokens of this context rank, padding included.
        places: (row, token) of each label that is here.
        tokens: without padding, over all context ranks.
    """

    token_ids: Tensor
    segments: Segments
    labels: Labels
    places: tuple[tuple[int, int], ...]
    tokens: int


class Batches:
    """Makes micro-batches; keeps the tables of the rotary embedding."""

    def __init__(self, shape: Shape, parallel: Parallel, *, token_budget: int, device: torch.device) -> None:
        self.shape, self.parallel, self.token_budget, self.device = shape, parallel, token_budget, device
        self.dtype = torch.float32 if parallel.dtype == "float32" else torch.bfloat16
        self._tables = rope_tables(shape.base, 1, device=device)

    def of_step(
        self, rows: Sequence[StepRow], weight: Sequence[Tensor], *, data_rank: int, data_ranks: int
    ) -> list[MicroBatch]:
        """This data rank's micro-batches, as many as every other has; `weight` holds one per trained token.

        Args:
            rows: of the whole step, each with a trained token.
        """
        base = self.shape.base
        trained = [[t for t, on in enumerate(row.loss_mask) if on] for row in rows]
        planned = plan(
            [own[-1] for own in trained],
            token_budget=self.token_budget,
            ranks=data_ranks,
            per_token=2.0 * self.shape.active_parameters,
            per_square=2.0 * base.num_hidden_layers * base.num_attention_heads * base.head_dim,
        )
        return [self._micro_batch(rows, trained, weight, places) for places in planned[data_rank]]

    def _micro_batch(
        self,
        rows: Sequence[StepRow],
        trained: list[list[int]],
        weight: Sequence[Tensor],
        chosen: Sequence[int],
    ) -> MicroBatch:
        """Inputs of each row only as far as its last label needs. No row at all is one token without a label."""
        lengths = [trained[row][-1] for row in chosen]
        own = share(
            lengths or [1],
            ranks=self.parallel.context,
            rank=parallel_state.get_context_parallel_rank(),
            multiple=self.parallel.tensor if self.parallel.sequence else 1,
        )
        flat = torch.zeros(sum(own.padded), dtype=torch.long)
        before, places = [], []
        for row, start, length in zip(chosen, _starts(own.padded), lengths):  # none of both for a dummy
            flat[start : start + length] = torch.tensor(rows[row].token_ids[:length])
            before += [start + t - 1 for t in trained[row]]
            places += [(row, t) for t in trained[row]]
        take = torch.tensor(own.take)
        here = torch.full((len(flat),), -1).index_copy(0, take, torch.arange(len(take)))
        before = here[torch.tensor(before, dtype=torch.long)]
        kept = before >= 0
        return MicroBatch(
            token_ids=flat[take][None].to(self.device),
            segments=self._segments(own.position, own.query_length, own.key_length, own.key),
            labels=self._labels(rows, weight, chosen, places, before, kept),
            places=tuple(place for place, on in zip(places, kept.tolist(), strict=True) if on),
            tokens=sum(lengths),
        )

    def _labels(
        self,
        rows: Sequence[StepRow],
        weight: Sequence[Tensor],
        chosen: Sequence[int],
        places: list[tuple[int, int]],
        before: Tensor,
        kept: Tensor,
    ) -> Labels:
        def here(values: list, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype)[kept].to(self.device)

        weights = torch.cat([weight[row] for row in chosen]) if chosen else torch.zeros(0)
        return Labels(
            before=before[kept].to(self.device),
            label=here([rows[row].token_ids[t] for row, t in places], torch.long),
            field=(
                here([rows[row].rollout_logprob[t] for row, t in places]),
                here([rows[row].advantage for row, _ in places]),
                weights[kept].to(self.device),
            ),
        )

    def _segments(
        self,
        position: Sequence[int],
        query_length: tuple[int, ...],
        key_length: tuple[int, ...],
        key: Sequence[int],
    ) -> Segments:
        cosine, sine = self._rotation(max(position) + 1)
        place = torch.tensor(position, device=self.device)
        return Segments(
            cosine=cosine[place][:, None].to(self.dtype),
            sine=sine[place][:, None].to(self.dtype),
            query_length=query_length,
            key_length=key_length,
            query_end=self._ends(query_length),
            key_end=self._ends(key_length),
            key=torch.tensor(key, device=self.device) if key else None,
            ranks=parallel_state.get_context_parallel_group(),
        )

    def _ends(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)

    def _rotation(self, length: int) -> tuple[Tensor, Tensor]:
        if len(self._tables[0]) < length:
            self._tables = rope_tables(self.shape.base, length, device=self.device)
        return self._tables


def _starts(padded: Sequence[int]) -> list[int]:
    return [sum(padded[:row]) for row in range(len(padded))]
