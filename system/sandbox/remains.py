"""What there is of a run on this machine: its processes, mounts and files, named, so that a leak can be looked at."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from .scratch import mounts_below


class Remains(NamedTuple):
    """A line for each thing: `Remains(("812 bwrap --unshare-user",), (), ("trials/trial-812-0a1b2c3d",))`."""

    processes: tuple[str, ...]
    mounts: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many of each."""
        return {name: len(found) for name, found in self._asdict().items()}


def remains(folder: Path, *, known: Collection[str] = ()) -> Remains:
    """Descendants of this process, mounts below a folder, and what lies in it.

    A process whose parent died is found only if this one adopts orphans (`kernel.adopt_orphans`). Mounts that only
    another process sees go with that process. A zombie holds nothing and is left out.

    Args:
        folder: of a run; need not exist.
        known: names in it that belong there, as paths relative to it.
    """
    mounts = tuple(os.fspath(place) for place in mounts_below(folder.resolve()))
    return Remains(_descendants(), mounts, _files(folder, known))


def _descendants() -> tuple[str, ...]:
    """Of this process, by the parents that /proc names; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # gone
                continue
            states[int(name)] = fields[0]
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return tuple(f"{pid} {_command(pid)}" for pid in sorted(found) if states[pid] not in "ZX")


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "(gone)"
    return " ".join(words).strip()[:200]


def _files(folder: Path, known: Collection[str]) -> tuple[str, ...]:
    """Files and empty folders, relative to the folder."""
    found = []
    for place, folders, names in os.walk(folder):
        here = os.path.relpath(place, folder)
        found += [os.path.normpath(os.path.join(here, name)) for name in names]
        if not folders and not names:
            found.append(here)
    return tuple(sorted(name for name in found if name not in known))
