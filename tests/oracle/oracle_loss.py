"""Surrogates anchored on the sampler, one token at a time, from the equations of the papers.

Each rule gives (coefficient, out of region) of one usable token; `surrogate` adds what all share.
Notation: pi = e^lp and mu = e^roll are probabilities, r = pi / mu, A the advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

LARGEST_EXPONENT = math.log(1.7976931348623157e308)

Rule = Callable[[float, float, float], tuple[float, bool]]
"""(logprob, rollout_logprob, advantage) -> (coefficient, out of region)"""


class OracleLoss(NamedTuple):
    """One list entry per token."""

    value: list[float]
    gradient: list[float]
    importance_ratio: list[float]
    out_of_region: list[bool]
    unusable: list[bool]


def surrogate(
    logprob: Sequence[float],
    rollout_logprob: Sequence[float],
    advantage: Sequence[float],
    loss_mask: Sequence[bool],
    rule: Rule,
) -> OracleLoss:
    """-coefficient * A * logprob in the mask; its slope is -coefficient * A (grad r = r grad log pi)."""
    result = OracleLoss([], [], [], [], [])
    for lp, roll, A, m in zip(logprob, rollout_logprob, advantage, loss_mask):
        value = slope = ratio = 0.0
        out = bad = False
        if m:
            bad = not math.isfinite(roll) or math.isinf(lp) or lp - roll > LARGEST_EXPONENT
            if not bad:
                coefficient, out = rule(lp, roll, A)
                ratio = math.exp(lp - roll)
                slope = -coefficient * A
                value = slope * lp
        result.value.append(value)
        result.gradient.append(slope)
        result.importance_ratio.append(ratio)
        result.out_of_region.append(out)
        result.unusable.append(bad)
    return result


def binary_tv(lp: float, roll: float) -> float:
    """D_TV^Bin = |mu - pi|, DPPO Eq. 13."""
    return abs(math.exp(roll) - math.exp(lp))


def binary_kl(lp: float, roll: float) -> float:
    """D_KL^Bin = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), DPPO Eq. 14; 0 log 0 = 0."""
    lp, roll = min(lp, 0.0), min(roll, 0.0)
    mu, rest_mu, rest_pi = math.exp(roll), -math.expm1(roll), -math.expm1(lp)
    first = mu * (roll - lp) if mu > 0 else 0.0
    if rest_mu == 0:
        return first
    return math.inf if rest_pi == 0 else first + rest_mu * (math.log(rest_mu) - math.log(rest_pi))


def dppo(
    divergence: Callable[[float, float], float], delta_low: float, delta_high: float, cap: float
) -> Rule:
    """M = 0 iff (A > 0, r > 1, D > delta_high) or (A < 0, r < 1, D > delta_low), Eq. 12; M min(r, C), Eq. 23."""

    def rule(lp: float, roll: float, A: float) -> tuple[float, bool]:
        distance = divergence(lp, roll)
        masked = (A > 0 and lp > roll and distance > delta_high) or (
            A < 0 and lp < roll and distance > delta_low
        )
        return (0.0 if masked else min(math.exp(lp - roll), cap)), masked

    return rule


def double_sided(min_ratio: float, max_ratio: float) -> Rule:
    """f(r) = r if low < r < high, else 0. GLM-5, Eq. 3 to 5."""

    def rule(lp: float, roll: float, A: float) -> tuple[float, bool]:
        r = math.exp(lp - roll)
        inside = min_ratio < r < max_ratio
        return (r if inside else 0.0), not inside

    return rule


def policy_gradient() -> Rule:
    """The ratio, whatever it is."""
    return lambda lp, roll, A: (math.exp(lp - roll), False)


def cispo(min_ratio: float, max_ratio: float) -> Rule:
    """clip(r, low, high)."""

    def rule(lp: float, roll: float, A: float) -> tuple[float, bool]:
        r = math.exp(lp - roll)
        return min(max(r, min_ratio), max_ratio), not min_ratio <= r <= max_ratio

    return rule
