"""One judge for many trials: its process holds the keys and what is known of them, trials hold a socket's path.

So a key that one trial found limited cools for all, and no key is ever in a process that an agent's tools are
forked from.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import SocketStream
from anyio.from_thread import start_blocking_portal
from anyio.streams.buffered import BufferedByteReceiveStream

from .fault import VerifyError
from .judge import Answer, JudgeClient, Question

_HEADER = struct.Struct("!I")
_LARGEST = 64 << 20
_GRACE_S = 15.0


class JudgeService:
    """A thread that answers trials on a unix socket by a `JudgeClient`.

    Example: `with JudgeService(client, folder / "judge.socket", side_by_side=16): ...`.
    """

    def __init__(self, client: JudgeClient, path: Path, *, side_by_side: int) -> None:
        if not side_by_side > 0:
            raise ValueError(f"side_by_side must be positive, got {side_by_side}")
        self.client, self.path = client, path
        self._side_by_side = side_by_side
        self._portal = start_blocking_portal()

    def __enter__(self) -> JudgeService:
        portal = self._portal.__enter__()
        self._serving, _ = portal.start_task(self._serve)
        return self

    def __exit__(self, *exception: object) -> None:
        self._serving.cancel()
        self._portal.__exit__(None, None, None)
        self.path.unlink(missing_ok=True)

    async def _serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        limiter = anyio.Semaphore(self._side_by_side)
        listener = await anyio.create_unix_listener(self.path, mode=0o600)

        async def handle(stream: SocketStream) -> None:
            async with stream:
                try:
                    received = BufferedByteReceiveStream(stream)
                    while True:
                        await self._answer(received, stream, limiter)
                except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, OSError):
                    return  # the trial went away

        async with listener:
            task_status.started()
            await listener.serve(handle)

    async def _answer(
        self, received: BufferedByteReceiveStream, stream: SocketStream, limiter: anyio.Semaphore
    ) -> None:
        (length,) = _HEADER.unpack(await received.receive_exactly(_HEADER.size))
        if length > _LARGEST:
            raise OSError(f"a message has {_LARGEST} bytes at most, got {length}")
        question = json.loads(await received.receive_exactly(length))
        try:
            async with limiter:
                reply: dict[str, Any] = asdict(await self.client.answer(Question(**question)))
        except VerifyError as error:
            reply = {"cause": error.cause, "detail": error.detail}
        await stream.send(_frame(reply))


class RemoteJudge:
    """The judge behind a service's socket; connects at each question, so it may be made before a fork.

    Example: `verify(folder, frozen, answer, judge=RemoteJudge(spec["judge_socket"], timeout_s=180.0))`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, timeout_s: float, request_characters: int = 120_000
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.path, self.timeout_s, self.request_characters = str(path), timeout_s, request_characters

    def ask(self, question: Question) -> Answer:
        """Blocks until there is an answer. Raises VerifyError("judge_...")."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
                stream.settimeout(self.timeout_s + _GRACE_S)
                stream.connect(self.path)
                stream.sendall(_frame(asdict(question)))
                (length,) = _HEADER.unpack(_exactly(stream, _HEADER.size))
                reply = json.loads(_exactly(stream, length))
        except TimeoutError:
            raise VerifyError("judge_timeout", f"no answer within {self.timeout_s + _GRACE_S:g} s") from None
        except OSError as error:
            raise VerifyError("judge_gone", f"{self.path}: {error}") from error
        if "cause" in reply:
            raise VerifyError(reply["cause"], reply["detail"])
        return Answer(**reply)


def _frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(len(body)) + body


def _exactly(stream: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = stream.recv(min(count, 1 << 16))
        if not part:
            raise ConnectionError("the judge closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
