"""Two arms against each other: the two-way table written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import oracle_student
from oracle_estimate import mean, standard_error


class Compared(NamedTuple):
    """What two arms say about each other."""

    difference: float
    low: float
    high: float
    p_value: float
    seed_spread: float


def mean_squares(table: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Of seeds, of tasks and of the rest in a two-way table with one entry per cell."""
    S, T = len(table), len(table[0])
    grand = mean([x for row in table for x in row])
    seeds = [mean(row) for row in table]
    tasks = [mean([row[t] for row in table]) for t in range(T)]
    of_seeds = T * math.fsum((x - grand) ** 2 for x in seeds) / (S - 1) if S > 1 else 0.0
    of_tasks = S * math.fsum((x - grand) ** 2 for x in tasks) / (T - 1) if T > 1 else 0.0
    rest = math.fsum((table[s][t] - seeds[s] - tasks[t] + grand) ** 2 for s in range(S) for t in range(T))
    return of_seeds, of_tasks, rest / ((S - 1) * (T - 1)) if S > 1 and T > 1 else 0.0


def compare(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], confidence: float
) -> tuple[Compared, bool]:
    """Var(mean) = (MS_seed + MS_task - MS_rest) / (S T), never below any of the three alone; whether that bound bit."""
    d = [[y - x for x, y in zip(one, other)] for one, other in zip(a, b)]
    S, T = len(d), len(d[0])
    ms_seed, ms_task, ms_rest = mean_squares(d)
    total = ms_seed + ms_task - ms_rest
    floor = max(ms_seed, ms_task, ms_rest)
    if S > 1 and T > 1 and total >= floor:
        parts = ((ms_seed, S - 1), (ms_task, T - 1), (ms_rest, (S - 1) * (T - 1)))
        below = math.fsum(ms * ms / n for ms, n in parts)
        degrees = total * total / below if below > 0 else math.inf
    else:
        alone = ((ms_seed, S - 1), (ms_task, T - 1), (ms_rest, (S - 1) * (T - 1)))
        degrees = next(n for ms, n in alone if ms == floor and n > 0)
        total = floor
    error = math.sqrt(total / (S * T))
    difference = mean([x for row in d for x in row])
    reach = oracle_student.student_quantile((1 + confidence) / 2, degrees) * error
    p = 2 * (1 - oracle_student.student_cdf(abs(difference) / error, degrees)) if error > 0 else math.nan
    seeds = [mean(row) for row in d]
    spread = standard_error(seeds) * math.sqrt(S) if S > 1 else math.nan
    bit = not (S > 1 and T > 1 and ms_seed + ms_task - ms_rest >= floor)
    return Compared(difference, difference - reach, difference + reach, p, spread), bit


def holm(p_values: Sequence[float]) -> list[float]:
    """The largest of (m - j + 1) p_(j) over all j up to the own rank, at most 1."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    result = [0.0] * len(p_values)
    for rank, i in enumerate(order):
        steps = [(len(order) - j) * p_values[order[j]] for j in range(rank + 1)]
        result[i] = min(1.0, max(steps))
    return result


def seeds_needed(difference: float, seed_spread: float, power: float, confidence: float) -> int:
    """Count up until n is enough."""
    n = 2
    while True:
        t = oracle_student.student_quantile((1 + confidence) / 2, n - 1)
        t += oracle_student.student_quantile(power, n - 1)
        if n >= (t * seed_spread / difference) ** 2:
            return n
        n += 1
