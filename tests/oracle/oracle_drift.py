"""A line through the gaps of each stretch, one slope for all: least squares by a search, its test by the book."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import groupby

import oracle_student

Stretch = list[tuple[float, float]]
"""(step, gap) of neighbouring steps with equal weights"""


def stretches(gap: Sequence[float], weights: Sequence[Hashable]) -> list[Stretch]:
    """Steps next to each other with equal hashes; a step without a gap is left out."""
    result = []
    for _, steps in groupby(range(len(gap)), key=lambda t: weights[t]):
        kept = [(float(t), gap[t]) for t in steps if not math.isnan(gap[t])]
        if kept:
            result.append(kept)
    return result


def residuals(parts: Sequence[Stretch], slope: float) -> float:
    """Sum of squares around lines of this slope, each through the means of its stretch."""
    total = 0.0
    for part in parts:
        x, y = (math.fsum(point[k] for point in part) / len(part) for k in (0, 1))
        total += math.fsum((b - y - slope * (a - x)) ** 2 for a, b in part)
    return total


def gap_drift(gap: Sequence[float], weights: Sequence[Hashable]) -> tuple[float, float, float]:
    """(slope, t, degrees); NaN where there is nothing to compare."""
    parts = stretches(gap, weights)
    width = residuals([[(b, a) for a, b in part] for part in parts], 0.0)  # of the steps themselves
    if width == 0:
        return math.nan, math.nan, 0
    slope = (residuals(parts, -0.5) - residuals(parts, 0.5)) / (2 * width)  # vertex of a parabola
    degrees = sum(map(len, parts)) - len(parts) - 1
    if degrees < 1:
        return slope, math.nan, degrees
    error = math.sqrt(max(0.0, residuals(parts, slope)) / degrees / width)
    return slope, slope / error if error > 0 else math.inf, degrees


def p_value(t: float, degrees: float) -> float:
    """P(T >= t)."""
    return oracle_student.student_cdf(-t, degrees)
