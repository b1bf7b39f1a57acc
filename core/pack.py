"""Rows to micro-batches under a token budget, micro-batches to ranks: planned once, for the whole step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .balance import levelled, spread
from .bins import Bins, filled, lower_bound, refilled, split
from .check import check_count


def first_fit_decreasing(lengths: Sequence[int], *, token_budget: int) -> tuple[tuple[int, ...], ...]:
    """Row indices in micro-batches of at most `token_budget` tokens; a longer row has one to itself.

    Longest first, each into the first micro-batch with room: at most 11/9 of the fewest possible, plus 6/9.
    """
    _check(lengths, token_budget)
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if lengths[index] <= free), None)
        if place is None:
            bins.append([index])
            room.append(token_budget - lengths[index])
        else:
            bins[place].append(index)
            room[place] -= lengths[index]
    return tuple(tuple(bin_) for bin_ in bins)


def cost(lengths: Sequence[int], *, per_token: float, per_square: float) -> float:
    """Work of a packed micro-batch: per_token * sum(s) + per_square * sum(s^2), attention within rows."""
    for name, value in (("per_token", per_token), ("per_square", per_square)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value}")
    return per_token * sum(lengths) + per_square * sum(length * length for length in lengths)


def fewest(lengths: Sequence[int], *, token_budget: int) -> int:
    """A number of micro-batches that no packing goes below: the bound L2 of Martello and Toth.

    At least the sum over the budget, rounded up; more where rows above half the budget cannot share.
    """
    _check(lengths, token_budget)
    return lower_bound(lengths, token_budget=token_budget)


def dummies(count: int, *, ranks: int) -> int:
    """How many empty micro-batches make `count` a multiple of `ranks`."""
    check_count("count", count, least=0)
    check_count("ranks", ranks, least=1)
    return -count % ranks


def deal(costs: Sequence[float], *, ranks: int) -> tuple[tuple[int | None, ...], ...]:
    """Micro-batch indices for every rank, equally many each; None is a dummy.

    Dearest first, each to the cheapest rank that still has a free place. A dummy is computed like any other
    micro-batch with every mask False, so that all ranks meet in the same collectives.
    """
    if not all(0 <= price < math.inf for price in costs):
        raise ValueError(f"every cost must be finite and not negative, got {list(costs)}")
    places = (len(costs) + dummies(len(costs), ranks=ranks)) // ranks
    hands: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min((r for r in range(ranks) if len(hands[r]) < places), key=lambda r: (load[r], r))
        hands[rank].append(index)
        load[rank] += costs[index]
    return tuple((*hand, *[None] * (places - len(hand))) for hand in hands)


def plan(
    lengths: Sequence[int], *, token_budget: int, ranks: int, per_token: float, per_square: float
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For every rank its micro-batches, dearest first, for every micro-batch its row indices; () is a dummy.

    Every row occurs once, and every rank has equally many micro-batches: as few as the lower bound allows where
    that many are found, never more than first-fit-decreasing needs. Rows are spread over all of them, so there is
    a dummy only where rows are fewer than micro-batches, and what the ranks cost is evened out. The plan depends
    on the lengths alone: rows in another order are planned to the same lengths.

    Args:
        lengths: tokens of every row.
        token_budget: tokens of one micro-batch; a longer row has one to itself.
        ranks: how many compute side by side.
        per_token, per_square: the model of `cost`.
    """
    _check(lengths, token_budget)
    check_count("ranks", ranks, least=1)
    cost((), per_token=per_token, per_square=per_square)  # refuses a bad model even where there is no row
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    falling = [lengths[row] for row in order]
    costs = [cost([length], per_token=per_token, per_square=per_square) for length in falling]
    hands = levelled(_dealt(falling, costs, token_budget, ranks), falling, costs, token_budget=token_budget)
    dearest_first = [
        sorted(hand, key=lambda rows: (-sum(costs[row] for row in rows), rows or (len(order),)))
        for hand in hands
    ]
    return tuple(tuple(tuple(order[row] for row in rows) for rows in hand) for hand in dearest_first)


def _dealt(lengths: list[int], costs: list[float], token_budget: int, ranks: int) -> list[Bins]:
    """Hands of equally many micro-batches. Rows dealt before they are packed come out evenest, where they fit."""
    rounds = -(-lower_bound(lengths, token_budget=token_budget) // ranks)
    hands = spread(lengths, costs, token_budget=token_budget, ranks=ranks, rounds=rounds)
    if hands is None:
        bins = _packed(lengths, token_budget, rounds * ranks)
        needed = -(-len(bins) // ranks)
        if needed > rounds:
            hands = spread(lengths, costs, token_budget=token_budget, ranks=ranks, rounds=needed)
        rounds = max(rounds, needed)
        hands = hands or _bins_dealt(bins, costs, ranks, min(rounds * ranks, len(lengths)))
    return [[*hand, *[()] * (rounds - len(hand))] for hand in hands]


def _bins_dealt(bins: Bins, costs: list[float], ranks: int, count: int) -> list[Bins]:
    bins = split(bins, costs, count=count)
    dealt = deal([sum(costs[row] for row in rows) for rows in bins], ranks=ranks)
    return [[bins[index] for index in hand if index is not None] for hand in dealt]


def _packed(lengths: list[int], token_budget: int, goal: int) -> Bins:
    """The fewest micro-batches that are found, content with `goal`."""
    first_fit = list(first_fit_decreasing(lengths, token_budget=token_budget))
    if len(first_fit) <= goal:
        return first_fit
    full = filled(range(len(lengths)), lengths, token_budget=token_budget, goal=goal)
    return refilled(min(full, first_fit, key=len), lengths, token_budget=token_budget, goal=goal)


def _check(lengths: Sequence[int], token_budget: int) -> None:
    check_count("token_budget", token_budget, least=1)
    for length in lengths:
        check_count("every length", length, least=1)
