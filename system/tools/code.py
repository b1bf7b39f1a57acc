"""Python code of the model, run in its own process and process group inside the world folder."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from mcp.server import MCPServer

from system.tools.registration import add_tool
from system.tools.results import one_line

TIME_LIMIT_S = 10.0
OUTPUT_LIMIT = 4096
CODE_LIMIT = 100_000
_KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")


def run_code(root: Path, code: str) -> str:
    """Run Python code in the folder of the files and give what it prints."""
    if len(code.encode()) > CODE_LIMIT:
        raise ValueError(f"code must be at most {CODE_LIMIT} bytes, got {len(code.encode())}")
    if "\0" in code:
        raise ValueError("code must not contain null bytes")
    status, output, errors, dropped = _run(root, code)
    if status is None:
        raise ValueError(f"code must end within {TIME_LIMIT_S:g} s")
    if status != 0:
        raise ValueError(_last_line(errors) or _ending(status))
    text = output.decode("utf-8", errors="replace").rstrip()
    if dropped:
        return f"{text}\n[cut: {OUTPUT_LIMIT} of {OUTPUT_LIMIT + dropped} bytes shown; print less]"
    return text or "no output"


def _run(root: Path, code: str) -> tuple[int | None, bytes, bytes, int]:
    """Run the code; returns exit status (None: out of time), output head, error tail, bytes dropped."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={name: os.environ[name] for name in _KEPT if name in os.environ} | {"HOME": str(root)},
    )
    assert process.stdout is not None and process.stderr is not None
    ended = os.pidfd_open(process.pid)
    try:
        return _drain(process, ended)
    finally:
        # The process is not yet reaped, so its group id is still its own; what it left behind dies here.
        _kill_group(process.pid)
        process.wait()
        os.close(ended)
        process.stdout.close()
        process.stderr.close()


def _drain(process: subprocess.Popen[bytes], ended: int) -> tuple[int | None, bytes, bytes, int]:
    assert process.stdout is not None and process.stderr is not None
    out, err = process.stdout.fileno(), process.stderr.fileno()
    output, errors, dropped = b"", b"", 0
    deadline = time.monotonic() + TIME_LIMIT_S
    with selectors.DefaultSelector() as selector:
        for descriptor in (out, err, ended):
            selector.register(descriptor, selectors.EVENT_READ)
        while True:
            # After the end read only what lies in the pipes: a child left behind may hold them open.
            over = ended not in selector.get_map()
            ready = selector.select(0 if over else max(0.0, deadline - time.monotonic()))
            if not ready and not over:
                return None, output, errors, dropped
            if not ready:
                break
            for key, _ in ready:
                descriptor = key.fd
                data = b"" if descriptor == ended else os.read(descriptor, 65536)
                if not data:
                    selector.unregister(descriptor)
                elif descriptor == out:
                    dropped += max(0, len(output) + len(data) - OUTPUT_LIMIT)
                    output = (output + data)[:OUTPUT_LIMIT]
                else:
                    errors = (errors + data)[-OUTPUT_LIMIT:]
            if not selector.get_map() or time.monotonic() > deadline:
                break
    if time.monotonic() > deadline:
        return None, output, errors, dropped
    return _status(process), output, errors, dropped


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


def register(server: MCPServer, root: Path) -> None:
    """Offer the code tool."""
    add_tool(server, root, run_code)
