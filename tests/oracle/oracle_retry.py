"""core/retry.py again: a table of statuses, a search over a grid of times, a back-off by repeated doubling."""

from __future__ import annotations

from typing import Any


def fault_of(status: int, code: str) -> str:
    """By a table of ranges, later lines first."""
    spent = code in ("insufficient_quota", "billing_hard_limit_reached", "invalid_api_key")
    table = [(range(100, 1000), "fatal"), (range(200, 300), ""), (range(500, 1000), "busy")]
    table += [(range(s, s + 1), "busy") for s in (408, 409, 425)]
    table += [(range(s, s + 1), "refused") for s in (400, 422)]
    table += [(range(s, s + 1), "key") for s in (401, 402, 403)]
    table += [(range(429, 430), "key" if spent else "limited")]
    return next(fault for statuses, fault in reversed(table) if status in statuses)


def whole_backoff(failures: int, base_s: float, ceiling_s: float) -> float:
    """The longest wait, by doubling once a failure."""
    wait = base_s
    for _ in range(failures - 1):
        wait = min(ceiling_s, wait + wait)
    return min(ceiling_s, wait)


def first_call(
    ready_s: int, free_at_s: list[int | None], now_s: int, deadline_s: int
) -> tuple[int, list[int]] | None:
    """The first whole second before the deadline at which a key may be used, and which may; None for none."""
    for at in range(now_s, deadline_s):
        free = [key for key, free in enumerate(free_at_s) if free is not None and free <= at]
        if free and at >= ready_s:
            return at, free
    return None


def held(fault: str, asked_s: float | None, now_s: float, shortest_s: float) -> dict[str, Any]:
    """Who must wait after a fault, and until when at the earliest."""
    until = now_s + (shortest_s if asked_s is None else asked_s)
    return {
        "key": until if fault == "limited" else None,
        "question": until if fault in ("busy", "timeout", "connection") else None,
        "dead": fault == "key",
    }
