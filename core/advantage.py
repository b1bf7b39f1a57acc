"""Group-relative advantages over valid rollouts: one vote each, none for a rollout without a valid reward.

A group has a signal when at least two of its rollouts are valid and their rewards differ by more than a
tolerance (judge noise of 1e-7 must not become a full-size gradient). Elsewhere the advantage is exactly 0,
a group of one included. A reward that is not finite is not valid. Ids are integers, and neither their names
nor the order of the rollouts changes a bit of the result.

Inputs are per rollout. Where a rollout has several rows, `core.vote` makes one vote of them, and
`token_advantage` gives every token the value of its rollout. Where a length penalty is in the reward, a group
has a signal if its *task* rewards differ: see `core.length`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .segment import Moment, dense, moment
from .shapes import (
    PerRollout,
    PerToken,
    check_bool,
    check_float,
    check_integer,
    check_one_axis,
    check_one_shape,
)


class GroupAdvantage(NamedTuple):
    """What a group says about each of its rollouts.

    Args:
        advantage: 0 where `has_signal` is False.
        has_signal: the rollout is valid and its group has a signal; only these rollouts are trained.
    """

    advantage: PerRollout
    has_signal: PerRollout


def group_mean_advantage(
    reward: PerRollout, valid: PerRollout, group_id: PerRollout, *, tolerance: float
) -> GroupAdvantage:
    """Reward minus the mean of the group; not divided by the standard deviation. arXiv:2503.20783.

    Args:
        reward: of each rollout; may be garbage where `valid` is False.
        valid: True where the verifier's number counts.
        group_id: rollouts of one task share it.
        tolerance: a spread of at most this is no difference.

    Raises:
        ValueError: if tolerance is negative or NaN, valid is not bool, group_id is not integer, or the three
            are not of one shape [N].
    """
    group, has_signal = _group(reward, valid, group_id, tolerance)
    return _advantage(group.centred, has_signal)


def group_standard_advantage(
    reward: PerRollout, valid: PerRollout, group_id: PerRollout, *, tolerance: float, epsilon: float
) -> GroupAdvantage:
    """(reward - mean) / (std + epsilon), std of the group with n - 1. GRPO, arXiv:2402.03300."""
    _check_epsilon(epsilon)
    group, has_signal = _group(reward, valid, group_id, tolerance)
    return _advantage(group.centred / (group.deviation(lost=1) + epsilon), has_signal)


def batch_standard_advantage(
    reward: PerRollout, valid: PerRollout, group_id: PerRollout, *, tolerance: float, epsilon: float
) -> GroupAdvantage:
    """(reward - mean of the group) / (std + epsilon), std of all valid rewards of the batch with n - 1.

    Groups keep their scale against each other, which a std of their own takes away. arXiv:2508.08221.
    """
    _check_epsilon(epsilon)
    group, has_signal = _group(reward, valid, group_id, tolerance)
    batch, _ = _group(reward, valid, torch.zeros_like(group_id), tolerance)
    return _advantage(group.centred / (batch.deviation(lost=1) + epsilon), has_signal)


def leave_one_out_advantage(
    reward: PerRollout, valid: PerRollout, group_id: PerRollout, *, tolerance: float
) -> GroupAdvantage:
    """Reward minus the mean of the others, n / (n - 1) times the group-mean advantage. arXiv:2402.14740."""
    group, has_signal = _group(reward, valid, group_id, tolerance)
    return _advantage(group.centred * group.size / (group.size - 1).clamp(min=1), has_signal)


def max_likelihood_advantage(
    reward: PerRollout, valid: PerRollout, group_id: PerRollout, *, tolerance: float
) -> GroupAdvantage:
    """(reward - mean) / mean: hard tasks weigh more. arXiv:2602.02710. No signal if mean <= 0.

    Meant for rewards of at least 0: then no advantage exceeds n - 1. A mean that is 0 but for rounding is 0.
    """
    group, has_signal = _group(reward, valid, group_id, tolerance)
    rounding = group.spread * group.size * torch.finfo(group.mean.dtype).eps
    return _advantage(group.centred / group.mean, has_signal & (group.mean > rounding))


def zero_variance(
    reward: PerRollout, valid: PerRollout, group_id: PerRollout, *, tolerance: float
) -> PerRollout:
    """True for every rollout of a group whose valid rewards, two or more, all agree within `tolerance`."""
    group, _ = _group(reward, valid, group_id, tolerance)
    return (group.size >= 2) & ~(group.spread > tolerance)


def whitened(value: Tensor, loss_mask: Tensor, *, epsilon: float) -> Tensor:
    """(value - mean) / (std + epsilon) over the whole step's mask, std with n; a value alone stays as it is.

    Call before any split into micro-batches or ranks: their own statistics are others. Any shape; 0 where the
    mask is False. NaN inside the mask makes everything NaN.

    Raises:
        ValueError: if epsilon is negative or NaN, loss_mask is not bool, or the shapes differ.
    """
    check_one_shape(value=value, loss_mask=loss_mask)
    everything = torch.zeros(loss_mask.numel(), dtype=torch.int64, device=loss_mask.device)
    flat = whitened_per_group(value.flatten(), loss_mask.flatten(), everything, epsilon=epsilon)
    return flat.view(value.shape)


def whitened_per_group(
    value: PerToken, loss_mask: PerToken, group_id: PerToken, *, epsilon: float
) -> PerToken:
    """`whitened` within every group of its own; entries that share a `group_id` share mean and std."""
    _check_epsilon(epsilon)
    check_float(value=value)
    check_bool(loss_mask=loss_mask)
    check_integer(group_id=group_id)
    check_one_axis("T", value=value, loss_mask=loss_mask, group_id=group_id)
    group = moment(value, loss_mask, dense(group_id))
    scale = group.deviation(lost=0) + epsilon
    white = group.centred / torch.where(scale == 0, 1.0, scale)
    return torch.where(loss_mask & (group.size == 1), group.mean, white)


def token_advantage(advantage: PerRollout, rollout_index: PerToken, loss_mask: PerToken) -> PerToken:
    """The advantage of every token: its rollout's, where the token is trained, else 0.

    Args:
        advantage: of each rollout.
        rollout_index: for every token the position of its rollout in `advantage`, in any shape; may be
            garbage where `loss_mask` is False.

    Raises:
        ValueError: if a trained token has an index that is not one of the rollouts. Under torch.compile, where
            nothing can be raised, its advantage is NaN.
    """
    check_float(advantage=advantage)
    check_bool(loss_mask=loss_mask)
    check_integer(rollout_index=rollout_index)
    check_one_shape(rollout_index=rollout_index, loss_mask=loss_mask)
    check_one_axis("N", advantage=advantage)
    rollouts = len(advantage)
    known = (rollout_index >= 0) & (rollout_index < rollouts)
    if not torch.compiler.is_compiling() and (loss_mask & ~known).any():
        stray = rollout_index[loss_mask & ~known][0]
        raise ValueError(f"rollout_index must be at least 0 and below the {rollouts} rollouts, got {stray}")
    table = torch.cat([advantage, advantage.new_zeros(1)])
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    value = torch.where(known, table[torch.where(known, rollout_index.long(), rollouts)], torch.nan)
    return torch.where(loss_mask, value, 0.0)


def _group(
    reward: PerRollout, valid: PerRollout, group_id: PerRollout, tolerance: float
) -> tuple[Moment, PerRollout]:
    """What every rollout sees of the valid rewards of its group, and whether it has a signal."""
    if not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, got {tolerance}")
    check_float(reward=reward)
    check_bool(valid=valid)
    check_integer(group_id=group_id)
    check_one_axis("N", reward=reward, valid=valid, group_id=group_id)
    counted = valid & reward.isfinite()
    group = moment(reward, counted, dense(group_id))
    return group, counted & (group.size >= 2) & (group.spread > tolerance)


def _advantage(advantage: PerRollout, has_signal: PerRollout) -> GroupAdvantage:
    return GroupAdvantage(torch.where(has_signal, advantage, 0.0), has_signal)


def _check_epsilon(epsilon: float) -> None:
    if not epsilon >= 0:
        raise ValueError(f"epsilon must not be negative, got {epsilon}")
