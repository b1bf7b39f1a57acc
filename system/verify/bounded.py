"""Runs a function over untrusted data in a child that may use so much and no more, and whose death is an answer."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from system.child import tell

_CHUNK = 1 << 16


class OutOfBounds(Exception):
    """The child did not answer: it took too long, grew too large, or died of the data."""


def bounded(work: Callable[[], Any], *, seconds: float, memory_bytes: int, result_bytes: int) -> Any:
    """The result of `work` as JSON brings it, computed in a forked child.

    Args:
        seconds: of the clock and of the processor.
        memory_bytes: that the child may take on top of what this process has.

    Raises:
        OutOfBounds: no result; the message says why in one line.
    """
    out, into = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; the child runs no code that another thread may hold locked.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        tell(lambda: _confined(work, seconds, memory_bytes), into, longest=200)
    os.close(into)
    try:
        deadline = time.monotonic() + seconds
        said, ended = _read(out, deadline, result_bytes)
    finally:
        os.close(out)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if not ended:
        raise OutOfBounds(f"not read within {seconds:g} s and {result_bytes} bytes of result")
    if not said:
        raise OutOfBounds(f"the reader died ({os.waitstatus_to_exitcode(status)})")
    result = json.loads(said)
    if "fault" in result:
        raise OutOfBounds(result["fault"])
    return result["value"]


def _read(out: int, deadline: float, most: int) -> tuple[bytes, bool]:
    """What a pipe brought, and whether it ended in time and in bounds."""
    said = bytearray()
    poller = select.poll()
    poller.register(out, select.POLLIN | select.POLLHUP)
    while len(said) <= most and poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        part = os.read(out, _CHUNK)
        if not part:
            return bytes(said), True
        said += part
    return bytes(said), False


def _confined(work: Callable[[], Any], seconds: float, memory_bytes: int) -> Any:
    """Silent: what a library prints or warns about somebody's file is nobody's business."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()
    warnings.simplefilter("ignore")
    used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
    _limit(resource.RLIMIT_CPU, used + int(seconds) + 1)
    _limit(resource.RLIMIT_AS, _address_space() + memory_bytes)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    return work()


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _address_space() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc: the bound is then that of the whole child
        return 0
