"""Score centering: the weighted policy gradient minus its own expectation under the sampler.

Where sampler q and trainer p differ, the score no longer has mean 0 under q: a constant advantage moves the
weights, and through weight sync the drift feeds itself. Importance weights undo that, a cap on them brings part of
it back. Here that mean is subtracted, from the sampler's most likely tokens and one assumption about the rest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .shapes import check_float, check_one_shape
from .surrogate import anchored, check_positive, check_shapes

_SMALLEST_TAIL = 1e-6
"""Mass that the rest of the vocabulary has at least; rounding may leave less than nothing."""


def score_centering(
    logprob: Tensor,
    rollout_logprob: Tensor,
    advantage: Tensor,
    loss_mask: Tensor,
    head_logprob: Tensor,
    head_rollout_logprob: Tensor,
    *,
    max_ratio: float,
) -> Tensor:
    """Truncated importance sampling whose expected gradient under the sampler is 0 for a constant advantage.

        value = -A (min(p/q, C) log p  -  sum over the head of (min(p, C q) - a p) log p)
        rho = (1 - sum q) / (1 - sum p) over the head,    a = min(C rho, 1)

    Coefficients are detached. Outside the head, q = rho p is assumed. Without a cap the sum is exactly 0 and this
    is `core.loss.importance_weighted_policy_gradient`; the smaller C, the more of the drift is for the head to
    undo. Both sides must speak of one distribution: that of the sampler's temperature and filter.
    arXiv:2609.20807.

    Any leading shape `[...]`; the head has one axis more. A head token in the mask whose `head_rollout_logprob` is
    not finite is not in the head. Otherwise the three rules of `core.loss`, NaN in `head_logprob` included.

    Args:
        logprob: log p of the sampled token under the weights being trained.
        rollout_logprob: log q of the same token as the engine reported it, never recomputed.
        advantage: in the shape of `logprob`.
        loss_mask: True where the policy sampled the token and it is trained; elsewhere the others may be
            garbage.
        head_logprob: log p of K distinct tokens at that place, with its gradient; [..., K].
        head_rollout_logprob: log q of the same K tokens, the sampler's most likely ones.
        max_ratio: C, the largest weight; `math.inf` for none.

    Raises:
        ValueError: if shapes differ, the mask is not bool, or `max_ratio` is not positive.
    """
    check_positive(max_ratio=max_ratio)
    check_shapes(logprob=logprob, rollout_logprob=rollout_logprob, advantage=advantage, loss_mask=loss_mask)
    _check_head(logprob, head_logprob, head_rollout_logprob)
    token = anchored(logprob, rollout_logprob, advantage, loss_mask)
    own = token.ratio.clamp(max=max_ratio) * torch.where(token.usable, token.logprob, 0.0)
    in_head = token.usable[..., None] & head_rollout_logprob.isfinite()
    dtype = token.ratio.dtype
    log_p = torch.where(in_head, head_logprob.to(dtype), -torch.inf)
    # Finite, so that an infinite C leaves no NaN.
    log_q = torch.where(in_head, head_rollout_logprob.detach().to(dtype), torch.finfo(dtype).min)
    coefficient = _head_coefficient(log_p.detach(), log_q, max_ratio)
    # Nothing is trained where the coefficient is 0: -inf stands there for a token that is not in the head.
    mean = (coefficient * torch.where(coefficient == 0, 0.0, log_p)).sum(-1)
    return -token.advantage * (own - mean)


def _head_coefficient(log_p: Tensor, log_q: Tensor, max_ratio: float) -> Tensor:
    """min(p, C q) - a p; q min(p / q, C) written so that it cannot overflow."""
    p = log_p.exp()
    tail_p = (1 - p.sum(-1, keepdim=True)).clamp(min=_SMALLEST_TAIL)
    tail_q = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST_TAIL)
    share = (max_ratio * tail_q / tail_p).clamp(max=1)
    return torch.minimum(log_p, log_q + math.log(max_ratio)).exp() - share * p


def _check_head(logprob: Tensor, head_logprob: Tensor, head_rollout_logprob: Tensor) -> None:
    check_float(head_logprob=head_logprob, head_rollout_logprob=head_rollout_logprob)
    check_one_shape(head_logprob=head_logprob, head_rollout_logprob=head_rollout_logprob)
    if head_logprob.shape[:-1] != logprob.shape or head_logprob.ndim != logprob.ndim + 1:
        raise ValueError(
            f"head_logprob must have shape [{', '.join(map(str, (*logprob.shape, 'K')))}],"
            f" got {tuple(head_logprob.shape)}"
        )
