"""Modal, and nothing else here imports its client: containers made, found, used and removed, each within a deadline."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from . import SandboxError

T = TypeVar("T")

FAULTS = {
    "limited": "Modal has no room or no quota left (RESOURCE_EXHAUSTED)",
    "busy": "Modal is not available (UNAVAILABLE)",
    "connection": "Modal cannot be reached",
    "key": "Modal refuses the token",
    "fatal": "Modal refuses this",
}
"""What a fault of `core.retry` means here."""

_TAIL = 4096
_EXIT_S = 10.0
_MOST_FED = 1 << 19


class Refused(Exception):
    """What Modal, or its client, did not do: a fault of `FAULTS`, and its own words."""

    def __init__(self, fault: str, said: str) -> None:
        super().__init__(f"{FAULTS[fault]}: {said}")
        self.fault, self.said = fault, said


class Late(Exception):
    """No answer before the deadline."""


@dataclass(slots=True, kw_only=True)
class Stream:
    """A program's input and output as one socket, and how it ended: `Stream(ours=a, theirs=b)`."""

    ours: socket.socket
    theirs: socket.socket
    end: str | None = None
    "Why the program is no longer there; set before the socket is closed."
    said: bytearray = field(default_factory=bytearray)
    "The last of what it said on its error output."


class Service:
    """The client, run by a thread of its own; every call from outside waits until a deadline at most.

    Args:
        app: Modal's name for a set of containers; made if it is missing.
        environment: of Modal, or "".
        config: Modal's configuration file, with the token; it is read when the client is first imported.
    """

    def __init__(self, *, app: str, environment: str, config: str) -> None:
        self._modal = load(config)
        self._app_name, self._environment = app, environment or None
        self._app: Any = None
        self._carried: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="modal", daemon=True).start()

    def close(self) -> None:
        """End what is carried, and the thread; containers stay as they are."""
        with suppress(Refused, Late):
            self.ask(self._drop(), time.monotonic() + 2.0)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _drop(self) -> None:
        if self._carried:
            for task in self._carried:
                task.cancel()
            await asyncio.wait(self._carried)

    def ask(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """The result of work on the client's thread. Raises Refused, or Late at the deadline (monotonic)."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            if isinstance(error, TimeoutError) and not future.done():
                future.cancel()
                raise Late from None
            future.cancel()
            if isinstance(error, Exception) and not isinstance(error, Refused | SandboxError):
                raise Refused(self._fault_of(error), _words(error)) from error
            raise

    def do(self, phase: str, what: str, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """`ask`, with the SandboxError of a phase."""
        begun = time.monotonic()
        try:
            return self.ask(work, deadline)
        except Late:
            raise SandboxError(phase, f"{what}: no end within {max(0.0, deadline - begun):.1f} s") from None
        except Refused as error:
            raise SandboxError(phase, f"{what}: {error}") from error

    def _fault_of(self, error: Exception) -> str:
        known = self._modal.exception
        if isinstance(error, known.ResourceExhaustedError):
            return "limited"
        if isinstance(error, known.AuthError | known.PermissionDeniedError):
            return "key"
        if isinstance(error, known.ServiceError | known.InternalError):
            return "busy"
        if isinstance(error, known.ConnectionError | known.TimeoutError | OSError):
            return "connection"
        return "fatal"

    async def _found_app(self) -> Any:
        if self._app is None:
            self._app = await self._modal.App.lookup.aio(
                self._app_name, environment_name=self._environment, create_if_missing=True
            )
        return self._app

    def image(self, reference: str, secret: str) -> Any:
        """An image of a registry; the secret, if one is named, opens AWS ECR or another private registry."""
        image, opened = self._modal.Image, self._modal.Secret.from_name(secret) if secret else None
        if ".dkr.ecr." in reference:
            return image.from_aws_ecr(reference, secret=opened)
        return image.from_registry(reference, secret=opened)

    async def build(self, image: Any) -> None:
        """Fetch the image now, so that no sandbox waits for it."""
        await image.build.aio(await self._found_app())

    async def create(self, command: tuple[str, ...], settings: Mapping[str, Any]) -> Any:
        """A container that runs a command; if one of its name runs already, an earlier call made it."""
        app = await self._found_app()
        try:
            return await self._modal.Sandbox.create.aio(*command, app=app, **settings)
        except self._modal.exception.AlreadyExistsError:
            return await self._of_name(settings["name"])

    async def _of_name(self, name: str) -> Any:
        return await self._modal.Sandbox.from_name.aio(
            self._app_name, name, environment_name=self._environment
        )

    async def run(
        self,
        container: Any,
        command: tuple[str, ...],
        *,
        seconds: float,
        feed: Iterable[bytes] = (),
        take: Callable[[bytes], object],
    ) -> tuple[int, str]:
        """Run a program to its end, with an input, its output taken as it comes: exit code and last error output."""
        limit = max(1, math.ceil(seconds))
        process = await container.exec.aio(*command, text=False, timeout=limit)
        said = bytearray()
        others = [asyncio.create_task(_feed(process, feed)), asyncio.create_task(_listen(process, said))]
        try:
            async for chunk in process.stdout:
                take(chunk)
            code = await process.wait.aio()
            await asyncio.wait(others, timeout=1.0)
            return code, _last_line(said)
        finally:
            for task in others:
                task.cancel()

    async def carry(self, container: Any, command: tuple[str, ...], stream: Stream) -> None:
        """Start a program whose input and output are the socket `stream.theirs`, until either of them ends."""
        stream.theirs.setblocking(False)
        process = await container.exec.aio(*command, text=False)
        task = asyncio.create_task(self._carry(container, process, stream))
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)

    async def _carry(self, container: Any, process: Any, stream: Stream) -> None:
        others = [
            asyncio.create_task(_carry_in(process, stream.theirs)),
            asyncio.create_task(_listen(process, stream.said)),
        ]
        try:
            await _carry_out(process, stream.theirs)
            code = await asyncio.wait_for(process.wait.aio(), _EXIT_S)
            await asyncio.wait(others[1:], timeout=1.0)
            killed = " (killed, as when memory is short)" if code == 137 else ""
            stream.end = f"tool server exit {code}{killed} {_last_line(stream.said)}".strip()
        except Exception as error:  # noqa: BLE001 - whatever the client raises is why the server is lost
            stream.end = f"tool server lost, {await self._state(container)}: {_words(error)}"
        finally:
            stream.end = stream.end or "tool server given up"
            for task in others:
                task.cancel()
            stream.theirs.close()

    async def _state(self, container: Any) -> str:
        try:
            code = await asyncio.wait_for(container.poll.aio(), _EXIT_S)
        except Exception as error:  # noqa: BLE001 - told as the state that cannot be known
            return f"state unknown ({_words(error)})"
        return "container running" if code is None else f"container gone (exit {code})"

    def remove(self, container: Any, deadline: float) -> None:
        """Terminate a container until it says that it has ended.

        Raises:
            Refused, Late: it could not be confirmed before the deadline; the last cause.
        """
        pause_s = 0.1
        while True:
            left = deadline - time.monotonic()
            try:
                return self.ask(self._end(container), time.monotonic() + max(left / 2, min(left, 1.0)))
            except Refused as error:
                if isinstance(error.__cause__, self._modal.exception.NotFoundError):
                    return None
                if time.monotonic() + pause_s > deadline:
                    raise
            except Late:
                if time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    async def _end(self, container: Any) -> None:
        await container.terminate.aio()
        with suppress(self._modal.exception.SandboxTimeoutError):  # it ended before, at its own time
            await container.wait.aio(raise_on_termination=False)

    async def find(self, name: str, tags: dict[str, str]) -> list[Any]:
        """The running containers of a name or with all these tags."""
        app = await self._found_app()
        found = {}
        with suppress(self._modal.exception.NotFoundError):
            one = await self._of_name(name)
            found[one.object_id] = one
        async for one in self._modal.Sandbox.list.aio(app_id=app.app_id, tags=tags):
            found[one.object_id] = one
        return list(found.values())


def load(config: str) -> Any:
    """The client, with its configuration file.

    Raises:
        SandboxError: the extra is missing, or the client was loaded before with another file.
    """
    if config:
        os.environ["MODAL_CONFIG_PATH"] = config
    try:
        modal, read = importlib.import_module("modal"), importlib.import_module("modal.config")
    except ImportError as error:
        cause = f"sandbox modal needs the extra modal: pip install bartleby[modal] ({error})"
        raise SandboxError("start", cause) from error
    if config and Path(read.user_config_path) != Path(config):
        cause = f"config must be {read.user_config_path}, which Modal's client has read, got {config}"
        raise SandboxError("start", cause)
    return modal


async def _feed(process: Any, chunks: Iterable[bytes]) -> None:
    """Write an input and close it; if nobody reads any more, the exit code says why."""
    waiting = bytearray()
    for chunk in chunks:
        waiting += chunk
        while len(waiting) >= _MOST_FED:
            process.stdin.write(waiting[:_MOST_FED])
            del waiting[:_MOST_FED]
            await process.stdin.drain.aio()
    process.stdin.write(waiting)
    process.stdin.write_eof()
    await process.stdin.drain.aio()


async def _listen(process: Any, said: bytearray) -> None:
    async for chunk in process.stderr:
        said += chunk
        del said[:-_TAIL]


async def _carry_in(process: Any, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(sock, 1 << 18):
        process.stdin.write(data)
        await process.stdin.drain.aio()
    process.stdin.write_eof()
    await process.stdin.drain.aio()


async def _carry_out(process: Any, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    async for chunk in process.stdout:
        try:
            await loop.sock_sendall(sock, chunk)
        except OSError:  # our end was closed; what the server still says is nobody's
            return


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".strip(": ")


def _last_line(said: bytearray) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""
