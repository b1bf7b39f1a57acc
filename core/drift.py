"""Whether the gap between trainer and sampler grows while the weights stand still.

Then it is not the policy that moves: the engine keeps state that it should not (a prefix cache, a recurrent state).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

from .student import student_cdf


class Drift(NamedTuple):
    """What a series of gaps says.

    Args:
        slope: growth of the gap a step while the weights are the same; NaN where no step can be compared.
        p_value: of a slope this large by chance, one-sided; NaN where too few steps share their weights.
        alarm: the gap grows.
    """

    slope: float
    p_value: float
    alarm: bool


def gap_drift(gap: Sequence[float], weights: Sequence[Hashable], *, level: float, min_slope: float) -> Drift:
    """A common slope within each stretch of steps with equal weights, against none (Student's t, one-sided).

        slope = sum (x - mean x)(y - mean y) / sum (x - mean x)^2,  means by stretch, x the step, y its gap
        t = slope / sqrt(sum of squared residuals / degrees / sum (x - mean x)^2),  degrees = steps - stretches - 1

    With independent normal noise of one size, one look raises a false alarm with chance `level`, exactly (less,
    where `min_slope` forbids it); k looks at a growing series with at most k * level. Three steps can tell. A
    jump between stretches says nothing: there the weights changed.

    Args:
        gap: per step, such as the mean of |logprob - rollout_logprob|; NaN, the mean over no token, is left out.
        weights: hash of the engine's weights, per step; steps next to each other with equal hashes form a stretch.
        level: chance of a false alarm a look.
        min_slope: growth a step that matters; above 0, so that rounding is no growth.

    Raises:
        ValueError: if the two differ in length, a gap is infinite, or a threshold is out of its range.
    """
    if len(gap) != len(weights):
        raise ValueError(f"gap and weights must have one length, got {len(gap)} and {len(weights)}")
    if any(math.isinf(y) for y in gap):
        raise ValueError(f"gap must not be infinite, got {list(gap)}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    if not 0 < min_slope < math.inf:
        raise ValueError(f"min_slope must be positive and finite, got {min_slope}")
    stretches = _stretches(gap, weights)
    points = [point for stretch in stretches for point in _centred(stretch)]
    spread = math.fsum(x * x for x, _ in points)
    if spread == 0:
        return Drift(math.nan, math.nan, False)
    slope = math.fsum(x * y for x, y in points) / spread
    degrees = len(points) - len(stretches) - 1
    if degrees < 1:
        return Drift(slope, math.nan, False)
    error = math.sqrt(math.fsum((y - slope * x) ** 2 for x, y in points) / degrees / spread)
    p_value = student_cdf(-slope / error, degrees) if error > 0 else float(slope <= 0)
    return Drift(slope, p_value, slope > min_slope and p_value < level)


def _stretches(gap: Sequence[float], weights: Sequence[Hashable]) -> list[list[tuple[int, float]]]:
    """Steps next to each other with equal weights; a gap that is NaN is in none, and joins nothing."""
    same = [list(part) for _, part in groupby(range(len(gap)), key=lambda x: weights[x])]
    told = [[(x, gap[x]) for x in part if not math.isnan(gap[x])] for part in same]
    return [part for part in told if part]


def _centred(stretch: list[tuple[int, float]]) -> list[tuple[float, float]]:
    middle = math.fsum(x for x, _ in stretch) / len(stretch)
    level = math.fsum(y for _, y in stretch) / len(stretch)
    return [(x - middle, y - level) for x, y in stretch]
