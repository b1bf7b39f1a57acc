"""Where injected faults are played: one fleet, one scripted engine, tasks to be spoilt, judges, stand-ins for bwrap."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for scripts; pytest has it already
from broken_engine import BrokenEngine, Said
from fault_traces import Traces, adopt, descendants
from judge_server import JudgeServer, Scripted

from core.outcome import Outcome
from system.fleet import FleetError
from system.fleet.local import LocalFleet, warm_up
from system.harness.chat import Chat
from system.sandbox import kernel, reap
from system.verify import JudgeClient, JudgeSettings
from system.verify.judge_service import JudgeService
from system.world.assignment import draw_assignment
from system.world.company import make_company
from system.world.office import write_world
from system.world.task import link, write_task

HERE = Path(__file__).resolve().parent
CLERK = HERE.parents[1] / "policies" / "clerk"
TARGET = "fault_trials:run"

RIGHT, WRONG = "RIGHT", "WRONG"
"""Among the turns: the task's right answer, and one that is wrong by one."""

TOOL_S = 3.0
"""Deadline of a call."""
LATE_S = 1.0
"""Deadline of a phase that is made late."""

Edit = Callable[[Path], None]
"""Spoils a copy of a task's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The right outcome: `Expected(kind="system_error", phase="start", cause="bwrap not found")`.

    cause is an expression that is found in the outcome's; kind "" means that nobody is left to get a result.
    """

    kind: str
    reason: str = ""
    phase: str = ""
    cause: str = ""
    reward: float | None = None

    @property
    def line(self) -> str:
        """In a few words, for the table."""
        why = self.reason or (f"{self.phase}: {self.cause}" if self.phase else "")
        return " ".join(part for part in (self.kind or "no result", why) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the table.

    Args:
        name: what is wrong.
        layer: where.
        how: by what means.
        then: the right outcome.
        turns: what the policy says.
        told: expressions, each of which is found in the result of some turn.
        restarts: fresh tool servers, None if any number is right.
        spec: of the trial, where it differs from `Stage.plain`; a function gets the stage.
        server: one of `fault_trials.SERVINGS`.
        task: what is done to a copy of the task.
        bwrap: a script in its place; "" for a search path without any, None for the real one.
        judge: what its endpoint says, the last again and again; the task has a rubric then.
        judge_settings: of its client.
        cancel: when the trial is to be cancelled, asked again and again.
        driver: the trial is run by another process than the test's, which may be killed.
        random: whether it also strikes among a thousand; not if it takes the fleet with it, or long.
    """

    name: str
    layer: str
    how: str
    then: Expected
    turns: Sequence[Said] = (RIGHT,)
    told: Sequence[str] = ()
    restarts: int | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    server: str = "office"
    task: Edit | None = None
    bwrap: str | None = None
    judge: Sequence[Scripted] | None = None
    judge_settings: dict[str, Any] = field(default_factory=dict)
    cancel: Callable[[Stage, str], bool] | None = None
    driver: bool = False
    random: bool = True


class Stage:
    """`with Stage(folder) as stage: result = stage.play(fault)`; nothing of it is left afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch, self.temporary = folder, folder / "scratch", folder / "temporary"
        self._close = ExitStack()
        self._number = count()
        self.tasks: dict[str, Path] = {}
        self._spoilt_tasks: dict[str, Path] = {}
        self._paths: dict[str, str] = {}
        self._judges: dict[str, str] = {}

    def __enter__(self) -> Stage:
        adopt()
        self._others = set(descendants(os.getpid()))  # of tests before, which end with the session
        company = make_company(3, split="train")
        world = write_world(company, self.folder / "world")
        drawn = [draw_assignment(company, level=1, index=0)]
        drawn += [draw_assignment(company, level=2, index=index) for index in range(12)]
        for assignment in drawn:
            if assignment.family not in self.tasks:
                task = write_task(assignment, company, tasks=self.folder / "tasks", world=world)
                self.tasks[assignment.family] = task
        self.task = self.tasks["find"]
        self.answers = {RIGHT: str(right_number(self.task)), WRONG: str(right_number(self.task) + 1)}
        self.engine = BrokenEngine(self.folder / "engine", Chat(CLERK))
        self._close.enter_context(self.engine)
        warm = warm_up(("brief", "full", "code"), policy=CLERK)
        fleet = LocalFleet(self.scratch, target=TARGET, warm=warm, temporary=self.temporary)
        self.fleet = self._close.enter_context(fleet)
        return self

    def __exit__(self, *exception: object) -> None:
        self._close.close()
        kernel.leave_orphans()

    @property
    def plain(self) -> dict[str, Any]:
        """The spec of a trial in which nothing is wrong."""
        return {
            "task": str(self.task),
            "policy": str(CLERK),
            "engine_address": self.engine.socket_path,
            "sandbox": "bubblewrap",
            "scratch": str(self.scratch),
            "seed": 1,
            "deadline_s": 60.0,
            "tool_timeout_s": 20.0,
            "start_s": 60.0,
            "verify_s": 60.0,
            "stop_s": 30.0,
            "limits": {
                "context": 8000,
                "turn_tokens": 3000,
                "turns": 20,
                "repairs": 2,
                "result_characters": 2000,
                "nudge_ratio": 0.0,
                "temperature": 1.0,
            },
        }

    def prepared(self, fault: Fault) -> dict[str, Any]:
        """The spec of a trial that the fault strikes; engine, judge and task stand ready for it."""
        trial_id = f"{next(self._number)} {fault.name}"
        spec = self.plain | {"trial_id": trial_id, "server": fault.server}
        if fault.task is not None or fault.judge is not None:
            spec["task"] = str(self._spoilt(fault))
        if fault.bwrap is not None:
            spec["path"] = self._path(fault)
        if fault.judge is not None:
            spec["judge_socket"] = self._judge(fault)
        limits = spec["limits"] | fault.spec.get("limits", {})
        self.engine.play(
            trial_id,
            [self.answers.get(said, said) if isinstance(said, str) else said for said in fault.turns],
        )
        own = {name: value(self) if callable(value) else value for name, value in fault.spec.items()}
        return spec | own | {"limits": limits}

    def play(self, fault: Fault) -> dict[str, Any]:
        """The result of one trial, under "left" what it left behind, by kind."""
        spec = self.prepared(fault)
        if fault.driver:
            return self._play_by_driver(spec)
        if not self._parent():
            self.fleet.start(
                self.prepared(Fault(name="nothing", layer="", how="", then=Expected(kind="solved")))
            )
            self.fleet.poll(60)
        traces = Traces(self.folder, (self.scratch, self.temporary))
        self.fleet.start(spec)
        result = self._result(fault, spec["trial_id"])
        self.engine.forget(spec["trial_id"])
        return result | {"left": traces.left(self.kept())}

    def _result(self, fault: Fault, trial_id: str) -> dict[str, Any]:
        cancelled = fault.cancel is None
        while not (results := self.fleet.poll(60.0 if cancelled else 0.05)):
            assert trial_id in self.fleet.running, "the trial is lost"
            if fault.cancel is not None and not cancelled and fault.cancel(self, trial_id):
                self.fleet.cancel(trial_id)
                cancelled = True
        (result,) = [result for result in results if result["trial_id"] == trial_id]
        return result

    def kept(self) -> set[int]:
        """The processes that stay between trials."""
        return self._others | self._parent()

    def _parent(self) -> set[int]:
        try:
            return {self.fleet.parent_pid}
        except FleetError:  # a fault has killed it; the next start makes another
            return set()

    def _play_by_driver(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The trial runs in a fleet of another process, which its script kills; what is left after the next start."""
        scratch = self.folder / "scratch of another"
        scratch.mkdir(exist_ok=True)
        traces = Traces(self.folder, (scratch, self.temporary))
        spec = spec | {"scratch": str(scratch)}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, os.fspath(HERE / "fault_driver.py"), json.dumps(spec)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as driver:
            assert driver.stdout is not None
            said = driver.stdout.read()
        self.engine.forget(spec["trial_id"])
        left = traces.left(self.kept(), but=("folders",))
        reap(scratch)  # as the next run does
        return {"outcome": {}, "said": said.decode(), "left": left | traces.left(self.kept())}

    def _spoilt(self, fault: Fault) -> Path:
        if fault.name not in self._spoilt_tasks:
            folder = self.folder / "spoilt" / re.sub(r"\W+", "-", fault.name)
            shutil.copytree(self.task, folder, copy_function=link)
            if fault.judge is not None:
                (folder / "tests" / "checks.json").unlink()
                rubric = {"rubric": [{"id": "r1", "criterion": "States the right number."}]}
                replaced(folder / "bartleby.json", json.dumps(rubric))
                told = (folder / "task.toml").read_text()
                replaced(
                    folder / "task.toml", told.replace("[metadata]", '[metadata]\nbartleby_tools = "brief"')
                )
            if fault.task is not None:
                fault.task(folder)
            self._spoilt_tasks[fault.name] = folder
        return self._spoilt_tasks[fault.name]

    def _path(self, fault: Fault) -> str:
        if fault.name not in self._paths:
            folder = self.folder / f"path {len(self._paths)}"
            folder.mkdir()
            if fault.bwrap:
                (folder / "bwrap").write_text(f"#!/bin/sh\nreal={shutil.which('bwrap')}\n{fault.bwrap}\n")
                (folder / "bwrap").chmod(0o755)
            self._paths[fault.name] = os.fspath(folder)
        return self._paths[fault.name]

    def _judge(self, fault: Fault) -> str:
        if fault.name not in self._judges:
            assert fault.judge is not None
            server = self._close.enter_context(JudgeServer(fault.judge))
            patience = {
                "attempts": 2,
                "base_s": 0.01,
                "ceiling_s": 0.02,
                "timeout_s": 20.0,
                "attempt_s": 10.0,
            }
            settings = JudgeSettings(
                endpoint=server.endpoint,
                model="judge",
                key_variables=("KEY",),
                **(patience | fault.judge_settings),
            )
            path = self.folder / f"judge{len(self._judges)}"
            client = JudgeClient(settings, {"KEY": "key-4821"})
            self._close.enter_context(JudgeService(client, path, side_by_side=16))
            self._judges[fault.name] = os.fspath(path)
        return self._judges[fault.name]


def right_number(task: Path) -> int:
    """What a task that asks for a number wants to hear."""
    checks = json.loads((task / "tests" / "checks.json").read_text())
    (number,) = [check["expected"] for check in checks if check["kind"] == "answer_number"]
    return number


def replaced(file: Path, text: str) -> None:
    """Writes a file of a spoilt task anew: its content may have another name in the task it was copied from."""
    file.unlink(missing_ok=True)
    file.write_text(text)


def differences(fault: Fault, result: dict[str, Any]) -> list[str]:
    """Where a result is not the one that was expected, a line each; [] if it is right."""
    then, outcome, wrong = fault.then, result["outcome"], []
    if outcome:
        Outcome(**outcome)  # as the loop reads it
    for name in ("kind", "reason", "phase"):
        if outcome.get(name, "") != getattr(then, name):
            wrong.append(f"{name} must be {getattr(then, name)!r}, got {outcome}")
    if not re.search(then.cause, outcome.get("cause", "")):
        wrong.append(f"cause must say {then.cause!r}, got {outcome.get('cause', '')!r}")
    if "\n" in outcome.get("cause", ""):
        wrong.append(f"cause must be one line, got {outcome['cause']!r}")
    if result.get("reward") != then.reward:
        wrong.append(f"reward must be {then.reward}, got {result.get('reward')}")
    results = [turn["result"] for turn in result.get("turns", [])]
    for words in fault.told:
        if not any(re.search(words, text) for text in results):
            wrong.append(f"a turn must be told {words!r}, got {[text[:200] for text in results]}")
    if fault.restarts is not None and result.get("tool_restarts") != fault.restarts:
        wrong.append(f"restarts must be {fault.restarts}, got {result.get('tool_restarts')}")
    return wrong
