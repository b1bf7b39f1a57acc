"""core/estimate.py against enumeration."""

from __future__ import annotations

import math

import oracle_estimate as oracle
import pytest
from comparing import assert_same
from hypothesis import given
from hypothesis import strategies as st

from core.estimate import (
    Behaviour,
    Count,
    behaviour_rates,
    counts_by_problem,
    mean_and_error,
    mean_pass_at_k,
    pass_at_k,
    pass_power_k,
)

CASES = [(n, c, k) for n in range(1, 7) for c in range(n + 1) for k in range(1, n + 1)]


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_and_pass_power_k_are_shares_of_all_subsets(n: int) -> None:
    for trials, passed, k in (case for case in CASES if case[0] == n):
        assert_same(pass_at_k(trials=trials, passed=passed, k=k), oracle.pass_at_k(trials, passed, k))
        assert_same(pass_power_k(trials=trials, passed=passed, k=k), oracle.pass_power_k(trials, passed, k))


@pytest.mark.parametrize(
    ("n", "c", "k", "share"), [(4, 1, 2, 0.5), (5, 2, 3, 0.9), (4, 2, 2, 0.8333333333333)]
)
def test_g54_pass_at_k_is_one_minus_the_share_of_failing_subsets(
    n: int, c: int, k: int, share: float
) -> None:
    assert_same(pass_at_k(trials=n, passed=c, k=k), share)


def test_g54_more_than_all_trials_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="k"):
        pass_at_k(trials=2, passed=1, k=3)


def test_g55_pass_at_1_counts_rollouts_and_not_their_rows() -> None:
    assert_same(pass_at_k(trials=4, passed=1, k=1), 0.25)


@given(st.lists(st.floats(-10, 10), max_size=8))
def test_mean_and_error_is_the_textbook_formula(values: list[float]) -> None:
    found = mean_and_error(values)
    assert_same(found.mean, oracle.mean(values))
    assert_same(found.error, oracle.standard_error(values))


@given(st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.booleans(), max_size=6), st.data())
def test_counts_by_problem_count_a_rollout_once(
    table: dict[tuple[int, int], bool], data: st.DataObject
) -> None:
    rows = [key for key in table for _ in range(data.draw(st.integers(1, 2)))]
    rows = data.draw(st.permutations(rows))
    columns = ([p for p, _ in rows], [r for _, r in rows], [table[key] for key in rows])
    found = counts_by_problem(*columns)
    assert {p: tuple(count) for p, count in found.items()} == oracle.counts_by_problem(*columns)


@given(st.lists(st.tuples(st.integers(3, 5), st.integers(0, 3)), max_size=4), st.integers(1, 3))
def test_mean_pass_at_k_is_the_mean_over_problems(rows: list[tuple[int, int]], k: int) -> None:
    found = mean_pass_at_k([Count(trials=n, passed=c) for n, c in rows], k=k)
    each = [oracle.pass_at_k(n, c, k) for n, c in rows]
    assert_same(found.mean, oracle.mean(each))
    assert_same(found.error, oracle.standard_error(each))


def test_g55_seven_rows_of_four_rollouts_are_four_trials() -> None:
    rollout, passed = [0, 0, 1, 2, 2, 3, 3], [True, True, False, False, False, False, False]
    found = counts_by_problem([9] * 7, rollout, passed)[9]
    assert tuple(found) == (4, 1)
    assert_same(pass_at_k(trials=found.trials, passed=found.passed, k=1), 0.25)


behaviours = st.builds(
    Behaviour,
    turns=st.integers(0, 9),
    sampled_tokens=st.integers(0, 99),
    tool_calls=st.integers(5, 9),
    tool_errors=st.integers(0, 5),
    context_exhausted=st.booleans(),
)


@given(st.lists(behaviours, max_size=5))
def test_behaviour_rates_are_sums_divided_once(trials: list[Behaviour]) -> None:
    turns = tokens = calls = errors = exhausted = 0
    for trial in trials:
        turns += trial.turns
        tokens += trial.sampled_tokens
        calls += trial.tool_calls
        errors += trial.tool_errors
        exhausted += 1 if trial.context_exhausted else 0
    found = behaviour_rates(trials)
    assert_same(found.turns, turns / len(trials) if trials else math.nan)
    assert_same(found.tokens_per_turn, tokens / turns if turns else math.nan)
    assert_same(found.tool_success, 1 - errors / calls if calls else math.nan)
    assert_same(found.context_exhausted, exhausted / len(trials) if trials else math.nan)


def test_reward_rates_of_recipe_f8() -> None:
    assert_same(mean_and_error([-1.0, 2.0]).mean, 0.5)
    assert_same(pass_at_k(trials=2, passed=1, k=1), 0.5)
    assert_same(mean_and_error([1.0, 0.0, 0.0]).mean, 1 / 3)
