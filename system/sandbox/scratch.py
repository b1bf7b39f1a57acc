"""What running trials have made, written down before it is made, so that a killed run can be cleared away.

Each sandbox has a folder and beside it a journal, `<folder>.json`, to which lines are added: "intent" (what will be
made, where, for which trial, by which process) before anything is made, "confirmed" once it is up, "removed" once
all of it but the folder is gone. The journal itself goes last; one that is there may have something behind it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import kernel

REMOTE = ("modal",)
"""Kinds of which something lies on another machine, where only their own service can remove it."""


def new_folder(root: Path, *, what: str = "", trial: str = "", **more: Any) -> Path:
    """Make a folder below root for one sandbox of this process; its journal is begun before.

    Args:
        what: the kind of the sandbox.
        trial: whose it is.
        more: where the rest of it will be, for whoever has to remove it.
    """
    root.mkdir(parents=True, exist_ok=True)
    pid = os.getpid()
    folder = root / f"trial-{pid}-{uuid.uuid4().hex[:8]}"
    owner = {"pid": pid, "start": _start_time(pid), "boot": _boot(), "host": socket.gethostname()}
    intent = {"event": "intent", "what": what, "where": os.fspath(folder), "trial": trial, **owner, **more}
    _add_line(_journal_of(folder), intent, os.O_EXCL | os.O_CREAT, sync=what in REMOTE)
    folder.mkdir(mode=0o700)
    return folder


def note(folder: Path, event: str, *, sync: bool = False, **facts: Any) -> None:
    """Add a line to the journal of a folder: a further "intent", "confirmed", "removed".

    Args:
        sync: wait for the disk as well, because what is noted outlives this machine.
    """
    _add_line(_journal_of(folder), {"event": event, **facts}, 0, sync=sync)


def _add_line(journal: Path, line: dict[str, Any], flags: int, *, sync: bool) -> None:
    """In one write, which is in the kernel's hands when this returns."""
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
    try:
        os.write(fd, json.dumps({"time": round(time.time(), 3), **line}).encode() + b"\n")
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def journal_of(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a folder's journal; [] if it is gone."""
    try:
        text = _journal_of(folder).read_text()
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # killed while writing it, so before what it says was begun
            continue
    return lines


def remove_folder(folder: Path) -> None:
    """Remove a folder of `new_folder`, say so, then remove its journal. Raises OSError if something stays."""
    if folder.exists():
        _remove_tree(folder)
    with suppress(FileNotFoundError):  # a reaper was at it
        note(folder, "removed")
        _journal_of(folder).unlink()


def abandoned(root: Path) -> list[Path]:
    """Folders whose owner is dead and of which something may be left on another machine."""
    found = [
        journal.with_suffix("") for journal in sorted(root.glob("trial-*.json")) if _owner_is_dead(journal)
    ]
    return [folder for folder in found if _is_remote(folder)]


def _is_remote(folder: Path) -> bool:
    lines = journal_of(folder)
    return any(line.get("what") in REMOTE for line in lines) and lines[-1]["event"] != "removed"


def reap(root: Path) -> list[str]:
    """Kill the processes and remove the mounts and folders of dead owners; the names of the folders.

    A journal written on another host is left alone: nothing can be known about its owner. So is one of a sandbox
    elsewhere (`abandoned`): that is asked for first.
    """
    removed = []
    for entry in sorted(root.glob("trial-*.json")) if root.is_dir() else []:
        folder = entry.with_suffix("")
        if not _owner_is_dead(entry) or _is_remote(folder):
            continue
        try:
            _kill_inside(folder)
            for mounted in sorted(mounts_below(folder), reverse=True):
                kernel.unmount(mounted)
            remove_folder(folder)
        except FileNotFoundError:  # another reaper is at it
            continue
        except PermissionError:  # another user's; that user's next run removes it
            continue
        removed.append(folder.name)
    return removed


def _journal_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".json")


def _owner_is_dead(journal: Path) -> bool:
    try:
        owner = json.loads(journal.read_text().partition("\n")[0])
    except FileNotFoundError:  # removed by its owner meanwhile
        return False
    except ValueError:  # it is being written, or its owner was killed at that, before the folder was made
        return _start_time(int(journal.name.split("-")[1])) == -1
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


def mounts_below(folder: Path) -> list[Path]:
    """Where something is mounted on a folder or in it, as this process sees it."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    points = [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]
    return [p for p in points if p == folder or folder in p.parents]


def _remove_tree(folder: Path) -> None:
    """Remove a folder and all in it, however deep: what lies in one that is emptied is moved up before it is opened.

    An agent can nest folders until no path names the last one and no stack holds the way to it, and can drop the
    permissions of its own; overlay's work folder has none either.
    """
    waiting = [folder]
    emptied: list[Path] = []
    for number, place in enumerate(waiting):
        os.chmod(place, stat.S_IRWXU)
        with os.scandir(place) as entries:
            for count, entry in enumerate(list(entries)):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                elif number == 0:
                    waiting.append(place / entry.name)
                else:
                    lifted = folder / f"{uuid.uuid4().hex}.{count}"
                    os.chmod(entry.path, stat.S_IRWXU)
                    os.rename(entry.path, lifted)
                    waiting.append(lifted)
        emptied.append(place)
    for place in reversed(emptied):
        os.rmdir(place)
