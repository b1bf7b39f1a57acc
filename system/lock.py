"""A run's folder belongs to one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "run.lock"


class LockedError(ValueError):
    """Another process has the folder; the message names it."""

    def __init__(self, folder: Path, pid: str) -> None:
        super().__init__(f"out must be a folder that no run is writing to, got {folder} of process {pid}")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps every other run out of a folder until the end, or until this process dies.

    The kernel lets go of the lock of a process that is dead, however it died. What it started does not inherit it.

    Raises:
        LockedError: a living process has it.
    """
    path = folder / NAME
    descriptor = _taken(path)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is let go: whoever waits at the old file looks again
        os.close(descriptor)


def holder(folder: Path) -> str:
    """The pid of the living process that has a folder, as its lock says; "" if none has."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return "" if _locked(descriptor) else _pid(descriptor)
    finally:
        os.close(descriptor)


def _taken(path: Path) -> int:
    """A descriptor of the lock's file, which is ours now."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not _locked(descriptor):
            pid = _pid(descriptor)
            os.close(descriptor)
            raise LockedError(path.parent, pid)
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # its owner ended meanwhile and took the file away


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _pid(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "(not told yet)"


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there, ours = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
