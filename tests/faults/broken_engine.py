"""The scripted engine, which can also break: on the wire, in what it says, or by what happens meanwhile."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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


Act = Callable[[int], None]
"""Happens while the trial, whose pid it gets, waits for its next completion."""

Said = str | float | Wrong | Wire | Act
"""A text, a number of seconds to wait before the next, a broken reply, or an act before the next."""


class BrokenEngine(ScriptedEngine):
    """A scripted engine that says every kind of `Said`, and knows which process asks."""

    def __init__(self, path: Path, chat: Chat) -> None:
        self._plays: dict[str, Iterable[Said] | Script] = {}
        self._pids: dict[str, int] = {}
        self._twists: dict[str, Wrong | Wire] = {}
        self._asking: dict[str, socket.socket] = {}
        super().__init__(path, chat, lambda trial_id, _: self._played(trial_id), logprob=-0.5, version=7)

    def play(self, trial_id: str, said: Iterable[Said] | Script) -> None:
        """What a trial is to hear: these, whatever its tools answer, or what a script makes of the answers."""
        self._plays[trial_id] = said

    def pid(self, trial_id: str) -> int:
        """The process of a trial, 0 until it has asked."""
        return self._pids.get(trial_id, 0)

    def forget(self, trial_id: str) -> None:
        """A trial that is over."""
        for known in (self._plays, self._pids, self._twists, self._scripts, self._asking):
            known.pop(trial_id, None)

    def _played(self, trial_id: str) -> Script:
        said = self._plays[trial_id]
        return said if hasattr(said, "send") else self._told(trial_id, said)  # type: ignore[return-value]

    def _told(self, trial_id: str, said: Iterable[Said]) -> Script:
        for one in said:
            if isinstance(one, Wrong | Wire):
                self._twists[trial_id] = one
                yield "1"
            elif isinstance(one, float):
                _wait(self._asking[trial_id], one)
            elif callable(one):
                one(self._pids[trial_id])
            else:
                yield one
        yield "the end"  # heard only by who waited until the trial hung up

    def _serve(self, stream: socket.socket) -> None:
        pid = _peer(stream)
        with stream, stream.makefile("rb") as incoming:
            while message := _message(incoming):
                self._pids[message["session_id"]], self._asking[message["session_id"]] = pid, stream
                reply = self._reply(message)
                twist = self._twists.pop(message["session_id"], None)
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
