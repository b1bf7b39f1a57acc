"""What belongs together, by dictionaries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


def dense(ids: Sequence[int]) -> list[int]:
    """The rank of every id among the distinct ones."""
    order = sorted(set(ids))
    return [order.index(one) for one in ids]


def segment_sum(value: Sequence[float], place: Sequence[int]) -> list[float]:
    """Entry k: the sum of all values whose place is k."""
    table = [0.0] * len(value)
    for x, k in zip(value, place):
        table[k] += x
    return table


def per_segment(value: Sequence[float], place: Sequence[int]) -> list[float]:
    """Entry t: the sum of all values with the place of t."""
    return [sum(x for x, k in zip(value, place) if k == mine) for mine in place]


class OracleMoment(NamedTuple):
    """What one token sees of the counted tokens of its segment."""

    size: int
    mean: float
    spread: float
    centred: float
    squares: float


def moment(value: Sequence[float], counted: Sequence[bool], place: Sequence[int]) -> list[OracleMoment]:
    """Mean, spread and sum of squared differences, for every token."""
    result = []
    for x, c, mine in zip(value, counted, place):
        inside = [y for y, d, other in zip(value, counted, place) if d and other == mine]
        mean = math.fsum(inside) / len(inside) if inside else 0.0
        result.append(
            OracleMoment(
                size=len(inside),
                mean=mean,
                spread=max(inside) - min(inside) if inside else 0.0,
                centred=x - mean if c else 0.0,
                squares=math.fsum((y - mean) ** 2 for y in inside),
            )
        )
    return result
