"""Laws of core.placement: no node is given more than it takes, no more start at a time or in a second than may."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.placement import next_start, roomiest, start_wait

NODES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=7)
RATES = st.sampled_from([0.5, 1.0, 4.0, 64.0])


@given(NODES)
def test_a_trial_goes_to_the_first_of_the_nodes_with_the_smallest_share_taken(nodes):
    running, slots = [n for n, _ in nodes], [m for _, m in nodes]
    chosen = roomiest(running, slots)
    order = [(n / m, node) for node, (n, m) in enumerate(nodes) if n < m]
    assert chosen == (min(order)[1] if order else None)


@given(st.lists(st.integers(0, 6), max_size=7))
def test_nodes_fill_to_the_last_slot_and_never_beyond(slots):
    running = [0] * len(slots)
    for _ in range(sum(slots)):
        node = roomiest(running, slots)
        assert node is not None
        running[node] += 1
    assert running == slots and roomiest(running, slots) is None


@given(
    st.lists(st.tuples(st.sampled_from(["come", "up"]), st.integers(0, 8)), max_size=60),
    st.integers(1, 5),
    RATES,
)
def test_never_more_start_at_a_time_or_in_any_time_than_may(steps, max_starting, rate):
    now_s, next_s, starting = 0.0, -math.inf, 0
    begun: list[float] = []
    for what, eighths in steps:
        now_s += eighths / 8
        if what == "up":
            starting = max(0, starting - 1)
        elif start_wait(starting, max_starting=max_starting, next_s=next_s, now_s=now_s) == 0:
            begun, starting, next_s = [*begun, now_s], starting + 1, next_start(now_s, starts_per_s=rate)
        assert starting <= max_starting
    for first in range(len(begun)):
        for last in range(first, len(begun)):
            assert last - first + 1 <= (begun[last] - begun[first]) * rate + 1


@given(st.integers(0, 9), st.integers(1, 9), st.integers(-9, 9), st.integers(-9, 9))
def test_a_start_waits_for_its_time_and_for_one_to_be_up(starting, max_starting, next_s, now_s):
    wait = start_wait(starting, max_starting=max_starting, next_s=next_s, now_s=now_s)
    if starting >= max_starting:
        assert wait == math.inf
    else:
        assert wait >= 0
        assert start_wait(starting, max_starting=max_starting, next_s=next_s, now_s=now_s + wait) == 0
        assert wait == 0 or now_s + wait == next_s


@given(st.integers(0, 9), st.integers(-9, 9))
def test_without_bounds_a_trial_starts_at_once(starting, now_s):
    next_s = next_start(now_s, starts_per_s=math.inf)
    assert next_s == now_s
    assert start_wait(starting, max_starting=math.inf, next_s=next_s, now_s=now_s) == 0
    assert start_wait(starting, max_starting=math.inf, next_s=-math.inf, now_s=now_s) == 0


def test_what_could_never_start_a_trial_is_refused():
    with pytest.raises(ValueError, match="running must have one entry a node, 2, got 1"):
        roomiest([0], [1, 1])
    with pytest.raises(ValueError, match="starting must not be negative, got -1"):
        start_wait(-1, max_starting=1, next_s=0, now_s=0)
    for wrong in (0, 0.5, math.nan):
        with pytest.raises(ValueError, match=f"max_starting must be at least 1, got {wrong}"):
            start_wait(0, max_starting=wrong, next_s=0, now_s=0)
    for wrong in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"starts_per_s must be positive, got {wrong}"):
            next_start(0, starts_per_s=wrong)
