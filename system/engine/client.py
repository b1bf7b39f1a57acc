"""The caller's side of the embedded engine: a socket client and the start of its process. No torch."""

from __future__ import annotations

import json
import math
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from system.engine.request import Completion, EngineError, GenerateRequest

HEADER = struct.Struct("!I")
LARGEST_MESSAGE = 64 * 1024 * 1024


def frame(message: dict[str, Any]) -> bytes:
    """One message on the wire: four bytes of length, then JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


class EngineClient:
    """An Engine behind a unix socket.

    Connects at the first call and anew after a fork, so one object may be made before forking. Calls of
    several threads of a process wait for each other. The engine drops what a client that goes away had there.

    Args:
        socket_path: where the engine listens.
        deadline: on the clock of time.monotonic; `generate` raises TimeoutError then, and its request is dropped.
        patience_s: of the wait for any reply; an engine that needs longer is an EngineError.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        *,
        deadline: float = math.inf,
        patience_s: float = math.inf,
    ) -> None:
        self.socket_path = str(socket_path)
        self.deadline, self.patience_s = deadline, patience_s
        self._forget()

    def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn; blocks until it is finished, or until the deadline."""
        reply = self._call({"op": "generate", **asdict(request)}, deadline=self.deadline)
        if missing := [name for name in Completion.__slots__ if name not in reply]:
            raise EngineError(f"engine at {self.socket_path} must answer {', '.join(missing)}, got none")
        return Completion(**{name: reply[name] for name in Completion.__slots__})

    def release(self, session_id: str) -> None:
        """Forget a session's cache."""
        self._call({"op": "release", "session_id": session_id})

    def update_weights(
        self, version: int, weights_path: str | os.PathLike[str], *, reset_kv: bool = False
    ) -> None:
        """Swap the weights between two decode steps."""
        self._call(
            {"op": "update_weights", "version": version, "path": str(weights_path), "reset_kv": reset_kv}
        )

    def stats(self) -> dict[str, Any]:
        """Counters of the engine."""
        return self._call({"op": "stats"})["stats"]

    def close(self) -> None:
        """Close this process's connection."""
        if self._socket is not None and self._pid == os.getpid():
            self._socket.close()
        self._socket = None

    def _forget(self) -> None:
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def _call(self, message: dict[str, Any], *, deadline: float = math.inf) -> dict[str, Any]:
        if self._pid != os.getpid():
            inherited = self._socket
            self._forget()
            if inherited is not None:
                inherited.close()  # only this process's copy of the descriptor
        with self._lock:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.connect(self.socket_path)
            patient = time.monotonic() + self.patience_s
            try:
                reply = self._exchanged(message, min(deadline, patient))
            except TimeoutError as error:
                self.close()
                if patient < deadline:
                    raise EngineError(
                        f"engine at {self.socket_path} did not answer within {self.patience_s:g} s"
                    ) from error
                raise
            except BaseException:
                self.close()  # half a reply must not be read as the next one
                raise
        if "error" in reply:
            raise EngineError(reply["error"])
        return reply

    def _exchanged(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """The reply to a message."""
        assert self._socket is not None
        self._wait_until(deadline)
        self._socket.sendall(frame(message))
        (length,) = HEADER.unpack(self._exactly(HEADER.size, deadline))
        if length > LARGEST_MESSAGE:
            raise EngineError(
                f"engine at {self.socket_path} must answer {LARGEST_MESSAGE} bytes at most, got {length}"
            )
        body = self._exactly(length, deadline)
        try:
            reply = json.loads(body)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise EngineError(f"engine at {self.socket_path} must answer a JSON object, got {body[:40]!r}")
        return reply

    def _wait_until(self, deadline: float) -> None:
        """The next operation on the socket raises TimeoutError at the deadline."""
        assert self._socket is not None
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"engine at {self.socket_path} was not done by the deadline")
        self._socket.settimeout(left if left < math.inf else None)

    def _exactly(self, count: int, deadline: float) -> bytes:
        assert self._socket is not None
        parts = []
        while count:
            self._wait_until(deadline)
            part = self._socket.recv(min(count, 1 << 16))
            if not part:
                raise ConnectionError(f"engine at {self.socket_path} closed the connection")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


class RunningEngine(Protocol):
    """An engine that listens, and whoever is in charge of it."""

    @property
    def socket_path(self) -> str: ...

    def client(self) -> EngineClient:
        """A client of this engine."""
        ...

    def fault(self, timeout_s: float) -> str:
        """Why it does not run any more, in one line; "" while it does, after waiting so long to see it end."""
        ...

    def close(self) -> None:
        """End it, where it is ours to end."""
        ...


class OtherEngine:
    """An engine that somebody else started, and ends. Example: `OtherEngine("/tmp/engine.sock")`.

    Raises:
        EngineError: nobody listens there.
    """

    def __init__(self, socket_path: str | os.PathLike[str]) -> None:
        self.socket_path = str(socket_path)
        if fault := self.fault(0.0):
            raise EngineError(fault)

    def client(self) -> EngineClient:
        """A client of this engine."""
        return EngineClient(self.socket_path)

    def fault(self, timeout_s: float) -> str:
        """Why nobody answers there, or ""."""
        client = self.client()
        try:
            client.stats()
        except OSError as error:
            return f"engine must listen at {self.socket_path}, got {type(error).__name__}: {error}"
        finally:
            client.close()
        return ""

    def close(self) -> None:
        """It is not ours to end."""


class EngineHandle:
    """A running engine process; dies with the process that started it."""

    def __init__(
        self, process: subprocess.Popen[bytes], socket_path: str, description: dict[str, Any]
    ) -> None:
        self.process, self.socket_path, self.description = process, socket_path, description

    def client(self) -> EngineClient:
        """A client of this engine."""
        return EngineClient(self.socket_path)

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def fault(self, timeout_s: float) -> str:
        """With what code the process ended, if it does within so long."""
        try:
            return f"engine must be running, got exit code {self.process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            return ""

    def close(self) -> None:
        """Stop the process and wait for it; running requests get an abort reply."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        Path(self.socket_path).unlink(missing_ok=True)


def start_embedded_engine(
    policy_dir: str | os.PathLike[str],
    socket_path: str | os.PathLike[str],
    log_path: str | os.PathLike[str],
    max_context: int,
    max_sessions: int,
    threads: int,
    device: str,
    *,
    version: int = 0,
    timeout_s: float = 120.0,
) -> EngineHandle:
    """Start the engine in a process of its own and wait until it listens.

    Args:
        policy_dir: Hugging Face folder to load.
        socket_path: unix socket to listen on (at most about 100 characters).
        log_path: JSONL file of every request and its reply, written by the engine.
        max_context: window in tokens, prompt and completion together.
        max_sessions: sessions with a cache at the same time; also the largest decode batch.
        threads: torch threads; one when a trainer runs beside it.
        device: "cpu" or "cuda".
        version: policy version of the weights in policy_dir.
        timeout_s: bound on the start.

    Raises:
        EngineError: it did not start; the message is its last line.
    """
    values = {
        "policy_dir": str(policy_dir),
        "socket_path": str(socket_path),
        "log_path": str(log_path),
        "max_context": max_context,
        "max_sessions": max_sessions,
        "threads": threads,
        "device": device,
        "version": version,
        "parent": os.getpid(),
    }
    root = Path(__file__).resolve().parent.parent.parent
    threaded = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        [sys.executable, "-m", "system.engine.embedded", json.dumps(values)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
        process_group=0,  # Ctrl-C is for the driver, which ends this process
        # torch makes its compiler's cache folder, used or not: beside the socket it goes with it
        env={**os.environ, **threaded, "TORCHINDUCTOR_CACHE_DIR": str(Path(socket_path).parent)},
    )
    assert process.stdout is not None
    deadline, line = time.monotonic() + timeout_s, b""
    while not line.endswith(b"\n") and time.monotonic() < deadline:
        if select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                break
            line += part
    description = json.loads(line) if line.endswith(b"\n") else {}
    handle = EngineHandle(process, str(socket_path), description)
    if not description.get("ready"):
        late = time.monotonic() >= deadline
        if late:
            process.kill()
        handle.close()
        fault = (
            f"did not start within {timeout_s} s" if late else f"ended with exit code {process.returncode}"
        )
        raise EngineError(description.get("error") or f"engine {fault}")
    return handle
