"""Engines that run: the embedded one's process, and one that somebody else is in charge of. No torch."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from system.engine.client import EngineClient
from system.engine.request import EngineError

ROOT = Path(__file__).resolve().parent.parent.parent


class OtherEngine:
    """An engine that somebody else started, and ends. Example: `OtherEngine("/tmp/engine.sock")`.

    Raises:
        EngineError: nobody listens there.
    """

    def __init__(self, socket_path: str | os.PathLike[str]) -> None:
        self.address = str(socket_path)
        if fault := self.fault(0.0):
            raise EngineError(fault)

    def fault(self, timeout_s: float) -> str:
        """Why nobody answers there, or ""."""
        try:
            self.stats()
        except OSError as error:
            return f"engine must listen at {self.address}, got {type(error).__name__}: {error}"
        return ""

    def restart(self) -> None:
        """It is not ours to start."""
        raise EngineError(f"engine at {self.address} must be started by its owner, got none that listens")

    def update_weights(self, version: int, weights: str, *, reset_kv: bool) -> None:
        """Swap the weights between two decode steps."""
        client = EngineClient(self.address)
        try:
            client.update_weights(version, weights, reset_kv=reset_kv)
        finally:
            client.close()

    def stats(self) -> dict[str, Any]:
        """Counters of the engine."""
        client = EngineClient(self.address)
        try:
            return client.stats()
        finally:
            client.close()

    def close(self) -> None:
        """It is not ours to end."""


class EngineHandle:
    """An engine process; dies with the thread that started it.

    Args:
        values: what the process is told, as `system.engine.embedded.main` takes it, but for the parent.
        timeout_s: bound on the start.
        update_s: bound on an update.
        silence_s: bound on the wait for its counters.
        module: of the process; it says on its first line that it is ready, and may say on its last why it ends.

    Raises:
        EngineError: it did not start; the message is its last line.
    """

    def __init__(
        self,
        values: dict[str, Any],
        *,
        timeout_s: float,
        update_s: float,
        silence_s: float,
        module: str = "system.engine.embedded",
    ) -> None:
        self._values, self._timeout_s, self._module = values, timeout_s, module
        self._update_s, self._silence_s = update_s, silence_s
        self.address = self.socket_path = str(values["socket_path"])
        self._start()

    def client(self) -> EngineClient:
        """A client of this engine."""
        return EngineClient(self.socket_path)

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def fault(self, timeout_s: float) -> str:
        """What it said last, or with what code the process ended, if it does within so long."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return ""
        return self._last_words() or f"engine must be running, got exit code {code}"

    def restart(self) -> None:
        """Kill the process and start another at the same address."""
        self.process.kill()
        self.close()
        self._start()

    def update_weights(self, version: int, weights: str, *, reset_kv: bool) -> None:
        """Swap the weights between two decode steps."""
        self._control.update_weights(version, weights, reset_kv=reset_kv)

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        return self._counters.stats()

    def close(self) -> None:
        """Stop the process and wait for it; running requests get an abort reply."""
        self._end()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        for client in (self._control, self._counters):
            client.close()
        Path(self.socket_path).unlink(missing_ok=True)

    def _end(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _start(self) -> None:
        # Other clients than those of an engine that hangs: threads may still wait in theirs.
        self._control = EngineClient(self.socket_path, patience_s=self._update_s)
        self._counters = EngineClient(self.socket_path, patience_s=self._silence_s)
        threads = str(self._values["threads"])
        self._said: str | None = None
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                self._module,
                json.dumps({**self._values, "parent": os.getpid()}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            process_group=0,  # Ctrl-C is for the driver, which ends this process
            # torch makes its compiler's cache folder, used or not: beside the socket it goes with it
            env={
                **os.environ,
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "TORCHINDUCTOR_CACHE_DIR": str(Path(self.socket_path).parent),
            },
        )
        said = self._first_line(time.monotonic() + self._timeout_s)
        self.description: dict[str, Any] = json.loads(said) if said.endswith(b"\n") else {}
        if not self.description.get("ready"):
            late = self.alive() and not self.description
            if late:
                self.process.kill()
            self.close()
            ended = f"ended with exit code {self.process.returncode}"
            fault = f"did not start within {self._timeout_s} s" if late else ended
            raise EngineError(self.description.get("error") or f"engine {fault}")

    def _last_words(self) -> str:
        """Why a process that has ended says it did, or ""; a second call has the answer of the first."""
        if self._said is None:
            self._said, out = "", self.process.stdout
            # Not to its end: a process of its own may outlive it and hold the pipe.
            if out is not None and not out.closed and select.select([out], [], [], 0)[0]:
                lines = os.read(out.fileno(), 1 << 16).splitlines()
                self._said = str(json.loads(lines[-1]).get("error", "")) if lines else ""
        return self._said

    def _first_line(self, deadline: float) -> bytes:
        """What the process says of itself, as far as it got by the deadline or its end."""
        assert self.process.stdout is not None
        said = b""
        while not said.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
            if select.select([self.process.stdout], [], [], left)[0]:
                part = os.read(self.process.stdout.fileno(), 1 << 16)
                if not part:
                    self.fault(5.0)  # its stream is at its end: so is it
                    break
                said += part
        return said


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
    update_s: float = 120.0,
    silence_s: float = 60.0,
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
        update_s: bound on an update of the weights.
        silence_s: bound on the wait for its counters.

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
    }
    return EngineHandle(values, timeout_s=timeout_s, update_s=update_s, silence_s=silence_s)
