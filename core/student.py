"""The normal and Student distributions, as far as comparing runs needs them."""

from __future__ import annotations

import math

_MANY = 1e4
"""Degrees of freedom beyond which gamma functions lose more digits than a series in their inverse."""


def normal_cdf(x: float) -> float:
    """P(Z <= x)."""
    if math.isnan(x):
        raise ValueError(f"x must be a number, got {x}")
    return 0.5 * math.erfc(-x / math.sqrt(2))


def student_cdf(x: float, degrees: float) -> float:
    """P(T <= x) with so many degrees of freedom; infinity is the normal distribution."""
    if math.isnan(x):
        raise ValueError(f"x must be a number, got {x}")
    if not degrees > 0:
        raise ValueError(f"degrees must be positive, got {degrees}")
    if math.isinf(degrees):
        return normal_cdf(x)
    if degrees > _MANY:
        return normal_cdf(_normal_score(x, degrees))
    square = x * x
    share = 1 / (1 + degrees / square) if square else 0.0
    tail = 0.5 * _incomplete_beta(degrees / (degrees + square), share, degrees / 2, 0.5)
    return 1 - tail if x > 0 else tail


def _normal_score(x: float, degrees: float) -> float:
    """The z of the normal distribution with the same tail, for many degrees. Hill, CACM algorithm 395, 1970."""
    a = degrees - 0.5
    square = a * math.log1p(x / degrees * x)
    return math.copysign(math.sqrt(square) * (1 + (square + 3) / a / a / 48), x)


def student_quantile(probability: float, degrees: float) -> float:
    """The x with P(T <= x) = probability."""
    if not 0 < probability < 1:
        raise ValueError(f"probability must lie between 0 and 1, got {probability}")
    tail = min(probability, 1 - probability)
    low, high = 0.0, 1.0
    while student_cdf(-high, degrees) > tail:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(-middle, degrees) > tail else (low, middle)
    return high if probability >= 0.5 else -high


def _incomplete_beta(x: float, rest: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction; `rest` is 1 - x before any rounding."""
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(rest, x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    )
    numerator, denominator = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = denominator
    for m in range(1, 400):  # pragma: no branch: below the mean it takes some twenty terms
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            denominator = 1 / (1 + term * denominator)
            numerator = 1 + term / numerator
            fraction *= numerator * denominator
        if abs(numerator * denominator - 1) < 1e-15:
            break
    return front * fraction / a
