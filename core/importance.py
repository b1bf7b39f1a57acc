"""Weights that make samples of the sampler count as samples of the old policy: pi_old / mu, bounded in some way.

For losses anchored on `old_logprob`, whose ratio pi / pi_old says nothing about who sampled. Both logprobs are
recorded numbers, so a weight has no gradient; it is 0 where `loss_mask` is False, and nothing is read there.

A token in the mask with a logprob that is not finite, or whose ratio overflows, has no usable ratio: its weight
is 0, never 1. In a row it is left out, and the other tokens of the row decide. `core.mismatch` counts logprobs
that are not finite. A weight of 0 drops its token, which keeps its place in the denominators.

Arithmetic is float32 at least, float64 where `old_logprob` is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .segment import dense, per_segment
from .shapes import (
    PerToken,
    check_bool,
    check_float,
    check_integer,
    check_one_axis,
    check_one_shape,
    check_record,
)
from .surrogate import TokenLoss, check_bounds, check_positive, check_shapes, detached_log_ratio


def truncated_importance_weight(
    old_logprob: Tensor, rollout_logprob: Tensor, loss_mask: Tensor, *, max_weight: float
) -> Tensor:
    """TIS: min(pi_old / mu, C). Never cuts a token off, and never lets one rule the step.

    Any leading shape. Without a bound the weighted gradient is unbiased.

    Args:
        old_logprob: log pi_old of the sampled token, by the trainer's own forward before the step.
        rollout_logprob: log mu of the same token as the engine reported it.
        loss_mask: True where the policy sampled the token and it is trained; elsewhere the others may be
            garbage.
        max_weight: C; `math.inf` for none.

    Raises:
        ValueError: if shapes differ, the mask is not bool, or `max_weight` is not positive.
    """
    check_positive(max_weight=max_weight)
    ratio = _ratio(old_logprob, rollout_logprob, loss_mask)
    return ratio.clamp(max=max_weight)


def masked_importance_weight(
    old_logprob: Tensor, rollout_logprob: Tensor, loss_mask: Tensor, *, min_weight: float, max_weight: float
) -> Tensor:
    """IcePop: pi_old / mu where it lies between two bounds, the bounds included; outside, the token is dropped.

    Any leading shape. arXiv:2510.18855. Arguments as `truncated_importance_weight`.
    """
    check_bounds(min_weight=min_weight, max_weight=max_weight)
    ratio = _ratio(old_logprob, rollout_logprob, loss_mask)
    inside = (ratio >= min_weight) & (ratio <= max_weight)
    return torch.where(inside, ratio, 0.0)


def sequence_truncated_importance_weight(
    old_logprob: PerToken,
    rollout_logprob: PerToken,
    loss_mask: PerToken,
    row_id: PerToken,
    *,
    max_weight: float,
) -> PerToken:
    """TIS of whole rows: min(product of pi_old / mu over the row, C), the same for all its tokens.

    Generalises `truncated_importance_weight`, which is this with a row for every token. A product that overflows
    is C, or unusable if there is no C. Arguments as there, one axis;

    Args:
        row_id: integers in any order; tokens of one id share a weight.
    """
    check_positive(max_weight=max_weight)
    total, _, usable = _row_log_ratio(old_logprob, rollout_logprob, loss_mask, row_id)
    weight = total.exp().clamp(max=max_weight)
    return torch.where(usable & ~weight.isinf(), weight, 0.0)


def sequence_masked_importance_weight(
    old_logprob: PerToken,
    rollout_logprob: PerToken,
    loss_mask: PerToken,
    row_id: PerToken,
    *,
    min_weight: float,
    max_weight: float,
) -> PerToken:
    """MIS of whole rows: 1 where the geometric mean of pi_old / mu over the row lies between two bounds, else 0.

    The bounds are included. It rejects a row and does not weigh it. Arguments as
    `sequence_truncated_importance_weight`.
    """
    check_bounds(min_weight=min_weight, max_weight=max_weight)
    total, count, usable = _row_log_ratio(old_logprob, rollout_logprob, loss_mask, row_id)
    mean = (total / count.clamp(min=1)).exp()
    inside = (mean >= min_weight) & (mean <= max_weight)
    return (usable & inside).to(mean.dtype)


def reweighted(loss: TokenLoss, importance_weight: Tensor) -> TokenLoss:
    """The loss with the gradient of every token times its weight; a weight of 0 is out of region.

    Args:
        loss: from `core.loss_old`, say.
        importance_weight: detached here; not read where the loss trains nothing.
    """
    check_record(TokenLoss, loss=loss)
    check_float(value=loss.value, slope=loss.slope, importance_weight=importance_weight)
    check_bool(out_of_region=loss.out_of_region)
    check_one_shape(value=loss.value, importance_weight=importance_weight)
    trained = loss.slope != 0
    weight = torch.where(trained, importance_weight.detach(), 1.0).to(loss.value.dtype)
    return loss._replace(
        value=loss.value * weight,
        slope=loss.slope * weight,
        out_of_region=loss.out_of_region | (weight == 0),
    )


def _ratio(old_logprob: Tensor, rollout_logprob: Tensor, loss_mask: Tensor) -> Tensor:
    """pi_old / mu, 0 where it is not usable."""
    log_ratio, usable = _log_ratio(old_logprob, rollout_logprob, loss_mask)
    return torch.where(usable, log_ratio.exp(), 0.0)


def _log_ratio(old_logprob: Tensor, rollout_logprob: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    check_shapes(old_logprob=old_logprob, rollout_logprob=rollout_logprob, loss_mask=loss_mask)
    return detached_log_ratio(old_logprob, rollout_logprob, loss_mask & old_logprob.isfinite())


def _row_log_ratio(
    old_logprob: PerToken, rollout_logprob: PerToken, loss_mask: PerToken, row_id: PerToken
) -> tuple[PerToken, PerToken, PerToken]:
    """Of every token's row: the sum of log(pi_old / mu) and the number of usable tokens; and who is usable."""
    check_integer(row_id=row_id)
    check_one_axis("T", old_logprob=old_logprob, row_id=row_id)
    log_ratio, usable = _log_ratio(old_logprob, rollout_logprob, loss_mask)
    row = dense(row_id)
    return per_segment(log_ratio, row), per_segment(usable, row), usable
