"""Per-token surrogates anchored on the sampler: the ratio is against the logprob that the engine recorded.

All are in score form, `value = -stopgrad(coefficient) * advantage * logprob`. Its gradient is that of the
ratio form `-ratio * advantage`, and a cap on the coefficient caps the gradient instead of cutting it off.
Read the gradient, not the value: as a metric the value means nothing.

Every function works token by token on any leading shape, and follows three rules:

* The mask enters on the arguments. Where `loss_mask` is False nothing is read, NaN and infinity included, and
  value and gradient are exactly 0.
* A token in the mask whose `rollout_logprob` is not finite, or so low that the ratio overflows, has no usable
  ratio: it is dropped and shown in `unusable`, never given ratio 1. It keeps its place in the denominators.
* A NaN in `logprob` or `advantage` inside the mask is an error upstream and comes out as NaN, never as 0.

Arithmetic is float32 at least, float64 where `logprob` is float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """What a surrogate says about every token, in the shape of `logprob`.

    Args:
        value: to be summed with the weights of `core.aggregate`; carries the gradient.
        importance_ratio: exp(logprob - rollout_logprob), raw; 0 outside the mask and where unusable.
        out_of_region: the trust region took this token's gradient away.
        unusable: in the mask, but without a usable ratio.
    """

    value: Tensor
    importance_ratio: Tensor
    out_of_region: Tensor
    unusable: Tensor


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
    _check_positive(delta_low=delta_low, delta_high=delta_high, max_ratio=max_ratio)
    token = _token(logprob, rollout_logprob, advantage, loss_mask)
    moved = token.logprob.detach().exp() - token.rollout_logprob.exp()
    too_high = (token.advantage > 0) & (moved > delta_high)
    too_low = (token.advantage < 0) & (-moved > delta_low)
    return _score(token, token.ratio.clamp(max=max_ratio), out_of_region=too_high | too_low)


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
    _check_positive(delta_low=delta_low, delta_high=delta_high, max_ratio=max_ratio)
    token = _token(logprob, rollout_logprob, advantage, loss_mask)
    # A kernel may report a logprob a hair above 0; the divergence of a certain token is taken just below it.
    ceiling = -torch.finfo(token.logprob.dtype).tiny
    log_pi, log_mu = token.logprob.detach().clamp(max=ceiling), token.rollout_logprob.clamp(max=ceiling)
    other_pi, other_mu = -torch.expm1(log_pi), -torch.expm1(log_mu)
    divergence = log_mu.exp() * (log_mu - log_pi) + other_mu * (other_mu.log() - other_pi.log())
    too_high = (token.advantage > 0) & (log_pi > log_mu) & (divergence > delta_high)
    too_low = (token.advantage < 0) & (log_pi < log_mu) & (divergence > delta_low)
    return _score(token, token.ratio.clamp(max=max_ratio), out_of_region=too_high | too_low)


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
    _check_bounds(min_ratio=min_ratio, max_ratio=max_ratio)
    token = _token(logprob, rollout_logprob, advantage, loss_mask)
    # Written so that a NaN ratio stays inside and is seen.
    outside = (token.ratio <= min_ratio) | (token.ratio >= max_ratio)
    return _score(token, token.ratio, out_of_region=outside)


def importance_weighted_policy_gradient(
    logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, loss_mask: Tensor
) -> TokenLoss:
    """The unbiased policy gradient from another policy's samples: coefficient = pi / mu, no trust region."""
    token = _token(logprob, rollout_logprob, advantage, loss_mask)
    return _score(token, token.ratio, out_of_region=torch.zeros_like(token.usable))


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
    _check_bounds(min_ratio=min_ratio, max_ratio=max_ratio)
    token = _token(logprob, rollout_logprob, advantage, loss_mask)
    weight = token.ratio.clamp(min_ratio, max_ratio)
    clamped = (token.ratio < min_ratio) | (token.ratio > max_ratio)
    value = _score(token, weight, out_of_region=torch.zeros_like(clamped))
    return value._replace(out_of_region=clamped & token.usable)


class _Token(NamedTuple):
    logprob: Tensor
    rollout_logprob: Tensor
    advantage: Tensor
    ratio: Tensor
    usable: Tensor
    loss_mask: Tensor


def _token(logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, loss_mask: Tensor) -> _Token:
    """Recorded arguments made harmless outside the mask, all wide enough, and the detached ratio."""
    _check_shapes(logprob, rollout_logprob, advantage, loss_mask)
    dtype = torch.promote_types(logprob.dtype, torch.float32)
    sampled = loss_mask & rollout_logprob.isfinite()
    anchor = torch.where(sampled, rollout_logprob, 0.0).detach().to(dtype)
    ratio = (torch.where(sampled, logprob.detach(), 0.0).to(dtype) - anchor).exp()
    usable = sampled & ~ratio.isinf()
    return _Token(
        logprob=logprob.to(dtype),
        rollout_logprob=torch.where(usable, anchor, 0.0),
        advantage=torch.where(usable, advantage, 0.0).detach().to(dtype),
        ratio=torch.where(usable, ratio, 0.0),
        usable=usable,
        loss_mask=loss_mask,
    )


def _score(token: _Token, coefficient: Tensor, *, out_of_region: Tensor) -> TokenLoss:
    """-coefficient * advantage * logprob; where nothing is trained the logprob itself is replaced."""
    outside = out_of_region & token.usable
    coefficient = torch.where(token.usable & ~outside, coefficient, 0.0)
    score = torch.where(token.usable & ~outside, token.logprob, 0.0)
    return TokenLoss(
        value=-coefficient * token.advantage * score,
        importance_ratio=token.ratio,
        out_of_region=outside,
        unusable=token.loss_mask & ~token.usable,
    )


def _check_shapes(logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, loss_mask: Tensor) -> None:
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask must be bool, got {loss_mask.dtype}")
    shapes = [tuple(x.shape) for x in (logprob, rollout_logprob, advantage, loss_mask)]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"logprob, rollout_logprob, advantage and loss_mask must have one shape, got {shapes}"
        )


def _check_positive(**threshold: float) -> None:
    for name, value in threshold.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def _check_bounds(*, min_ratio: float, max_ratio: float) -> None:
    if not 0 <= min_ratio < max_ratio:
        raise ValueError(f"min_ratio must be at least 0 and below max_ratio, got {min_ratio} and {max_ratio}")
