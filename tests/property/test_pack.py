"""Laws of core.pack: every row once, no micro-batch too long, every rank equally many."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import pack

LENGTHS = st.lists(st.integers(1, 40), max_size=30)
BUDGET = st.integers(1, 60)
RANKS = st.integers(1, 5)


def plan(lengths, budget, ranks):
    return pack.plan(lengths, token_budget=budget, ranks=ranks, per_token=24.0, per_square=1.0)


@given(lengths=LENGTHS, budget=BUDGET)
def test_packing_is_a_partition_of_the_rows(lengths, budget):
    bins = pack.first_fit_decreasing(lengths, token_budget=budget)
    assert sorted(i for rows in bins for i in rows) == list(range(len(lengths)))
    assert all(bins)


@given(lengths=LENGTHS, budget=BUDGET)
def test_no_micro_batch_exceeds_the_budget_unless_it_is_one_row(lengths, budget):
    for rows in pack.first_fit_decreasing(lengths, token_budget=budget):
        assert len(rows) == 1 or sum(lengths[i] for i in rows) <= budget


@given(lengths=LENGTHS, budget=BUDGET, data=st.data())
def test_the_order_of_the_rows_changes_no_micro_batchs_lengths(lengths, budget, data):
    def shapes(rows):
        bins = pack.first_fit_decreasing(rows, token_budget=budget)
        return sorted(sorted(rows[i] for i in bin_) for bin_ in bins)

    assert shapes(lengths) == shapes(data.draw(st.permutations(lengths)))


@given(lengths=LENGTHS, budget=BUDGET)
def test_packing_is_within_first_fit_decreasings_bound(lengths, budget):
    fitting = [length for length in lengths if length <= budget]
    bins = pack.first_fit_decreasing(fitting, token_budget=budget)
    fewest = math.ceil(sum(fitting) / budget)
    assert fewest <= len(bins)
    assert sum(sum(fitting[i] for i in rows) * 2 <= budget for rows in bins) <= 1


@pytest.mark.parametrize(
    "lengths, budget, bins",
    [
        ([10, 10, 5, 5], 15, 2),
        ([5, 5, 5, 5], 10, 2),
        ([8, 3, 5, 6, 2, 7], 11, 3),
        ([10, 1, 1, 1, 1, 1], 10, 2),
        ([6, 5, 4, 3, 2], 10, 2),
        ([44, 24, 24, 22, 21, 17, 8, 8, 6, 6], 60, 3),
        ([7] * 8, 8, 8),
        ([3] * 5, 5, 5),
        ([], 5, 0),
    ],
)
def test_worked_bin_counts(lengths, budget, bins):
    """Not the ceiling of the sum over the budget, which would break the cap."""
    assert len(pack.first_fit_decreasing(lengths, token_budget=budget)) == bins


def test_an_oversize_row_is_alone():
    assert pack.first_fit_decreasing([100, 10, 10], token_budget=50) == ((0,), (1, 2))


@given(lengths=LENGTHS, budget=BUDGET, ranks=RANKS)
def test_a_plan_has_every_row_once_and_every_rank_equally_many_micro_batches(lengths, budget, ranks):
    hands = plan(lengths, budget, ranks)
    assert len(hands) == ranks and len({len(hand) for hand in hands}) == 1
    assert sorted(i for hand in hands for rows in hand for i in rows) == list(range(len(lengths)))
    dummies = sum(rows == () for hand in hands for rows in hand)
    assert dummies < ranks


@given(lengths=LENGTHS, budget=BUDGET, ranks=RANKS)
def test_a_plan_depends_on_the_lengths_alone(lengths, budget, ranks):
    before = list(lengths)
    assert plan(lengths, budget, ranks) == plan(tuple(lengths), budget, ranks)
    assert lengths == before


@given(lengths=LENGTHS, budget=BUDGET)
def test_one_rank_has_no_dummy(lengths, budget):
    assert all(plan(lengths, budget, 1)[0])


def test_ranks_with_different_rows_compute_equally_often():
    """Budget 10, rows 9 8 3 3 over two ranks."""
    assert [len(hand) for hand in plan([9, 8, 3, 3], 10, 2)] == [2, 2]


@pytest.mark.parametrize("count, ranks, dummies", [(8, 4, 0), (9, 4, 3), (0, 4, 0), (1, 1, 0)])
def test_dummies_fill_up_and_never_add_a_round(count, ranks, dummies):
    assert pack.dummies(count, ranks=ranks) == dummies


@given(costs=st.lists(st.floats(0, 100), max_size=20), ranks=RANKS)
def test_dealing_gives_every_micro_batch_to_one_rank(costs, ranks):
    hands = pack.deal(costs, ranks=ranks)
    assert sorted(i for hand in hands for i in hand if i is not None) == list(range(len(costs)))
    assert {len(hand) for hand in hands} == {math.ceil(len(costs) / ranks)}


@given(costs=st.lists(st.floats(0, 100), min_size=1, max_size=20), ranks=RANKS)
def test_dealing_never_gives_a_rank_more_than_its_share_and_one(costs, ranks):
    """The dearest rank has at most an equal share of all, plus as many as it holds of the dearest."""
    load = [sum(costs[i] for i in hand if i is not None) for hand in pack.deal(costs, ranks=ranks)]
    places = math.ceil(len(costs) / ranks)
    assert max(load) - min(load) <= places * max(costs) + 1e-9
    if ranks > 1 and len(costs) == ranks:
        assert max(load) == max(costs)


def test_dealing_puts_the_dearest_apart():
    assert pack.deal([9.0, 8.0, 2.0, 1.0], ranks=2) == ((0, 3), (1, 2))


@given(lengths=LENGTHS)
def test_cost_adds_up_over_rows(lengths):
    whole = pack.cost(lengths, per_token=24576.0, per_square=1.0)
    assert whole == sum(pack.cost([length], per_token=24576.0, per_square=1.0) for length in lengths)


def test_cost_of_a_long_row_against_a_short_one():
    """73.47 times, in tokens 32.8."""
    long, short = (pack.cost([s], per_token=24576.0, per_square=1.0) for s in (32768, 1000))
    assert long / short == pytest.approx(73.47, abs=0.01)


@pytest.mark.parametrize(
    "lengths, budget, ranks, text",
    [
        ([1], 0, 1, "token_budget must be positive, got 0"),
        ([3, 0], 5, 1, "every length must be positive, got 0"),
        ([1], 5, 0, "ranks must be positive, got 0"),
    ],
)
def test_bad_input_is_refused(lengths, budget, ranks, text):
    with pytest.raises(ValueError, match=text):
        plan(lengths, budget, ranks)
