"""core/routing.py against lists of trials."""

from __future__ import annotations

import oracle_routing as oracle
from hypothesis import given
from hypothesis import strategies as st

from core.routing import assigned, empty_routes, may_restart, released

STEPS = st.lists(st.tuples(st.integers(0, 9), st.lists(st.booleans(), min_size=4, max_size=4)), max_size=50)


@given(STEPS)
def test_routes_are_the_lines_in_which_trials_stand(steps: list[tuple[int, list[bool]]]) -> None:
    routes, lines = empty_routes(4), [[], [], [], []]
    for number, alive in steps:
        trial = f"train-{number}"
        if trial in routes.engine_of:
            routes = released(routes, trial)
            oracle.leave(lines, trial)
        else:
            routes, engine = assigned(routes, trial, alive=alive)
            assert engine == oracle.place(lines, trial, alive)
        assert routes.load == tuple(len(line) for line in lines)
        assert routes.engine_of == {name: i for i, line in enumerate(lines) for name in line}


@given(st.lists(st.integers(0, 90), max_size=8), st.integers(0, 40), st.integers(0, 4), st.integers(1, 80))
def test_restarts_are_taken_one_by_one(times: list[int], later: int, most: int, window_s: int) -> None:
    now_s = max(times, default=0) + later
    expected = oracle.may_restart(times, now_s, most, window_s)
    assert may_restart(times, now_s=now_s, most=most, window_s=window_s) == expected
