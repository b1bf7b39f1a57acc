"""Laws of core.staleness: how many may start, and how old is too old."""

from __future__ import annotations

import math

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


@given(versions=st.lists(st.integers(-3, 9), min_size=1), now=st.integers(9, 12))
def test_age_does_not_depend_on_order_repetition_or_the_kind_of_iterable(versions, now):
    age = staleness.staleness(versions, version=now)
    assert age == staleness.staleness(iter(versions[::-1] * 2), version=now) >= 0


def test_a_trajectory_without_a_sampled_token_has_no_age():
    assert staleness.staleness([], version=7) == staleness.staleness([-1, -1], version=7) == 0


def test_version_zero_is_a_version():
    assert staleness.staleness([-1, 0], version=2) == 2


@pytest.mark.parametrize("bound, keep", [(0, True), (1, True)])
def test_a_trajectory_of_the_current_version_is_always_fresh(bound, keep):
    assert staleness.is_fresh(0, max_staleness=bound) is keep


def test_overtaking_takes_a_group_past_the_bound_though_every_start_was_admitted():
    """Batch 1, bound 1, two side by side: g0 and g1 start at version 0, g1 to g3 are trained, g0 last.

    The bound on admission holds for counts, not for a group that others overtake; hence `is_fresh`.
    """
    started, trained = {"g0": 0, "g1": 0}, 0
    for name in ("g1", "g2", "g3"):
        trained += 1
        assert capacity(version=trained, accepted=trained, running=1, batch=1, bound=1, cap=2) == 1
        started[f"g{int(name[1]) + 1}"] = trained
    age = staleness.staleness([started["g0"]], version=trained)
    assert age == 3 and not staleness.is_fresh(age, max_staleness=1)


def test_a_dropped_group_gives_its_place_back():
    """Batch 2, bound 1, four side by side: four accepted leave none, one of them dropped leaves one."""
    assert capacity(batch=2, bound=1, cap=4, accepted=4) == 0
    assert capacity(batch=2, bound=1, cap=4, accepted=3) == 1


@pytest.mark.parametrize("name", ["version", "accepted", "running", "bound", "cap"])
@pytest.mark.parametrize(
    "value, text",
    [
        (-1, "must not be negative, got -1"),
        (1.0, r"must be a whole number, got 1\.0"),
        (True, "number, got True"),
    ],
)
def test_a_count_that_is_none_is_refused(name, value, text):
    full = {"bound": "max_staleness", "cap": "max_running"}.get(name, name)
    with pytest.raises(ValueError, match=f"^{full} .*{text}"):
        capacity(**{name: value})


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: capacity(batch=0), "batch_groups must be positive, got 0"),
        (lambda: capacity(batch=math.nan), "batch_groups must be a whole number, got nan"),  # pyright: ignore[reportArgumentType]
        (lambda: staleness.accepted_at(-1, batch_groups=1), "version must not be negative, got -1"),
        (lambda: staleness.accepted_at(1, batch_groups=0), "batch_groups must be positive, got 0"),
        (
            lambda: staleness.staleness([4, 5], version=3),
            "a token must not be newer than the trainer's version 3, got 4",
        ),
        (lambda: staleness.staleness([], version=-1), "version must not be negative, got -1"),
        (
            lambda: staleness.staleness([0.0], version=1),  # pyright: ignore[reportArgumentType]
            r"every policy_version must be a whole number, got 0\.0",
        ),
        (
            lambda: staleness.staleness([math.nan], version=1),  # pyright: ignore[reportArgumentType]
            "every policy_version must be a whole number, got nan",
        ),
        (lambda: staleness.is_fresh(-1, max_staleness=1), "age must not be negative, got -1"),
        (lambda: staleness.is_fresh(math.nan, max_staleness=1), "age must be a whole number, got nan"),  # pyright: ignore[reportArgumentType]
        (lambda: staleness.is_fresh(1, max_staleness=-1), "max_staleness must not be negative, got -1"),
        (lambda: staleness.staleness_histogram([1, -1]), "every age must not be negative, got -1"),
        (lambda: staleness.staleness_histogram([0.5]), r"every age must be a whole number, got 0\.5"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_input_is_refused(call, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        call()


def test_a_token_as_new_as_the_trainer_has_age_zero():
    assert staleness.staleness([3], version=3) == 0


TOKENS = st.lists(st.tuples(st.booleans(), st.integers(-1, 6)), max_size=8)


@given(tokens=TOKENS, oldest=st.integers(0, 6))
def test_a_mask_keeps_of_the_trained_tokens_those_that_are_young_enough(tokens, oldest):
    mask, versions = [on for on, _ in tokens], [version for _, version in tokens]
    fresh = staleness.fresh_mask(mask, versions, min_version=oldest)
    assert fresh == [on and version >= oldest for on, version in tokens]
    assert staleness.fresh_mask(fresh, versions, min_version=oldest) == fresh
    kept = [version for on, version in zip(fresh, versions) if on]
    bound = max(0, 6 - oldest)
    assert staleness.is_fresh(staleness.staleness(kept, version=6), max_staleness=bound)


def test_a_mask_of_another_length_and_a_negative_version_are_refused():
    with pytest.raises(ValueError, match="^min_version must not be negative, got -1$"):
        staleness.fresh_mask([True], [0], min_version=-1)
    with pytest.raises(ValueError, match="^policy_version must have one entry a token, 1, got 2$"):
        staleness.fresh_mask([True], [0, 1], min_version=0)


SWAPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=5).map(sorted)


@given(start=st.integers(0, 9), swaps=SWAPS, count=st.integers(0, 8))
def test_a_token_has_the_version_of_the_last_swap_before_it(start, swaps, count):
    swaps = [(0, start), *swaps]
    versions = staleness.token_versions(swaps, count=count)
    assert versions == [[v for begun, v in swaps if begun <= token][-1] for token in range(count)]
    assert versions == staleness.token_versions(swaps, count=count + 3)[:count]


@pytest.mark.parametrize(
    ("swaps", "count", "text"),
    [
        ([], 1, r"swaps must begin with one at 0 tokens, got \[\]"),
        ([(1, 0)], 1, r"swaps must begin with one at 0 tokens, got \[\(1, 0\)\]"),
        (
            [(0, 0), (3, 1), (2, 2)],
            1,
            r"swaps must be in the order of their tokens, got \[\(0, 0\), \(3, 1\), \(2, 2\)\]",
        ),
        ([(0, 0)], -1, "count must not be negative, got -1"),
    ],
)
def test_swaps_out_of_order_or_without_a_start_are_refused(swaps, count, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        staleness.token_versions(swaps, count=count)
