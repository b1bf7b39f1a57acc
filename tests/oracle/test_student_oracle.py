"""core/student.py against series and slices."""

from __future__ import annotations

import math

import oracle_student as oracle
import pytest
from comparing import assert_same
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.student import normal_cdf, student_cdf, student_quantile

xs = st.floats(-8, 8)


@given(st.floats(-11, 11))
def test_normal_cdf_is_its_series(x: float) -> None:
    assert_same(normal_cdf(x), oracle.normal_cdf(x))


@given(xs, st.integers(1, 60))
def test_student_cdf_of_whole_degrees_is_the_finite_sum(x: float, degrees: int) -> None:
    assert_same(
        student_cdf(x, float(degrees)), oracle.student_cdf_of_whole_degrees(x, degrees), absolute=1e-11
    )


@settings(max_examples=25)
@given(xs, st.floats(1, 300))
def test_student_cdf_is_the_sum_of_slices(x: float, degrees: float) -> None:
    assert_same(student_cdf(x, degrees), oracle.student_cdf(x, degrees), absolute=1e-10)


@given(xs)
def test_student_cdf_of_infinite_degrees_is_normal(x: float) -> None:
    assert_same(student_cdf(x, math.inf), oracle.normal_cdf(x))


@settings(max_examples=10)
@given(st.floats(0.003, 0.997), st.floats(1, 80))
@example(0.975, 1.0)
@example(0.5, 3.0)
def test_student_quantile_is_found_by_halving(probability: float, degrees: float) -> None:
    found = student_quantile(probability, degrees)
    assert_same(found, oracle.student_quantile(probability, degrees), relative=1e-7, absolute=1e-8)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1.0, 12.7062047), (2.0, 4.3026527), (4.0, 2.7764451), (10.0, 2.2281389), (math.inf, 1.9599640)],
)
def test_student_quantile_of_printed_tables(degrees: float, quantile: float) -> None:
    assert_same(student_quantile(0.975, degrees), quantile, relative=1e-7)
