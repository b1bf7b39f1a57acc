"""core/pack.py against brute force and the published cases."""

from __future__ import annotations

import math

import oracle_pack as oracle
import pytest
from comparing import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from core.pack import cost, deal, dummies, fewest, first_fit_decreasing, plan

lengths = st.lists(st.integers(1, 12), max_size=7)
budgets = st.integers(1, 16)


def by_length(bins: tuple[tuple[int, ...], ...], sizes: list[int]) -> list[list[int]]:
    """Lengths in place of indices."""
    return [[sizes[index] for index in one] for one in bins]


@given(lengths, budgets)
def test_first_fit_decreasing_is_the_loop(sizes: list[int], budget: int) -> None:
    found = first_fit_decreasing(sizes, token_budget=budget)
    assert sorted(index for one in found for index in one) == list(range(len(sizes)))
    assert sorted(map(sorted, by_length(found, sizes))) == sorted(
        map(sorted, oracle.first_fit_decreasing(sizes, budget))
    )


@given(lengths, budgets)
def test_first_fit_decreasing_is_within_eleven_ninths_of_the_fewest(sizes: list[int], budget: int) -> None:
    found, fewest = len(first_fit_decreasing(sizes, token_budget=budget)), oracle.fewest_bins(sizes, budget)
    assert fewest <= found
    assert 9 * found <= 11 * fewest + 6


@given(st.lists(st.integers(0, 20), max_size=6), st.floats(0, 3), st.floats(0, 3))
def test_cost_is_every_token_with_every_token_of_its_row(
    sizes: list[int], per_token: float, per_square: float
) -> None:
    found = cost(sizes, per_token=per_token, per_square=per_square)
    assert_same(found, oracle.cost(sizes, per_token, per_square))


@given(st.integers(0, 40), st.integers(1, 9))
def test_dummies_are_counted_up_to_the_next_multiple(count: int, ranks: int) -> None:
    expected = 0
    while (count + expected) % ranks:
        expected += 1
    assert dummies(count, ranks=ranks) == expected


distinct_costs = st.lists(st.integers(1, 10**6).map(float), max_size=6, unique=True)


@settings(max_examples=30)
@given(distinct_costs, st.integers(1, 3))
def test_deal_is_the_loop_and_no_better_than_the_best(costs: list[float], ranks: int) -> None:
    found = deal(costs, ranks=ranks)
    dealt = [[costs[index] for index in rank if index is not None] for rank in found]
    assert len({len(rank) for rank in found}) == 1
    assert sorted(c for rank in dealt for c in rank) == sorted(costs)
    expected = oracle.deal(costs, ranks)
    assert sorted(map(sorted, dealt)) == sorted(map(sorted, expected))
    if costs:
        best = oracle.least_makespan(costs, ranks)
        assert max(map(math.fsum, dealt)) >= best
        assert max(map(math.fsum, dealt)) <= 2 * best


@given(lengths, budgets, st.integers(1, 4))
def test_plan_holds_every_row_once_in_as_few_even_rounds_as_first_fit_decreasing_needs(
    sizes: list[int], budget: int, ranks: int
) -> None:
    found = plan(sizes, token_budget=budget, ranks=ranks, per_token=1.0, per_square=0.125)
    assert len(found) == ranks
    assert len({len(rank) for rank in found}) == 1
    batches = [batch for rank in found for batch in rank if batch]
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    assert all(len(batch) == 1 or sum(sizes[i] for i in batch) <= budget for batch in batches)
    bins = oracle.first_fit_decreasing(sizes, budget)
    least = math.ceil(oracle.fewest_bins(sizes, budget) / ranks)
    assert least <= len(found[0]) <= math.ceil(len(bins) / ranks)
    places = ranks * len(found[0])
    assert len(batches) == min(places, len(sizes)), "a dummy only where rows are fewer than places"


@given(lengths, budgets)
def test_fewest_is_never_above_the_fewest_and_never_below_the_sum(sizes: list[int], budget: int) -> None:
    found = fewest(sizes, token_budget=budget)
    assert found <= oracle.fewest_bins(sizes, budget)
    oversize = [size for size in sizes if size > budget]
    rest = sum(size for size in sizes if size <= budget)
    assert found >= len(oversize) + math.ceil(rest / budget)
    assert found >= sum(1 for size in sizes if 2 * size > budget)


# losses.md 8, recipe.md F.7, cases.md G30 and G31.


@pytest.mark.parametrize(
    ("sizes", "budget", "bins"),
    [
        ([6, 5, 4, 3, 2], 10, [[6, 4], [5, 3, 2]]),
        ([7] * 8, 8, [[7]] * 8),
        ([3] * 5, 5, [[3]] * 5),
        ([10, 10, 5, 5], 15, [[10, 5], [10, 5]]),
        ([10, 1, 1, 1, 1, 1], 10, [[10], [1, 1, 1, 1, 1]]),
        ([5, 5, 5, 5], 10, [[5, 5], [5, 5]]),
        ([100, 10, 10], 50, [[100], [10, 10]]),
    ],
)
def test_first_fit_decreasing_table(sizes: list[int], budget: int, bins: list[list[int]]) -> None:
    assert by_length(first_fit_decreasing(sizes, token_budget=budget), sizes) == bins


def test_ten_rows_need_three_bins_where_balancing_opens_four() -> None:
    sizes = [44, 24, 24, 22, 21, 17, 8, 8, 6, 6]
    assert len(first_fit_decreasing(sizes, token_budget=60)) == 3


def test_six_rows_of_recipe_f7_fit_where_three_bins_are_the_least() -> None:
    sizes = [8, 3, 5, 6, 2, 7]
    assert len(first_fit_decreasing(sizes, token_budget=11)) == 3 == oracle.fewest_bins(sizes, 11)


def test_cost_of_a_long_row_against_a_short_one_is_73_47_where_tokens_are_32_8() -> None:
    long, short = (cost([s], per_token=24576.0, per_square=1.0) for s in (32768, 1000))
    assert_same(long / short, 73.47, absolute=0.005)


@pytest.mark.parametrize(("count", "more"), [(8, 0), (9, 3)])
def test_g30_dummies_fill_up_and_never_a_whole_round(count: int, more: int) -> None:
    assert dummies(count, ranks=4) == more


def test_g31_ranks_have_equally_many_micro_batches() -> None:
    found = plan([9, 8, 3, 3], token_budget=10, ranks=2, per_token=1.0, per_square=0.0)
    assert [len(rank) for rank in found] == [2, 2]
