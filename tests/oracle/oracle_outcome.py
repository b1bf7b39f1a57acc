"""What a group can still become, by playing every future of its trials."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import product


def group_verdict(size: int, valid: int, lost: int, retriable: int, min_valid: int) -> str:
    """Drop when no future has enough valid rewards; else try again, wait, and see who is there."""
    undecided = size - valid - lost
    futures = [valid + sum(future) for future in product((0, 1), repeat=undecided)]
    if not any(count >= min_valid for count in futures):
        return "drop"
    if retriable > 0:
        return "refill"
    if undecided > 0:
        return "wait"
    return "complete" if valid == size else "survivors"


def reward_per_rollout(
    rollout_id: Sequence[Hashable], reward: Sequence[float | None]
) -> dict[Hashable, float | None]:
    """The set of rewards of each rollout has one member."""
    result: dict[Hashable, float | None] = {}
    for name in rollout_id:
        seen = {(r is None, r) for other, r in zip(rollout_id, reward) if other == name}
        if len(seen) > 1:
            raise ValueError(name)
        result[name] = seen.pop()[1]
    return result
