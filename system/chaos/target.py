"""Which process of a run is which, as /proc tells it from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One line of /proc: `Process(812, 1, "S", "python", "python -m system.fleet.warm 12")`."""

    pid: int
    parent: int
    state: str
    name: str
    command: str


def descendants(root: int) -> list[Process]:
    """All living processes below one, nearest first."""
    below: dict[int, list[Process]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if (found := _process(int(name))) and found.state not in "ZX":
            below.setdefault(found.parent, []).append(found)
    tree = list(below.get(root, []))
    for process in tree:
        tree += below.get(process.pid, [])
    return tree


def _process(pid: int) -> Process | None:
    try:
        head, _, rest = Path("/proc", str(pid), "stat").read_text().rpartition(")")
        words = Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # gone
        return None
    fields = rest.split()
    return Process(pid, int(fields[1]), fields[0], head.partition("(")[2], " ".join(words).strip())


def workers(run: int) -> list[Process]:
    """Those that fork trials, and under Ray those that ask them to."""
    below = descendants(run)
    return _warm(below) + [p for p in below if p.command.startswith("ray::")]


def _warm(below: Sequence[Process]) -> list[Process]:
    """Parents of the trials; a trial has the same command, and one of them for its parent."""
    alike = {p.pid: p for p in below if "-m system.fleet.warm" in p.command}
    return [p for p in alike.values() if p.parent not in alike]


def engines(run: int) -> list[Process]:
    """The engines of a run."""
    return [p for p in descendants(run) if "-m system.engine.embedded" in p.command]


def trainers(run: int) -> list[Process]:
    """The ranks of the trainer."""
    return [p for p in descendants(run) if "-m system.trainer.worker" in p.command]


def trials(run: int) -> list[Process]:
    """Forks of the parents of the trials."""
    below = descendants(run)
    return [fork for warm in _warm(below) for fork in _forks(warm, below)]


def servers(run: int) -> list[Process]:
    """Tool servers: forks of a trial."""
    return [fork for trial in trials(run) for fork in _forks(trial, descendants(trial.pid))]


def _forks(parent: Process, below: Sequence[Process]) -> list[Process]:
    """Children that run the program of their parent."""
    return [p for p in below if p.parent == parent.pid and p.name == parent.name]


TARGETS: dict[str, Callable[[int], list[Process]]] = {
    "trial": trials,
    "tool server": servers,
    "worker": workers,
    "engine": engines,
    "trainer": trainers,
}
"""What may be killed of a run, by what it is called in the table."""


def kill(pids: Sequence[int]) -> int:
    """SIGKILL to each; how many were there."""
    struck = 0
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        struck += 1
    return struck
