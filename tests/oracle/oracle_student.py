"""The normal and Student distributions by series and by adding up thin slices."""

from __future__ import annotations

import math


def normal_cdf(x: float) -> float:
    """1/2 + density(x) sum x^(2n+1) / (1 3 5 ... (2n+1)). Abramowitz and Stegun 26.2.11."""
    if abs(x) > 12:
        return 1.0 if x > 0 else 0.0
    term, total, n = x, x, 0
    while abs(term) > 1e-20 * abs(total):
        n += 1
        term *= x * x / (2 * n + 1)
        total += term
    return 0.5 + total * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def student_cdf_of_whole_degrees(x: float, degrees: int) -> float:
    """The finite trigonometric sums. Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(x / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees == 1:
        return 0.5 + angle / math.pi
    first = 1 if degrees % 2 == 0 else 2
    term = 1.0 if degrees % 2 == 0 else cosine
    total = term
    for k in range(first, degrees - 2, 2):
        term *= k / (k + 1) * cosine * cosine
        total += term
    inside = sine * total if degrees % 2 == 0 else 2 / math.pi * (angle + sine * total)
    return 0.5 + inside / 2


def student_cdf(x: float, degrees: float, slices: int = 2000) -> float:
    """1/2 + c integral of cos^(degrees - 1) from 0 to atan(x / sqrt(degrees)), by Simpson's rule."""
    if math.isinf(degrees):
        return normal_cdf(x)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    step = math.atan(x / math.sqrt(degrees)) / slices
    total = 0.0
    for k in range(slices + 1):
        share = 1 if k in (0, slices) else 4 if k % 2 else 2
        total += share * math.cos(k * step) ** (degrees - 1)
    return 0.5 + scale * total * step / 3


def student_quantile(probability: float, degrees: float) -> float:
    """Halving an interval until it has no inside."""
    low, high = -1.0, 1.0
    while student_cdf(low, degrees, 400) > probability:
        low *= 2
    while student_cdf(high, degrees, 400) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if student_cdf(middle, degrees, 400) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2
