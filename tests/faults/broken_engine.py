"""The scripted engine, which can also break: on the wire, in what it says, or by what happens meanwhile."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from system.engine.client import HEADER, frame
from system.engine.scripted import Script, ScriptedEngine
from system.harness.chat import Chat


@dataclass(frozen=True)
class Wrong:
    """A completion with other fields than it should have: `Wrong({"token_ids": []})`; a function gets the request."""

    fields: dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Wire:
    """Bytes in place of a reply, and then the end of the connection: `Wire(b"")`."""

    data: bytes


@dataclass(frozen=True)
class AtRelease:
    """What the engine does when the trial lets go of it: bytes and the end of the connection, or seconds of silence."""

    what: Wire | float


Act = Callable[[int], None]
"""Happens while the trial, whose pid it gets, waits for its next completion."""

Said = str | float | Wrong | Wire | AtRelease | Act
"""A text, a number of seconds to wait before the next, a broken reply, what comes at the end, or an act before the
next."""


class BrokenEngine(ScriptedEngine):
    """A scripted engine that says every kind of `Said`, and knows which process asks."""

    def __init__(self, path: Path, chat: Chat) -> None:
        self._plays: dict[str, Iterator[Said] | Script] = {}
        self._pids: dict[str, int] = {}
        self._twists: dict[str, Wrong | Wire] = {}
        self._asking: dict[str, socket.socket] = {}
        self._ends: dict[str, Wire | float] = {}
        super().__init__(path, chat, lambda session, _: self._played(session), logprob=-0.5, version=7)

    def play(self, trial_id: str, said: Iterable[Said] | Script) -> None:
        """What a trial is to hear: these, whatever its tools answer, or what a script makes of the answers.

        A step of a task of several goes on where the one before it ended.
        """
        self._plays[trial_id] = iter(said)

    def pid(self, trial_id: str) -> int:
        """The process of a trial, 0 until it has asked."""
        return self._pids.get(trial_id, 0)

    def forget(self, trial_id: str) -> None:
        """A trial that is over."""
        for known in (self._plays, self._pids, self._twists, self._scripts, self._asking, self._ends):
            for session in [session for session in known if self._trial_of(session) == trial_id]:
                known.pop(session)
        self._plays.pop(trial_id, None)

    def _trial_of(self, session: str) -> str:
        """The trial of a session, which is named after it, or after it and a step."""
        return session if session in self._plays else session.rpartition("/")[0]

    def _played(self, session: str) -> Script:
        said = self._plays[self._trial_of(session)]
        return cast(Script, said) if isinstance(said, Generator) else self._told(session, said)

    def _told(self, session: str, said: Iterator[Said]) -> Script:
        for one in said:
            if isinstance(one, Wrong | Wire):
                self._twists[session] = one
                yield "1"
            elif isinstance(one, AtRelease):
                self._ends[session] = one.what
            elif isinstance(one, float):
                _wait(self._asking[session], one)
            elif callable(one):
                one(self._pids[session])
            else:
                yield one
        yield "the end"  # heard only by who waited until the trial hung up

    def _serve(self, stream: socket.socket) -> None:
        pid = _peer(stream)
        with stream, stream.makefile("rb") as incoming:
            while message := _message(incoming):
                session = message["session_id"]
                self._pids[session], self._asking[session] = pid, stream
                twist: Wrong | Wire | float | None = None
                if message["op"] == "release":
                    twist = self._ends.pop(session, None)
                reply = self._reply(message)
                twist = twist or self._twists.pop(session, None)
                if isinstance(twist, float):
                    _wait(stream, twist)
                if isinstance(twist, Wrong):
                    reply |= twist.fields(message) if callable(twist.fields) else twist.fields
                try:
                    stream.sendall(twist.data if isinstance(twist, Wire) else frame(reply))
                except OSError:  # the trial did not wait
                    return
                if isinstance(twist, Wire):
                    return


def _peer(stream: socket.socket) -> int:
    """Pid of the process at the other end."""
    layout = struct.Struct("3i")
    return layout.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))[0]


def _wait(stream: socket.socket, seconds: float) -> None:
    """Wait so long, or until the other end hangs up."""
    poller = select.poll()
    poller.register(stream, select.POLLRDHUP)
    poller.poll(seconds * 1000)


def _message(incoming: BinaryIO) -> dict[str, Any] | None:
    """The next request, None at the end of the connection, however it ends."""
    try:
        header = incoming.read(HEADER.size)
        return json.loads(incoming.read(HEADER.unpack(header)[0])) if header else None
    except ConnectionError:
        return None
