"""Rewards that length takes from."""

from __future__ import annotations

from collections.abc import Sequence


def length_penalised(
    reward: Sequence[float],
    solved: Sequence[bool],
    token_count: Sequence[int],
    valid: Sequence[bool],
    group_id: Sequence[int],
    coefficient: float,
    token_scale: float,
) -> list[float]:
    """R - (beta / N) max(p_solved, 1 / K) |y|. arXiv:2506.05256."""
    nothing = [0] * len(reward)
    return source_penalised(
        reward, solved, token_count, nothing, valid, group_id, coefficient, 0.0, token_scale
    )


def source_penalised(
    reward: Sequence[float],
    solved: Sequence[bool],
    policy_tokens: Sequence[int],
    environment_tokens: Sequence[int],
    valid: Sequence[bool],
    group_id: Sequence[int],
    policy_coefficient: float,
    environment_coefficient: float,
    token_scale: float,
) -> list[float]:
    """The same with one price for what the policy wrote and one for what it read."""
    result = []
    for i in range(len(reward)):
        if not valid[i]:
            result.append(0.0)
            continue
        attempts = [s for s, v, g in zip(solved, valid, group_id) if v and g == group_id[i]]
        rate = max(sum(1 for s in attempts if s) / len(attempts), 1 / len(attempts))
        price = policy_coefficient * policy_tokens[i] + environment_coefficient * environment_tokens[i]
        result.append(reward[i] - rate * price / token_scale)
    return result


def soft_overlong(length: int, limit: int, cushion: int) -> float:
    """DAPO's soft punishment: 0, then falling over the cushion, then -1. arXiv:2503.14476, Eq. 13."""
    if length <= limit - cushion:
        return 0.0
    return (limit - cushion - length) / cushion if length <= limit else -1.0
