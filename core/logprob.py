"""Hidden states times head to the logprob of each label, a chunk of tokens at a time: never the whole logits.

Memory is chunk * V instead of T * V; the backward pass computes each chunk's logits once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .shapes import Head, Hidden, PerToken


class TokenLogprob(NamedTuple):
    """Of every token, at least float32.

    Args:
        logprob: of its label; carries the gradient.
        entropy: of the whole distribution, in nats; a metric, without gradient.
    """

    logprob: PerToken
    entropy: PerToken


def token_logprob(
    hidden: Hidden, head: Head, label: PerToken, *, temperature: float, chunk: int
) -> TokenLogprob:
    """log softmax(hidden @ head^T / temperature) at the label, equal to the dense computation.

    Args:
        hidden: state that predicts the label.
        head: output weight; no bias.
        label: token id; any valid id where the loss mask is False.
        temperature: of the sampler, so that both sides speak of one distribution.
        chunk: tokens whose logits exist at once.
    """
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
    return TokenLogprob(*_ChunkedLogprob.apply(hidden, head, label, temperature, chunk))


class _ChunkedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, label: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        wide = head.to(dtype)
        logprob, entropy, log_total = [], [], []
        for part, target in zip(hidden.split(chunk), label.split(chunk)):
            logits = part.to(dtype) @ wide.T / temperature
            total = logits.logsumexp(1)
            logprob.append(logits.gather(1, target[:, None]).squeeze(1) - total)
            entropy.append(total - ((logits - total[:, None]).exp() * logits).sum(1))
            log_total.append(total)
        ctx.save_for_backward(hidden, head, label, torch.cat(log_total))
        ctx.temperature, ctx.chunk = temperature, chunk
        found = torch.cat(logprob), torch.cat(entropy)
        ctx.mark_non_differentiable(found[1])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob / d logits = onehot(label) - softmax; sums over tokens are kept in the wide dtype."""
        hidden, head, label, log_total = ctx.saved_tensors
        dtype = log_total.dtype
        wide = head.to(dtype)
        grad_hidden, grad_head = [], torch.zeros_like(wide)
        parts = zip(*(x.split(ctx.chunk) for x in (hidden, label, log_total, grads[0])))
        for part, target, total, grad in parts:
            state = part.to(dtype)
            share = (state @ wide.T / ctx.temperature - total[:, None]).exp()
            share.scatter_add_(1, target[:, None], torch.full_like(total, -1.0)[:, None])
            grad_logits = share * (-grad / ctx.temperature)[:, None]
            grad_hidden.append((grad_logits @ wide).to(hidden.dtype))
            grad_head += grad_logits.T @ state
        return torch.cat(grad_hidden), grad_head.to(head.dtype), None, None, None
