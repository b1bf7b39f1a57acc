"""Laws of core.drift: an alarm when the gap grows while the weights stand still, and a stated rate of false ones."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.drift import gap_drift

KNOBS = {"level": 0.01, "min_slope": 1e-5}


def test_a_gap_that_grows_under_the_same_weights_raises_an_alarm():
    drift = gap_drift([0.01, 0.02, 0.03], ["w"] * 3, **KNOBS)
    assert drift.alarm and drift.slope == pytest.approx(0.01) and drift.p_value < 1e-6


def test_a_gap_that_grows_with_changing_weights_raises_none():
    drift = gap_drift([0.01, 0.02, 0.03], ["a", "b", "c"], **KNOBS)
    assert drift.alarm is False and math.isnan(drift.slope) and math.isnan(drift.p_value)


def test_a_gap_that_falls_or_stays_raises_none():
    assert not gap_drift([0.03, 0.02, 0.01], ["w"] * 3, **KNOBS).alarm
    assert gap_drift([0.03, 0.02, 0.01], ["w"] * 3, **KNOBS).p_value == pytest.approx(1, abs=1e-6)
    assert gap_drift([0.25] * 5, ["w"] * 5, **KNOBS) == (0.0, 1.0, False)
    assert not gap_drift([0.1] * 50, ["w"] * 50, **KNOBS).alarm


def test_growth_without_any_noise_is_certain():
    assert gap_drift([0.25, 0.5, 0.75], ["w"] * 3, **KNOBS) == (0.25, 0.0, True)
    assert not gap_drift([0.25, 0.5, 0.75], ["w"] * 3, level=0.01, min_slope=0.25).alarm


def test_a_chance_of_the_level_itself_raises_no_alarm():
    gap = [0.25, 0.5, 0.25, 1.0]
    chance = gap_drift(gap, ["w"] * 4, level=0.5, min_slope=0.001).p_value
    assert not gap_drift(gap, ["w"] * 4, level=chance, min_slope=0.001).alarm
    assert gap_drift(gap, ["w"] * 4, level=math.nextafter(chance, 1), min_slope=0.001).alarm


def test_two_steps_cannot_tell():
    drift = gap_drift([0.01, 0.02], ["w"] * 2, **KNOBS)
    assert drift.slope == pytest.approx(0.01) and math.isnan(drift.p_value) and drift.alarm is False
    assert math.isnan(gap_drift([0.01], ["w"], **KNOBS).slope)
    assert math.isnan(gap_drift([], [], **KNOBS).slope)


def test_slope_and_chance_agree_with_a_worked_regression():
    """y = 1, 2, 4, 4 at x = 0..3: slope 1.1, residual square 0.7 on 2 degrees, t = 4.1576, one-sided p = 0.02663."""
    drift = gap_drift([1.0, 2.0, 4.0, 4.0], ["w"] * 4, level=0.05, min_slope=0.1)
    t = 1.1 / math.sqrt(0.7 / 2 / 5)
    assert drift.slope == pytest.approx(1.1)
    assert drift.p_value == pytest.approx(0.5 * (1 - t / math.sqrt(2 + t * t)), rel=1e-9)
    assert drift.alarm
    assert not gap_drift([1.0, 2.0, 4.0, 4.0], ["w"] * 4, level=0.02, min_slope=0.1).alarm
    assert not gap_drift([1.0, 2.0, 4.0, 4.0], ["w"] * 4, level=0.05, min_slope=1.2).alarm


def test_stretches_share_a_slope_and_each_has_a_level_of_its_own():
    """Two stretches of three: degrees 6 - 2 - 1 = 3; with the levels taken out the worked t is 4.47."""
    gap, weights = [1.0, 2.0, 4.0, 90.0, 91.0, 92.0], list("aaabbb")
    drift = gap_drift(gap, weights, level=0.05, min_slope=0.1)
    slope = (1.5 * 2 + 1.0 * 2) / 4
    left = [(1 - 7 / 3 + slope), (2 - 7 / 3), (4 - 7 / 3 - slope), (-1 + slope), 0.0, (1 - slope)]
    t = slope / math.sqrt(sum(r * r for r in left) / 3 / 4)
    u = t / math.sqrt(3)
    assert drift.slope == pytest.approx(slope)
    assert drift.p_value == pytest.approx(0.5 - (u / (1 + u * u) + math.atan(u)) / math.pi, rel=1e-9)


def test_equal_weights_that_are_not_neighbours_are_two_stretches():
    assert math.isnan(gap_drift([0.01, 0.02, 0.03], ["a", "b", "a"], **KNOBS).slope)


def test_a_step_without_a_token_is_left_out_and_keeps_its_place():
    holes = gap_drift([1.0, math.nan, 2.0, 4.0], ["w"] * 4, **KNOBS)
    mean = 5 / 3
    expected = sum((x - mean) * y for x, y in ((0, 1.0), (2, 2.0), (3, 4.0)))
    assert holes.slope == pytest.approx(expected / sum((x - mean) ** 2 for x in (0, 2, 3)))


@given(
    gap=st.lists(st.integers(0, 50).map(lambda k: k / 64), min_size=3, max_size=9),
    shift=st.integers(-4, 4),
    power=st.integers(-2, 3),
)
def test_drift_does_not_move_with_the_level_and_scales_with_the_unit(gap, shift, power):
    weights = ["a"] * (len(gap) - 1) + ["b"]
    one = gap_drift(gap, weights, level=0.05, min_slope=1e-3)
    other = gap_drift(
        [(y + shift) * 2.0**power for y in gap], weights, level=0.05, min_slope=1e-3 * 2.0**power
    )
    assert other.slope == pytest.approx(one.slope * 2.0**power, rel=1e-9, abs=1e-12)
    assert other.p_value == pytest.approx(one.p_value, rel=1e-6, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("size", [3, 4, 10])
def test_noise_without_a_trend_raises_a_false_alarm_as_often_as_stated(size):
    """4,000 looks at level 0.05: 200 expected, with a standard deviation of 13.8."""
    rng = random.Random(size)
    alarms = sum(
        gap_drift(
            [rng.gauss(0.02, 0.004) for _ in range(size)], ["w"] * size, level=0.05, min_slope=1e-12
        ).alarm
        for _ in range(4000)
    )
    assert abs(alarms - 200) < 4 * 13.8


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weights": ["w"]}, "gap and weights must have one length, got 3 and 1"),
        ({"gap": [0.1, math.inf, 0.1]}, "gap must not be infinite, got [0.1, inf, 0.1]"),
        ({"level": 0.0}, "level must lie between 0 and 1, got 0.0"),
        ({"level": 1.0}, "level must lie between 0 and 1, got 1.0"),
        ({"level": math.nan}, "level must lie between 0 and 1, got nan"),
        ({"min_slope": 0.0}, "min_slope must be positive and finite, got 0.0"),
        ({"min_slope": math.inf}, "min_slope must be positive and finite, got inf"),
        ({"min_slope": math.nan}, "min_slope must be positive and finite, got nan"),
    ],
)
def test_bad_series_are_refused(change, message):
    given_ = {"gap": [0.1, 0.2, 0.3], "weights": ["w"] * 3, **KNOBS} | change
    with pytest.raises(ValueError) as refused:
        gap_drift(**given_)
    assert str(refused.value) == message


def test_a_gap_that_is_missing_joins_no_two_stretches():
    """The weights were others in between, whether or not that step had a token."""
    assert math.isnan(gap_drift([0.0, math.nan, 0.0], ["a", "b", "a"], level=0.05, min_slope=0.001).slope)
