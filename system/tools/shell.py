"""A shell command of the model in a process group of its own: nothing to read from, a clock, an end to its children."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from system.tools.confine import shield

OUTPUT_LIMIT = 30_000
"""Characters of output that are shown."""
KEPT_BYTES = 8_000_000
"""Bytes of output that are kept in all."""
WARNING_S = 0.2
"""Between the signal that asks a late command to end and the one that ends it."""
_KEPT = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "HOME", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Run(NamedTuple):
    """How a command ended: `Run(0, b"4898\\n", 0)`; status None means out of time, negative a signal.

    output is the head of what was printed, errors among it; dropped counts the bytes after it.
    """

    status: int | None
    output: bytes
    dropped: int


def run(command: str, folder: Path, *, limit_s: float) -> Run:
    """Run a command by bash; what it leaves running in its process group is killed with it.

    Args:
        command: for `bash -c`; `python` and `python3` are the interpreter that has the office libraries.
        folder: where it runs.
        limit_s: seconds after which it is asked to end, and killed.
    """
    if "\0" in command:
        raise ValueError("command must not contain null bytes")
    try:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=shield(),
            env=_environment(),
        )
    except OSError as error:
        raise ValueError(f"command could not be started: {error.strerror}") from None
    assert process.stdout is not None
    try:
        return _drain(process, process.stdout.fileno(), time.monotonic() + limit_s)
    finally:
        # Not yet reaped, so its group id is still its own.
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    folders = [os.path.dirname(sys.executable), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    return kept | {"PATH": os.pathsep.join(dict.fromkeys(folders)), "TERM": "dumb", "PYTHONUNBUFFERED": "1"}


def _drain(process: subprocess.Popen[bytes], out: int, deadline: float) -> Run:
    """Read until the shell ends, then what still lies in the pipe: a child may hold that open."""
    kept, dropped, asked = bytearray(), 0, False
    with selectors.DefaultSelector() as selector, open(os.pidfd_open(process.pid), "rb") as end:
        for descriptor in (out, end.fileno()):
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            running = end.fileno() in selector.get_map()
            ready = selector.select(max(0.0, deadline - time.monotonic()) if running else 0)
            if time.monotonic() > deadline:
                if asked or not running:
                    break
                _signal_group(process.pid, signal.SIGTERM)
                asked, deadline = True, time.monotonic() + WARNING_S
                continue
            if not ready and not running:
                break
            for key, _ in ready:
                data = b"" if key.fd == end.fileno() else os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fd)
                if key.fd == end.fileno():  # a child that goes on writing does not keep the caller
                    deadline = min(deadline, time.monotonic() + WARNING_S)
                room = max(0, KEPT_BYTES - len(kept))
                kept += data[:room]
                dropped += max(0, len(data) - room)
    return Run(None if asked else _status(process), bytes(kept), dropped)


def _status(process: subprocess.Popen[bytes]) -> int:
    info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert info is not None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # no one is left in it
        pass
