"""Hidden states times head to the logprob of each label, a chunk of tokens at a time: never the whole logits.

`token_logprob` is an ordinary differentiable function; its backward pass computes each chunk's logits again.
`head_gradient` is for every loss whose slope at a token needs no more than that token's own logprob, as all in
`core.loss`: one way through the chunks gives the gradients of hidden states and head, in three matrix products.
Memory is chunk * V in both. The vocabulary may be split over ranks (`core.shard`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .shapes import Head, Hidden, PerToken, check_float, check_integer, check_tensor
from .shard import (
    Shard,
    Sums,
    log2_total,
    logprob_and_entropy,
    overwrite_by_gradient,
    set_label_gradient,
    shard_sums,
    softmax_gradient,
)


class TokenLogprob(NamedTuple):
    """Of every token, at least float32.

    Args:
        logprob: of its label; carries the gradient.
        entropy: of the distribution, in nats; no gradient.
    """

    logprob: PerToken
    entropy: PerToken


class HeadGradient(NamedTuple):
    """What one way through the chunks finds.

    Args:
        logprob: of every label, at least float32.
        entropy: of the distribution, in nats.
        hidden: gradient of the hidden states, in their dtype. Of a shard its part, to be added up.
        head: gradient of the rows that are here, at least float32.
    """

    logprob: PerToken
    entropy: PerToken
    hidden: Hidden
    head: Head


def token_logprob(
    hidden: Hidden, head: Head, label: PerToken, *, temperature: float, chunk: int, shard: Shard
) -> TokenLogprob:
    """log softmax(hidden @ head^T / temperature) at the label, equal to the dense computation.

    Args:
        hidden: state that predicts the label, finite everywhere; with a shard, its gradient is this shard's part.
        head: output weight; no bias.
        label: token id; any valid id where the loss mask is False. One outside the vocabulary has logprob NaN.
        temperature: of the sampler, so that both sides speak of one distribution.
        chunk: tokens whose logits exist at once.
        shard: `core.shard.WHOLE`, or the part of the vocabulary that `head` holds.
    """
    _check(hidden, head, label, temperature, chunk)
    return TokenLogprob(*_ChunkedLogprob.apply(hidden, head, label.long(), temperature, chunk, shard))  # pyright: ignore[reportUnknownMemberType]


def head_gradient(
    hidden: Hidden,
    head: Head,
    label: PerToken,
    field: Sequence[PerToken],
    *,
    slope: Callable[..., PerToken],
    temperature: float,
    chunk: int,
    logit_dtype: torch.dtype,
    fuse: Callable[[Any], Any],
    shard: Shard,
) -> HeadGradient:
    """Gradients of a loss of the logprobs, no logit stored for long or computed twice: 6 T H V operations.

        d loss / d logits = slope * (onehot(label) - softmax) / temperature

    Then `hidden.backward(found.hidden)` goes on through the model and `found.head` is added to the head's gradient.
    Select the trained tokens first: those without a slope cost as much.

    Args:
        hidden, head, label, temperature, chunk, shard: as in `token_logprob`; no graph is recorded.
        field: what `slope` needs to know of each token, such as rollout logprob, advantage, mask, weight.
        slope: from (logprob, *field) of a chunk to d loss / d logprob, such as
            `lambda logprob, mu, a, m, w: w * cispo(logprob, mu, a, m, min_ratio=0, max_ratio=5).slope`.
        logit_dtype: in which a chunk's logits are kept. In bfloat16 they are off by 1 / 256 of their size at
            most, as are those of an engine that samples from such; the label's own is always wide.
        fuse: `torch.compile`, or the identity.
    """
    _check(hidden, head, label, temperature, chunk)
    check_tensor(**{f"field {index}": one for index, one in enumerate(field)})
    wide = torch.promote_types(hidden.dtype, torch.float32)
    grad_hidden = torch.empty_like(hidden)
    grad_head = (torch.empty if len(label) else torch.zeros)(head.shape, dtype=wide, device=head.device)
    logprob, entropy = (torch.empty(label.shape, dtype=wide, device=hidden.device) for _ in range(2))
    space = hidden.new_empty((min(chunk, len(label)), head.shape[0]), dtype=logit_dtype)
    sum_up, tell = fuse(shard_sums), fuse(_per_token)
    write = fuse(overwrite_by_gradient if logit_dtype == hidden.dtype else softmax_gradient)
    with torch.no_grad():
        for start in range(0, len(label), chunk):
            part = slice(start, start + chunk)
            place = label[part].long() - shard.first_id
            logits = _product(hidden[part], head.T, out=space[: len(place)])
            sums = shard.combine(sum_up(logits, hidden[part], head, place, temperature))
            own = [x[part] for x in field]
            logprob[part], entropy[part], total, weight = tell(sums, own, slope, temperature)
            gradient = write(logits, total, weight, temperature, hidden.dtype)
            set_label_gradient(gradient, place, logprob[part], weight)
            torch.mm(gradient, head, out=grad_hidden[part])
            _accumulate(grad_head, gradient.T, hidden[part], fresh=start == 0)
            del gradient  # Or the next chunk's would stand beside it.
    return HeadGradient(logprob, entropy, grad_hidden, grad_head)


def chunk_within(
    *, memory_bytes: float, vocabulary: int, logit_dtype: torch.dtype, hidden_dtype: torch.dtype
) -> int:
    """The most tokens whose logits and their gradient fit into so much memory; at least 1.

    One overwrites the other where they have one dtype. A multiple of 128 from there on: the rows of a tile.
    """
    if not memory_bytes > 0:
        raise ValueError(f"memory_bytes must be positive, got {memory_bytes}")
    if vocabulary < 1:
        raise ValueError(f"vocabulary must be positive, got {vocabulary}")
    size = logit_dtype.itemsize + (0 if logit_dtype == hidden_dtype else hidden_dtype.itemsize)
    tokens = int(memory_bytes // (vocabulary * size))
    return max(1, tokens if tokens < 128 else tokens // 128 * 128)


def _per_token(
    sums: Sums, field: Sequence[Tensor], slope: Callable[..., Tensor], temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprob, entropy = logprob_and_entropy(sums)
    return logprob, entropy, log2_total(sums), slope(logprob, *field) / temperature


class _ChunkedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, label: Tensor, temperature: float, chunk: int, shard: Shard
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprob, entropy, total = (label.new_empty(label.shape, dtype=wide) for _ in range(3))
        space = hidden.new_empty((min(chunk, len(label)), head.shape[0]), dtype=wide)
        for start in range(0, len(label), chunk):
            part = slice(start, start + chunk)
            place = label[part] - shard.first_id
            logits = _product(hidden[part], head.T, out=space[: len(place)])
            sums = shard.combine(shard_sums(logits, hidden[part], head, place, temperature))
            logprob[part], entropy[part] = logprob_and_entropy(sums)
            total[part] = log2_total(sums)
        ctx.save_for_backward(hidden, head, label, logprob, total)
        ctx.temperature, ctx.chunk, ctx.first_id = temperature, chunk, shard.first_id
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """d logprob / d logits = onehot(label) - softmax; sums over tokens are kept in the wide dtype."""
        hidden, head, label, logprob, total = ctx.saved_tensors
        wide = total.dtype
        grad_hidden = torch.empty_like(hidden)
        grad_head = (torch.empty if len(label) else torch.zeros)(head.shape, dtype=wide, device=head.device)
        space = hidden.new_empty((min(ctx.chunk, len(label)), head.shape[0]), dtype=wide)
        for start in range(0, len(label), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            weight = grads[0][part] / ctx.temperature
            logits = _product(hidden[part], head.T, out=space[: len(weight)])
            gradient = softmax_gradient(logits, total[part], weight, ctx.temperature, hidden.dtype)
            set_label_gradient(gradient, label[part] - ctx.first_id, logprob[part], weight)
            torch.mm(gradient, head, out=grad_hidden[part])
            _accumulate(grad_head, gradient.T, hidden[part], fresh=start == 0)
        return grad_hidden, grad_head.to(head.dtype), None, None, None, None


def _product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """a @ b into `out`, summed in float32 at least and rounded to the dtype of `out` once."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:  # pragma: no cover: on a GPU alone
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    wide = torch.promote_types(a.dtype, torch.float32)
    return out.copy_(a.to(wide) @ b.to(wide))


def _accumulate(total: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
    """total += a @ b in the dtype of `total`, or total = a @ b."""
    beta = 0 if fresh else 1
    if a.dtype != total.dtype and a.is_cuda:  # pragma: no cover: on a GPU alone
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _check(hidden: Hidden, head: Head, label: PerToken, temperature: float, chunk: int) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if chunk < 1:
        raise ValueError(f"chunk must be positive, got {chunk}")
    check_float(hidden=hidden, head=head)
    check_integer(label=label)
    if hidden.dtype != head.dtype:
        raise ValueError(f"hidden and head must have one dtype, got {[hidden.dtype, head.dtype]}")
    if not (hidden.ndim == head.ndim == 2 and hidden.shape[1] == head.shape[1]):
        raise ValueError(
            f"hidden [T, H] and head [V, H] must agree on H, got {[tuple(hidden.shape), tuple(head.shape)]}"
        )
    if label.shape != hidden.shape[:1]:
        raise ValueError(f"label must have shape {tuple(hidden.shape[:1])}, got {tuple(label.shape)}")
