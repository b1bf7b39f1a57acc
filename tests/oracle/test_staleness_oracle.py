"""core/staleness.py against counting."""

from __future__ import annotations

import oracle_staleness as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.staleness import (
    accepted_at,
    admission_capacity,
    fresh_mask,
    is_fresh,
    staleness,
    staleness_histogram,
    token_versions,
)

small = st.integers(0, 6)


@given(small, st.integers(0, 40), small, st.integers(1, 5), small, st.integers(1, 12))
def test_admission_capacity_is_what_starting_one_by_one_gives(
    version: int, accepted: int, running: int, batch: int, lag: int, slots: int
) -> None:
    found = admission_capacity(
        version=version,
        accepted=accepted,
        running=running,
        batch_groups=batch,
        max_staleness=lag,
        max_running=slots,
    )
    assert found == oracle.admission_capacity(version, accepted, running, batch, lag, slots)


@given(st.lists(st.sampled_from([-1, -3]) | st.integers(0, 9), max_size=8), st.integers(9, 12), small)
def test_staleness_counts_from_the_oldest_sampled_token(versions: list[int], now: int, lag: int) -> None:
    versions = [*versions, 9]
    age = staleness(versions, version=now)
    assert age == oracle.staleness(versions, now)
    assert is_fresh(age, max_staleness=lag) == (age <= lag)


@given(st.lists(small, max_size=8))
def test_staleness_histogram_counts_each_age(ages: list[int]) -> None:
    expected = [(age, ages.count(age)) for age in range(7) if age in ages]
    assert list(staleness_histogram(ages).items()) == expected


@given(small, st.integers(1, 5))
def test_accepted_at_is_a_batch_for_every_step_so_far(version: int, batch: int) -> None:
    assert accepted_at(version, batch_groups=batch) == sum(batch for _ in range(version))


NO_LIMIT = 10**6


# losses.md 9, recipe.md F.6 and B.10, cases.md G25 to G27.


@pytest.mark.parametrize(
    ("lag", "batch", "version", "accepted", "running", "slots"),
    [(4, 8, 0, 0, 0, 40), (4, 8, 0, 0, 10, 30), (0, 8, 1, 8, 0, 8)],
    ids=["empty", "ten-running", "synchronous"],
)
def test_capacity_table(lag: int, batch: int, version: int, accepted: int, running: int, slots: int) -> None:
    found = admission_capacity(
        version=version,
        accepted=accepted,
        running=running,
        batch_groups=batch,
        max_staleness=lag,
        max_running=NO_LIMIT,
    )
    assert found == slots


@pytest.mark.parametrize(("version", "allowed"), [(0, 64), (1, 80), (4, 128), (12, 256)])
def test_groups_allowed_of_recipe_f6(version: int, allowed: int) -> None:
    found = admission_capacity(
        version=version, accepted=0, running=0, batch_groups=16, max_staleness=3, max_running=NO_LIMIT
    )
    assert found == allowed


def test_a_dropped_group_gives_its_place_back() -> None:
    def capacity(accepted: int) -> int:
        return admission_capacity(
            version=0, accepted=accepted, running=0, batch_groups=2, max_staleness=1, max_running=4
        )

    assert [capacity(4), capacity(3)] == [0, 1]


def test_sixty_four_groups_start_and_the_next_waits_for_a_version() -> None:
    def capacity(version: int, running: int) -> int:
        return admission_capacity(
            version=version,
            accepted=0,
            running=running,
            batch_groups=16,
            max_staleness=3,
            max_running=NO_LIMIT,
        )

    assert capacity(0, 64) == 0
    assert capacity(1, 64) == 16


def test_g25_capacity_after_a_resume_is_that_of_a_fresh_run() -> None:
    accepted = accepted_at(10, batch_groups=4)
    found = admission_capacity(
        version=10, accepted=accepted, running=0, batch_groups=4, max_staleness=2, max_running=NO_LIMIT
    )
    assert found == 12


def test_g26_no_staleness_still_admits_one_batch() -> None:
    found = admission_capacity(
        version=0, accepted=0, running=0, batch_groups=8, max_staleness=0, max_running=NO_LIMIT
    )
    assert found == 8


@pytest.mark.parametrize(("oldest", "kept"), [(8, True), (7, False)])
def test_g27_age_is_that_of_the_oldest_token(oldest: int, kept: bool) -> None:
    assert is_fresh(staleness([10, -1, oldest, 9], version=10), max_staleness=2) == kept


@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 5)), max_size=9), st.integers(0, 6))
def test_fresh_mask_leaves_out_what_is_older(tokens: list[tuple[bool, int]], oldest: int) -> None:
    mask, versions = [on for on, _ in tokens], [version for _, version in tokens]
    assert fresh_mask(mask, versions, min_version=oldest) == oracle.fresh_mask(mask, versions, oldest)


@given(st.integers(0, 5), st.lists(st.tuples(small, st.integers(0, 5)), max_size=4), st.integers(0, 9))
def test_token_versions_are_those_of_sampling_one_by_one(
    start: int, swaps: list[tuple[int, int]], count: int
) -> None:
    swaps = [(0, start), *sorted(swaps)]
    assert token_versions(swaps, count=count) == oracle.token_versions(swaps, count)
