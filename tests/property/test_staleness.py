"""Laws of core.staleness: how many may start, and how old is too old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import staleness

NUMBER = st.integers(0, 50)


def capacity(*, version=0, accepted=0, running=0, batch=1, bound=0, cap=10**6):
    return staleness.admission_capacity(
        version=version,
        accepted=accepted,
        running=running,
        batch_groups=batch,
        max_staleness=bound,
        max_running=cap,
    )


@given(version=NUMBER, accepted=NUMBER, running=NUMBER, batch=st.integers(1, 9), bound=NUMBER, cap=NUMBER)
def test_capacity_is_the_number_of_starts_until_a_bound_is_met(version, accepted, running, batch, bound, cap):
    starts = 0
    while running + starts < cap and accepted + running + starts < (bound + version + 1) * batch:
        starts += 1
    found = capacity(version=version, accepted=accepted, running=running, batch=batch, bound=bound, cap=cap)
    assert found == starts


@pytest.mark.parametrize(
    "case, arguments, expected",
    [
        ("resumed at version 10", {"version": 10, "accepted": 40, "batch": 4, "bound": 2}, 12),
        ("synchronous is a batch, not a deadlock", {"batch": 8}, 8),
        ("a bound of four", {"batch": 8, "bound": 4}, 40),
        ("running groups take their place", {"batch": 8, "bound": 4, "running": 10}, 30),
        ("a step gives a batch back", {"batch": 8, "version": 1, "accepted": 8}, 8),
        ("all accepted", {"batch": 2, "bound": 1, "accepted": 4, "cap": 4}, 0),
        ("one filtered gives its place back", {"batch": 2, "bound": 1, "accepted": 3, "cap": 4}, 1),
        ("batch 16, bound 3", {"batch": 16, "bound": 3}, 64),
        ("the 65th waits", {"batch": 16, "bound": 3, "running": 64}, 0),
        ("more running than allowed is no debt", {"running": 9, "cap": 4}, 0),
    ],
)
def test_worked_capacities(case, arguments, expected):
    assert capacity(**arguments) == expected, case


@pytest.mark.parametrize("version, total", [(0, 64), (1, 80), (4, 128), (12, 256)])
def test_groups_allowed_in_all_grow_by_a_batch_a_version(version, total):
    assert capacity(version=version, batch=16, bound=3) == total


@given(version=NUMBER, batch=st.integers(1, 9), bound=NUMBER)
def test_a_resumed_run_has_the_capacity_of_a_fresh_one(version, batch, bound):
    accepted = staleness.accepted_at(version, batch_groups=batch)
    assert capacity(version=version, accepted=accepted, batch=batch, bound=bound) == capacity(
        batch=batch, bound=bound
    )


@given(versions=st.lists(st.integers(-1, 9), min_size=1))
def test_age_counts_from_the_oldest_sampled_token(versions):
    sampled = [v for v in versions if v >= 0]
    assert staleness.staleness(versions, version=9) == (9 - min(sampled) if sampled else 0)


@pytest.mark.parametrize("oldest, keep", [(8, True), (7, False), (10, True)])
def test_the_bound_is_inclusive(oldest, keep):
    """Consumer at 10, bound 2."""
    age = staleness.staleness([-1, 10, oldest, 9], version=10)
    assert staleness.is_fresh(age, max_staleness=2) is keep


@given(ages=st.lists(st.integers(0, 5)))
def test_histogram_counts_every_trajectory_once(ages):
    found = staleness.staleness_histogram(ages)
    assert found == {age: ages.count(age) for age in sorted(set(ages))}
    assert list(found) == sorted(found)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="batch_groups must be positive, got 0"):
        capacity(batch=0)
    with pytest.raises(ValueError, match="must not be negative, got 0, -1, 0, 0"):
        capacity(accepted=-1)
    with pytest.raises(ValueError, match="a token must not be newer than the trainer's version 3, got 4"):
        staleness.staleness([4, 5], version=3)
