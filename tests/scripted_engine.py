"""An engine that says what a script says: the embedded engine's wire, with a thread of the tests behind it.

A script is a generator of completion texts that is sent what the tool answered. A text may be replaced by a number of
seconds to wait before the next one is said, as a slow engine would.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from system.engine.client import HEADER, frame
from system.harness.chat import Chat, ToolCall, call_text
from system.world import expert

Script = Generator[str | float, str, None]

_ANSWER = re.compile(r"<tool_response>\n(.*)\n</tool_response>", re.DOTALL)


class ScriptedEngine:
    """Listens on a socket. Example: `with ScriptedEngine(path, chat, {"t1": script()}) as engine: ...`.

    `requests` has every generate message in order; each sampled token has the logprob -0.5 and the version 7.
    """

    def __init__(self, path: Path, chat: Chat) -> None:
        self.path, self.chat = path, chat
        self.scripts: dict[str, Script] = {}
        self.requests: list[dict[str, Any]] = []
        self.sampled: dict[str, list[list[int]]] = {}
        self._shown: dict[str, int] = {}
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        with stream, stream.makefile("rb") as incoming:
            while header := incoming.read(HEADER.size):
                message = json.loads(incoming.read(HEADER.unpack(header)[0]))
                reply = self._completion(message) if message["op"] == "generate" else {}
                try:
                    stream.sendall(frame(reply))
                except OSError:  # the trial did not wait
                    return

    def _completion(self, message: dict[str, Any]) -> dict[str, Any]:
        session, ids = message["session_id"], message["token_ids"]
        self.requests.append(message)
        script = self.scripts[session]
        if session in self._shown:
            new = self.chat.tokenizer.decode(ids[self._shown[session] :], skip_special_tokens=False)
            found = _ANSWER.search(new)
            said = script.send(found.group(1) if found else "")
        else:
            said = next(script)
        while not isinstance(said, str):
            time.sleep(said)
            said = next(script)
        sampled = self.chat.completion(said)[: message["max_tokens"]]
        self.sampled.setdefault(session, []).append(sampled)
        self._shown[session] = len(ids) + len(sampled)
        return {
            "request_id": message["request_id"],
            "token_ids": sampled,
            "logprob": [-0.5] * len(sampled),
            "policy_version": [7] * len(sampled),
            "finish_reason": "stop" if sampled[-1] in message["stop_token_ids"] else "length",
        }


def says(*texts: str | float) -> Script:
    """A script that says these texts, whatever the tools answer."""
    for text in texts:  # noqa: UP028  # `yield from` a tuple cannot be sent to
        yield text


def as_it_is(call: expert.ToolCall) -> ToolCall:
    """The expert's own call."""
    return ToolCall(*call)


def plays(instruction: str, translated: Callable[[expert.ToolCall], ToolCall] = as_it_is) -> Script:
    """The scripted expert as an engine; each of its calls may be made with other tools."""
    steps = expert.Expert(instruction).steps()
    try:
        step = next(steps)
        while True:
            assert not isinstance(step, expert.BadCall)
            step = steps.send((yield call_text(translated(step))))
    except StopIteration as stop:
        yield stop.value
