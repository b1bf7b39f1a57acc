"""Policy-version arithmetic: how many groups may be under way, and how old a trajectory is.

A version counts optimizer steps: version 0 is the warm start; the step trained *from* version v makes v + 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from .check import check_count, check_whole


def admission_capacity(
    *, version: int, accepted: int, running: int, batch_groups: int, max_staleness: int, max_running: int
) -> int:
    """How many more groups may start now.

        max(0, min(max_running - running, (max_staleness + version + 1) * batch_groups - accepted - running))

    The second bound says: if groups are trained in the order in which they start, a group that starts at
    `version` is trained at most `max_staleness` versions later. With `max_staleness` 0 this is synchronous
    training.

    Args:
        version: the weights that the engine samples from now.
        accepted: groups trained, in training or waiting to be trained; dropped groups have left this count.
        running: groups being sampled.
        batch_groups: groups in one optimizer step.
        max_staleness: versions a trajectory may lag behind.
        max_running: groups that the machines can sample side by side.
    """
    check_count("batch_groups", batch_groups, least=1)
    check_count("version", version, least=0)
    check_count("accepted", accepted, least=0)
    check_count("running", running, least=0)
    check_count("max_staleness", max_staleness, least=0)
    check_count("max_running", max_running, least=0)
    by_staleness = (max_staleness + version + 1) * batch_groups - accepted - running
    return max(0, min(max_running - running, by_staleness))


def accepted_at(version: int, *, batch_groups: int) -> int:
    """Groups that count as accepted when a run resumes at `version`: as many as got it there."""
    check_count("version", version, least=0)
    check_count("batch_groups", batch_groups, least=1)
    return version * batch_groups


def staleness(policy_version: Iterable[int], *, version: int) -> int:
    """Age of a trajectory: the version it is trained from, minus the version of its oldest sampled token.

    Args:
        policy_version: per token; negative where no policy sampled (prompt, observation), which does not
            count.
        version: the trainer's version before the step.
    """
    check_count("version", version, least=0)
    distinct = set(policy_version)
    for sampled_from in distinct:
        check_whole("every policy_version", sampled_from)
    oldest = min((v for v in distinct if v >= 0), default=version)
    if oldest > version:
        raise ValueError(f"a token must not be newer than the trainer's version {version}, got {oldest}")
    return version - oldest


def is_fresh(age: int, *, max_staleness: int) -> bool:
    """Whether a trajectory of this age may be trained: a bound that holds per trajectory, not on average."""
    check_count("age", age, least=0)
    check_count("max_staleness", max_staleness, least=0)
    return age <= max_staleness


def fresh_mask(loss_mask: Iterable[bool], policy_version: Iterable[int], *, min_version: int) -> list[bool]:
    """The mask of a row without the tokens that are older than the step may train.

    Args:
        loss_mask: per token.
        policy_version: per token; the version that sampled it.
        min_version: the oldest that is trained.
    """
    check_count("min_version", min_version, least=0)
    mask, versions = list(loss_mask), list(policy_version)
    if len(mask) != len(versions):
        raise ValueError(f"policy_version must have one entry a token, {len(mask)}, got {len(versions)}")
    return [bool(on) and version >= min_version for on, version in zip(mask, versions, strict=True)]


def token_versions(swaps: Sequence[tuple[int, int]], *, count: int) -> list[int]:
    """Which version sampled each token of a request, from when the weights were swapped while it ran.

    Args:
        swaps: tokens that the request had when the weights became this version, in the order of the swaps. The first
            is that of its start, so has 0 tokens.
        count: of its tokens.
    """
    check_count("count", count, least=0)
    if not swaps or swaps[0][0] != 0:
        raise ValueError(f"swaps must begin with one at 0 tokens, got {list(swaps)}")
    if any(before > after for (before, _), (after, _) in pairwise(swaps)):
        raise ValueError(f"swaps must be in the order of their tokens, got {list(swaps)}")
    ends = [min(begun, count) for begun, _ in swaps[1:]] + [count]
    return [
        version
        for (begun, version), end in zip(swaps, ends, strict=True)
        for _ in range(min(begun, count), end)
    ]


def staleness_histogram(ages: Iterable[int]) -> dict[int, int]:
    """How many trajectories have each age, youngest first."""
    count = Counter(ages)
    for age in count:
        check_count("every age", age, least=0)
    return dict(sorted(count.items()))
