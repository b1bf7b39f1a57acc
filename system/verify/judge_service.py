"""One judge for many trials: its process holds the keys and what is known of them, trials hold a socket's path.

So a key that one trial found limited cools for all, and no key is ever in a process that an agent's tools are
forked from.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from contextlib import suppress
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
                        (length,) = _HEADER.unpack(await received.receive_exactly(_HEADER.size))
                        message = json.loads(await received.receive_exactly(min(length, _LARGEST)))
                        reply = await self._reply_while_there(stream, message, limiter)
                        if reply is None:
                            return
                        await stream.send(_frame(reply))
                except (
                    anyio.EndOfStream,
                    anyio.IncompleteRead,
                    anyio.BrokenResourceError,
                    OSError,
                    ValueError,
                ):
                    return  # the trial went away, or spoke nonsense

        async with listener:
            task_status.started()
            await listener.serve(handle)

    async def _reply_while_there(
        self, stream: SocketStream, message: dict[str, Any], limiter: anyio.Semaphore
    ) -> dict[str, Any] | None:
        """The reply; None as soon as the trial that asked is gone, so that nobody judges or waits for the dead."""
        reply = None
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError, OSError):
                    await stream.receive(1)  # a trial says nothing before it has its reply
                group.cancel_scope.cancel()

            group.start_soon(watch)
            async with limiter:
                reply = await self._reply(message)
            group.cancel_scope.cancel()
        return reply

    async def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        if not message:
            settings = self.client.settings
            return {"timeout_s": settings.timeout_s, "request_characters": settings.request_characters}
        try:
            return asdict(await self.client.answer(Question(**message)))
        except VerifyError as error:
            return {"cause": error.cause, "detail": error.detail}
        except Exception as error:  # noqa: BLE001 - one question must not end the judge of all; the trial records it
            return {"cause": "judge_fatal", "detail": f"{type(error).__name__} in the judge's process"}


class RemoteJudge:
    """The judge behind a service's socket; connects at each question, so it may be made before a fork.

    Example: `verify(folder, frozen, answer, judge=RemoteJudge(spec["judge_socket"]))`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        self._settings: dict[str, Any] = {}

    @property
    def request_characters(self) -> int:
        """Size of a question, as the service has it."""
        return int(self._known()["request_characters"])

    def ask(self, question: Question) -> Answer:
        """Blocks until there is an answer. Raises VerifyError("judge_...")."""
        reply = self._exchange(asdict(question), self._known()["timeout_s"] + _GRACE_S)
        if "cause" in reply:
            raise VerifyError(reply["cause"], reply["detail"])
        return Answer(**reply)

    def _known(self) -> dict[str, Any]:
        self._settings = self._settings or self._exchange({}, _GRACE_S)
        return self._settings

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
                stream.settimeout(timeout_s)
                stream.connect(self.path)
                stream.sendall(_frame(message))
                (length,) = _HEADER.unpack(_exactly(stream, _HEADER.size, deadline))
                return json.loads(_exactly(stream, length, deadline))
        except TimeoutError:
            raise VerifyError("judge_timeout", f"no answer within {timeout_s:g} s") from None
        except (OSError, ValueError) as error:
            raise VerifyError("judge_gone", f"{self.path}: {error}") from error


def _frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(len(body)) + body


def _exactly(stream: socket.socket, count: int, deadline: float) -> bytes:
    parts = []
    while count:
        stream.settimeout(max(0.001, deadline - time.monotonic()))
        part = stream.recv(min(count, 1 << 16))
        if not part:
            raise ConnectionError("the judge closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
