"""How many trials can run side by side, and what memory do they take?

One command: `python -m benchmarks.scale`. 5,000 trials in forked processes, 550 of them at a time, then 500 under Ray,
64 at a time: real tasks in real sandboxes, started by the schedule of `core.schedule` and the live loop. The policy is
the scripted expert in a process of its own, which thinks before each turn as long as a busy engine would. Ends with
status 1 if a trial met a system error. Writes benchmarks/recorded/scale.jsonl, a line a run, and scale.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from core.advantage import group_mean_advantage
from core.counter import counter_hash, counter_uniform
from core.schedule import DropGroup, Settings, StartTrial, Train
from system.engine import OtherEngine, RestartRule, Router
from system.engine.scripted import Script, ScriptedEngine
from system.fleet import Fleet
from system.fleet.local import LocalFleet, warm_up
from system.fleet.ray_fleet import RayFleet
from system.harness.chat import Chat
from system.journal import Journal
from system.loop import Crew, Loop, Result
from system.record.audit import machine_name, markdown_table, spread
from system.record.metrics import commit_hash
from system.trainer import StepMetrics
from system.world.expert_script import expert_script
from system.world.generate import generate

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "policies" / "clerk"
RECORDED = ROOT / "benchmarks" / "recorded"
TASKS = 50
TURNS = 6
"""Turns of a common trial: its time to think is spread over so many."""

Record = dict[str, Any]


def main(arguments: argparse.Namespace) -> int:
    """Run what is asked for; 1 if any trial was lost."""
    plans = {
        "local": (arguments.trials or 5000, arguments.running or 550),
        "ray": (arguments.trials or 500, arguments.running or 64),
    }
    records = []
    for kind in [arguments.fleet] if arguments.fleet else list(plans):
        trials, running = plans[kind]
        record = measured(kind, trials, running, arguments.think_s, arguments.starting)
        records.append(record)
        with open(arguments.out.with_suffix(".jsonl"), "a") as lines:
            lines.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
    arguments.out.with_suffix(".md").write_text(page(records))
    return int(any(record["system_errors"] for record in records))


def measured(kind: str, trials: int, running: int, think_s: float, starting: int) -> Record:
    """One fleet from its start to its end."""
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        tasks = generate(folder / "made", split="heldout", worlds=10, tasks=TASKS, seed=0)
        begun = time.monotonic()
        with (
            scripted(folder / "engine.sock", think_s) as address,
            opened(kind, folder, running, starting) as fleet,
        ):
            up_s = time.monotonic() - begun
            router = Router([OtherEngine(address)], hold=folder / "held", rule=RestartRule(silence_s=600.0))
            counts, memory = Counts(trials), Memory(fleet)
            try:
                with memory:
                    loop = Loop(
                        settings(trials, running),
                        crew=Crew(fleet=fleet, engine=router, trainer=None),
                        name="scale",
                        spec=partial(spec, tasks, folder / "trials"),
                        advantage=partial(group_mean_advantage, tolerance=1e-6),
                        journal=Journal(folder / "events.jsonl", tags={}, settings=settings(trials, running)),
                        observer=counts,
                    )
                    reason = loop.run()
            finally:
                router.close()
        left = [str(path) for path in (folder / "trials").rglob("trial-*")]
    return {
        "fleet": kind,
        "trials": trials,
        "running": running,
        "starting": starting,
        "think_s": think_s,
        "reason": reason,
        "outcomes": dict(counts.outcomes),
        "system_errors": counts.outcomes["system_error"],
        "causes": dict(counts.causes),
        "most_at_once": counts.most,
        "up_s": round(up_s, 1),
        "wall_s": round(counts.ended_s - counts.begun_s, 1),
        "trials_per_minute": round(60 * trials / (counts.ended_s - counts.begun_s), 1),
        "trial_cpu_s": spread(counts.cpu_s),
        "trial_seconds": {name: spread(values) for name, values in sorted(counts.seconds.items())},
        "driver_cpu_s": round(memory.driver_cpu_s, 1),
        "memory_mb": memory.most,
        "left": left,
        "load": os.getloadavg(),
        "machine": machine_name(),
        "commit": commit_hash(ROOT),
    }


@contextmanager
def scripted(socket_path: Path, think_s: float) -> Iterator[str]:
    """The expert behind the engine's wire, in a process of its own."""
    call = [sys.executable, "-m", "benchmarks.scale", "--serve", str(socket_path), "--think-s", str(think_s)]
    process = subprocess.Popen(call, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdout.readline()
        yield str(socket_path)
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def serve(socket_path: Path, think_s: float) -> None:
    """Answers until the standard input ends."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(1 << 20)

    def write(session: str, opening: Sequence[tuple[str, str]]) -> Script:
        waits = think_s / TURNS * (0.5 + counter_uniform(0, *session.encode()))
        script = expert_script(opening)
        said = next(script)
        while True:
            yield waits
            answer = yield said
            try:
                said = script.send(answer)
            except StopIteration:
                return

    with ScriptedEngine(socket_path, Chat(POLICY), write):
        print("ready", flush=True)
        sys.stdin.read()


@contextmanager
def opened(kind: str, folder: Path, running: int, starting: int) -> Iterator[LocalFleet | RayFleet]:
    """A fleet of either kind."""
    common: dict[str, Any] = {
        "warm": warm_up(("brief",), policy=POLICY),
        "temporary": folder / "tmp",
        "max_starting": starting,
    }
    scratch = folder / "trials"
    with (
        LocalFleet(scratch, **common) if kind == "local" else RayFleet(scratch, slots=running, **common)
    ) as fleet:
        yield fleet


def settings(trials: int, running: int) -> Settings:
    """An evaluation of so many trials, and nothing else."""
    return Settings(
        steps=0,
        batch_groups=1,
        group_size=2,
        max_staleness=0,
        max_running=running,
        max_retries=0,
        min_valid=2,
        tolerance=1e-6,
        max_zero_variance=4,
        max_lost=4,
        order="oldest",
        in_order_steps=0,
        late_group="wait",
        requeue_stale=True,
        task_count=TASKS,
        seed=0,
        save_every=0,
        evaluate_at=(0,),
        evaluation_tasks=TASKS,
        evaluation_samples=trials // TASKS,
    )


def spec(tasks: Sequence[Path], scratch: Path, action: StartTrial, trial_id: str) -> Record:
    """What a trial needs. Its deadlines are for a machine that is busy with all the others."""
    return {
        "trial_id": trial_id,
        "task": str(tasks[action.task]),
        "policy": str(POLICY),
        "sandbox": "bubblewrap",
        "sandbox_limits": {"start_s": 300.0, "stop_s": 300.0},
        "scratch": str(scratch),
        "seed": counter_hash(0, action.task, action.sample),
        "purpose": "eval",
        "start_s": 300.0,
        "deadline_s": 3600.0,
        "tool_timeout_s": 300.0,
        "engine_s": 600.0,
        "verify_s": 300.0,
        "stop_s": 300.0,
        "limits": {
            "context": 200_000,
            "turn_tokens": 4_000,
            "turns": 100,
            "repairs": 2,
            "result_characters": 1200,
            "nudge_ratio": 0.0,
            "temperature": 1.0,
        },
    }


class Counts:
    """The loop's observer: what became of trials, and how many there were at a time."""

    def __init__(self, planned: int) -> None:
        self.planned, self.outcomes, self.causes = planned, Counter[str](), Counter[str]()
        self.cpu_s: list[float] = []
        self.seconds: dict[str, list[float]] = {}
        self.spans: list[tuple[float, float]] = []
        self.begun_s = self.ended_s = time.monotonic()

    @property
    def most(self) -> int:
        """The most trials that were between their start and their end at a moment, by their own clocks."""
        moments = sorted([(b, 1) for b, _ in self.spans] + [(e, -1) for _, e in self.spans])
        now = most = 0
        for _, change in moments:
            now += change
            most = max(most, now)
        return most

    def trial(self, action: StartTrial, result: Result, *, valid: bool) -> None:
        outcome = result["outcome"]
        self.outcomes[outcome["kind"]] += 1
        if outcome["kind"] == "system_error":
            self.causes[f"{outcome['phase']}: {outcome['cause']}"[:200]] += 1
        self.cpu_s.append(result["cpu_seconds"]["trial"])
        spent = result.get("seconds", {})
        for name, value in spent.items():
            self.seconds.setdefault(name, []).append(value)
        self.ended_s = time.monotonic()
        lived = sum(value for name, value in spent.items() if name not in ("ready", "engine"))
        self.spans.append((self.ended_s - lived, self.ended_s))
        if sum(self.outcomes.values()) % 250 == 0:
            print(
                f"{sum(self.outcomes.values())} of {self.planned}, {self.ended_s - self.begun_s:.0f} s, "
                f"{dict(self.outcomes)}",
                file=sys.stderr,
                flush=True,
            )

    def dropped(self, action: DropGroup) -> None: ...
    def step(
        self,
        action: Train,
        results: Sequence[Result],
        metrics: StepMetrics,
        *,
        idle_s: float,
        engine: Mapping[str, Any],
    ) -> None: ...
    def evaluation(self, version: int, trials: Sequence[tuple[StartTrial, Result]]) -> None: ...
    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def tick(self) -> None: ...


class Memory:
    """Looks now and then what memory driver, parent of the trials and all processes below this one take, in MB.

    PSS: what is shared is divided by those who share it, so that the sum is what the machine holds.
    """

    EVERY_S = 60.0

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._over = fleet, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.most: dict[str, float] = {}

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self.driver_cpu_s = time.process_time()

    def _watch(self) -> None:
        while not self._over.wait(self.EVERY_S):
            below = descendants(os.getpid())
            sizes = {pid: pss_mb(pid) for pid in (os.getpid(), *below)}
            parents = [pid for pid in below if "system.fleet.warm" in called(pid) and parent_is_no_trial(pid)]
            found = {
                "all": sum(sizes.values()),
                "processes": len(sizes),
                "driver": sizes[os.getpid()],
                "parent": sum(sizes.get(pid, 0.0) for pid in parents),
                "engine": sum(size for pid, size in sizes.items() if "benchmarks.scale" in called(pid)),
                "ray": sum(
                    size for pid, size in sizes.items() if "ray::" in called(pid) or "/ray/" in called(pid)
                ),
                "gone_from_machine": (available_at_start - available_mb()),
            }
            for name, value in found.items():
                self.most[name] = round(max(self.most.get(name, 0.0), value), 1)


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (state := state_of(int(name))):
            below.setdefault(int(state[1]), []).append(int(name))
    found, waiting = [], [pid]
    while waiting:
        more = below.get(waiting.pop(), [])
        found += more
        waiting += more
    return found


def state_of(pid: int) -> list[str]:
    """What the kernel says of a process after its name; [] if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def called(pid: int) -> str:
    """How a process was called; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def parent_is_no_trial(pid: int) -> bool:
    """Whether this is the parent of the trials: they are called as it is, and so is what they fork."""
    state = state_of(pid)
    return bool(state) and "system.fleet.warm" not in called(int(state[1]))


def pss_mb(pid: int) -> float:
    """Proportional size of a process; 0 if it is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def available_mb() -> float:
    """What the kernel could still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


available_at_start = available_mb()


def page(records: Sequence[Record]) -> str:
    """The table."""
    rows = []
    for r in records:
        memory, cpu = r["memory_mb"], r["trial_cpu_s"]
        others = sum(memory.get(name, 0.0) for name in ("driver", "engine", "ray"))
        share = (memory.get("all", 0.0) - others) / max(1, r["most_at_once"])
        rows.append(
            (
                *(r["fleet"], f"{r['trials']:,}", str(r["most_at_once"]), str(r["system_errors"])),
                f"{r['wall_s']:.0f} s",
                f"{r['trials_per_minute']:.0f}",
                f"{cpu['p50']:.2f} / {cpu['p95']:.2f} s",
                *(f"{memory.get(name, 0.0):.0f}" for name in ("all", "driver", "parent", "engine", "ray")),
                f"{share:.1f}",
            )
        )
    headings = (
        *("fleet", "trials", "most at once", "system errors", "wall", "trials a minute", "CPU of a trial"),
        *("PSS of all, MB", "driver", "parent", "engine", "Ray", "MB a trial"),
    )
    about = f"{records[0]['machine']}, commit {records[0]['commit'][:10]}; median / 95 %; memory at its most"
    loads = ", ".join(f"{r['load'][1]:.1f}" for r in records)
    return f"{about}; load at the end {loads}\n\n{markdown_table(headings, rows)}\n"


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", choices=["local", "ray"], help="only this one")
    parser.add_argument("--trials", type=int, help=f"of each fleet, a multiple of {TASKS}")
    parser.add_argument("--running", type=int, help="trials at a time")
    parser.add_argument("--starting", type=int, default=16, help="of these, starting at a time")
    parser.add_argument(
        "--think-s", type=float, default=60.0, help="seconds that the engine takes for a trial"
    )
    parser.add_argument("--out", type=Path, default=RECORDED / "scale", help="without a suffix")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    asked = parsed()
    if asked.serve:
        serve(asked.serve, asked.think_s)
    else:
        sys.exit(main(asked))
