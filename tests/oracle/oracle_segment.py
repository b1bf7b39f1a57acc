"""What belongs together, by dictionaries."""

from __future__ import annotations

from collections.abc import Sequence


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
