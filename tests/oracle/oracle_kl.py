"""KL estimators from a sampled token, and the divergence itself by enumeration of a vocabulary.

d = log pi - log pi_ref. Schulman's k1, k2, k3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def k1(lp: float, ref: float) -> tuple[float, float]:
    """d and its slope in log pi."""
    return lp - ref, 1.0


def k2(lp: float, ref: float) -> tuple[float, float]:
    """d^2 / 2 and d."""
    d = lp - ref
    return d * d / 2, d


def k3(lp: float, ref: float) -> tuple[float, float]:
    """e^-d - 1 + d and 1 - e^-d."""
    d = lp - ref
    return math.expm1(-d) + d, -math.expm1(-d)


def weighted_k3(lp: float, roll: float, ref: float) -> tuple[float, float]:
    """r k3 and r (k3 + 1 - e^-d) = r d, r = pi / mu with its gradient. DeepSeek-V3.2."""
    r = math.exp(lp - roll)
    value, slope = k3(lp, ref)
    return r * value, r * (value + slope)


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities."""
    top = max(logits)
    weights = [math.exp(z - top) for z in logits]
    return [w / math.fsum(weights) for w in weights]


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q) = sum p log(p / q)."""
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q))


def divergence_gradient(p: Sequence[float], q: Sequence[float]) -> list[float]:
    """d KL(p || q) / d logits of p: p_v (log(p_v / q_v) - KL)."""
    whole = divergence(p, q)
    return [a * (math.log(a / b) - whole) for a, b in zip(p, q)]


def expected_gradient(
    p: Sequence[float], sampler: Sequence[float], slope: Callable[[int], float]
) -> list[float]:
    """sum_v sampler_v slope(v) grad log p_v, grad log p_v = onehot(v) - p."""
    return [
        math.fsum(mu * slope(v) * ((1.0 if v == w else 0.0) - p[w]) for v, mu in enumerate(sampler))
        for w in range(len(p))
    ]
