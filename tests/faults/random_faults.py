"""Does a system error ever pass for the policy's doing, or the policy's doing for a system error?

One command: `python tests/faults/random_faults.py --trials 1000 --out tests/faults/recorded/1000.json`. About half of
the trials are healthy, the scripted expert's or one's that answers wrongly, on tasks of every family; a fault of the
table strikes the others. The injector labels each before it starts. The seed gives the labels and the order.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from fault_stage import Expected, Fault, Stage, differences, right_number
from fault_table import FAULTS
from fault_traces import Traces

from system.engine.scripted import Script
from system.harness.chat import ToolCall, call_text
from system.record.audit import machine_name
from system.record.metrics import commit_hash
from system.world.expert_script import plays

POLICY = ("solved", "failed", "truncated")
"""Outcomes that are the policy's doing; a system error is nobody's, and who cancelled knows it."""

ANYWHERE = ("policy", "tools", "engine", "agent", "verifier", "steps", "judge")
"""Layers whose faults strike in either kind of sandbox."""

WAVE = 100
"""Trials after which what is left behind is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One trial before it starts: what strikes it, or a healthy trial's own script."""

    fault: Fault
    task: Path | None = None
    script: Callable[[], Script] | None = None
    spec: dict[str, Any] = field(default_factory=dict)


def label_of(kind: str) -> str:
    """Whose doing an outcome is: policy, system, or cancelled."""
    return "policy" if kind in POLICY else "system" if kind == "system_error" else kind


def draw(stage: Stage, seed: int, number: int) -> Drawn:
    """What happens in a trial; the same for the same seed and number."""
    random = Random(f"{seed}/{number}")
    sandbox = random.choice(("bubblewrap", "process"))
    if random.random() < 0.5:
        return _healthy(stage, random, sandbox)
    fault = random.choice([fault for fault in FAULTS if fault.random])
    if fault.layer not in ANYWHERE or fault.bwrap is not None:
        sandbox = "bubblewrap"
    return Drawn(fault=fault, spec={"sandbox": sandbox})


def _healthy(stage: Stage, random: Random, sandbox: str) -> Drawn:
    family, right = random.choice(sorted(stage.tasks)), random.random() < 0.5
    task = stage.tasks[family]
    spec: dict[str, Any] = {"sandbox": sandbox, "toolset": random.choice(("brief", "full"))}
    if spec["toolset"] == "full":
        spec["limits"] = {"context": 60_000}
    name = f"nothing: a task to {family}, done {'right' if right else 'wrong'}"
    then = Expected(kind="solved", reward=1.0) if right else Expected(kind="failed", reward=0.0)
    fault = Fault(name=name, layer="policy", how="", then=then)
    script = _expert(task) if right else _wrong(task, family)
    return Drawn(fault=fault, task=task, script=script, spec=spec)


def _expert(task: Path) -> Callable[[], Script]:
    instruction = (task / "instruction.md").read_text().strip()
    return lambda: plays(instruction)


def _wrong(task: Path, family: str) -> Callable[[], Script]:
    """Looks about, and says that it is done, or a number that is wrong by one."""
    answer = str(right_number(task) + 1) if family in ("find", "sum") else "done"

    def script() -> Script:
        yield call_text(ToolCall("list_files", {}))
        yield answer

    return script


@dataclass(slots=True)
class Report:
    """What came of the trials so far."""

    trials: int = 0
    confusion: Counter[tuple[str, str]] = field(default_factory=Counter)
    "Label and what the outcome says, to how often."
    struck: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    "Trials whose outcome differs in anything from the one expected."
    lost: list[str] = field(default_factory=list)
    left: list[dict[str, object]] = field(default_factory=list)

    def add(self, fault: Fault, result: dict[str, Any]) -> None:
        """Count one result."""
        label, got = label_of(fault.then.kind), label_of(result["outcome"]["kind"])
        self.confusion[label, got] += 1
        self.struck[fault.name] += 1
        self.wrong += [f"{result['trial_id']}: {line}" for line in differences(fault, result)]

    @property
    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "trials": self.trials,
            "confusion": {f"{label} called {got}": n for (label, got), n in sorted(self.confusion.items())},
            "system_error_called_policy_outcome": self.confusion["system", "policy"],
            "policy_outcome_called_system_error": self.confusion["policy", "system"],
            "wrong_in_anything": self.wrong,
            "lost": self.lost,
            "left_behind": self.left,
            "struck": dict(sorted(self.struck.items())),
        }

    @property
    def clean(self) -> bool:
        """Whether nothing was mistaken, lost or left."""
        mistaken = sum(n for (label, got), n in self.confusion.items() if label != got)
        return not (mistaken or self.wrong or self.lost or self.left)


def play_all(stage: Stage, *, trials: int, seed: int, side_by_side: int) -> Report:
    """So many trials, some at a time, in waves."""
    report = Report(trials=trials)
    numbers = list(range(trials))
    for begin in range(0, trials, WAVE):
        drawn = [draw(stage, seed, number) for number in numbers[begin : begin + WAVE]]
        _play_wave(stage, drawn, side_by_side, report)
    return report


def _play_wave(stage: Stage, drawn: Sequence[Drawn], side_by_side: int, report: Report) -> None:
    ready = [(one, _prepared(stage, one)) for one in drawn]
    traces = Traces(stage.folder, (stage.scratch, stage.temporary))
    running: dict[str, Fault] = {}
    cancelled: set[str] = set()
    deadline = time.monotonic() + 600
    while (ready or running) and time.monotonic() < deadline:
        while ready and len(running) < side_by_side:
            one, spec = ready.pop(0)
            running[spec["trial_id"]] = one.fault
            stage.fleet.start(spec)
        for result in stage.fleet.poll(0.05):
            report.add(running.pop(result["trial_id"]), result)
            stage.engine.forget(result["trial_id"])
        for trial_id, fault in running.items():
            if fault.cancel is not None and trial_id not in cancelled and fault.cancel(stage, trial_id):
                stage.fleet.cancel(trial_id)
                cancelled.add(trial_id)
    report.lost += [*running, *(spec["trial_id"] for _, spec in ready)]
    if left := traces.left(stage.kept()):
        report.left.append(left)


def _prepared(stage: Stage, one: Drawn) -> dict[str, Any]:
    own = {name: value for name, value in one.spec.items() if name != "limits"}
    spec = stage.prepared(replace(one.fault, spec=one.spec | one.fault.spec)) | own
    if one.task is not None and one.script is not None:
        spec["task"] = str(one.task)
        stage.engine.play(spec["trial_id"], one.script())
    return spec


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if nothing was mistaken, lost or left behind."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side-by-side", type=int, default=8, help="trials at once")
    parser.add_argument("--out", type=Path, default=None, help="where the report goes as JSON")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="f") as folder, Stage(Path(folder)) as stage:
        report = play_all(stage, trials=given.trials, seed=given.seed, side_by_side=given.side_by_side)
    about = {
        "command": f"python tests/faults/random_faults.py --trials {given.trials} --seed {given.seed}",
        "commit": commit_hash(Path(__file__).parent),
        "machine": machine_name(),
        "seconds": round(time.monotonic() - begun, 1),
        "side_by_side": given.side_by_side,
    }
    text = json.dumps(about | report.record, indent=1) + "\n"
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text)
    print(text, end="")
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())
