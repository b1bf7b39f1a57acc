"""Laws of core.routing: a trial goes where fewest are, stays there, and takes its place with it when it leaves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.routing import Routes, assigned, empty_routes, may_restart, released

TRIALS = st.sampled_from([f"t{i}" for i in range(9)])
STEPS = st.lists(st.tuples(TRIALS, st.lists(st.booleans(), min_size=3, max_size=3)), max_size=40)
TIMES = st.lists(st.integers(0, 99), max_size=9)


def walked(steps: list[tuple[str, list[bool]]]) -> list[tuple[Routes, Routes, str, list[bool], int | None]]:
    """A trial that is there leaves, one that is not comes: before, after, the trial, who lived, where it went."""
    routes, seen = empty_routes(3), []
    for trial, alive in steps:
        if trial in routes.engine_of:
            after, engine = released(routes, trial), None
        else:
            after, engine = assigned(routes, trial, alive=alive)
        seen.append((routes, after, trial, alive, engine))
        routes = after
    return seen


@given(STEPS)
def test_the_load_is_the_number_of_trials_at_each_engine(steps):
    for _, after, _, _, _ in walked(steps):
        placed = list(after.engine_of.values())
        assert list(after.load) == [placed.count(engine) for engine in range(3)]


@given(STEPS)
def test_a_trial_never_goes_to_a_dead_engine_and_waits_only_if_all_are_dead(steps):
    for before, after, trial, alive, engine in walked(steps):
        if trial in before.engine_of:
            continue
        assert (engine is None) == (not any(alive)) == (after is before)
        assert engine is None or (alive[engine] and after.engine_of[trial] == engine)


@given(STEPS)
def test_a_trial_goes_to_the_first_of_the_living_engines_with_fewest_trials(steps):
    for before, _, _, alive, engine in walked(steps):
        if engine is not None:
            order = [(before.load[one], one) for one in range(3) if alive[one]]
            assert (before.load[engine], engine) == min(order)


@given(STEPS)
def test_other_trials_stay_where_they_are(steps):
    for before, after, trial, _, _ in walked(steps):
        others = {name: engine for name, engine in before.engine_of.items() if name != trial}
        assert {name: engine for name, engine in after.engine_of.items() if name != trial} == others


@given(st.integers(1, 9), st.integers(0, 40))
def test_loads_of_living_engines_that_only_grow_differ_by_one_at_most(engines, trials):
    routes = empty_routes(engines)
    for number in range(trials):
        routes, _ = assigned(routes, str(number), alive=[True] * engines)
    assert max(routes.load) - min(routes.load) <= 1 and sum(routes.load) == trials


def test_a_trial_that_left_twice_or_was_never_there_changes_nothing():
    routes, _ = assigned(empty_routes(2), "a", alive=[False, True])
    assert released(routes, "b") is routes
    assert released(released(routes, "a"), "a") == released(routes, "a") == empty_routes(2)


@given(TIMES, st.integers(0, 5), st.integers(1, 60))
def test_a_restart_is_one_of_so_many_in_the_window(times, most, window):
    now = max(times, default=0)
    recent = [one for one in times if now - window < one <= now]
    assert may_restart(times, now_s=now, most=most, window_s=window) == (len(recent) <= most)


@given(TIMES, st.integers(1, 5), st.integers(1, 60))
def test_what_ended_long_ago_is_forgiven_and_order_is_nothing(times, most, window):
    now = max(times, default=0) + window
    assert may_restart(times, now_s=now, most=0, window_s=window)
    told = {may_restart(some, now_s=now - 1, most=most, window_s=window) for some in (times, times[::-1])}
    assert len(told) == 1


def test_worked_restarts():
    assert may_restart([1.0, 2.0, 3.0], now_s=3.0, most=3, window_s=60)
    assert not may_restart([1.0, 2.0, 3.0, 4.0], now_s=4.0, most=3, window_s=60)
    assert may_restart([1.0, 2.0, 3.0, 61.0], now_s=61.0, most=3, window_s=60)
    assert not may_restart([5.0], now_s=5.0, most=0, window_s=1)


@pytest.mark.parametrize("window", [0, -1.0, math.nan, math.inf])
def test_a_window_that_is_none_is_refused(window):
    with pytest.raises(ValueError, match="window_s must be positive and finite, got"):
        may_restart([], now_s=0.0, most=1, window_s=window)


def test_bad_counts_and_trials_are_refused():
    with pytest.raises(ValueError, match="engines must be"):
        empty_routes(0)
    with pytest.raises(ValueError, match="most must"):
        may_restart([], now_s=0.0, most=-1, window_s=1.0)
    routes, _ = assigned(empty_routes(2), "a", alive=[True, True])
    with pytest.raises(ValueError, match="trial must be a new one, got a at engine 0"):
        assigned(routes, "a", alive=[True, True])
    with pytest.raises(ValueError, match="alive must have one entry an engine, 2, got 1"):
        assigned(routes, "b", alive=[True])
