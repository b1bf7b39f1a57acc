"""Length in the reward: penalties that ask for shorter rollouts, and how not to make signal of length alone.

A penalised reward differs between rollouts of a group that all failed, or all passed, by their lengths. So
whether a group has a signal is asked of the task reward, and only then is the penalised one compared:

    flat = zero_variance(reward, valid, group_id, tolerance=1e-6)
    penalised = length_penalised_reward(reward, solved, token_count, valid, group_id, ...)
    group = group_mean_advantage(penalised, valid & ~flat, group_id, tolerance=0.0)

Asked of the penalised reward, every failed group would train the policy to give up early.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .segment import dense, per_segment
from .shapes import PerRollout, check_bool, check_float, check_integer, check_one_axis


def length_penalised_reward(
    reward: PerRollout,
    solved: PerRollout,
    token_count: PerRollout,
    valid: PerRollout,
    group_id: PerRollout,
    *,
    coefficient: float,
    token_scale: float,
) -> PerRollout:
    """Reward minus a price per token, dear where the group solves the task, cheap where it rarely does.

        reward - coefficient / token_scale * max(solved / K, 1 / K) * token_count

    The adaptive length penalty of arXiv:2506.05256: beta is `coefficient`, N is `token_scale`. Solved and
    failed rollouts pay alike.

    Args:
        reward: of the task; may be garbage where `valid` is False.
        solved: True where the task counts as solved; the paper's reward is its 1 and 0.
        token_count: tokens that the policy sampled in this rollout.
        valid: True where the verifier's number counts, if it is finite; the K of a group are these only.
        group_id: rollouts of one task share it.

    Returns:
        One number per rollout, 0 where `valid` is False; a valid reward that is not finite stays so.

    Raises:
        ValueError: if coefficient is negative or token_scale is not positive (or either is not finite), a mask
            is not bool, token_count or group_id is not integer, or they are not of one shape [N].
    """
    _check_prices(token_scale, coefficient=coefficient)
    price = coefficient / token_scale
    return _penalised(reward, solved, valid, group_id, token_count=(token_count, price))


def source_penalised_reward(
    reward: PerRollout,
    solved: PerRollout,
    policy_tokens: PerRollout,
    environment_tokens: PerRollout,
    valid: PerRollout,
    group_id: PerRollout,
    *,
    policy_coefficient: float,
    environment_coefficient: float,
    token_scale: float,
) -> PerRollout:
    """`length_penalised_reward` with a price of its own for what the tools answered.

        reward - max(solved / K, 1 / K) * (policy_coefficient * policy_tokens
                                           + environment_coefficient * environment_tokens) / token_scale

    An agent fills its window with what it writes and with what it asks to see. No published formula is known
    to us; this is the direct reading of two coefficients, and equal ones are one penalty on the whole
    trajectory. Arguments as `length_penalised_reward`.
    """
    _check_prices(
        token_scale, policy_coefficient=policy_coefficient, environment_coefficient=environment_coefficient
    )
    return _penalised(
        reward,
        solved,
        valid,
        group_id,
        policy_tokens=(policy_tokens, policy_coefficient / token_scale),
        environment_tokens=(environment_tokens, environment_coefficient / token_scale),
    )


def soft_overlong_punishment(
    token_count: Tensor, *, max_length: int, buffer: int, dtype: torch.dtype
) -> Tensor:
    """What to add to the reward of a long rollout: 0 up to the buffer, then down in a line to -1. DAPO.

        0                                            where token_count <= max_length - buffer
        (max_length - buffer - token_count) / buffer up to max_length
        -1                                           beyond

    arXiv:2503.14476, Eq. 13. Works token count by token count, in any shape; at least float32.

    Raises:
        ValueError: if buffer is not positive or above max_length, or token_count is not integer.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be positive and at most max_length {max_length}, got {buffer}")
    check_integer(token_count=token_count)
    room = (max_length - buffer) - token_count.to(torch.promote_types(dtype, torch.float32))
    return (room / buffer).clamp(-1.0, 0.0)


def _penalised(
    reward: PerRollout,
    solved: PerRollout,
    valid: PerRollout,
    group_id: PerRollout,
    **priced: tuple[PerRollout, float],
) -> PerRollout:
    """The reward less what its tokens cost: for each name how many they are, and the price of one."""
    tokens = {name: count for name, (count, _) in priced.items()}
    check_float(reward=reward)
    check_bool(solved=solved, valid=valid)
    check_integer(**tokens, group_id=group_id)
    check_one_axis("N", reward=reward, solved=solved, **tokens, valid=valid, group_id=group_id)
    value = torch.where(valid, reward, 0).to(torch.promote_types(reward.dtype, torch.float32))
    place, counted = dense(group_id), valid & reward.isfinite()
    rollouts, passed = per_segment(counted, place), per_segment(solved & counted, place)
    rate = passed.clamp(min=1).to(value.dtype) / rollouts.clamp(min=1)
    cost = sum((count.to(value.dtype) * price for count, price in priced.values()), torch.zeros_like(value))
    return torch.where(valid, value - rate * cost, 0.0)


def _check_prices(token_scale: float, **coefficient: float) -> None:
    for name, value in coefficient.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must not be negative and must be finite, got {value}")
    if not 0 < token_scale < math.inf:
        raise ValueError(f"token_scale must be positive and finite, got {token_scale}")
