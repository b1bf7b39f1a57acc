"""Surrogates anchored on the trainer's own forward before the step, one token or one row at a time.

r' = pi / pi_old. Each objective J (to be maximised) is the paper's; `slope` is d(-J)/d log pi in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Coefficient(NamedTuple):
    """What multiplies A log pi, and whether the trust region took it away."""

    value: float
    out_of_region: bool


def ppo_objective(ratio: float, A: float, epsilon_low: float, epsilon_high: float) -> float:
    """min(r A, clip(r, 1 - low, 1 + high) A). arXiv:1707.06347, Eq. 7."""
    return min(ratio * A, min(max(ratio, 1 - epsilon_low), 1 + epsilon_high) * A)


def dual_clip_objective(
    ratio: float, A: float, epsilon_low: float, epsilon_high: float, bound: float
) -> float:
    """max(PPO, c A) where A < 0. arXiv:1912.09729, Eq. 5."""
    objective = ppo_objective(ratio, A, epsilon_low, epsilon_high)
    return max(objective, bound * A) if A < 0 else objective


def sapo_objective(ratio: float, A: float, temperature_positive: float, temperature_negative: float) -> float:
    """(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A. arXiv:2511.20347."""
    tau = temperature_positive if A > 0 else temperature_negative
    return 4 / tau * sigmoid(tau * (ratio - 1)) * A


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x) without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def clipped_away(ratio: float, A: float, epsilon_low: float, epsilon_high: float) -> bool:
    """PPO's region: the minimum takes the clipped branch, and that is constant in pi."""
    return (A > 0 and ratio > 1 + epsilon_high) or (A < 0 and ratio < 1 - epsilon_low)


def ppo_clip(ratio: float, A: float, epsilon_low: float, epsilon_high: float, cap: float) -> Coefficient:
    """min(r', C) inside PPO's region, 0 outside."""
    out = clipped_away(ratio, A, epsilon_low, epsilon_high)
    return Coefficient(0.0 if out else min(ratio, cap), out)


def ppo_dual_clip(
    ratio: float, A: float, epsilon_low: float, epsilon_high: float, bound: float
) -> Coefficient:
    """PPO's, and 0 where A < 0 and r' > c."""
    out = clipped_away(ratio, A, epsilon_low, epsilon_high) or (A < 0 and ratio > bound)
    return Coefficient(0.0 if out else ratio, out)


def decoupled_ppo(
    ratio: float, behaviour_ratio: float, A: float, epsilon_low: float, epsilon_high: float, max_weight: float
) -> Coefficient:
    """w r' inside PPO's region, w = min(pi_old / mu, C). arXiv:2110.00641; arXiv:2505.24298."""
    out = clipped_away(ratio, A, epsilon_low, epsilon_high)
    return Coefficient(0.0 if out else min(behaviour_ratio, max_weight) * ratio, out)


def sapo(ratio: float, A: float, temperature_positive: float, temperature_negative: float) -> Coefficient:
    """4 sigma (1 - sigma) r', sigma = sigmoid(tau (r' - 1))."""
    gate = sigmoid((temperature_positive if A > 0 else temperature_negative) * (ratio - 1))
    return Coefficient(4 * gate * (1 - gate) * ratio, False)


def sequence_ratio(
    log_ratio: Sequence[float], loss_mask: Sequence[bool], row_id: Sequence[int]
) -> list[float]:
    """exp of the mean log-ratio of the row's trained tokens, for every token. GSPO, arXiv:2507.18071, Eq. 7."""
    result = []
    for row in row_id:
        inside = [x for x, m, other in zip(log_ratio, loss_mask, row_id) if m and other == row]
        result.append(math.exp(math.fsum(inside) / len(inside)) if inside else 1.0)
    return result
