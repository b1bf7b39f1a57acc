"""Group-relative advantages over valid rollouts: one vote each, none for a rollout without a valid reward.

A group has a signal when at least two of its rollouts are valid and their rewards differ by more than a
tolerance (judge noise of 1e-7 must not become a full-size gradient). Elsewhere the advantage is exactly 0,
a group of one included. A reward that is not finite is not valid. Ids are integers in any order.

Inputs are per rollout. Several rows of one rollout vote once; `token_advantage` gives each row its
rollout's value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .shapes import PerRollout, PerToken


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
    """
    group = _group(reward, valid, group_id, tolerance)
    return _signal(group, group.reward - group.mean)


def group_standard_advantage(
    reward: PerRollout, valid: PerRollout, group_id: PerRollout, *, tolerance: float, epsilon: float
) -> GroupAdvantage:
    """(reward - mean) / (std + epsilon), std of the group with n - 1. GRPO, arXiv:2402.03300."""
    if not epsilon >= 0:
        raise ValueError(f"epsilon must not be negative, got {epsilon}")
    group = _group(reward, valid, group_id, tolerance)
    centred = torch.where(group.valid, group.reward - group.mean, 0.0)
    variance = (group.same @ centred.square()[:, None]).squeeze(1) / (group.count - 1).clamp(min=1)
    scale = torch.where(group.has_signal, variance.sqrt() + epsilon, 1.0)
    return _signal(group, centred / scale)


def leave_one_out_advantage(
    reward: PerRollout, valid: PerRollout, group_id: PerRollout, *, tolerance: float
) -> GroupAdvantage:
    """Reward minus the mean of the others, n / (n - 1) times the group-mean advantage. arXiv:2402.14740."""
    group = _group(reward, valid, group_id, tolerance)
    return _signal(group, (group.reward - group.mean) * group.count / (group.count - 1).clamp(min=1))


def max_likelihood_advantage(
    reward: PerRollout, valid: PerRollout, group_id: PerRollout, *, tolerance: float
) -> GroupAdvantage:
    """(reward - mean) / mean: hard tasks weigh more. arXiv:2602.02710. No signal if mean <= 0."""
    group = _group(reward, valid, group_id, tolerance)
    group = group._replace(has_signal=group.has_signal & (group.mean > 0))
    return _signal(group, (group.reward - group.mean) / torch.where(group.has_signal, group.mean, 1.0))


def zero_variance(
    reward: PerRollout, valid: PerRollout, group_id: PerRollout, *, tolerance: float
) -> PerRollout:
    """True for every rollout of a group whose valid rewards, two or more, all agree within `tolerance`."""
    group = _group(reward, valid, group_id, tolerance)
    return (group.count >= 2) & ~group.differs


def token_advantage(advantage: PerRollout, rollout_index: PerToken, loss_mask: PerToken) -> PerToken:
    """The advantage of every token: its rollout's, where the token is trained, else 0.

    Args:
        rollout_index: for every token the position of its rollout in `advantage`.
    """
    return torch.where(loss_mask, advantage[rollout_index], 0.0)


class _Group(NamedTuple):
    reward: Tensor
    valid: Tensor
    same: Tensor
    count: Tensor
    mean: Tensor
    differs: Tensor
    has_signal: Tensor


def _group(reward: PerRollout, valid: PerRollout, group_id: PerRollout, tolerance: float) -> _Group:
    """What every rollout sees of its group, from an N by N table of who belongs together, in any order."""
    if not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, got {tolerance}")
    if valid.dtype != torch.bool:
        raise ValueError(f"valid must be bool, got {valid.dtype}")
    if not (reward.ndim == 1 and reward.shape == valid.shape == group_id.shape):
        shapes = [tuple(x.shape) for x in (reward, valid, group_id)]
        raise ValueError(f"reward, valid and group_id must have one shape [N], got {shapes}")
    dtype = torch.promote_types(reward.dtype, torch.float32)
    counted = valid & reward.isfinite()
    value = torch.where(counted, reward, 0.0).to(dtype)
    same = (group_id[:, None] == group_id[None, :]) & counted[None, :]
    count = same.sum(1)
    highest = torch.where(same, value[None, :], -torch.inf).amax(1) if len(value) else value
    lowest = torch.where(same, value[None, :], torch.inf).amin(1) if len(value) else value
    total = (same.to(dtype) @ value[:, None]).squeeze(1)
    differs = highest - lowest > tolerance
    return _Group(
        reward=value,
        valid=counted,
        same=same.to(dtype),
        count=count,
        mean=total / count.clamp(min=1),
        differs=differs,
        has_signal=counted & (count >= 2) & differs,
    )


def _signal(group: _Group, advantage: Tensor) -> GroupAdvantage:
    return GroupAdvantage(torch.where(group.has_signal, advantage, 0.0), group.has_signal)
