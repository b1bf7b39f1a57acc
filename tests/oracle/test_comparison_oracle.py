"""core/comparison.py against the two-way table."""

from __future__ import annotations

import math

import oracle_comparison as oracle
import pytest
from comparing import assert_same
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.comparison import compare, holm, seeds_needed, variance_of

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


@settings(max_examples=8)
@given(st.floats(0.2, 2), st.floats(0.05, 1), st.sampled_from([0.5, 0.8, 0.9]), st.sampled_from([0.9, 0.95]))
def test_seeds_needed_is_the_first_count_that_is_enough(
    difference: float, spread: float, power: float, confidence: float
) -> None:
    assume(spread / difference < 2)
    found = seeds_needed(difference=difference, seed_spread=spread, power=power, confidence=confidence)
    assert found == oracle.seeds_needed(difference, spread, power, confidence)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_variance_of_is_the_square_of_the_error_times_the_count(values: list[float]) -> None:
    error = oracle.standard_error(values)
    assert_same(variance_of(values), error * error * len(values))


@pytest.mark.parametrize("d", [0.25, -0.25, 0.0])
@pytest.mark.parametrize("tasks", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("seeds", [1, 2, 3, 6, 9])
def test_one_difference_everywhere_is_judged_by_the_number_of_its_signs(
    seeds: int, tasks: int, d: float
) -> None:
    found = compare([[0.5] * tasks] * seeds, [[0.5 + d] * tasks] * seeds, confidence=0.95)
    signs = max(seeds, tasks) if 1 in (seeds, tasks) else min(seeds, tasks)
    chance = 1.0 if d == 0 else sum(1 for k in range(2**signs) if k in (0, 2**signs - 1)) / 2**signs
    told = d == 0 or chance < 0.05
    assert_same(found.difference, d)
    assert_same(found.p_value, min(1.0, chance))
    assert_same([found.low, found.high], [d, d] if told else [-math.inf, math.inf])
    assert found.verdict == ("tie" if d == 0 or not told else "b better" if d > 0 else "a better")
