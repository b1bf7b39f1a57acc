"""The forked process that serves the tools: what it inherits, what it may use, how it ends."""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from . import Limits, Serve, kernel

INSIDE = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""Environment of the tools."""


def become_server(
    fd: int, log: int, root: Path, serve: Serve, limits: Limits, enter: Callable[[], None], environment: dict[str, str]
) -> NoReturn:
    """Turn a fresh fork into the tool server; never returns.

    Args:
        fd: its end of the stream; every other descriptor but `log` is closed.
        log: where stdout and stderr go.
        enter: joins the sandbox; called before descriptors and limits are set.
        environment: replaces the inherited one.
    """
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setsid()
        enter()
        os.chdir(root)
        fd = _keep_only(fd, log)
        _limit(limits)
        kernel.forget_environment(environment)
        kernel.hide_memory()
        serve(fd, root)
        status = 0
    except BaseException:  # noqa: BLE001 - the last frame of a forked process: the log is the only way out
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _keep_only(fd: int, log: int) -> int:
    """Standard descriptors to nothing and the log, the stream to 3, everything else closed; the stream's number."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    fd, log = (os.dup(d) if d < 4 else d for d in (fd, log))
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(fd, 3, inheritable=False)
    os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return 3


def _limit(limits: Limits) -> None:
    wanted = {
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 256,
    }
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def last_line(log: Path) -> str:
    """The last line that the server wrote, or ""."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""
