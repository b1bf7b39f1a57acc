"""Estimates from graded trials, by enumerating subsets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations


def pass_at_k(trials: int, passed: int, k: int) -> float:
    """Share of the subsets of k trials that hold at least one that passed."""
    subsets = list(combinations([index < passed for index in range(trials)], k))
    return sum(1 for subset in subsets if any(subset)) / len(subsets)


def pass_power_k(trials: int, passed: int, k: int) -> float:
    """Share of the subsets of k trials that all passed."""
    subsets = list(combinations([index < passed for index in range(trials)], k))
    return sum(1 for subset in subsets if all(subset)) / len(subsets)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean, NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def standard_error(values: Sequence[float]) -> float:
    """sqrt(sum (x - mean)^2 / (n - 1) / n)."""
    if len(values) < 2:
        return math.nan
    middle = mean(values)
    return math.sqrt(math.fsum((x - middle) ** 2 for x in values) / (len(values) - 1) / len(values))


def counts_by_problem(
    problem_id: Sequence[int], rollout_id: Sequence[int], passed: Sequence[bool]
) -> dict[int, tuple[int, int]]:
    """(trials, passes) of every problem; rows of one rollout of it count once."""
    outcome = {(p, r): one for p, r, one in zip(problem_id, rollout_id, passed)}
    result = {}
    for problem in problem_id:
        mine = [one for (p, _), one in outcome.items() if p == problem]
        result[problem] = (len(mine), sum(1 for one in mine if one))
    return result
