"""core/drift.py against least squares written out."""

from __future__ import annotations

import math

import oracle_drift as oracle
import pytest
from comparing import assert_same
from hypothesis import assume, given
from hypothesis import strategies as st

from core.drift import gap_drift

steps = st.lists(
    st.tuples(st.floats(0, 1).map(lambda x: round(x, 3)) | st.just(math.nan), st.sampled_from("aaab")),
    max_size=10,
)


@given(steps, st.sampled_from([0.01, 0.05]), st.sampled_from([1e-6, 0.02]))
def test_gap_drift_is_the_common_slope_and_students_test_of_it(
    rows: list[tuple[float, str]], level: float, least: float
) -> None:
    gap, weights = [x for x, _ in rows], [w for _, w in rows]
    slope, t, degrees = oracle.gap_drift(gap, weights)
    kept = [(x, w) for x, w in rows if not math.isnan(x)]
    # A stretch that is broken only where a gap is missing is left open.
    assume(
        len(oracle.stretches(gap, weights))
        == len(oracle.stretches(*([list(c) for c in zip(*kept)] or [[], []])))
    )
    found = gap_drift(gap, weights, level=level, min_slope=least)
    assert_same(found.slope, slope, absolute=1e-10)
    if degrees < 1:
        assert math.isnan(found.p_value) and not found.alarm
        return
    assume(abs(slope) > 1e-9 and oracle.residuals(oracle.stretches(gap, weights), slope) > 1e-9)
    p = oracle.p_value(t, degrees)
    assert_same(found.p_value, p, relative=1e-6, absolute=1e-9)
    assume(abs(p - level) > 1e-6 and abs(slope - least) > 1e-9)
    assert found.alarm == (p < level and slope > least)


def test_g74_a_gap_that_grows_under_frozen_weights_is_an_alarm() -> None:
    found = gap_drift([0.01, 0.02, 0.031], ["h", "h", "h"], level=0.05, min_slope=1e-3)
    assert found.alarm
    assert_same(found.slope, 0.0105)


@pytest.mark.parametrize("weights", [["a", "b", "c"], ["a", "b", "a"]], ids=["each-its-own", "back-again"])
def test_a_gap_that_grows_while_the_weights_change_is_none(weights: list[str]) -> None:
    found = gap_drift([0.01, 0.02, 0.03], weights, level=0.05, min_slope=1e-3)
    assert math.isnan(found.slope) and not found.alarm
