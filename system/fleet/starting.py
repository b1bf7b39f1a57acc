"""What a trial tells the fleet once: that it is up, so that another may start."""

from __future__ import annotations

import os
import struct

PID = struct.Struct("=i")

_way: list[int] = []
"""Where to say it: in a trial's process one descriptor, until it is said; elsewhere none."""


def tell_over(descriptor: int) -> None:
    """This process is a trial, which is to say it there. Called by the fleet."""
    _way[:] = [descriptor]


def started() -> None:
    """The trial is up: its sandbox runs and its tools are there. Without a fleet, or said again, this does nothing."""
    while _way:
        descriptor = _way.pop()
        try:
            os.write(descriptor, PID.pack(os.getpid()))
        finally:
            os.close(descriptor)


def heard(descriptor: int) -> list[int]:
    """The pids of those that have said it."""
    try:
        data = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return []
    return [pid for (pid,) in PID.iter_unpack(data[: len(data) // PID.size * PID.size])]
