"""Versions and capacity, by starting groups one at a time and by counting."""

from __future__ import annotations

from collections.abc import Sequence


def admission_capacity(
    version: int, accepted: int, running: int, batch_groups: int, max_staleness: int, max_running: int
) -> int:
    """Start groups until one more would break a bound."""
    started = 0
    while running + started < max_running and (
        accepted + running + started < (max_staleness + version + 1) * batch_groups
    ):
        started += 1
    return started


def staleness(policy_version: Sequence[int], version: int) -> int:
    """How often the oldest sampled token's version must be counted up."""
    sampled = [one for one in policy_version if one >= 0]
    oldest, age = sampled[0], 0
    for one in sampled:
        oldest = one if one < oldest else oldest
    while oldest + age < version:
        age += 1
    return age


def fresh_mask(loss_mask: Sequence[bool], policy_version: Sequence[int], min_version: int) -> list[bool]:
    """Go through the tokens: a trained one stays unless it is too old."""
    kept = []
    for position, trained in enumerate(loss_mask):
        too_old = policy_version[position] < min_version
        kept.append(False if too_old else trained)
    return kept


def token_versions(swaps: Sequence[tuple[int, int]], count: int) -> list[int]:
    """Sample token by token; before each, carry out the swaps that are due."""
    due, version, sampled = list(swaps), -1, []
    while len(sampled) < count:
        while due and due[0][0] == len(sampled):
            version = due.pop(0)[1]
        sampled.append(version)
    return sampled
