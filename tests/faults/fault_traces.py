"""What trials could leave behind, counted from outside: processes, mounts, folders, sockets, descriptors."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from system.sandbox import kernel

PATIENCE_S = 10.0
"""How long what is dying may take to be gone; nothing waits so long where nothing is left."""


def adopt() -> None:
    """Make this process the heir of every orphan below it: whatever a trial leaves running is then found."""
    kernel.adopt_orphans()


def descendants(pid: int) -> list[int]:
    """All processes below one, the dead that nobody has waited for among them."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if parent := parent_of(int(name)):
            children.setdefault(parent, []).append(int(name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def parent_of(pid: int) -> int:
    """The parent of a process, 0 if it is gone."""
    try:
        return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def command(pid: int) -> str:
    """The name of a process's program, "" if it is gone."""
    try:
        return Path("/proc", str(pid), "comm").read_text().strip()
    except OSError:
        return ""


def await_state(pid: int, states: str) -> None:
    """Wait until a process is in one of these states of /proc/PID/stat, or gone."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] in states:
                return
        except OSError:  # gone
            return
        time.sleep(0.001)
    raise TimeoutError(f"process {pid} must come into a state of {states}, got another")


def server_of(trial: int) -> int:
    """The tool server of a trial: the child that is a fork of it."""
    own = command(trial)
    (server,) = [pid for pid in descendants(trial) if parent_of(pid) == trial and command(pid) == own]
    return server


def holder_of(trial: int) -> int:
    """The first process of a trial's place, which keeps all others inside alive."""
    (bwrap,) = [pid for pid in descendants(trial) if parent_of(pid) == trial and command(pid) == "bwrap"]
    (holder,) = [pid for pid in descendants(bwrap) if parent_of(pid) == bwrap]
    return holder


class Traces:
    """What is there before a trial, to be compared with what is there after it.

    Args:
        folder: everything of the trials lies below it.
        scratch: folders there that are empty between trials, but for the fleet's log.
    """

    def __init__(self, folder: Path, scratch: Collection[Path]) -> None:
        self._folder, self._scratch = folder, scratch
        self._sockets, self._descriptors = _sockets(folder), _descriptors(os.getpid())

    def left(self, keep: Collection[int], *, but: Collection[str] = ()) -> dict[str, object]:
        """What is left of the trials by now, by kind; waits while it still goes away.

        Args:
            keep: processes that may stay, and that nobody here waits for.
            but: kinds that do not count.
        """
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._now(keep, but)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _now(self, keep: Collection[int], but: Collection[str]) -> dict[str, object]:
        _bury(keep)
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found = {
            "processes": {p: command(p) for p in descendants(os.getpid()) if p not in keep},
            "folders": [f for s in self._scratch for f in os.listdir(s) if f != "fleet.log"],
            "mounts": [line for line in mounts if os.fspath(self._folder) in line],
            "sockets": sorted(_sockets(self._folder) - self._sockets),
            "descriptors": sorted(set(_descriptors(os.getpid())) - set(self._descriptors)),
        }
        return {kind: what for kind, what in found.items() if what and kind not in but}


def _bury(keep: Collection[int]) -> None:
    """Wait for the orphans that fell to this process and are dead."""
    for pid in kernel.children():
        if pid not in keep:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _sockets(folder: Path) -> set[str]:
    """Named sockets below a folder that someone holds."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if os.fspath(folder) in line}


def _descriptors(pid: int) -> dict[int, str]:
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:  # the one that lists
            continue
    return found
