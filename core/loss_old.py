"""Per-token surrogates that need an old policy: the ratio is against the trainer's own forward before the step.

Score form and the three rules of `core.loss`, with `old_logprob` in the place of `rollout_logprob`: not finite,
or so low that the ratio overflows, it drops its token. Never give these the sampler's logprobs under that name: a
run without old logprobs has None, and None is refused. Correct for the sampler with `core.importance`.

Ties: a ratio exactly at a bound is inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .segment import dense, per_segment
from .shapes import PerToken, check_integer, check_one_axis
from .surrogate import (
    AnchoredToken,
    TokenLoss,
    anchored,
    check_positive,
    check_shapes,
    detached_log_ratio,
    score_form,
)


def ppo_clip(
    logprob: Tensor,
    old_logprob: Tensor | None,
    advantage: Tensor,
    loss_mask: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    max_ratio: float,
) -> TokenLoss:
    """PPO: a token whose ratio already moved the way its advantage pushes, beyond the bound, is left alone.

        coefficient = 0              where A > 0 and r > 1 + epsilon_high, or A < 0 and r < 1 - epsilon_low
                      min(r, C)      elsewhere, r = pi / pi_old

    The gradient of min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A). arXiv:1707.06347, Eq. 7.

    Args:
        logprob: log pi of the sampled token under the weights being trained.
        old_logprob: log pi_old of the same token, by the trainer's own forward before the step.
        advantage: in the shape of `logprob`.
        loss_mask: True where the policy sampled the token and it is trained; elsewhere the others may be
            garbage.
        epsilon_low: how far below 1 the ratio may fall.
        epsilon_high: how far above 1 it may rise.
        max_ratio: C, the largest coefficient; `math.inf` for none. Without one a token with A < 0 may have any.

    Raises:
        ValueError: if there is no `old_logprob`, shapes differ, the mask is not bool, or a knob is not positive.
    """
    check_positive(epsilon_low=epsilon_low, epsilon_high=epsilon_high, max_ratio=max_ratio)
    token = _token(logprob, old_logprob, advantage, loss_mask)
    outside = _beyond(token.ratio, token.advantage, epsilon_low, epsilon_high)
    return score_form(token, token.ratio.clamp(max=max_ratio), out_of_region=outside)


def ppo_dual_clip(
    logprob: Tensor,
    old_logprob: Tensor | None,
    advantage: Tensor,
    loss_mask: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float,
) -> TokenLoss:
    """PPO that also leaves alone what is bad and has become much more likely: one such token could rule a step.

        coefficient = 0 where PPO clips, or A < 0 and r > dual_clip, else r

    The gradient of max(min(r A, clip(r) A), dual_clip A) where A < 0. arXiv:1912.09729. Arguments as `ppo_clip`;

    Args:
        dual_clip: the largest ratio that a token with A < 0 is trained at; above 1.
    """
    check_positive(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    if not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    token = _token(logprob, old_logprob, advantage, loss_mask)
    clipped = _beyond(token.ratio, token.advantage, epsilon_low, epsilon_high)
    runaway = (token.advantage < 0) & (token.ratio > dual_clip)
    return score_form(token, token.ratio, out_of_region=clipped | runaway)


def decoupled_ppo(
    logprob: Tensor,
    old_logprob: Tensor | None,
    rollout_logprob: Tensor,
    advantage: Tensor,
    loss_mask: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    max_weight: float,
) -> TokenLoss:
    """PPO around a recent policy, on samples of an older one: the clip and the correction are two ratios.

        coefficient = min(pi_old / mu, C) * (pi / pi_old where PPO keeps, else 0)

    arXiv:2110.00641, in asynchronous training arXiv:2505.24298. A token is usable where all three ratios are,
    pi / mu with them. `importance_ratio` is pi / pi_old, which the region is about. Arguments as `ppo_clip`;

    Args:
        rollout_logprob: log mu of the sampled token as the engine reported it, never recomputed.
        max_weight: C, the largest weight; `math.inf` for none.
    """
    check_positive(epsilon_low=epsilon_low, epsilon_high=epsilon_high, max_weight=max_weight)
    old = _recorded(old_logprob)
    check_shapes(
        logprob=logprob,
        old_logprob=old,
        rollout_logprob=rollout_logprob,
        advantage=advantage,
        loss_mask=loss_mask,
    )
    old = old.to(torch.promote_types(logprob.dtype, torch.float32))
    log_weight, known = detached_log_ratio(old, rollout_logprob, loss_mask & old.isfinite())
    _, known = detached_log_ratio(logprob, rollout_logprob, known)
    token = anchored(logprob, old, advantage, known)._replace(loss_mask=loss_mask)
    outside = _beyond(token.ratio, token.advantage, epsilon_low, epsilon_high)
    weight = log_weight.exp().clamp(max=max_weight)
    return score_form(token, weight * token.ratio, out_of_region=outside)


def gspo(
    logprob: PerToken,
    old_logprob: PerToken | None,
    advantage: PerToken,
    loss_mask: PerToken,
    row_id: PerToken,
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> TokenLoss:
    """GSPO: one ratio for the whole row, the geometric mean of its tokens', and PPO's clip on that.

        s = exp(mean of log(pi / pi_old) over the usable tokens of the row)
        coefficient = 0 where A > 0 and s > 1 + epsilon_high, or A < 0 and s < 1 - epsilon_low, else s

    With `core.aggregate.sequence_mean_weight` this is the gradient of GSPO; an advantage that varies inside the
    row makes it GSPO-token. arXiv:2507.18071. A row must be whole in one call, so this loss cannot be taken
    chunk by chunk; a NaN in it makes the whole row NaN. Arguments as `ppo_clip`, one axis;

    Args:
        row_id: integers in any order; tokens of one id share a ratio.
    """
    check_positive(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    check_integer(row_id=row_id)
    check_one_axis("T", logprob=logprob, row_id=row_id)
    token = _token(logprob, old_logprob, advantage, loss_mask)
    moved = torch.where(token.usable, token.logprob.detach() - token.anchor, 0.0)
    row = dense(row_id)
    ratio = (per_segment(moved, row) / per_segment(token.usable, row).clamp(min=1)).exp()
    outside = _beyond(ratio, token.advantage, epsilon_low, epsilon_high)
    return score_form(token, ratio, out_of_region=outside)


def sapo(
    logprob: Tensor,
    old_logprob: Tensor | None,
    advantage: Tensor,
    loss_mask: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> TokenLoss:
    """SAPO: a gate that closes smoothly as the ratio leaves 1, in the place of a clip.

        coefficient = 4 gate (1 - gate) r,    gate = sigmoid(temperature * (r - 1))

    The gradient of 4 / temperature * gate * A; at r = 1 the plain policy gradient. No token is out of region.
    arXiv:2511.20347. Arguments as `ppo_clip`;

    Args:
        temperature_positive: where A > 0; the larger, the sooner the gate closes.
        temperature_negative: elsewhere.
    """
    check_positive(temperature_positive=temperature_positive, temperature_negative=temperature_negative)
    token = _token(logprob, old_logprob, advantage, loss_mask)
    moved = token.ratio - 1
    x = torch.where(token.advantage > 0, temperature_positive * moved, temperature_negative * moved)
    # 1 - sigmoid(x) would round to 0 long before sigmoid(-x) does.
    coefficient = 4 * x.sigmoid() * (-x).sigmoid() * token.ratio
    return score_form(token, coefficient, out_of_region=torch.zeros_like(token.usable))


def _token(
    logprob: Tensor, old_logprob: Tensor | None, advantage: Tensor, loss_mask: Tensor
) -> AnchoredToken:
    """Anchored on the old policy, after a look at the shapes."""
    old = _recorded(old_logprob)
    check_shapes(logprob=logprob, old_logprob=old, advantage=advantage, loss_mask=loss_mask)
    return anchored(logprob, old, advantage, loss_mask)


def _recorded(old_logprob: Tensor | None) -> Tensor:
    if old_logprob is None:
        raise ValueError(
            "old_logprob must be a tensor: this loss is anchored on the trainer's own forward before the step,"
            " got None"
        )
    return old_logprob


def _beyond(ratio: Tensor, advantage: Tensor, epsilon_low: float, epsilon_high: float) -> Tensor:
    """PPO's clip: the ratio went on in the direction of the advantage, further than the bound."""
    too_high = (advantage > 0) & (ratio > 1 + epsilon_high)
    too_low = (advantage < 0) & (ratio < 1 - epsilon_low)
    return too_high | too_low
