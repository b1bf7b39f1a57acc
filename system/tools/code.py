"""Python code of the model, run in its own process and process group inside the world folder."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from system.tools.confine import shield
from system.tools.registration import tool
from system.tools.results import one_line

TIME_LIMIT_S = 10.0
OUTPUT_LIMIT = 4096
"""Bytes of output that are kept."""
CODE_LIMIT = 100_000
"""Bytes of code; the system takes about 128 KB in one argument."""
_KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")


def run_code(root: Path, code: str) -> str:
    """Run Python code in the folder of the files and give what it prints."""
    return run_for(root, code, seconds=TIME_LIMIT_S, output_limit=OUTPUT_LIMIT)


def run_for(root: Path, code: str, *, seconds: float, output_limit: int) -> str:
    """Run Python code for some seconds and give some bytes of what it prints.

    Raises:
        ValueError: The code fails, or is out of time; the message is the last line of what it says.
    """
    if len(code.encode()) > CODE_LIMIT:
        raise ValueError(f"code must be at most {CODE_LIMIT} bytes, got {len(code.encode())}")
    if "\0" in code:
        raise ValueError("code must not contain null bytes")
    run = _run(root, code, seconds, output_limit)
    if run.status is None:
        raise ValueError(f"code must end within {seconds:g} s")
    if run.status != 0:
        raise ValueError(_last_line(run.errors) or _ending(run.status))
    text = run.output.decode("utf-8", errors="replace").rstrip()
    if run.dropped:
        return f"{text}\n[cut: {output_limit} of {output_limit + run.dropped} bytes shown; print less]"
    return text or "no output"


class Run(NamedTuple):
    """How a run ended: `Run(0, b"4898\\n", b"", 0)`; status None means out of time, negative a signal.

    output is the head of what was printed, errors the tail of the error output, dropped counts output bytes.
    """

    status: int | None
    output: bytes
    errors: bytes
    dropped: int


def _run(root: Path, code: str, seconds: float, output_limit: int) -> Run:
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=shield(),
        env=_environment(root),
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        return _drain(process, process.stdout.fileno(), process.stderr.fileno(), seconds, output_limit)
    finally:
        # The process is not yet reaped, so its group id is still its own; what it left behind dies here.
        _kill_group(process.pid)
        process.wait()
        process.stdout.close()
        process.stderr.close()


def _environment(root: Path) -> dict[str, str]:
    """One thread for each library; what libraries remember lies outside the world, where it is no change of it."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    caches = dict.fromkeys(("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR"), tempfile.gettempdir())
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return kept | caches | threads | {"HOME": str(root)}


def _drain(process: subprocess.Popen[bytes], out: int, err: int, seconds: float, output_limit: int) -> Run:
    """Read both pipes until the process ends, then what still lies in them: a child may hold them open."""
    output, errors, dropped = b"", b"", 0
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, open(os.pidfd_open(process.pid), "rb") as end:
        for descriptor in (out, err, end.fileno()):
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            running = end.fileno() in selector.get_map()
            ready = selector.select(max(0.0, deadline - time.monotonic()) if running else 0)
            if time.monotonic() > deadline:
                return Run(None, output, errors, dropped)
            if not ready and not running:
                break
            for key, _ in ready:
                data = b"" if key.fd == end.fileno() else os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fd)
                elif key.fd == out:
                    dropped += max(0, len(output) + len(data) - output_limit)
                    output = (output + data)[:output_limit]
                else:
                    errors = (errors + data)[-OUTPUT_LIMIT:]
    return Run(_status(process), output, errors, dropped)


def _status(process: subprocess.Popen[bytes]) -> int:
    info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert info is not None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # no one is left in it
        pass


def _last_line(errors: bytes) -> str:
    lines = [line for line in errors.decode("utf-8", errors="replace").splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else ""


def _ending(status: int) -> str:
    return f"code was killed by signal {-status}" if status < 0 else f"code ended with status {status}"


TOOLS = (tool(run_code, limit_s=None),)
