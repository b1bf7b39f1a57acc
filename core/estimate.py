"""What graded trials say about a policy, and what two sets say about two, with the doubt that is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .student import student_cdf, student_quantile


def pass_at_k(*, trials: int, passed: int, k: int) -> float:
    """The chance that of k trials at a task at least one passes, unbiased: 1 - C(n - c, k) / C(n, k).

    Trials are rollouts, not rows. Average over tasks afterwards. arXiv:2107.03374.
    """
    _check_counts(trials, passed, k)
    return 1 - math.comb(trials - passed, k) / math.comb(trials, k)


def pass_power_k(*, trials: int, passed: int, k: int) -> float:
    """The chance that k trials at a task all pass (pass^k), unbiased: C(c, k) / C(n, k). arXiv:2406.12045."""
    _check_counts(trials, passed, k)
    return math.comb(passed, k) / math.comb(trials, k)


class Mean(NamedTuple):
    """A mean and its standard error; NaN where there is nothing to tell it from."""

    mean: float
    error: float


def mean_and_error(values: Sequence[float]) -> Mean:
    """The mean of independent values and its standard error, with n - 1."""
    if not values:
        return Mean(math.nan, math.nan)
    mean = math.fsum(values) / len(values)
    return Mean(mean, math.sqrt(_variance(values) / len(values)) if len(values) > 1 else math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two arms, run with the same seeds on the same tasks, say about each other.

    Example: `Comparison(difference=0.04, low=-0.01, high=0.09, p_value=0.1, seed_spread=0.03, verdict="tie")`

    Args:
        difference: mean of b minus mean of a.
        low, high: confidence interval of the difference.
        p_value: of no difference, two-sided; what `holm` takes.
        seed_spread: standard deviation over seeds of a seed's mean difference; what `seeds_needed` takes.
        verdict: "tie", "a better" or "b better".
    """

    difference: float
    low: float
    high: float
    p_value: float
    seed_spread: float
    verdict: str


def compare(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], *, confidence: float) -> Comparison:
    """The paired difference by seed and task, seeds and tasks both drawn at random.

    d = b - a per seed and task is a mean, a seed's part, a task's part and a rest; the three mean squares
    of the two-way table give Var(mean) = (MS_seed + MS_task - MS_rest) / (S T), at least what either alone
    gives, with Satterthwaite's degrees of freedom. So neither many tasks nor many seeds hide a spread in
    the other. With one seed it speaks about tasks only, and `seed_spread` is NaN.

    Args:
        a: score of the first arm, [seed][task]; a score may be a mean over samples.
        b: of the second arm, the same seeds and tasks.
        confidence: of the interval, such as 0.95; for m comparisons 1 - 0.05 / m (Bonferroni).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    shapes = [[len(row) for row in a], [len(row) for row in b]]
    if not a or not a[0] or shapes[0] != shapes[1] or len(set(shapes[0])) > 1:
        raise ValueError(f"a and b must be two equal tables [seed][task], got rows of {shapes}")
    d = [[y - x for x, y in zip(row_a, row_b, strict=True)] for row_a, row_b in zip(a, b, strict=True)]
    by_seed = [math.fsum(row) / len(row) for row in d]
    difference = math.fsum(by_seed) / len(by_seed)
    variance, degrees = _crossed_variance(d)
    error = math.sqrt(variance)
    if error == 0:
        low = high = difference
        p_value = 1.0 if difference == 0 else 0.0
    else:
        reach = student_quantile((1 + confidence) / 2, degrees) * error
        low, high = difference - reach, difference + reach
        p_value = 2 * student_cdf(-abs(difference) / error, degrees)
    return Comparison(
        difference=difference,
        low=low,
        high=high,
        p_value=p_value,
        seed_spread=math.sqrt(_variance(by_seed)) if len(by_seed) > 1 else math.nan,
        verdict="tie" if not (low > 0 or high < 0) else "b better" if low > 0 else "a better",
    )


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """p-values of several comparisons, adjusted so that the chance of any error is the stated one."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    so_far = 0.0
    for rank, index in enumerate(order):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = so_far
    return tuple(adjusted)


def seeds_needed(*, difference: float, seed_spread: float, power: float, confidence: float) -> int:
    """Paired seeds with which a true `difference` would be told from none with this power.

        least n >= 2 with n >= ((t_{n-1}((1 + confidence) / 2) + t_{n-1}(power)) * seed_spread / difference)^2

    Only the spread over seeds shrinks with more seeds; the doubt that comes from few tasks does not.
    """
    if not abs(difference) > 0:
        raise ValueError(f"difference must not be 0, got {difference}")
    if not seed_spread >= 0:
        raise ValueError(f"seed_spread must not be negative, got {seed_spread}")
    ratio = (seed_spread / abs(difference)) ** 2
    level = (1 + confidence) / 2
    count = max(
        2, math.ceil((student_quantile(level, math.inf) + student_quantile(power, math.inf)) ** 2 * ratio)
    )
    while count < (student_quantile(level, count - 1) + student_quantile(power, count - 1)) ** 2 * ratio:
        count += 1
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What one trial did.

    Example: `Behaviour(turns=3, sampled_tokens=60, tool_calls=2, tool_errors=0, context_exhausted=False)`.
    """

    turns: int
    sampled_tokens: int
    tool_calls: int
    tool_errors: int
    context_exhausted: bool


class BehaviourRates(NamedTuple):
    """Over a set of trials: sums first, then one division; NaN where there is nothing to divide by."""

    turns: float
    tokens_per_turn: float
    tool_success: float
    context_exhausted: float


def behaviour_rates(trials: Sequence[Behaviour]) -> BehaviourRates:
    """Turns a trial, sampled tokens a turn, share of tool calls without error, of trials out of context."""
    turns = sum(t.turns for t in trials)
    calls = sum(t.tool_calls for t in trials)
    return BehaviourRates(
        turns=_share(turns, len(trials)),
        tokens_per_turn=_share(sum(t.sampled_tokens for t in trials), turns),
        tool_success=_share(calls - sum(t.tool_errors for t in trials), calls),
        context_exhausted=_share(sum(t.context_exhausted for t in trials), len(trials)),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _check_counts(trials: int, passed: int, k: int) -> None:
    if not 0 <= passed <= trials:
        raise ValueError(f"passed must lie between 0 and {trials} trials, got {passed}")
    if not 1 <= k <= trials:
        raise ValueError(f"k must lie between 1 and {trials} trials, got {k}")


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _crossed_variance(d: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Variance of the mean of a seed-by-task table and its degrees of freedom."""
    seeds, tasks = len(d), len(d[0])
    by_seed = [math.fsum(row) / tasks for row in d]
    by_task = [math.fsum(column) / seeds for column in zip(*d, strict=True)]
    if seeds == 1 and tasks == 1:
        return math.inf, 1.0
    if seeds == 1 or tasks == 1:
        values = by_task if seeds == 1 else by_seed
        return _variance(values) / len(values), len(values) - 1
    mean = math.fsum(by_seed) / seeds
    rest = math.fsum(
        (d[s][t] - by_seed[s] - by_task[t] + mean) ** 2 for s in range(seeds) for t in range(tasks)
    ) / ((seeds - 1) * (tasks - 1))
    square = (tasks * _variance(by_seed), seeds * _variance(by_task), rest)
    degrees = (seeds - 1, tasks - 1, (seeds - 1) * (tasks - 1))
    total = square[0] + square[1] - square[2]
    if total <= max(square[:2]):
        largest = 0 if square[0] >= square[1] else 1
        return square[largest] / (seeds * tasks), degrees[largest]
    spread = sum(ms * ms / df for ms, df in zip(square, degrees, strict=True))
    return total / (seeds * tasks), total * total / spread
