"""What the tests of fleets look at: results as they come in, processes, and what lies in a scratch folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from system.fleet import Fleet

OpenFleet = Callable[..., Any]
"""Opens a fleet, with the keyword arguments that every kind has; it is closed after the test."""


def collect(fleet: Fleet, *, timeout_s: float = 60) -> dict[str, dict[str, Any]]:
    """All results that are due, by id."""
    results: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while fleet.running and time.monotonic() < deadline:
        for result in fleet.poll(1.0):
            assert result["trial_id"] not in results
            results[result["trial_id"]] = result
    assert not fleet.running
    return results


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 20) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def noted_pids(notes: Path, trial_id: str, *, timeout_s: float = 30) -> list[int]:
    """The pids that a trial noted, once it has."""
    note = notes / trial_id
    assert wait_for(lambda: note.exists() and note.read_text() != "", timeout_s=timeout_s)
    return [int(pid) for pid in (notes / trial_id).read_text().split()]


def state_of(pid: int) -> list[str]:
    """What the kernel says of a process after its name: its state, its parent, ...; [] if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pids: list[int]) -> list[int]:
    """Those that still run."""
    return [pid for pid in pids if (state_of(pid) or "X")[0] not in "ZX"]


def parent_of(pid: int) -> int:
    """The pid of a process's parent."""
    return int(state_of(pid)[1])


def command_line(pid: str) -> str:
    """How a process was called, empty if it is gone."""
    try:
        return Path("/proc", pid, "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def those_called(text: str) -> list[str]:
    """Processes whose call has this in it."""
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and text in command_line(pid)]


def left_in(scratch: Path) -> list[str]:
    """What lies in a fleet's scratch folder, or in that of one of its nodes, but for logs."""
    places = [scratch, *scratch.glob("node-*")]
    found = [f"{name}" for place in places for name in sorted(os.listdir(place))]
    return [name for name in found if name != "fleet.log" and not name.startswith("node-")]
