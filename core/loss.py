"""Per-token surrogates anchored on the sampler: the ratio is against the logprob that the engine recorded.

All are in score form, `value = -stopgrad(coefficient) * advantage * logprob`. Its gradient is that of the
ratio form `-ratio * advantage`, and a cap on the coefficient caps the gradient instead of cutting it off.
Read the gradient, not the value: as a metric the value means nothing.

Every function works token by token on any leading shape, and follows three rules:

* The mask enters on the arguments. Where `loss_mask` is False nothing is read, NaN and infinity included, and
  value and gradient are exactly 0.
* A token in the mask whose `rollout_logprob` is not finite, or so low that the ratio overflows, has no usable
  ratio, nor has one whose `logprob` is infinite: it is dropped and shown in `unusable`, never given ratio 1. It
  keeps its place in the denominators.
* A NaN in `logprob` or `advantage` inside the mask is an error upstream and comes out as NaN, never as 0.

Arithmetic is float32 at least, float64 where `logprob` is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .surrogate import (
    AnchoredToken,
    TokenLoss,
    anchored,
    check_bounds,
    check_positive,
    check_shapes,
    score_form,
)


def dppo_binary_tv(
    logprob: Tensor,
    rollout_logprob: Tensor,
    advantage: Tensor,
    loss_mask: Tensor,
    *,
    delta_low: float,
    delta_high: float,
    max_ratio: float,
) -> TokenLoss:
    """DPPO, total variation of the sampled token: stop pushing once its probability has moved far enough.

        coefficient = 0               where A > 0 and pi - mu > delta_high, or A < 0 and mu - pi > delta_low
                      min(pi / mu, C) elsewhere

    Generalises PPO's clip, which measures |pi / mu - 1| and so starves rare tokens.
    arXiv:2602.04879, Eq. 12 and 13.

    Args:
        logprob: log pi of the sampled token under the weights being trained.
        rollout_logprob: log mu of the same token as the engine reported it, never recomputed.
        advantage: in the shape of `logprob`.
        loss_mask: True where the policy sampled the token and it is trained; elsewhere the others may be
            garbage.
        delta_low: how far a probability may fall.
        delta_high: how far it may rise.
        max_ratio: C, the largest coefficient; `math.inf` for none.
    """
    check_positive(delta_low=delta_low, delta_high=delta_high, max_ratio=max_ratio)
    token = _token(logprob, rollout_logprob, advantage, loss_mask)
    moved = token.logprob.detach().exp() - token.anchor.exp()
    too_high = (token.advantage > 0) & (moved > delta_high)
    too_low = (token.advantage < 0) & (-moved > delta_low)
    return score_form(token, token.ratio.clamp(max=max_ratio), out_of_region=too_high | too_low)


def dppo_binary_kl(
    logprob: Tensor,
    rollout_logprob: Tensor,
    advantage: Tensor,
    loss_mask: Tensor,
    *,
    delta_low: float,
    delta_high: float,
    max_ratio: float,
) -> TokenLoss:
    """DPPO with the binary KL divergence of the sampled token in the place of its total variation.

        D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))
        coefficient = 0               where D > delta and the step would go on in the direction already gone
                      min(pi / mu, C) elsewhere

    D has no sign, so the direction is tested on its own. arXiv:2602.04879, Eq. 14. Arguments as
    `dppo_binary_tv`.
    """
    check_positive(delta_low=delta_low, delta_high=delta_high, max_ratio=max_ratio)
    token = _token(logprob, rollout_logprob, advantage, loss_mask)
    # A kernel may report a logprob a hair above 0; the divergence of a certain token is taken just below it.
    ceiling = -torch.finfo(token.logprob.dtype).tiny
    log_pi, log_mu = token.logprob.detach().clamp(max=ceiling), token.anchor.clamp(max=ceiling)
    other_pi, other_mu = -torch.expm1(log_pi), -torch.expm1(log_mu)
    divergence = log_mu.exp() * (log_mu - log_pi) + other_mu * (other_mu.log() - other_pi.log())
    too_high = (token.advantage > 0) & (log_pi > log_mu) & (divergence > delta_high)
    too_low = (token.advantage < 0) & (log_pi < log_mu) & (divergence > delta_low)
    return score_form(token, token.ratio.clamp(max=max_ratio), out_of_region=too_high | too_low)


def double_sided_importance(
    logprob: Tensor,
    rollout_logprob: Tensor,
    advantage: Tensor,
    loss_mask: Tensor,
    *,
    min_ratio: float,
    max_ratio: float,
) -> TokenLoss:
    """GLM-5's asynchronous loss: the ratio where it lies strictly between two bounds, nothing outside.

        coefficient = r where min_ratio < r < max_ratio, else 0

    Blind to the sign of the advantage. arXiv:2602.15763, section 4.1.2. Bounds are absolute: the paper's
    (1 - epsilon_low, 1 + epsilon_high).
    """
    check_bounds(min_ratio=min_ratio, max_ratio=max_ratio)
    token = _token(logprob, rollout_logprob, advantage, loss_mask)
    # Written so that a NaN ratio stays inside and is seen.
    outside = (token.ratio <= min_ratio) | (token.ratio >= max_ratio)
    return score_form(token, token.ratio, out_of_region=outside)


def importance_weighted_policy_gradient(
    logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, loss_mask: Tensor
) -> TokenLoss:
    """The unbiased policy gradient from another policy's samples: coefficient = pi / mu, no trust region."""
    token = _token(logprob, rollout_logprob, advantage, loss_mask)
    return score_form(token, token.ratio, out_of_region=torch.zeros_like(token.usable))


def cispo(
    logprob: Tensor,
    rollout_logprob: Tensor,
    advantage: Tensor,
    loss_mask: Tensor,
    *,
    min_ratio: float,
    max_ratio: float,
) -> TokenLoss:
    """CISPO: the ratio clamped between two bounds, so that every token keeps some gradient.

        coefficient = min(max(r, min_ratio), max_ratio)

    arXiv:2506.13585, anchored on the sampler. Bounds are absolute, not offsets from 1; (0, C) is truncated
    importance sampling. `out_of_region` shows the clamped tokens.
    """
    check_bounds(min_ratio=min_ratio, max_ratio=max_ratio)
    token = _token(logprob, rollout_logprob, advantage, loss_mask)
    weight = token.ratio.clamp(min_ratio, max_ratio)
    clamped = (token.ratio < min_ratio) | (token.ratio > max_ratio)
    value = score_form(token, weight, out_of_region=torch.zeros_like(clamped))
    return value._replace(out_of_region=clamped & token.usable)


def _token(logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, loss_mask: Tensor) -> AnchoredToken:
    """Anchored on the sampler, after a look at the shapes."""
    check_shapes(logprob=logprob, rollout_logprob=rollout_logprob, advantage=advantage, loss_mask=loss_mask)
    return anchored(logprob, rollout_logprob, advantage, loss_mask)
