"""core/estimate.py against enumeration and the two-way table."""

from __future__ import annotations

import math

import oracle_estimate as oracle
import pytest
from comparing import assert_same
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.estimate import (
    Behaviour,
    behaviour_rates,
    compare,
    holm,
    mean_and_error,
    pass_at_k,
    pass_power_k,
    seeds_needed,
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


scores = st.integers(0, 8).map(lambda k: k / 8) | st.floats(-1, 1)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]]]:
    """Two arms, the same seeds and tasks."""
    seeds, tasks = draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    row = st.lists(scores, min_size=tasks, max_size=tasks)
    table = st.lists(row, min_size=seeds, max_size=seeds)
    return draw(table), draw(table)


@settings(max_examples=30)
@given(tables(), st.sampled_from([0.8, 0.95, 0.99]))
def test_compare_is_the_two_way_table_written_out(
    arms: tuple[list[list[float]], list[list[float]]], confidence: float
) -> None:
    a, b = arms
    seeds, tasks = len(a), len(a[0])
    assume(seeds > 1 or tasks > 1)
    squares = oracle.mean_squares([[y - x for x, y in zip(*rows)] for rows in zip(a, b)])
    assume(max(squares[:2]) > 1e-6 and squares[0] != squares[1])
    turn = squares[0] + squares[1] - squares[2] - max(squares[:2])
    assume(seeds == 1 or tasks == 1 or abs(turn) > 1e-9)
    expected, _ = oracle.compare(a, b, confidence)
    found = compare(a, b, confidence=confidence)
    assert_same(found.difference, expected.difference)
    assert_same(found.seed_spread, expected.seed_spread)
    assert_same(found.low, expected.low, relative=1e-6, absolute=1e-7)
    assert_same(found.high, expected.high, relative=1e-6, absolute=1e-7)
    assert_same(found.p_value, expected.p_value, relative=1e-6, absolute=1e-9)
    verdict = "b better" if expected.low > 0 else "a better" if expected.high < 0 else "tie"
    assert found.verdict == verdict


@given(st.lists(st.floats(0, 1), max_size=7))
def test_holm_is_the_largest_of_the_steps_so_far(p_values: list[float]) -> None:
    assert_same(list(holm(p_values)), oracle.holm(p_values))


@settings(max_examples=15)
@given(st.floats(0.2, 2), st.floats(0.05, 1), st.sampled_from([0.5, 0.8, 0.9]), st.sampled_from([0.9, 0.95]))
def test_seeds_needed_is_the_first_count_that_is_enough(
    difference: float, spread: float, power: float, confidence: float
) -> None:
    assume(spread / difference < 3)
    found = seeds_needed(difference=difference, seed_spread=spread, power=power, confidence=confidence)
    assert found == oracle.seeds_needed(difference, spread, power, confidence)


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
