"""Weights between the policy before the step and the sampler, token by token and row by row. k = pi_old / mu."""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGEST_EXPONENT = math.log(1.7976931348623157e308)


def log_ratio(old: float, roll: float, m: bool) -> float | None:
    """Log k of a trained token; None where it has no k that is a number."""
    if not m or not math.isfinite(old) or not math.isfinite(roll):
        return None
    return None if old - roll > LARGEST_EXPONENT else old - roll


def log_ratios(old: Sequence[float], roll: Sequence[float], loss_mask: Sequence[bool]) -> list[float | None]:
    """Log k of every token."""
    return [log_ratio(o, r, m) for o, r, m in zip(old, roll, loss_mask)]


def truncated(
    old: Sequence[float], roll: Sequence[float], loss_mask: Sequence[bool], max_weight: float
) -> list[float]:
    """min(k, C)."""
    return [0.0 if x is None else min(math.exp(x), max_weight) for x in log_ratios(old, roll, loss_mask)]


def masked(
    old: Sequence[float],
    roll: Sequence[float],
    loss_mask: Sequence[bool],
    min_weight: float,
    max_weight: float,
) -> list[float]:
    """k if low <= k <= high, else 0. IcePop, arXiv:2510.18855."""
    result = []
    for x in log_ratios(old, roll, loss_mask):
        k = 0.0 if x is None else math.exp(x)
        result.append(k if x is not None and min_weight <= k <= max_weight else 0.0)
    return result


def of_row(logs: Sequence[float | None], row_id: Sequence[int], row: int) -> list[float]:
    """Log k of the usable tokens of a row."""
    return [x for x, one in zip(logs, row_id) if x is not None and one == row]


def sequence_truncated(
    old: Sequence[float],
    roll: Sequence[float],
    loss_mask: Sequence[bool],
    row_id: Sequence[int],
    max_weight: float,
) -> list[float]:
    """min(product of k over the row, C) on every usable token of the row; a product beyond all numbers is C."""
    logs, result = log_ratios(old, roll, loss_mask), []
    for x, row in zip(logs, row_id):
        whole = math.fsum(of_row(logs, row_id, row))
        product = math.exp(whole) if whole <= LARGEST_EXPONENT else math.inf
        weight = min(product, max_weight)
        result.append(weight if x is not None and math.isfinite(weight) else 0.0)
    return result


def sequence_masked(
    old: Sequence[float],
    roll: Sequence[float],
    loss_mask: Sequence[bool],
    row_id: Sequence[int],
    min_weight: float,
    max_weight: float,
) -> list[float]:
    """1 if low <= (product of k)^(1/n) <= high, else 0."""
    logs, result = log_ratios(old, roll, loss_mask), []
    for x, row in zip(logs, row_id):
        inside = of_row(logs, row_id, row)
        kept = bool(inside) and min_weight <= math.exp(math.fsum(inside) / len(inside)) <= max_weight
        result.append(1.0 if x is not None and kept else 0.0)
    return result
