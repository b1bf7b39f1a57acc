"""The tools of a sandbox as an agent calls them: a gate before the first call, a deadline on each, one fresh server
after a death.

One task owns the session and takes calls from a queue, so that a call can be given up anywhere without leaving the
session half-way. What comes of a call is text for the model, unless the system is at fault.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream, TaskStatus
from mcp import Client, MCPError
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT, Tool

from system.harness.chat import function_schema
from system.sandbox import Sandbox, SandboxError
from system.sandbox.serve import open_client

READ_ONLY = frozenset(
    {
        *(
            "list_files",
            "read_file",
            "search_files",
            "read_sheet",
            "read_pdf",
            "read_slides",
            "read_document",
        ),
        *("list_mail", "search_mail", "read_mail", "read_channel", "list_events"),
    }
)
"""Tools that change nothing, where a server does not say it of its tools."""

GRACE_S = 1.0
"""How much longer than its deadline a call may hold the session, for the write of a request included."""


LOST = "error: the tool server broke off during this call, which may have taken effect; a fresh one has taken its place"


class NotReady(Exception):
    """The tools were not all there, or not in time, before the agent began."""


@runtime_checkable
class Restartable(Protocol):
    """A sandbox that can start its tool server again over the world as it now is."""

    def restart(self) -> None:
        """End what is left of the server and start a fresh one; `connect` can then be called again."""
        ...


@dataclass(slots=True, eq=False)
class _Asked:
    """A call in the queue, and what came of it."""

    name: str
    arguments: dict[str, Any]
    tries: int = 0
    done: anyio.Event = field(default_factory=anyio.Event)
    answer: tuple[str, bool] = ("", False)
    fault: ConnectionError | None = None

    def tell(self, text: str, error: bool) -> None:
        self.answer = text, error
        self.done.set()

    def fail(self, cause: str) -> None:
        self.fault = ConnectionError(cause)
        self.done.set()


class Tools:
    """What an agent gets: the schemas of the tools, and a way to call them.

    `restarts` counts the servers that had to be started after the first.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        queue: ObjectReceiveStream[_Asked],
        into: ObjectSendStream[_Asked],
        *,
        timeout_s: float,
    ) -> None:
        self._sandbox, self._queue, self._into, self._timeout_s = sandbox, queue, into, timeout_s
        self._expected: Collection[str] = ()
        self._listed: Sequence[Tool] = ()
        self.restarts = 0

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates want them."""
        return [function_schema(t.name, t.description or "", t.input_schema) for t in self._listed]

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """What a tool answers, and whether that is an error.

        Raises:
            ConnectionError: the tool server is gone and does not come back: a fault of the system.
        """
        asked = _Asked(name, arguments)
        await self._into.send(asked)
        await asked.done.wait()
        if asked.fault is not None:
            raise asked.fault
        return asked.answer

    async def own(self, expected: Collection[str], *, task_status: TaskStatus[None]) -> None:
        """The owner's task: one session after another until it is cancelled."""
        self._expected = expected
        lost = await self._session(None, task_status.started)
        while not (fault := self._renewed()):
            repeat = lost if not lost.done.is_set() and self._may_repeat(lost) else None
            if repeat is None and not lost.done.is_set():
                lost.tell(LOST, True)
            try:
                lost = await self._session(repeat)
            except NotReady as error:
                fault = str(error)
                break
        lost.fail(fault)
        async for asked in self._queue:
            asked.fail(fault)

    async def _session(self, repeat: _Asked | None, ready: Callable[[], None] | None = None) -> _Asked:
        """Serves calls, `repeat` before those of the queue, until a fresh server is needed; the call it was lost in."""
        try:
            stream = self._sandbox.connect()
        except SandboxError as error:
            raise NotReady(str(error)) from error
        async with open_client(stream, timeout_s=self._timeout_s) as client:
            await self._list(client)
            if ready is not None:
                ready()
            if repeat is not None and not await self._served(client, repeat):
                return repeat
            async for asked in self._queue:
                if not await self._served(client, asked):
                    return asked
        raise AssertionError("the queue outlives its owner")

    async def _list(self, client: Client) -> None:
        """The readiness gate."""
        try:
            listed = (await client.list_tools()).tools
        except (MCPError, ValueError) as error:
            raise NotReady(self._sandbox.died() or f"the tools could not be listed: {error}") from error
        if missing := sorted(set(self._expected) - {tool.name for tool in listed}):
            raise NotReady(f"tools missing: {', '.join(missing)}")
        self._listed = listed

    async def _served(self, client: Client, asked: _Asked) -> bool:
        """Whether the server can serve another call after this one, which is done unless the server was lost in it."""
        asked.tries += 1
        with anyio.move_on_after(self._timeout_s + GRACE_S):
            try:
                reply = await client.call_tool(asked.name, asked.arguments)
            except MCPError as error:
                if error.code == CONNECTION_CLOSED:
                    return False
                if error.code != REQUEST_TIMEOUT:
                    asked.tell(f"error: {' '.join(str(error).split())}", True)
            except (ValueError, RuntimeError) as error:
                fault = f"{type(error).__name__}: {error}".splitlines()[0]
                asked.fail(f"the answer to {asked.name} must be one by the protocol, got {fault}")
            else:
                shown = [p.text if p.type == "text" else f"[{p.type} left out]" for p in reply.content]
                asked.tell("\n".join(shown) if shown else "no output", bool(reply.is_error))
        if not asked.done.is_set():
            asked.tell(f"error: no answer within {self._timeout_s:g} s; the call may have taken effect", True)
            return not isinstance(self._sandbox, Restartable)  # what hangs would keep later calls waiting
        return True

    def _may_repeat(self, asked: _Asked) -> bool:
        """Whether an unanswered call may be made again: once, and only if it changes nothing."""
        marked = {tool.name: tool.annotations for tool in self._listed}
        said = marked.get(asked.name)
        reads = said.read_only_hint is True if said is not None else asked.name in READ_ONLY
        return reads and asked.tries < 2

    def _renewed(self) -> str:
        """Starts a fresh server; why there is none, or ""."""
        cause = self._sandbox.died() or "the tool server closed its stream or hangs"
        if not isinstance(self._sandbox, Restartable):
            return cause
        try:
            self._sandbox.restart()
        except SandboxError as error:
            return f"{cause}; {error}"
        self.restarts += 1
        return ""


@asynccontextmanager
async def open_tools(
    sandbox: Sandbox, *, expected: Collection[str], timeout_s: float
) -> AsyncIterator[Tools]:
    """The tools of a sandbox, all of them there.

    What is raised in its block comes out as it was, not wrapped in an exception group.

    Args:
        sandbox: with its tool server running and not yet connected.
        expected: names of tools without which no agent begins.
        timeout_s: of each call.

    Raises:
        NotReady: a tool is missing, or the server does not answer.
    """
    into, queue = anyio.create_memory_object_stream[_Asked](0)
    tools = Tools(sandbox, queue, into, timeout_s=timeout_s)
    try:
        async with into, queue, anyio.create_task_group() as group:
            await group.start(tools.own, expected)
            yield tools
            group.cancel_scope.cancel()
    except ExceptionGroup as errors:
        only = _only(errors)
        raise only from only.__cause__


def _only(error: Exception) -> Exception:
    """The one exception inside a nest of groups, or the group that holds several."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
