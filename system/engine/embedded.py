"""The embedded engine's process: a unix socket in front of a batch.

`python -m system.engine.embedded '{"policy_dir": ...}'`; see `start_embedded_engine` for the values.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from system.engine.asked import parse_request
from system.engine.batch import Batch, Run
from system.engine.cached import CachedModel
from system.engine.client import HEADER, LARGEST_MESSAGE, frame
from system.engine.request import Completion
from system.parent import die_with_parent
from system.policy import load_policy
from system.record.metrics import drop_torn_tail


class Connection:
    """One client: bytes not yet a message, bytes not yet sent, sessions to forget when it goes."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.received = bytearray()
        self.unsent = bytearray()
        self.sessions: set[str] = set()
        self.open = True

    def messages(self) -> list[bytes]:
        """Whole messages received so far. Raises ValueError on a length beyond the bound."""
        whole = []
        while len(self.received) >= HEADER.size:
            (length,) = HEADER.unpack_from(self.received)
            if length > LARGEST_MESSAGE:
                raise ValueError(f"message must be at most {LARGEST_MESSAGE} bytes, got {length}")
            if len(self.received) < HEADER.size + length:
                break
            whole.append(bytes(self.received[HEADER.size : HEADER.size + length]))
            del self.received[: HEADER.size + length]
        return whole


class Server:
    """Moves messages between clients and the batch; one thread, no waiting but in `select`."""

    def __init__(self, batch: Batch, listener: socket.socket, log: FileIO) -> None:
        self.batch, self.listener, self.log = batch, listener, log
        self.busy_s = 0.0
        self.stopping = False
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def watch_parent(self, descriptor: int) -> None:
        """Stop when the other end of this pipe is closed."""
        self.selector.register(descriptor, selectors.EVENT_READ, self._parent)

    def serve(self) -> None:
        """Run until the parent goes away; then abort what runs."""
        while not self.stopping:
            work = bool(self.batch.running or self.batch.waiting)
            for key, events in self.selector.select(0 if work else None):
                key.data(key.fileobj, events) if callable(key.data) else self._talk(key.data, events)
            if self.batch.running or self.batch.waiting:
                start = time.perf_counter()
                finished = self.batch.step()
                self.busy_s += time.perf_counter() - start
                for run, completion in finished:
                    self._reply(run, completion)
        for session_id in [run.request.session_id for run in self.batch.runs()]:
            for run, completion in self.batch.release(session_id):
                self._reply(run, completion)

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        return {
            **self.batch.counters,
            "running": self.batch.running,
            "waiting": len(self.batch.waiting),
            "sessions": sum(slot.session_id is not None for slot in self.batch.slots),
            "policy_version": self.batch.version,
            "busy_s": self.busy_s,
            "cpu_s": time.process_time(),
        }

    def _parent(self, descriptor: Any, events: int) -> None:
        if not os.read(descriptor if isinstance(descriptor, int) else descriptor.fileno(), 1 << 16):
            self.stopping = True

    def _accept(self, listener: Any, events: int) -> None:
        stream, _ = listener.accept()
        stream.setblocking(False)
        self.selector.register(stream, selectors.EVENT_READ, Connection(stream))

    def _talk(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(connection, b"")
        if not events & selectors.EVENT_READ or not connection.open:
            return
        try:
            part = connection.stream.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._drop(connection)
            return
        connection.received += part
        try:
            messages = connection.messages()
        except ValueError as error:
            self._send(connection, frame({"error": str(error)}))
            self._drop(connection)
            return
        for message in messages:
            try:
                reply = self._answer(connection, message)
            except Exception as error:  # noqa: BLE001 (told to the client in one line; the engine must live on)
                reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
            if reply is not None:
                self._send(connection, frame(reply))

    def _answer(self, connection: Connection, body: bytes) -> dict[str, Any] | None:
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ValueError(f"message must be an object, got {type(message).__name__}")
        match message.get("op"):
            case "generate":
                request = parse_request(message)
                self.batch.submit(request, connection)
                connection.sessions.add(request.session_id)
                return None
            case "release":
                for run, completion in self.batch.release(message["session_id"]):
                    self._reply(run, completion)
                return {}
            case "update_weights":
                version = message["version"]
                if not isinstance(version, int) or isinstance(version, bool) or version < 0:
                    raise ValueError(f"version must be a whole number from 0, got {version!r}")
                start = time.perf_counter()
                self.batch.update(
                    version, load_file(message["path"]), reset_kv=message.get("reset_kv", False)
                )
                self.busy_s += time.perf_counter() - start
                return {"policy_version": version}
            case "stats":
                return {"stats": self.stats()}
            case other:
                raise ValueError(f"op must be generate, release, update_weights or stats, got {other!r}")

    def _reply(self, run: Run, completion: Completion) -> None:
        request, record = run.request, asdict(completion)
        line = {"session_id": request.session_id, "prompt_ids": request.token_ids, "seed": request.seed}
        told = json.dumps({**line, "temperature": request.temperature, **record}, separators=(",", ":"))
        self.log.write(f"{told}\n".encode())
        if run.owner.open:
            self._send(run.owner, frame(record))

    def _send(self, connection: Connection, data: bytes) -> None:
        if not connection.open:
            return
        connection.unsent += data
        try:
            while connection.unsent:
                del connection.unsent[: connection.stream.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        writing = selectors.EVENT_WRITE if connection.unsent else 0
        self.selector.modify(connection.stream, selectors.EVENT_READ | writing, connection)

    def _drop(self, connection: Connection) -> None:
        if not connection.open:
            return
        connection.open = False
        self.selector.unregister(connection.stream)
        connection.stream.close()
        for session_id in connection.sessions:
            for run, completion in self.batch.release(session_id):
                self._reply(run, completion)


def main(
    *,
    policy_dir: str,
    socket_path: str,
    log_path: str,
    max_context: int,
    max_sessions: int,
    threads: int,
    device: str,
    version: int,
    parent: int,
) -> None:
    """Load, listen, say so on stdout in one JSON line, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    for name, value in {
        "max_sessions": max_sessions,
        "threads": threads,
        "max_context": max_context - 1,
    }.items():
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    config, state = load_policy(policy_dir)
    longest = config.max_position_embeddings
    if max_context > longest:
        raise ValueError(f"max_context must be at most max_position_embeddings={longest}, got {max_context}")
    model = CachedModel(config, state, max_context=max_context, slots=max_sessions, device=device)
    model.prefill([[0, 0]], [0], [0])  # the first call of each kernel is slow
    model.decode([0], [2])
    Path(socket_path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_path)
    listener.listen(1024)
    drop_torn_tail(Path(log_path))  # of an engine that was killed
    with open(log_path, "ab", buffering=0) as log:
        server = Server(Batch(model, version=version), listener, log)
        server.watch_parent(sys.stdin.fileno())
        described = {"ready": True, "pid": os.getpid(), "token_count": config.token_count}
        print(json.dumps({**described, "max_context": max_context, "policy_version": version}), flush=True)
        server.serve()


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except Exception as error:
        print(json.dumps({"error": " ".join(f"{type(error).__name__}: {error}".split())}), flush=True)
        raise SystemExit(1) from error
