"""The caller's side of the embedded engine's wire. No torch."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from system.engine.request import Completion, EngineError, EngineSilent, GenerateRequest

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

    def score(self, token_ids: Sequence[int]) -> tuple[list[float], int]:
        """Log-probability of every token but the first, at temperature 1, and the version of the weights: vLLM only."""
        reply = self._call({"op": "score", "token_ids": list(token_ids)})
        return reply["logprob"], reply["policy_version"]

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
                    raise EngineSilent(
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
