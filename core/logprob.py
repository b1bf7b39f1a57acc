"""Hidden states times head to the logprob of each label, a chunk of tokens at a time: never the whole logits.

`token_logprob` is an ordinary differentiable function; its backward pass computes each chunk's logits again.
`head_gradient` is for every loss whose slope at a token needs no more than that token's own logprob, as all in
`core.loss`: one way through the chunks gives the gradients of hidden states and head, in three matrix products.
Memory is chunk * V in both. The vocabulary may be split over ranks (`core.shard`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .shapes import Head, Hidden, PerToken
from .shard import Shard, Sums, logprob_and_entropy, softmax_sums, with_exact_label


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
        hidden: state that predicts the label; with a shard, its gradient is this shard's part.
        head: output weight; no bias.
        label: token id; any valid id where the loss mask is False.
        temperature: of the sampler, so that both sides speak of one distribution.
        chunk: tokens whose logits exist at once.
        shard: `WHOLE`, or the part of the vocabulary that `head` holds.
    """
    _check(hidden, head, label, temperature, chunk)
    return TokenLogprob(*_ChunkedLogprob.apply(hidden, head, label, temperature, chunk, shard))


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
    wide = torch.promote_types(hidden.dtype, torch.float32)
    grad_hidden = torch.empty_like(hidden)
    grad_head = torch.zeros(head.shape, dtype=wide, device=head.device)
    logprob, entropy = (torch.empty(label.shape, dtype=wide, device=hidden.device) for _ in range(2))
    sums_of, overwrite = fuse(_sums), fuse(_gradient_of_logits)
    with torch.no_grad():
        for start in range(0, len(label), chunk):
            part = slice(start, start + chunk)
            place = label[part] - shard.first_id
            logits = _product(hidden[part], head.T, logit_dtype)
            sums = shard.combine(sums_of(logits, hidden[part], head, place, temperature))
            logprob[part], entropy[part] = logprob_and_entropy(sums)
            weight = slope(logprob[part], *(x[part] for x in field)) / temperature
            room = logits if logit_dtype == hidden.dtype else torch.empty_like(logits, dtype=hidden.dtype)
            gradient = overwrite(logits, room, sums.maximum + sums.total.log(), weight, temperature)
            _set_label(gradient, place, logprob[part], weight)
            torch.mm(gradient, head, out=grad_hidden[part])
            _accumulate(grad_head, gradient.T, hidden[part])
    return HeadGradient(logprob, entropy, grad_hidden, grad_head)


def chunk_within(
    *, memory_bytes: float, vocabulary: int, logit_dtype: torch.dtype, hidden_dtype: torch.dtype
) -> int:
    """The most tokens whose logits and their gradient fit into so much memory; at least 1.

    One overwrites the other where they have one dtype.
    """
    if not memory_bytes > 0:
        raise ValueError(f"memory_bytes must be positive, got {memory_bytes}")
    if vocabulary < 1:
        raise ValueError(f"vocabulary must be positive, got {vocabulary}")
    size = logit_dtype.itemsize + (0 if logit_dtype == hidden_dtype else hidden_dtype.itemsize)
    return max(1, int(memory_bytes // (vocabulary * size)))


def _sums(logits: Tensor, hidden: Tensor, head: Tensor, place: Tensor, temperature: float) -> Sums:
    """Of this shard, with the label's own logit in the wide dtype."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    column = place.clamp(0, logits.shape[1] - 1)
    rounded = logits.gather(1, column[:, None]).squeeze(1).to(wide)
    exact = (hidden.to(wide) * head[column].to(wide)).sum(1)
    plain = softmax_sums(logits, temperature=temperature, dtype=wide)
    return with_exact_label(plain, rounded / temperature, exact / temperature, column == place)


def _gradient_of_logits(
    logits: Tensor, room: Tensor, log_total: Tensor, weight: Tensor, temperature: float
) -> Tensor:
    """-weight * softmax into `room`, which may be `logits` itself; the label's own column is still to be set."""
    scale = 1 / math.log(2)
    log_share = logits.to(log_total.dtype) * (scale / temperature) - (log_total * scale)[:, None]
    return room.copy_(log_share.exp2() * -weight[:, None])


def _set_label(gradient: Tensor, place: Tensor, logprob: Tensor, weight: Tensor) -> None:
    """weight * (1 - share) in the label's column, where this shard holds it."""
    column = place.clamp(0, gradient.shape[1] - 1)[:, None]
    own = (-torch.expm1(logprob) * weight).to(gradient.dtype)[:, None]
    gradient.scatter_(1, column, torch.where(column == place[:, None], own, gradient.gather(1, column)))


class _ChunkedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, label: Tensor, temperature: float, chunk: int, shard: Shard
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprob, entropy, log_total = (label.new_empty(label.shape, dtype=wide) for _ in range(3))
        for start in range(0, len(label), chunk):
            part = slice(start, start + chunk)
            place = label[part] - shard.first_id
            logits = _product(hidden[part], head.T, wide)
            sums = shard.combine(_sums(logits, hidden[part], head, place, temperature))
            logprob[part], entropy[part] = logprob_and_entropy(sums)
            log_total[part] = sums.maximum + sums.total.log()
        ctx.save_for_backward(hidden, head, label, log_total, logprob)
        ctx.temperature, ctx.chunk, ctx.first_id = temperature, chunk, shard.first_id
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob / d logits = onehot(label) - softmax; sums over tokens are kept in the wide dtype."""
        hidden, head, label, log_total, logprob = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=log_total.dtype, device=head.device)
        for start in range(0, len(label), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _product(hidden[part], head.T, log_total.dtype)
            weight = grads[0][part] / ctx.temperature
            gradient = _gradient_of_logits(logits, logits, log_total[part], weight, ctx.temperature)
            _set_label(gradient, label[part] - ctx.first_id, logprob[part], weight)
            gradient = gradient.to(hidden.dtype)
            grad_hidden[part] = _product(gradient, head, hidden.dtype)
            _accumulate(grad_head, gradient.T, hidden[part])
        return grad_hidden, grad_head.to(head.dtype), None, None, None, None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, summed in float32 at least and rounded to `dtype` once."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) @ b.to(wide)).to(dtype)


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of `total`."""
    if a.dtype != total.dtype and a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _check(hidden: Hidden, head: Head, label: PerToken, temperature: float, chunk: int) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if chunk < 1:
        raise ValueError(f"chunk must be positive, got {chunk}")
    if not (hidden.ndim == head.ndim == 2 and hidden.shape[1] == head.shape[1]):
        raise ValueError(
            f"hidden [T, H] and head [V, H] must agree on H, got {[tuple(hidden.shape), tuple(head.shape)]}"
        )
    if label.shape != hidden.shape[:1]:
        raise ValueError(f"label must have shape {tuple(hidden.shape[:1])}, got {tuple(label.shape)}")
