"""Folders of running trials, written down before they are made, so that a killed run can be cleared away."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import uuid
from pathlib import Path

from . import kernel


def new_folder(root: Path) -> Path:
    """Make a folder below root for one sandbox of this process; its entry `<name>.json` is written first."""
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"trial-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    pid = os.getpid()
    entry = {"pid": pid, "start": _start_time(pid), "boot": _boot(), "host": socket.gethostname()}
    with open(_entry_of(folder), "x") as file:
        json.dump(entry, file)
    folder.mkdir(mode=0o700)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder of `new_folder` and then its entry. Raises OSError if something stays."""
    if folder.exists():
        shutil.rmtree(folder, onerror=_open_up)
    _entry_of(folder).unlink(missing_ok=True)


def reap(root: Path) -> list[str]:
    """Kill the processes and remove the mounts and folders of dead owners; the names of the folders.

    An entry written on another host is left alone: nothing can be known about its owner.
    """
    removed = []
    for entry in sorted(root.glob("trial-*.json")) if root.is_dir() else []:
        folder = entry.with_suffix("")
        if not _owner_is_dead(entry):
            continue
        try:
            _kill_inside(folder)
            for mounted in _mounts_below(folder):
                kernel.unmount(mounted)
            remove_folder(folder)
        except FileNotFoundError:  # another reaper is at it
            continue
        except PermissionError:  # another user's; that user's next run removes it
            continue
        removed.append(folder.name)
    return removed


def _entry_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".json")


def _owner_is_dead(entry: Path) -> bool:
    try:
        owner = json.loads(entry.read_text())
    except FileNotFoundError:  # removed by its owner meanwhile
        return False
    except ValueError:  # killed while writing it, so before the folder was made
        return True
    if owner["host"] != socket.gethostname():
        return False
    return owner["boot"] != _boot() or owner["start"] != _start_time(owner["pid"])


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> int:
    """Clock ticks from boot to the start of a process; -1 if it is gone (a zombie counts as gone)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return -1 if fields[0] in "ZX" else int(fields[19])
    except OSError:
        pass
    if os.path.isdir("/proc/self"):
        return -1
    try:  # no /proc: a live pid is all that can be known
        os.kill(pid, 0)
        return 0
    except OSError:
        return -1


def processes_of(folder: Path) -> list[int]:
    """Processes that work in a folder or have a path into it in their environment, as far as we may look."""
    inside = os.fspath(folder) + "/"
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            works_there = (os.readlink(f"/proc/{name}/cwd") + "/").startswith(inside)
            if works_there or os.fsencode(inside) in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
        except OSError:  # gone, or another user's
            continue
    return found


def _kill_inside(folder: Path) -> None:
    for _ in range(100):
        pids = processes_of(folder)
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _mounts_below(folder: Path) -> list[Path]:
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    points = [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]
    return sorted((p for p in points if p == folder or folder in p.parents), reverse=True)


def _open_up(function, path, _info) -> None:
    """rmtree hook: overlay's work folder has no permissions, and an agent can drop those of its own."""
    parent = os.path.dirname(path)
    for place in (parent, path):
        if os.path.isdir(place) and not os.path.islink(place):
            os.chmod(place, stat.S_IRWXU)
    if function in (os.open, os.scandir, os.lstat):
        shutil.rmtree(path)
    else:
        function(path)
