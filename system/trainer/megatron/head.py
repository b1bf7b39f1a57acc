"""The loss of a micro-batch from its last hidden states, the vocabulary shared by the tensor ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from core.logprob import TokenLogprob, chunk_within, head_gradient, token_logprob
from core.shard import WHOLE, Shard, Sums, combine_sums
from system.trainer.megatron.ranks import tensor_group


def no_fusion(function: Any) -> Any:
    """In the place of a compiler."""
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How the head computes.

    Args:
        slope: d loss / d logprob from (logprob, rollout_logprob, advantage, weight) of some tokens.
        temperature: at which the rollouts were sampled.
        memory_bytes: bound on the logits that exist at once.
        logit_dtype: in which they are kept.
        fuse: `torch.compile`, or `no_fusion`.
    """

    slope: Callable[..., Tensor]
    temperature: float
    memory_bytes: float
    logit_dtype: torch.dtype
    fuse: Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The trained tokens of a micro-batch whose hidden states are on this rank.

    Args:
        before: where among the tokens here the hidden state lies that predicts each label.
        label: token ids.
        field: rollout_logprob, advantage and weight of each.
    """

    before: Tensor
    label: Tensor
    field: tuple[Tensor, Tensor, Tensor]


def combine_over(group: dist.ProcessGroup, sums: Sums) -> Sums:
    """The sums of all shards of the vocabulary."""
    own = torch.stack(sums)
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    return combine_sums([Sums(*one.unbind()) for one in found])


def own_shard(weight: Tensor, token_count: int) -> tuple[Tensor, Shard]:
    """The rows of the head that are here, those of no token left out, and their place in the vocabulary."""
    group = tensor_group()
    first = group.rank() * len(weight)
    rows = weight[: token_count - first]
    return rows, WHOLE if group.size() == 1 else Shard(first, partial(combine_over, group))


def chosen_states(hidden: Tensor, labels: Labels, *, sequence: bool) -> Tensor:
    """Hidden states that predict a label, whole on each tensor rank; gradients of the ranks are added up."""
    if sequence:
        hidden = gather_from_sequence_parallel_region(hidden)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    return hidden.squeeze(1)[labels.before]


def chunk_of(head: Head, weight: Tensor) -> int:
    """Tokens whose logits exist at once: the same on all tensor ranks, which go through the chunks together."""
    return chunk_within(
        memory_bytes=head.memory_bytes,
        vocabulary=len(weight),
        logit_dtype=head.logit_dtype,
        hidden_dtype=weight.dtype,
    )


def logprob_of(hidden: Tensor, weight: Tensor, token_count: int, labels: Labels, head: Head) -> TokenLogprob:
    """Of each label, without a gradient."""
    rows, shard = own_shard(weight, token_count)
    chunk = chunk_of(head, weight)
    return token_logprob(hidden, rows, labels.label, temperature=head.temperature, chunk=chunk, shard=shard)


def loss_of(
    hidden: Tensor, weight: Tensor, token_count: int, labels: Labels, head: Head, told: Callable[..., None]
) -> Tensor:
    """0, with the gradient of the loss.

    Args:
        hidden: of the chosen tokens.
        weight: rows of the head on this tensor rank, those of no token included.
        told: is called with logprob and entropy of each label.
    """
    rows, shard = own_shard(weight, token_count)
    chunk = chunk_of(head, weight)
    return _Loss.apply(hidden, rows, shard, chunk, labels, head, told)  # pyright: ignore[reportReturnType]


class _Loss(torch.autograd.Function):
    """The gradients are found on the way forward; the way back hands them on."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        rows: Tensor,
        shard: Shard,
        chunk: int,
        labels: Labels,
        head: Head,
        told: Callable[..., None],
    ) -> Tensor:
        found = head_gradient(
            hidden,
            rows,
            labels.label,
            labels.field,
            slope=head.slope,
            temperature=head.temperature,
            chunk=chunk,
            logit_dtype=head.logit_dtype,
            fuse=head.fuse,
            shard=shard,
        )
        told(found.logprob, found.entropy)
        ctx.save_for_backward(found.hidden, found.head)
        ctx.dtype = rows.dtype
        return found.logprob.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, rows = ctx.saved_tensors
        scale = grads[0]
        return hidden * scale, (rows * scale).to(ctx.dtype), None, None, None, None, None
