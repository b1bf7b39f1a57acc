"""Where attacks are played."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attacking import fails, gives_up, says, solves, works
from scripted_engine import Script, ScriptedEngine

from system.fleet.local import LocalFleet
from system.harness.chat import Chat, ToolCall

CLERK = Path(__file__).resolve().parents[2] / "policies" / "clerk"
CHAT = Chat(CLERK)


class Stage:
    """Where attacks are played; each trial must leave nothing behind."""

    def __init__(
        self, fleet: LocalFleet, engine: ScriptedEngine, tasks: dict[str, Path], scratch: Path
    ) -> None:
        self.fleet, self.engine, self.tasks, self.scratch = fleet, engine, tasks, scratch
        self.chat = CHAT
        self._number = 0

    def trial(
        self,
        script: Script | None = None,
        *,
        task: Path | None = None,
        family: str = "find",
        kit: str = "full",
        limits: dict[str, Any] | None = None,
        **spec: Any,
    ) -> dict[str, Any]:
        """The result of one trial whose policy is the script."""
        self.start(script, task=task, family=family, kit=kit, limits=limits, **spec)
        (result,) = self.results(1)
        return result

    def start(
        self,
        script: Script | None,
        *,
        task: Path | None = None,
        family: str = "find",
        kit: str = "full",
        limits: dict[str, Any] | None = None,
        **spec: Any,
    ) -> str:
        self._number += 1
        trial_id = f"attack {self._number}"
        if script is not None:
            self.engine.scripts[trial_id] = script
        usual = {
            "context": 400_000,
            "turn_tokens": 150_000,
            "turns": 60,
            "repairs": 2,
            "result_characters": 30_000,
        }
        plain = {
            "trial_id": trial_id,
            "task": str(task or self.tasks[family]),
            "policy": str(CLERK),
            "engine_address": str(self.engine.path),
            "sandbox": "bubblewrap",
            "scratch": str(self.scratch),
            "seed": 1,
            "start_s": 30.0,
            "deadline_s": 60.0,
            "verify_s": 60.0,
            "stop_s": 15.0,
            "tool_timeout_s": 30.0,
            "limits": usual | {"nudge_ratio": 0.0, "temperature": 1.0} | (limits or {}),
            "harness": "code" if kit == "code" else "office",
            "toolset": "brief" if kit == "code" else kit,
        }
        self.fleet.start(plain | spec)
        return trial_id

    def check(self, family: str, kind: str) -> dict[str, Any]:
        """The first check of a kind in the tests of a task."""
        checks = json.loads((self.tasks[family] / "tests" / "checks.json").read_text())
        return next(check for check in checks if check["kind"] == kind)

    def results(self, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while len(found) < count:
            came = self.fleet.poll(120)
            assert came, f"no result within 120 s\n{self.fleet.log.read_text()[-3000:]}"
            found += came
        left = [place.name for place in self.scratch.glob("trial-*")]
        assert not left, f"trials left {left}"
        return found

    def both(
        self,
        calls: Callable[[], Sequence[ToolCall]] | Sequence[ToolCall],
        *,
        task: Path | None = None,
        family: str = "find",
        kit: str = "full",
        work: Sequence[ToolCall] | None = None,
        **spec: Any,
    ) -> list[str]:
        """Plays an attack twice, without the work and with it; what the tools answered to the attack.

        Graded both times: 0 for the cheater, 1 for who then does the work.
        """
        answers: list[str] = []
        made = calls() if callable(calls) else calls
        fails(self.trial(says(made, answers, gives_up()), task=task, family=family, kit=kit, **spec))
        instruction = ((task or self.tasks[family]) / "instruction.md").read_text().strip()
        end = says(work, [], gives_up("done")) if work is not None else works(instruction, kit)
        solves(self.trial(says(made, answers, end), task=task, family=family, kit=kit, **spec))
        return answers
