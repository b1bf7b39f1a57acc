"""The forked process that serves the tools: what it inherits, what it may use, how it ends."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from . import Limits, SandboxError, Serve, kernel

INSIDE = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Environment of the tools."""

DYING_S = 0.2
"""How long a server whose stream has ended may take to be seen dead."""

_UP = b"\n"
_STREAM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a server runs. Example: `Place(root=Path("/world"), environment=INSIDE, enter=join, log=log)`."""

    root: Path
    "The world, as seen inside."
    environment: dict[str, str]
    "Replaces the inherited one."
    enter: Callable[[], None]
    "Joins the sandbox; called first, while the inherited descriptors are still open."
    log: Path
    "Where stdout and stderr go, as seen outside."


class Connectable:
    """What has a stream to a tool server, for one taker."""

    _stream: socket.socket | None

    def connect(self) -> socket.socket:
        """The stream to the tool server; can be taken once."""
        if self._stream is None:
            raise SandboxError("connect", "the stream was taken before")
        stream, self._stream = self._stream, None
        return stream


def become_server(serve: Serve, stream: int, place: Place, limits: Limits) -> NoReturn:
    """Turn a fresh fork into the tool server on its end of the stream; never returns.

    Every other descriptor is closed: a host folder behind one would be a way out.
    """
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setsid()
        log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        kernel.die_first()  # while /proc can be written
        place.enter()
        os.chdir(place.root)
        _keep_only(stream)
        _limit(limits)
        kernel.forget_environment(place.environment)
        tempfile.tempdir = None  # what an ancestor found is not where temporary files belong here
        kernel.hide_memory()
        os.write(_STREAM, _UP)
        serve(_STREAM, place.root)
        status = 0
    except BaseException:  # noqa: BLE001 - the last frame of a forked process: the log is the only way out
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def is_up(stream: socket.socket, deadline: float) -> bool:
    """Whether the server at the other end has entered its place before the deadline (time.monotonic)."""
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        return False
    return stream.recv(1) == _UP


def _keep_only(stream: int) -> None:
    """Input from nothing, the stream as descriptor 3, everything above closed."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if stream != _STREAM:
        os.dup2(stream, _STREAM, inheritable=False)
    os.closerange(_STREAM + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _limit(limits: Limits) -> None:
    wanted = {
        resource.RLIMIT_AS: _address_space() + limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 256,
    }
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _address_space() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def last_line(log: Path) -> str:
    """The last line of a log, or ""."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""
