"""Our own agent at work in a keeper's sandbox: a fork that speaks with the engine, and the tools beside it.

The agent waits for its engine as long as that takes, so it is a process apart, which can be killed; the sandbox stays
with the keeper, which starts its tool server again when the agent asks for that.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn, cast

import anyio

from system.engine import connect
from system.fleet import kit_of
from system.fleet.office import load
from system.harness.serving import expected_tools, serving
from system.sandbox import Sandbox, SandboxError, View
from system.sandbox.bubblewrap import BubblewrapSandbox
from system.sandbox.server_process import Connectable
from system.trial import TrialError, agent_for, episode_record, load_chat, work

LARGEST = 256 << 20
"""Longest record of an episode in bytes."""


class Player:
    """One agent's run. The keeper waits for `descriptors` and hands what is ready to `attend`, until it has `ended`.

    Args:
        sandbox: frozen; it is thawed with the agent's tools.
        spec: as of `system.trial.run_trial`: trial_id, policy, engine_address, seed, limits, deadline_s,
            tool_timeout_s, harness, toolset, instruction.
        view: what the tools see.
    """

    def __init__(self, sandbox: BubblewrapSandbox, spec: dict[str, Any], view: View) -> None:
        self._sandbox, self._spec, self._view = sandbox, spec, view
        self._asks: socket.socket | None = None
        self._pid, self._record, self._said = -1, -1, bytearray()
        self.ended = False

    def start(self) -> None:
        """Thaw the sandbox and fork the agent."""
        spec = self._spec
        _loaded(kit_of(spec["harness"], spec["toolset"]))
        load_chat(spec["policy"])
        characters, longest_s = spec["limits"]["result_characters"], spec["tool_timeout_s"]
        serve = serving(
            spec["harness"], spec["toolset"], result_characters=characters, longest_call_s=longest_s
        )
        self._sandbox.thaw(serve, self._view)
        stream = self._sandbox.connect()
        self._asks, there = socket.socketpair()
        self._record, out = os.pipe()
        with stream, there:
            self._pid = os.fork()
            if self._pid == 0:
                self._asks.close()
                os.close(self._record)
                _become_agent(spec, _Borrowed(stream, there, self._view.root), out)
        os.close(out)

    def descriptors(self) -> list[int]:
        """What to wait for."""
        return [self._record] if self._asks is None else [self._record, self._asks.fileno()]

    def attend(self, ready: list[int]) -> None:
        """Take in what has come: a part of the record, or a question about the tool server."""
        if self._record in ready:
            data = os.read(self._record, 1 << 20)
            self._said += data
            self.ended = not data or len(self._said) > LARGEST
        if self._asks is not None and self._asks.fileno() in ready:
            asked = self._asks.recv(1)
            if asked == b"d":
                self._tell(self._sandbox.died())
            elif asked == b"r":
                self._restart()
            else:
                self._asks.close()
                self._asks = None

    def _restart(self) -> None:
        try:
            self._sandbox.restart()
            with self._sandbox.connect() as stream:
                self._tell(None, stream)
        except SandboxError as error:
            self._tell(error.cause)

    def _tell(self, cause: str | None, stream: socket.socket | None = None) -> None:
        assert self._asks is not None
        line = json.dumps(cause).encode() + b"\n"
        socket.send_fds(self._asks, [line], [] if stream is None else [stream.fileno()])

    def result(self) -> dict[str, Any]:
        """The record of the episode, or {"fault", "phase"} of the system."""
        try:
            return json.loads(self._said)
        except ValueError:
            return {"fault": "the agent's process died", "phase": "agent"}

    def close(self) -> None:
        """The agent is dead afterwards."""
        if self._pid > 0:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = -1
        if self._asks is not None:
            self._asks.close()
        if self._record >= 0:
            os.close(self._record)
            self._record = -1


_loaded = cache(load)


class _Borrowed(Connectable):
    """The keeper's sandbox as its agent sees it; everything but the first stream is asked for."""

    kind = "bubblewrap"

    def __init__(self, stream: socket.socket, asks: socket.socket, root: Path) -> None:
        self._stream: socket.socket | None = stream
        self._asks, self.root = asks, root

    def died(self) -> str | None:
        return self._ask(b"d")

    def restart(self) -> None:
        cause = self._ask(b"r")
        if cause is not None:
            raise SandboxError("start", cause)

    def _ask(self, what: bytes) -> str | None:
        self._asks.sendall(what)
        line, descriptors, _, _ = socket.recv_fds(self._asks, 1 << 16, 1)
        while line and not line.endswith(b"\n"):
            line += self._asks.recv(1 << 16)
        if descriptors:
            self._stream = socket.socket(fileno=descriptors[0])
        return json.loads(line) if line else "the keeper of the sandbox is gone"


def _become_agent(spec: dict[str, Any], place: _Borrowed, out: int) -> NoReturn:
    """Turn a fresh fork into the agent: its record goes into the pipe, whatever happens; never returns."""
    status = 1
    try:
        record = _played(spec, place)
        with open(out, "wb") as into:
            into.write(json.dumps(record).encode())
        status = 0
    finally:
        os._exit(status)


def _played(spec: dict[str, Any], place: _Borrowed) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    engine = connect(spec["engine_address"], deadline=time.monotonic() + spec["deadline_s"])
    try:
        agent = agent_for(spec, engine)
        expected = expected_tools(spec["harness"], spec["toolset"])
        run = partial(
            work, agent, spec["instruction"], cast(Sandbox, place), expected, spec["tool_timeout_s"], seconds
        )
        episode, restarts = anyio.run(run)
        engine.release(spec["trial_id"])
    except TrialError as error:
        return {"fault": error.cause, "phase": error.phase}
    except Exception as error:  # noqa: BLE001 - the fault of a system of several parts: told, never graded
        return {"fault": f"{type(error).__name__}: {error}".replace("\n", " "), "phase": "agent"}
    finally:
        engine.close()
    seconds["engine"] = episode.engine_seconds
    truncated = None if episode.truncated is None else asdict(episode.truncated)
    kept = {"truncated": truncated, "tool_restarts": restarts, "seconds": seconds}
    return {**episode_record(episode), **kept}
