"""Megatron's layer with what its stock parts leave to Transformer Engine: packed rows, shared rows, the norm.

Rows lie one after the other in one flat [T, 1, H] batch. A segment is some tokens of a row and the beginning of
that row as its keys; where rows are not shared among ranks a segment is a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from system.model import rotate


@dataclass(kw_only=True)
class Segments(PackedSeqParams):
    """What the attention of all layers needs to know of a micro-batch; Megatron hands it through.

    Args:
        cosine, sine: of every token here, [T, 1, head_dim].
        query_length, key_length: of every segment.
        query_end, key_end: their running sums from 0, int32, where the tokens are.
        key: place of each segment's keys among those of all ranks; None where the keys are what is here.
        ranks: the context-parallel group.
    """

    cosine: Tensor
    sine: Tensor
    query_length: tuple[int, ...]
    key_length: tuple[int, ...]
    query_end: Tensor
    key_end: Tensor
    key: Tensor | None
    ranks: Any


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Causal attention inside each row; q [T, heads, size], k and v [T, key heads, size]."""
    if segments.key is not None:
        both = torch.stack((k, v), dim=1)
        whole = gather_from_sequence_parallel_region(both, group=segments.ranks)
        k, v = whole.index_select(0, segments.key).unbind(1)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _flash(q, k, v, segments)
    return _segment_by_segment(q, k, v, segments)


def _flash(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """FlashAttention over ragged segments, as torch has it; the last query sees the last key."""
    longest = max(segments.query_length), max(segments.key_length)
    ends = segments.query_end, segments.key_end
    return torch.ops.aten._flash_attention_forward(q, k, v, *ends, *longest, 0.0, True, False)[0]


def _segment_by_segment(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """The same by torch's dense attention. Heads that share a key head are the head axis, nothing is copied."""
    group, out = q.shape[1] // k.shape[1], []
    parts = zip(
        q.split(segments.query_length),
        k.split(segments.key_length),
        v.split(segments.key_length),
        strict=True,
    )
    for query, key, value in parts:
        query = rearrange(query, "t (h g) d -> h g t d", g=group)
        key = rearrange(key, "t h d -> h 1 t d").expand(-1, group, -1, -1)
        value = rearrange(value, "t h d -> h 1 t d").expand(-1, group, -1, -1)
        fewer = query.shape[2] < key.shape[2]
        seen = _lower_right(query.shape[2], key.shape[2], query.device) if fewer else None
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=not fewer)
        out.append(rearrange(mixed, "h g t d -> t (h g) d"))
    return torch.cat(out)


def _lower_right(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class PackedAttention(SelfAttention):
    """Grouped-query attention with normed queries and keys over packed rows."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, *_: Any, packed_seq_params: Segments, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.get_query_key_value_tensors(hidden_states)  # pyright: ignore[reportAssignmentType]
        q, k, v = (x.squeeze(1) for x in (q, k, v))  # pyright: ignore[reportAttributeAccessIssue]
        turn = compiled_rotate if q.is_cuda else rotate
        q, k = (turn(x, packed_seq_params.cosine, packed_seq_params.sine) for x in (q, k))
        mixed = attend(q, k, v.contiguous(), packed_seq_params)
        return self.linear_proj(rearrange(mixed, "t h d -> t 1 (h d)"))


compiled_rotate = torch.compile(rotate, dynamic=True)
"""The rotation in one pass; compiled at its first call."""


class Norm(nn.Module):
    """Root-mean-square norm, told apart for the sum of its gradient over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def add_residual(training: bool, fused: bool) -> Any:
    """Megatron's bias, dropout and residual for a model without bias and dropout."""

    def add(told: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
        return told[0] + residual

    return add
