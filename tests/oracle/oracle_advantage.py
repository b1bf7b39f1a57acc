"""Group advantages, one group at a time; a rollout without a valid, finite reward is as if it were not there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Answer = tuple[list[float], list[bool]]


def advantages(
    reward: Sequence[float],
    valid: Sequence[bool],
    group_id: Sequence[int],
    tolerance: float,
    of_group: Callable[[list[float]], list[float] | None],
) -> Answer:
    """of_group(rewards of the valid) per group of two or more whose spread exceeds the tolerance."""
    advantage, signal = [0.0] * len(reward), [False] * len(reward)
    for group in set(group_id):
        members = [
            i for i in range(len(reward)) if group_id[i] == group and valid[i] and math.isfinite(reward[i])
        ]
        rewards = [reward[i] for i in members]
        if len(members) < 2 or not max(rewards) - min(rewards) > tolerance:
            continue
        values = of_group(rewards)
        if values is None:
            continue
        for i, value in zip(members, values):
            advantage[i], signal[i] = value, True
    return advantage, signal


def mean_of(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


def group_mean(
    reward: Sequence[float], valid: Sequence[bool], group_id: Sequence[int], tolerance: float
) -> Answer:
    """R - mean. Dr. GRPO."""
    return advantages(
        reward, valid, group_id, tolerance, lambda rewards: [r - mean_of(rewards) for r in rewards]
    )


def group_standard(
    reward: Sequence[float], valid: Sequence[bool], group_id: Sequence[int], tolerance: float, epsilon: float
) -> Answer:
    """(R - mean) / (std + epsilon), std with n - 1. GRPO."""

    def of_group(rewards: list[float]) -> list[float]:
        mean = mean_of(rewards)
        variance = math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
        return [(r - mean) / (math.sqrt(variance) + epsilon) for r in rewards]

    return advantages(reward, valid, group_id, tolerance, of_group)


def batch_standard(
    reward: Sequence[float], valid: Sequence[bool], group_id: Sequence[int], tolerance: float, epsilon: float
) -> Answer:
    """(R - mean of the group) / (std + epsilon), std of all valid rewards with n - 1."""
    everything = [r for r, v in zip(reward, valid) if v and math.isfinite(r)]
    if len(everything) < 2:
        return [0.0] * len(reward), [False] * len(reward)
    mean = mean_of(everything)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in everything) / (len(everything) - 1))

    def of_group(rewards: list[float]) -> list[float]:
        return [(r - mean_of(rewards)) / (deviation + epsilon) for r in rewards]

    return advantages(reward, valid, group_id, tolerance, of_group)


def leave_one_out(
    reward: Sequence[float], valid: Sequence[bool], group_id: Sequence[int], tolerance: float
) -> Answer:
    """R_i - mean of the others. RLOO."""

    def of_group(rewards: list[float]) -> list[float]:
        return [r - mean_of(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]

    return advantages(reward, valid, group_id, tolerance, of_group)


def max_likelihood(
    reward: Sequence[float], valid: Sequence[bool], group_id: Sequence[int], tolerance: float
) -> Answer:
    """(R - mean) / mean where the mean is positive. MaxRL."""

    def of_group(rewards: list[float]) -> list[float] | None:
        mean = mean_of(rewards)
        return [(r - mean) / mean for r in rewards] if mean > 0 else None

    return advantages(reward, valid, group_id, tolerance, of_group)


def zero_variance(
    reward: Sequence[float], valid: Sequence[bool], group_id: Sequence[int], tolerance: float
) -> list[bool]:
    """Every rollout of a group whose two or more valid rewards lie within the tolerance."""
    result = []
    for group in group_id:
        rewards = [r for r, v, g in zip(reward, valid, group_id) if g == group and v and math.isfinite(r)]
        result.append(len(rewards) >= 2 and max(rewards) - min(rewards) <= tolerance)
    return result


def token_advantage(
    advantage: Sequence[float], rollout_index: Sequence[int], loss_mask: Sequence[bool]
) -> list[float]:
    """The rollout's advantage on its trained tokens."""
    return [advantage[place] if m else 0.0 for place, m in zip(rollout_index, loss_mask)]


def whitened(value: Sequence[float], loss_mask: Sequence[bool], epsilon: float) -> list[float]:
    """(x - mean) / (population std + epsilon) over the mask; a single token stays as it is."""
    inside = [x for x, m in zip(value, loss_mask) if m]
    if len(inside) < 2:
        return [x if m else 0.0 for x, m in zip(value, loss_mask)]
    mean = mean_of(inside)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in inside) / len(inside))
    return [(x - mean) / (deviation + epsilon) if m else 0.0 for x, m in zip(value, loss_mask)]


def whitened_per_group(
    value: Sequence[float], loss_mask: Sequence[bool], group_id: Sequence[int], epsilon: float
) -> list[float]:
    """The same with every group by itself."""
    result = [0.0] * len(value)
    for group in set(group_id):
        members = [i for i, one in enumerate(group_id) if one == group]
        part = whitened([value[i] for i in members], [loss_mask[i] for i in members], epsilon)
        for i, x in zip(members, part):
            result[i] = x
    return result
