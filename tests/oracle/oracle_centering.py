"""Score centering, arXiv:2609.20807: the drift of the sampler's own distribution, taken out of the gradient.

For one token with sampler q and trainer p over a head H of the vocabulary; w(r) = min(r, C).
    rho = (1 - sum_H q) / (1 - sum_H p), both tails at least 1e-6;  alpha = rho w(1 / rho)
    loss = -A (w(p_y / q_y) log p_y - sum_{v in H} (q_v w(p_v / q_v) - alpha p_v) log p_v)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

FLOOR = 1e-6


class Centered(NamedTuple):
    """Value, slope in the token's own logprob, slopes in the head's."""

    value: float
    slope: float
    head_slope: list[float]


def centered(
    lp: float, roll: float, A: float, head: Sequence[float], head_roll: Sequence[float], max_ratio: float
) -> Centered:
    """One token in the mask."""

    def weight(ratio: float) -> float:
        return min(ratio, max_ratio)

    known = [math.isfinite(x) for x in head_roll]  # the others are not in the head
    p = [math.exp(x) if k else 0.0 for x, k in zip(head, known)]
    q = [math.exp(x) if k else 0.0 for x, k in zip(head_roll, known)]
    rho = max(1 - math.fsum(q), FLOOR) / max(1 - math.fsum(p), FLOOR)
    alpha = rho * weight(1 / rho)
    own = weight(math.exp(lp - roll))
    moved = [b * weight(a / b) - alpha * a if k else 0.0 for a, b, k in zip(p, q, known)]
    value = -A * (own * lp - math.fsum(c * x for c, x, k in zip(moved, head, known) if k))
    return Centered(value, -A * own, [A * c for c in moved])


def drift(p: Sequence[float], q: Sequence[float]) -> list[float]:
    """sum_v q_v grad_z log p_v over the whole vocabulary: q - p."""
    return [math.fsum(b * ((1.0 if v == w else 0.0) - p[w]) for v, b in enumerate(q)) for w in range(len(p))]
