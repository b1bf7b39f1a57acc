"""core/segment.py against dictionaries."""

from __future__ import annotations

import math

import oracle_segment as oracle
import pytest
from comparing import assert_same, flags, gradient, junk, numbers, places
from hypothesis import given
from hypothesis import strategies as st

from core.segment import dense, moment, per_segment, segment_sum

ids = st.lists(st.sampled_from([-(2**62), -5, 0, 3, 10, 2**40]) | st.integers(-4, 4), max_size=12)
valued = st.lists(st.tuples(st.floats(-100, 100), st.integers(-2, 2)), max_size=12)


@given(ids)
def test_dense_is_the_rank_among_the_distinct_ids(values: list[int]) -> None:
    assert_same(dense(places(values)), oracle.dense(values))


@given(valued)
def test_segment_sum_is_a_table_of_sums(rows: list[tuple[float, int]]) -> None:
    value, place = [row[0] for row in rows], oracle.dense([row[1] for row in rows])
    assert_same(segment_sum(numbers(value), places(place)), oracle.segment_sum(value, place))


@given(valued)
def test_per_segment_is_the_sum_over_those_of_the_same_place(rows: list[tuple[float, int]]) -> None:
    value, place = [row[0] for row in rows], oracle.dense([row[1] for row in rows])
    assert_same(per_segment(numbers(value), places(place)), oracle.per_segment(value, place))


@given(valued)
def test_per_segment_carries_the_gradient_of_every_member(rows: list[tuple[float, int]]) -> None:
    value, place = [row[0] for row in rows], oracle.dense([row[1] for row in rows])
    found = gradient(lambda leaf: per_segment(leaf, places(place)), value)
    assert_same(found, [float(place.count(k)) for k in place])


@given(st.lists(st.tuples(st.booleans(), st.integers(-2, 2)), max_size=12))
def test_segment_sum_of_flags_counts(rows: list[tuple[bool, int]]) -> None:
    value, place = [row[0] for row in rows], oracle.dense([row[1] for row in rows])
    found = segment_sum(places(value).bool(), places(place))
    assert not found.is_floating_point()
    assert_same(found, [sum(1 for x, k in zip(value, place) if x and k == n) for n in range(len(rows))])


values = st.sampled_from([0.0, 1.0, 2.0]) | st.floats(-50, 50).map(lambda x: round(x, 3))
moments = st.lists(
    st.tuples(values, st.just(True), st.integers(-1, 1))
    | st.tuples(junk, st.just(False), st.integers(-1, 1)),
    max_size=9,
)


@given(moments)
def test_moment_is_mean_spread_and_squares_of_the_counted(rows: list[tuple[float, bool, int]]) -> None:
    value, counted = [x for x, _, _ in rows], [c for _, c, _ in rows]
    place = oracle.dense([name for _, _, name in rows])
    found, expected = (
        moment(numbers(value), flags(counted), places(place)),
        oracle.moment(value, counted, place),
    )
    assert_same(found.size, [one.size for one in expected])
    assert_same(found.mean, [one.mean for one in expected])
    assert_same(found.spread, [one.spread for one in expected])
    assert_same(found.centred, [one.centred for one in expected], absolute=1e-12)
    assert_same(found.square * found.spread**2, [one.squares for one in expected], absolute=1e-10)


@pytest.mark.parametrize("lost", [0, 1])
@given(rows=moments)
def test_deviation_divides_the_squares_by_the_number_less_what_is_lost(
    lost: int, rows: list[tuple[float, bool, int]]
) -> None:
    value, counted = [x for x, _, _ in rows], [c for _, c, _ in rows]
    place = oracle.dense([name for _, _, name in rows])
    found = moment(numbers(value), flags(counted), places(place)).deviation(lost=lost).tolist()
    for deviation, one in zip(found, oracle.moment(value, counted, place)):
        if one.size > lost:
            assert_same(deviation, math.sqrt(one.squares / (one.size - lost)), absolute=1e-10)
