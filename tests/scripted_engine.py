"""The scripted engine as the tests use it: scripts by the name of their trial, and what was asked and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from system.engine import scripted
from system.engine.scripted import Script as Script
from system.harness.chat import Chat
from system.world.expert_script import as_it_is as as_it_is
from system.world.expert_script import plays as plays


class ScriptedEngine:
    """Listens on a socket. Example: `with ScriptedEngine(path, chat) as engine: engine.scripts["t1"] = says("7")`.

    `requests` has every generate message in order; each sampled token has the logprob -0.5 and the version 7.
    """

    def __init__(self, path: Path, chat: Chat) -> None:
        self.path, self.chat = path, chat
        self.scripts: dict[str, Script] = {}
        self.requests: list[dict[str, Any]] = []
        self.sampled: dict[str, list[list[int]]] = {}
        self._engine = scripted.ScriptedEngine(
            path, chat, lambda session, _: self.scripts[session], logprob=-0.5, version=7, note=self._note
        )

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.close()

    def _note(self, message: dict[str, Any], sampled: list[int]) -> None:
        self.requests.append(message)
        self.sampled.setdefault(message["session_id"], []).append(sampled)


def says(*texts: str | float) -> Script:
    """A script that says these texts, whatever the tools answer."""
    for text in texts:  # noqa: UP028  # `yield from` a tuple cannot be sent to
        yield text
