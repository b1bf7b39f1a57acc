"""core/bins.py and core/balance.py against brute force: what a packing and a deal must be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import oracle_bins as oracle
import oracle_pack
from hypothesis import assume, given
from hypothesis import strategies as st

from core.balance import levelled, spread
from core.bins import filled, lower_bound, refilled, split

descending = st.lists(st.integers(1, 12), max_size=7).map(lambda sizes: sorted(sizes, reverse=True))
budgets = st.integers(1, 16)


def loads(bins: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """Tokens of every bin."""
    return [sum(sizes[row] for row in one) for one in bins]


def holds(bins: Sequence[Sequence[int]], sizes: Sequence[int], budget: int) -> bool:
    """Every row once, no bin above the budget unless it is a single row."""
    rows = sorted(row for one in bins for row in one)
    fits = all(load <= budget or len(one) == 1 for one, load in zip(bins, loads(bins, sizes)))
    return rows == list(range(len(sizes))) and fits


def costs_of(sizes: Sequence[int]) -> list[float]:
    """Work of every row."""
    return [float(s + s * s) for s in sizes]


@given(descending, budgets)
def test_lower_bound_is_l2_and_no_packing_has_fewer(sizes: list[int], budget: int) -> None:
    found = lower_bound(sizes, token_budget=budget)
    assert found == oracle.lower_bound(sizes, budget)
    assert found <= oracle_pack.fewest_bins(sizes, budget)


@given(descending, budgets)
def test_filled_packs_every_row_within_the_budget(sizes: list[int], budget: int) -> None:
    goal = max(1, oracle_pack.fewest_bins(sizes, budget))
    found = filled(range(len(sizes)), sizes, token_budget=budget, goal=goal)
    assert holds(found, sizes, budget)
    assert all(found)


@given(descending, budgets)
def test_refilled_packs_the_same_rows_in_no_more_and_never_fewer_than_the_fewest(
    sizes: list[int], budget: int
) -> None:
    fewest = oracle_pack.fewest_bins(sizes, budget)
    start = [(row,) for row in range(len(sizes))]
    found = refilled(start, sizes, token_budget=budget, goal=max(1, fewest))
    assert holds(found, sizes, budget)
    assert fewest <= len(found) <= len(start)


@given(descending, budgets, st.data())
def test_split_halves_until_there_are_as_many_as_asked(
    sizes: list[int], budget: int, data: st.DataObject
) -> None:
    assume(sizes)
    start = [tuple(one) for one in filled(range(len(sizes)), sizes, token_budget=budget, goal=1)]
    count = data.draw(st.integers(len(start), len(sizes)))
    found = split(start, costs_of(sizes), count=count)
    assert len(found) == count and all(found)
    assert holds(found, sizes, budget)
    assert all(any(set(part) <= set(whole) for whole in start) for part in found)


def makespan(hands: Sequence[Sequence[Sequence[int]]], cost: Sequence[float]) -> float:
    """Cost of the dearest rank."""
    return max(math.fsum(cost[row] for batch in hand for row in batch) for hand in hands)


@given(descending, st.integers(6, 30), st.integers(1, 3), st.integers(0, 1))
def test_spread_and_levelled_deal_every_row_in_equal_rounds_and_levelling_never_makes_the_dearest_dearer(
    sizes: list[int], budget: int, ranks: int, more: int
) -> None:
    assume(len(sizes) >= ranks)
    rounds = math.ceil(oracle_pack.fewest_bins(sizes, budget) / ranks) + more
    assume(ranks * rounds <= len(sizes))  # else there are dummies, which the plan adds
    cost = costs_of(sizes)
    hands = spread(sizes, cost, token_budget=budget, ranks=ranks, rounds=rounds)
    if hands is None:
        return
    even = levelled(hands, sizes, cost, token_budget=budget)
    for one in (hands, even):
        assert [len(hand) for hand in one] == [rounds] * ranks
        assert holds([batch for hand in one for batch in hand], sizes, budget)
    assert makespan(even, cost) <= makespan(hands, cost) + 1e-9
    whole = [batch for hand in even for batch in hand if batch]
    assert len(whole) == len([batch for hand in hands for batch in hand if batch])
    if len(sizes) <= 6:
        assert makespan(even, cost) >= oracle_pack.least_makespan_of_rows(cost, ranks) - 1e-9
