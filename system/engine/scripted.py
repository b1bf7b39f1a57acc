"""An engine that says what a script says: the embedded engine's wire, with scripts in the place of weights.

A script sees what a policy would: the token ids of the prompt, read back into messages, and nothing else.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from system.engine.client import HEADER, EngineClient, frame
from system.engine.request import EngineError
from system.harness.chat import Chat

Script = Generator[str | float, str, None]
"""Completion texts, one a turn, each answered by what the tool said; a number is seconds to wait before the next."""

Message = tuple[str, str]
"""Role and text."""

Write = Callable[[str, Sequence[Message]], Script]
"""The script of a session, from its name and the messages before its first turn."""

Note = Callable[[dict[str, Any], list[int]], None]
"""Is given every request, and the ids that were said."""

_OPEN, _CLOSE = "<tool_response>\n", "\n</tool_response>"


class ScriptedEngine:
    """Listens on a unix socket; a thread for each client.

    Example: `with ScriptedEngine(path, chat, lambda session, opening: expert_script(opening)) as engine: ...`.

    Args:
        path: of the socket.
        chat: the policy's tokenizer and template; the template must be of the ChatML kind.
        write: called once a session; what it or its script raises is the engine's answer to that request.
        logprob, version: of each token said.
        note: is told what is asked and said.

    Raises:
        ValueError: messages cannot be read back from what the template makes of them.
    """

    def __init__(
        self,
        path: Path,
        chat: Chat,
        write: Write,
        *,
        logprob: float = 0.0,
        version: int = 0,
        note: Note | None = None,
    ) -> None:
        self.address = self.socket_path = str(path)
        self._reader, self._chat = Reader(chat), chat
        self._write, self._logprob, self._version, self._note = write, logprob, version, note
        self._scripts: dict[str, Script] = {}
        self._streams: set[socket.socket] = set()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(self.socket_path)
        self._listening.listen(1024)
        threading.Thread(target=self._accept, daemon=True).start()

    def client(self) -> EngineClient:
        """A client of this engine."""
        return EngineClient(self.socket_path)

    def fault(self, timeout_s: float) -> str:
        """Why it does not run: it ends with this process only."""
        return ""

    def restart(self) -> None:
        """It ends with this process only."""
        raise EngineError("a scripted engine must not be started again, got a restart")

    def update_weights(self, version: int, weights: str, *, reset_kv: bool) -> None:
        """A script has no weights: what it says from now on carries this version."""
        self._version = version

    def stats(self) -> dict[str, Any]:
        """It costs its driver's time, not its own."""
        return {"cpu_s": 0.0, "policy_version": self._version}

    def close(self) -> None:
        """Stop listening, hang up on every client, remove the socket."""
        for stream in (self._listening, *self._streams):
            try:
                stream.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other end was faster
                continue
        self._listening.close()
        Path(self.socket_path).unlink(missing_ok=True)

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listening.accept()
            except OSError:  # closed
                return
            self._streams.add(stream)
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        with stream, stream.makefile("rb") as incoming:
            try:
                while header := incoming.read(HEADER.size):
                    message = json.loads(incoming.read(HEADER.unpack(header)[0]))
                    stream.sendall(frame(self._reply(message)))
            except OSError:  # the client did not wait
                return
            finally:
                self._streams.discard(stream)

    def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "generate":
            try:
                return self._completion(message)
            except Exception as error:  # noqa: BLE001 - a script's fault is told to its trial, which records it
                return {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        if message["op"] == "release":
            self._scripts.pop(message["session_id"], None)
        return {"stats": self.stats()} if message["op"] == "stats" else {}

    def _completion(self, message: dict[str, Any]) -> dict[str, Any]:
        sampled = self._chat.completion(self._said(message))[: message["max_tokens"]]
        if self._note is not None:
            self._note(message, sampled)
        return {
            "request_id": message["request_id"],
            "token_ids": sampled,
            "logprob": [self._logprob] * len(sampled),
            "policy_version": [self._version] * len(sampled),
            "finish_reason": "stop" if sampled[-1] in message["stop_token_ids"] else "length",
        }

    def _said(self, message: dict[str, Any]) -> str:
        """The script's next text."""
        session, ids = message["session_id"], message["token_ids"]
        script = self._scripts.get(session)
        try:
            if script is None:
                script = self._scripts[session] = self._write(session, self._reader.messages(ids))
                said = next(script)
            else:
                said = script.send(self._reader.last(ids))
            while not isinstance(said, str):
                time.sleep(said)
                said = next(script)
        except StopIteration:
            raise EngineError(f"the script of {session} has no further turn") from None
        return said


class Reader:
    """Messages out of the token ids of a ChatML prompt.

    Args:
        chat: whose tokenizer and template wrote them.

    Raises:
        ValueError: the template is of another kind.
    """

    def __init__(self, chat: Chat) -> None:
        self._tokenizer, self._ends = chat.tokenizer, frozenset(chat.stop_ids)
        start = chat.tokenizer.token_to_id("<|im_start|>")
        self._start = -1 if start is None else start
        said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}]
        said.append({"role": "tool", "content": "a\nb"})
        if self.last(chat.render(said, None, add_generation_prompt=True)) != "a\nb":
            raise ValueError(
                "chat template must be ChatML with <tool_response> for a script to read it, got another"
            )

    def messages(self, ids: Sequence[int]) -> list[Message]:
        """Every message but the one that the prompt begins."""
        starts = [place for place, i in enumerate(ids) if i == self._start]
        return [self._message(ids[a + 1 : b]) for a, b in zip(starts, starts[1:])]

    def last(self, ids: Sequence[int]) -> str:
        """The text of the last of them, read from the end."""
        starts: list[int] = []
        for place in range(len(ids) - 1, -1, -1):
            if ids[place] == self._start:
                starts.append(place)
                if len(starts) == 2:
                    return self._message(ids[place + 1 : starts[0]])[1]
        return ""

    def _message(self, ids: Sequence[int]) -> Message:
        end = next((place for place, i in enumerate(ids) if i in self._ends), len(ids))
        role, _, text = self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False).partition("\n")
        return role.strip(), text.removeprefix(_OPEN).removesuffix(_CLOSE)
