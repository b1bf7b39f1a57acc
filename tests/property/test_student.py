"""Laws of core.student: the tables, the closed forms, and both tails."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.student import normal_cdf, student_cdf, student_quantile


@pytest.mark.parametrize(
    "probability, degrees, quantile",
    [
        (0.975, 1, 12.7062047362),
        (0.975, 2, 4.30265272991),
        (0.975, 10, 2.22813885196),
        (0.95, 5, 2.01504837333),
        (0.8, 3, 0.978472312),
        (0.975, math.inf, 1.95996398454),
    ],
)
def test_student_quantiles_of_the_tables(probability, degrees, quantile):
    assert student_quantile(probability, degrees) == pytest.approx(quantile, rel=1e-7)
    assert student_quantile(1 - probability, degrees) == pytest.approx(-quantile, rel=1e-7)


@given(x=st.floats(-20, 20), degrees=st.floats(0.5, 200))
def test_student_cdf_and_quantile_are_inverse(x, degrees):
    p = student_cdf(x, degrees)
    assert p == pytest.approx(1 - student_cdf(-x, degrees), abs=1e-12)
    if 1e-9 < p < 1 - 1e-9:
        assert student_quantile(p, degrees) == pytest.approx(x, rel=1e-5, abs=1e-6)


def test_student_with_one_degree_is_cauchy_and_with_many_is_normal():
    for x in (-3.0, -0.2, 0.0, 1.7):
        assert student_cdf(x, 1) == pytest.approx(0.5 + math.atan(x) / math.pi)
        assert student_cdf(x, 1e7) == pytest.approx(student_cdf(x, math.inf), abs=1e-7)


@given(x=st.floats(0.01, 50))
def test_student_with_two_degrees_has_a_closed_form(x):
    """P(T <= x) = 1/2 + x / (2 sqrt(2 + x^2)); both tails, near and far."""
    root = math.sqrt(2 + x * x)
    assert student_cdf(x, 2) == pytest.approx(0.5 + x / (2 * root), rel=1e-13)
    assert student_cdf(-x, 2) == pytest.approx(1 / (root * (root + x)), rel=1e-12)


@pytest.mark.parametrize("degrees", [1, 2, 3, 7.5, 1000])
def test_student_is_exact_near_zero(degrees):
    """The density there is G((d + 1) / 2) / (G(d / 2) sqrt(pi d)); 1 - x^2 would have lost it."""
    density = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(
        math.pi * degrees
    )
    assert student_cdf(1e-9, degrees) - 0.5 == pytest.approx(1e-9 * density, rel=1e-6)
    assert student_cdf(0.0, degrees) == 0.5


@pytest.mark.parametrize("degrees", [0.5, 3, 1e7, math.inf])
def test_student_has_ends(degrees):
    for far in (1e200, math.inf):
        assert student_cdf(-far, degrees) == pytest.approx(0.0, abs=1e-90)
        assert student_cdf(far, degrees) == 1.0
    assert student_quantile(0.5, degrees) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    "degrees, x, tail",
    [
        (9999, -3.0, 0.0013532244278561749),
        (10001, -3.0, 0.0013532237622080997),
        (10001, -10.0, 9.8161567307099125e-24),
        (1e6, -1.0, 0.15865537491678906),
        (1e6, -30.0, 6.0100471168317189e-198),
        (1e7, -10.0, 7.6217961451368782e-24),
        (1e15, -1.959963984540054, 0.025),
        (1e300, -10.0, 7.619853024160527e-24),
    ],
)
def test_student_of_many_degrees_keeps_its_digits(degrees, x, tail):
    """Against an evaluation with forty digits; gamma functions of 1e15 would lose all of them."""
    assert student_cdf(x, degrees) == pytest.approx(tail, rel=1e-11, abs=0)
    assert student_cdf(-x, degrees) == pytest.approx(1 - tail, rel=1e-15)


@given(x=st.floats(-30, 30), degrees=st.floats(6, 300).map(lambda e: 10**e))
def test_student_of_many_degrees_lies_beyond_the_normal_by_less_the_more_there_are(x, degrees):
    tails = [student_cdf(-abs(x), d) for d in (degrees, 4 * degrees, math.inf)]
    assert tails == pytest.approx(sorted(tails, reverse=True), rel=1e-8)
    assert tails[0] == pytest.approx(tails[2], rel=1e-8 + (x**4 + x**2 + 10) / degrees)


@given(x=st.floats(-30, 30), step=st.floats(1e-3, 5), degrees=st.floats(0.5, 1e4))
def test_student_never_falls(x, step, degrees):
    assert student_cdf(x, degrees) <= student_cdf(x + step, degrees) + 1e-15


@pytest.mark.parametrize("probability, quantile", [(1e-30, -11.46402468844361), (1e-10, -6.361340902404056)])
def test_small_probabilities_keep_their_quantiles(probability, quantile):
    assert student_quantile(probability, math.inf) == pytest.approx(quantile, rel=1e-9)
    assert student_cdf(student_quantile(probability, 4), 4) == pytest.approx(probability, rel=1e-9)


@pytest.mark.parametrize("x, p", [(0.0, 0.5), (1.0, 0.8413447460685429), (-1.959963984540054, 0.025)])
def test_normal_of_the_tables(x, p):
    assert normal_cdf(x) == pytest.approx(p, rel=1e-12) == student_cdf(x, math.inf)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: student_cdf(0, 0), "degrees must be positive, got 0"),
        (lambda: student_cdf(0, -1), "degrees must be positive, got -1"),
        (lambda: student_cdf(0, math.nan), "degrees must be positive, got nan"),
        (lambda: student_cdf(math.nan, 3), "x must be a number, got nan"),
        (lambda: normal_cdf(math.nan), "x must be a number, got nan"),
        (lambda: student_quantile(0.0, 3), r"probability must lie between 0 and 1, got 0\.0"),
        (lambda: student_quantile(1.0, 3), r"probability must lie between 0 and 1, got 1\.0"),
        (lambda: student_quantile(math.nan, 3), "probability must lie between 0 and 1, got nan"),
        (lambda: student_quantile(0.9, 0), "degrees must be positive, got 0"),
    ],
)
def test_student_refuses_what_has_no_answer(call, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        call()
