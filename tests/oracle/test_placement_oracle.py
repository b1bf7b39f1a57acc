"""core/placement.py against fractions and a clock that ticks."""

from __future__ import annotations

import math

import oracle_placement as oracle
from hypothesis import given
from hypothesis import strategies as st

from core.placement import next_start, roomiest, start_wait


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=9))
def test_the_roomiest_node_is_that_of_the_fractions(nodes: list[tuple[int, int]]) -> None:
    running, slots = [n for n, _ in nodes], [m for _, m in nodes]
    assert roomiest(running, slots) == oracle.roomiest(running, slots)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 5), st.sampled_from([1, 2, 4, 8]))
def test_trials_start_at_the_ticks_of_the_clock(
    waiting: int, takes: int, max_starting: int, spacing: int
) -> None:
    now_s, next_s = 0.0, -math.inf
    begun: list[int] = []
    while len(begun) < waiting:
        up = [start + takes for start in begun if start + takes > now_s]
        wait = start_wait(len(up), max_starting=max_starting, next_s=next_s, now_s=now_s)
        if wait == 0:
            begun.append(int(now_s))
            next_s = next_start(now_s, starts_per_s=1 / spacing)
        now_s = now_s + wait if wait < math.inf else min(up)
    assert begun == oracle.starts(waiting, takes, max_starting, spacing, 1000)
