"""Routing by standing in line: each engine is a list of the trials at it."""

from __future__ import annotations

from collections.abc import Sequence


def place(lines: list[list[str]], trial: str, alive: Sequence[bool]) -> int | None:
    """Look at every engine in turn; a shorter line than the best so far is better."""
    best: int | None = None
    for engine in range(len(lines)):
        if alive[engine] and (best is None or len(lines[engine]) < len(lines[best])):
            best = engine
    if best is not None:
        lines[best].append(trial)
    return best


def leave(lines: list[list[str]], trial: str) -> None:
    """Go through the lines and take the trial out of the one it stands in."""
    for line in lines:
        if trial in line:
            line.remove(trial)


def may_restart(ended_at_s: Sequence[float], now_s: float, most: int, window_s: float) -> bool:
    """Take a restart away for each end that is not forgiven yet, until none is left."""
    left = most
    for ended in sorted(ended_at_s, reverse=True):
        if ended + window_s <= now_s:
            break
        if left == 0:
            return False
        left -= 1
    return True
