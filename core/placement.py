"""Where a trial is started, and when: the node with most room, not too many starts at a time or in a second."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .check import check_count


def roomiest(running: Sequence[int], slots: Sequence[int]) -> int | None:
    """The node with the smallest share of its slots taken, of equals the first; None if none is free.

    Args:
        running: trials at each node.
        slots: trials that each node takes; 0 for one that takes none, or is gone.
    """
    if len(running) != len(slots):
        raise ValueError(f"running must have one entry a node, {len(slots)}, got {len(running)}")
    free = [node for node, (taken, most) in enumerate(zip(running, slots)) if taken < most]
    return min(free, key=lambda node: running[node] / slots[node]) if free else None


def start_wait(starting: int, *, max_starting: float, next_s: float, now_s: float) -> float:
    """Seconds until another trial may start: 0 for now, infinite where one that is starting must be up first.

    Args:
        starting: trials that were started and are not up yet.
        max_starting: how many of these there may be; infinite for no bound.
        next_s: `next_start` of the last start; minus infinity before the first.
        now_s: the time, by the clock of next_s.
    """
    check_count("starting", starting, least=0)
    if not max_starting >= 1:
        raise ValueError(f"max_starting must be at least 1, got {max_starting}")
    return max(0.0, next_s - now_s) if starting < max_starting else math.inf


def next_start(now_s: float, *, starts_per_s: float) -> float:
    """When the next may start after one at now_s: any L seconds see at most L * starts_per_s + 1 starts."""
    if not starts_per_s > 0:
        raise ValueError(f"starts_per_s must be positive, got {starts_per_s}")
    return now_s + 1 / starts_per_s
