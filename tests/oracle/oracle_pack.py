"""Packing and dealing by brute force: every assignment is tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product


def fewest_bins(lengths: Sequence[int], budget: int) -> int:
    """The least number of bins over all assignments; a row above the budget is alone in one."""
    best = len(lengths)

    def place(index: int, loads: tuple[int, ...]) -> None:
        nonlocal best
        if len(loads) >= best and index < len(lengths):
            return
        if index == len(lengths):
            best = min(best, len(loads))
            return
        length = lengths[index]
        for k in range(len(loads)):
            if loads[k] + length <= budget:
                place(index + 1, (*loads[:k], loads[k] + length, *loads[k + 1 :]))
        place(index + 1, (*loads, length))

    place(0, ())
    return best


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Lengths by bin: the longest left goes into the first bin with room."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        for one in bins:
            if sum(one) + length <= budget:
                one.append(length)
                break
        else:
            bins.append([length])
    return bins


def cost(lengths: Sequence[int], per_token: float, per_square: float) -> float:
    """Every token pays for itself and for every token of its row."""
    total = 0.0
    for length in lengths:
        for _ in range(length):
            total += per_token + per_square * length
    return total


def least_makespan(costs: Sequence[float], ranks: int) -> float:
    """The least cost of the dearest rank, over all deals of equally many to each."""
    places = math.ceil(len(costs) / ranks)
    best = math.inf
    for deal in product(range(ranks), repeat=len(costs)):
        if all(deal.count(rank) <= places for rank in range(ranks)):
            best = min(
                best,
                max(math.fsum(c for c, mine in zip(costs, deal) if mine == rank) for rank in range(ranks)),
            )
    return best


def deal(costs: Sequence[float], ranks: int) -> list[list[float]]:
    """Costs by rank: the dearest left goes to the cheapest rank with a free place."""
    places = math.ceil(len(costs) / ranks)
    result: list[list[float]] = [[] for _ in range(ranks)]
    for one in sorted(costs, reverse=True):
        free = [rank for rank in result if len(rank) < places]
        min(free, key=math.fsum).append(one)
    return result


def least_makespan_of_rows(costs: Sequence[float], ranks: int) -> float:
    """The least cost of the dearest rank, over all deals of rows."""
    return min(
        max(math.fsum(c for c, mine in zip(costs, deal) if mine == rank) for rank in range(ranks))
        for deal in product(range(ranks), repeat=len(costs))
    )
