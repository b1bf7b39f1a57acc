"""What two arms, run with the same seeds on the same tasks, say about each other, with the doubt that is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .student import student_cdf, student_quantile

ROUNDING = 1e-9
"""Differences nearer to each other than this share of the largest score are the same difference."""


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
    of the two-way table give Var(mean) = (MS_seed + MS_task - MS_rest) / (S T), at least what each of the three
    alone gives, with Satterthwaite's degrees of freedom. So neither many tasks nor many seeds hide a spread in
    the other. With one seed it speaks about tasks only, and `seed_spread` is NaN.

    Where every d is the same, there is no spread to measure doubt by, and the sign test speaks instead: n equal
    signs have p = 2^(1 - n), n being the seeds or the tasks, whichever are fewer (if there is one of either, the
    other). Enough of them, and the interval is that difference; too few, and it is without end, a tie. Where all
    d are 0, the arms are the same in everything seen: p = 1, an interval without width, a tie.

    Args:
        a: score of the first arm, [seed][task]; a score may be a mean over samples.
        b: of the second arm, the same seeds and tasks.
        confidence: of the interval, such as 0.95; for m comparisons 1 - 0.05 / m (Bonferroni).
    """
    _check(a, b, confidence)
    d = [[y - x for x, y in zip(row_a, row_b, strict=True)] for row_a, row_b in zip(a, b, strict=True)]
    by_seed = [math.fsum(row) / len(row) for row in d]
    difference = math.fsum(by_seed) / len(by_seed)
    rounding = ROUNDING * max(abs(score) for row in (*a, *b) for score in row)
    if max(map(max, d)) - min(map(min, d)) <= rounding:
        difference = difference if abs(difference) > rounding else 0.0
        reach, p_value = _sign_test(d, difference, confidence)
    else:
        variance, degrees = _crossed_variance(d)
        error = math.sqrt(variance)
        reach = student_quantile((1 + confidence) / 2, degrees) * error
        p_value = 2 * student_cdf(-abs(difference) / error, degrees)
    low, high = difference - reach, difference + reach
    return Comparison(
        difference=difference,
        low=low,
        high=high,
        p_value=p_value,
        seed_spread=math.sqrt(variance_of(by_seed)) if len(by_seed) > 1 else math.nan,
        verdict="tie" if not (low > 0 or high < 0) else "b better" if low > 0 else "a better",
    )


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """p-values of several comparisons, adjusted so that the chance of any error is the stated one."""
    if not all(0 <= p <= 1 for p in p_values):
        raise ValueError(f"p_values must lie between 0 and 1, got {list(p_values)}")
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
    if not 0 < abs(difference) < math.inf:
        raise ValueError(f"difference must be finite and not 0, got {difference}")
    if not 0 <= seed_spread < math.inf:
        raise ValueError(f"seed_spread must be finite and not negative, got {seed_spread}")
    for name, value in (("power", power), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}")
    ratio = (seed_spread / abs(difference)) ** 2

    def enough(degrees: float) -> float:
        reach = student_quantile((1 + confidence) / 2, degrees) + student_quantile(power, degrees)
        return max(0.0, reach) ** 2 * ratio

    count = max(2, math.ceil(enough(math.inf)))
    while count < enough(count - 1):
        count += 1
    return count


def variance_of(values: Sequence[float]) -> float:
    """The variance of at least two independent values, with n - 1."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _check(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    shapes = [[len(row) for row in a], [len(row) for row in b]]
    if not a or not a[0] or shapes[0] != shapes[1] or len(set(shapes[0])) > 1:
        raise ValueError(f"a and b must be two equal tables [seed][task], got rows of {shapes}")
    for score in (score for row in (*a, *b) for score in row):
        if not math.isfinite(score):
            raise ValueError(f"every score must be finite, got {score}")


def _sign_test(d: Sequence[Sequence[float]], difference: float, confidence: float) -> tuple[float, float]:
    """Half the width of the interval, and the p-value, of a table with one difference everywhere."""
    if difference == 0:
        return 0.0, 1.0
    seeds, tasks = len(d), len(d[0])
    p_value = 2.0 ** (1 - (max(seeds, tasks) if min(seeds, tasks) == 1 else min(seeds, tasks)))
    return (0.0 if p_value <= 1 - confidence else math.inf), p_value


def _crossed_variance(d: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Variance of the mean of a seed-by-task table whose entries differ, and its degrees of freedom."""
    seeds, tasks = len(d), len(d[0])
    by_seed = [math.fsum(row) / tasks for row in d]
    by_task = [math.fsum(column) / seeds for column in zip(*d, strict=True)]
    if seeds == 1 or tasks == 1:
        values = by_task if seeds == 1 else by_seed
        return variance_of(values) / len(values), len(values) - 1
    mean = math.fsum(by_seed) / seeds
    rest = math.fsum(
        (d[s][t] - by_seed[s] - by_task[t] + mean) ** 2 for s in range(seeds) for t in range(tasks)
    ) / ((seeds - 1) * (tasks - 1))
    square = (tasks * variance_of(by_seed), seeds * variance_of(by_task), rest)
    degrees = (seeds - 1, tasks - 1, (seeds - 1) * (tasks - 1))
    total = square[0] + square[1] - square[2]
    if total <= max(square):
        largest = square.index(max(square))
        return square[largest] / (seeds * tasks), degrees[largest]
    spread = sum(ms * ms / df for ms, df in zip(square, degrees, strict=True))
    return total / (seeds * tasks), total * total / spread
