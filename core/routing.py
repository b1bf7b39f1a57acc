"""Which engine a trial goes to, and whether an engine that ended is started again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .check import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Where every trial is. Example: `Routes(load=(1, 0), engine_of={"train-0-0-0": 0})`.

    Args:
        load: trials at each engine.
        engine_of: the engine of each trial; it keeps it while it lives, since its cache is there.
    """

    load: tuple[int, ...]
    engine_of: Mapping[str, int]


def empty_routes(engines: int) -> Routes:
    """No trial anywhere."""
    check_count("engines", engines, least=1)
    return Routes(load=(0,) * engines, engine_of={})


def assigned(routes: Routes, trial: str, *, alive: Sequence[bool]) -> tuple[Routes, int | None]:
    """The routes with a new trial at the living engine that has the fewest, of equals the first; None if none lives."""
    if len(alive) != len(routes.load):
        raise ValueError(f"alive must have one entry an engine, {len(routes.load)}, got {len(alive)}")
    if trial in routes.engine_of:
        raise ValueError(f"trial must be a new one, got {trial} at engine {routes.engine_of[trial]}")
    living = [engine for engine, lives in enumerate(alive) if lives]
    if not living:
        return routes, None
    engine = min(living, key=lambda one: routes.load[one])
    moved = replace(_moved(routes, engine, 1), engine_of={**routes.engine_of, trial: engine})
    return moved, engine


def released(routes: Routes, trial: str) -> Routes:
    """The routes without a trial, however it ended; one that is nowhere changes nothing."""
    if trial not in routes.engine_of:
        return routes
    left = {name: engine for name, engine in routes.engine_of.items() if name != trial}
    return replace(_moved(routes, routes.engine_of[trial], -1), engine_of=left)


def _moved(routes: Routes, engine: int, change: int) -> Routes:
    return replace(
        routes,
        load=tuple(load + change if one == engine else load for one, load in enumerate(routes.load)),
    )


def may_restart(ended_at_s: Sequence[float], *, now_s: float, most: int, window_s: float) -> bool:
    """Whether what ended at these times, the last included, is started again: at most so often in any such window.

    Args:
        ended_at_s: when it ended, in any order.
        most: restarts within the window.
        window_s: seconds back from now; what lies further back is forgiven.
    """
    check_count("most", most, least=0)
    if not 0 < window_s < math.inf:
        raise ValueError(f"window_s must be positive and finite, got {window_s}")
    return sum(now_s - ended < window_s for ended in ended_at_s) <= most
