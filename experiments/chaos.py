"""Is anything lost, done twice or made up, whatever dies? A real run is struck at random, resumed, and audited.

python experiments/chaos.py --minutes 10

Kills trials, tool servers, the parent of the trials, the engine, the trainer and the whole run; fills the disk, stalls
the judge, cuts the journal's last line, damages a checkpoint, and tries to resume the run a second time while it lives.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import check_tokens
from command import claim, command_line

from system.chaos.audit import AUDITS, ledger, read_history, reward_faults, surviving_steps
from system.chaos.disk import Disk
from system.chaos.judge import CRITERION, StallingJudge, is_met
from system.chaos.life import End, Life
from system.chaos.target import TARGETS, descendants, kill
from system.record.audit import machine_name
from system.record.metrics import commit_hash, write_json
from system.run import RunError
from system.sandbox import kernel
from system.sandbox.scratch import mounts_below
from system.world.generate import generate

ROOT = Path(__file__).resolve().parent.parent

DECK = {
    **{"trial": 6, "tool server": 5, "worker": 2, "judge": 2, "engine": 1, "trainer": 1},
    **{"run": 1, "run, all at once": 1, "disk": 1, "second run": 1},
}
"""Faults in 21, shuffled anew each time: what is cheap often, what ends the run about one time in five."""

DEADLY = ("trainer", "run", "run, all at once", "disk")
"""Faults after which the run must have ended soon."""

END_S, UP_S, SILENT_S = 90.0, 240.0, 120.0
"""How long a run may take to end after a deadly fault, to be up again, and to write nothing into its journal."""

TAGS = {"arm": "policy", "seed": 0}


@dataclass(frozen=True, kw_only=True)
class Config:
    minutes: float = 10.0
    """How long faults strike."""
    fleet: Literal["local", "ray"] = "local"
    """Who runs the trials."""
    seed: int = 0
    """Of the faults, their order and their times."""
    kinds: tuple[str, ...] = ()
    """Only these faults, each once a turn; by default all of them, the cheap ones more often."""
    gap_s: float = 3.0
    """Mean time from when the run is well to the next fault."""
    least_faults: float = 6.0
    """Faults a minute without which the run was too quiet to pass."""
    least_steps: float = 3.0
    """Steps a minute, along the surviving line of weights, without which it does not pass."""
    out: Path | None = None
    """Folder of the report and of the run; by default out/chaos/<time>."""
    record: Path | None = None
    """Where a copy of the report goes as well, with .json and .md after its name."""

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.kinds) - DECK.keys()):
            raise ValueError(f"kinds must be of {', '.join(DECK)}, got {unknown[0]}")
        for name in ("minutes", "gap_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("seed", "least_faults", "least_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(slots=True, kw_only=True)
class Fault:
    """One blow: `Fault(kind="engine", at_s=41.2, version=3, what="pid 812")`."""

    kind: str
    at_s: float
    version: int
    what: str
    outcome: str = ""
    "went on, or how the run ended."
    up_s: float | None = None
    "From its end until it went on."
    wrong: str = ""
    "What must not be."


@dataclass(kw_only=True)
class Storm:
    """The run, what strikes it, and what came of that."""

    config: Config
    life: Life
    disk: Disk
    judge: StallingJudge
    run: Path
    random: Random
    begun: float = field(default_factory=time.monotonic)
    faults: list[Fault] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        """Since the first fault could have struck."""
        return time.monotonic() - self.begun

    def rage(self) -> None:
        """Strikes until the time is over."""
        deck = self._deck()
        while self.now_s < 60 * self.config.minutes:
            wait = min(self.random.expovariate(1 / self.config.gap_s), 4 * self.config.gap_s)
            end = self.life.end(wait)
            if end is not None:
                self._ended(self.faults[-1], end)
                continue
            self.life.look()
            bury({self.life.pid})
            self._strike(next(deck))
            if time.monotonic() - self.life.heard_at > SILENT_S:
                self.faults[-1].wrong = f"the journal was silent for {SILENT_S:g} s"
                self._put_down(self.faults[-1])

    def _deck(self) -> Iterator[str]:
        while True:
            counts = dict.fromkeys(self.config.kinds, 1) or DECK
            cards = [kind for kind, count in counts.items() for _ in range(count)]
            self.random.shuffle(cards)
            yield from cards

    def _strike(self, kind: str) -> None:
        fault = Fault(kind=kind, at_s=round(self.now_s, 2), version=self.life.version, what="")
        deed = self._deeds().get(kind, lambda: self._kill_one(kind))
        told = deed()
        if told is None:  # nothing of that kind just now
            return
        fault.what = told
        self.faults.append(fault)
        end = self.life.end(END_S if kind in DEADLY else 0.5)
        if kind == "disk":
            self.disk.free(self._processes())
        if end is not None:
            self._ended(fault, end)
        elif kind in DEADLY:
            fault.wrong = f"the run must end within {END_S:g} s, got one that hangs"
            self._put_down(fault)
        else:
            fault.outcome = "went on"

    def _deeds(self) -> dict[str, Callable[[], str | None]]:
        return {
            "run": lambda: f"{self.life.kill(all_at_once=False)} process",
            "run, all at once": lambda: f"{self.life.kill(all_at_once=True)} processes",
            "disk": self._fill_disk,
            "judge": self._stall_judge,
            "second run": self._second_run,
        }

    def _kill_one(self, kind: str) -> str | None:
        there = TARGETS[kind](self.life.pid)
        if not there:
            return None
        chosen = self.random.choice(there)
        return f"pid {chosen.pid}" if kill([chosen.pid]) else None

    def _fill_disk(self) -> str:
        self.disk.fill(self._processes())
        return self.disk.how

    def _processes(self) -> list[int]:
        return [self.life.pid, *(process.pid for process in descendants(self.life.pid))]

    def _stall_judge(self) -> str:
        seconds = self.random.uniform(2.0, 14.0)
        self.judge.stall(seconds)
        return f"{seconds:.1f} s"

    def _second_run(self) -> str | None:
        """Refused in one line that names the first; else the fault is wrong."""
        other = Life(
            *self.life.commands,
            folder=self.run,
            log=self.run.parent.parent / "log" / "second",
            environment=os.environ,
        )
        other.start()
        end = other.end(END_S)
        if end is None:
            other.kill(all_at_once=True)
        if self.life.end(0.0) is not None:
            return None  # the first ended meanwhile, so that the second was right to go on
        refused = (
            end is not None and end.code == 2 and len(end.said) == 1 and str(self.life.pid) in end.said[0]
        )
        if not refused:
            raise RunError(f"a second run must be refused, got {end.told if end else 'one that runs'}")
        return "refused"

    def _ended(self, fault: Fault, end: End) -> None:
        """The run is dead: damage what a power cut could damage, and go on with it."""
        fault.outcome = end.told
        if not end.clean:
            fault.wrong = f"the run must end in one line, got exit {end.code} and {len(end.said)} lines"
        begun = time.monotonic()
        if self.random.random() < 0.3:
            fault.what += f"; {self._damage()}"
        self._go_on(fault)
        fault.up_s = round(time.monotonic() - begun, 2)

    def _damage(self) -> str:
        versions = sorted(self.run.glob("checkpoints/*/version-*"))
        if len(versions) > 1 and self.random.random() < 0.5:
            weights = versions[-1] / "model.safetensors"
            with open(weights, "r+b") as file:
                file.seek(weights.stat().st_size // 2)
                file.write(b"chaos")
            return f"{versions[-1].name} damaged"
        events = self.run / "events.jsonl"
        os.truncate(events, events.stat().st_size - self.random.randint(1, 20))
        self.life.forget_the_last_line()
        return "last line of the journal cut"

    def _go_on(self, fault: Fault) -> None:
        """Resumes until it is up; now and then it is killed once more while it starts."""
        for _ in range(8):
            self.life.start()
            if self.random.random() < 0.1 and self.life.end(self.random.uniform(0.0, 8.0)) is None:
                struck = self.life.kill(all_at_once=self.random.random() < 0.5)
                self.faults.append(
                    Fault(
                        kind="run, while it starts",
                        at_s=round(self.now_s, 2),
                        version=self.life.version,
                        what=f"{struck} processes",
                        outcome="exit -9",
                    )
                )
                self.life.end(END_S)
                continue
            if self.life.is_up(UP_S):
                return
            end = self.life.end(0.0)
            told = end.told if end else f"one that is not up within {UP_S:g} s"
            fault.wrong = f"a run must go on, got {told}"
            self.life.kill(all_at_once=True)
            self.life.end(END_S)
            break
        raise RunError(f"the run cannot be resumed: {fault.wrong}")

    def _put_down(self, fault: Fault) -> None:
        self.life.kill(all_at_once=True)
        if (end := self.life.end(END_S)) is not None:
            fault.outcome = end.told
        self._go_on(fault)


def main(config: Config) -> dict[str, Any]:
    """Strikes a run, audits it, writes chaos.json and chaos.md.

    Raises:
        RunError: something does not hold; the report says what.
    """
    folder = (config.out or Path("out") / "chaos" / time.strftime("%Y%m%d-%H%M%S")).resolve()
    claim(folder)
    about = {
        "command": f"python experiments/chaos.py --minutes {config.minutes:g} --fleet {config.fleet}"
        f" --seed {config.seed}",
        "commit": commit_hash(ROOT),
        "machine": machine_name(),
    }
    write_json(folder / "config.json", {**about, "config": asdict(config)})
    make_tasks(folder)
    temporary = Path(tempfile.mkdtemp(prefix="c"))  # short: paths of sockets are
    kernel.adopt_orphans()
    broken = ""
    with ExitStack() as stack:
        disk = stack.enter_context(Disk(folder / "disk"))
        judge = stack.enter_context(StallingJudge())
        run = disk.place / "run"
        life = life_of(config, folder, run, judge, temporary)
        storm = Storm(config=config, life=life, disk=disk, judge=judge, run=run, random=Random(config.seed))
        life.start()
        stack.callback(life.kill, all_at_once=True)
        if not life.is_up(UP_S):
            raise RunError(f"a run must begin, got {(life.end(0.0) or End(0, ())).told}")
        storm.begun = time.monotonic()
        try:
            storm.rage()
        except RunError as error:
            broken = str(error)
        seconds = storm.now_s
        stopped = life.stop(END_S)
        left = left_behind(temporary, disk.place)
        shutil.copytree(run, folder / "run")
        if disk.mounted:
            shutil.rmtree(run)
        how = disk.how
    shutil.rmtree(temporary, ignore_errors=True)
    kernel.leave_orphans()
    found = audited(folder / "run")
    wrong = [f"{f.kind} at {f.at_s:g} s: {f.wrong}" for f in storm.faults if f.wrong]
    found["faults"] = [*wrong, *([broken] if broken else [])]
    found["end"] = [] if stopped and stopped.code == 130 else [f"Ctrl-C must end the run, got {stopped}"]
    found["nothing left"] = left
    report = {**about, "seconds": round(seconds, 1), "disk": how, **counted(folder / "run"), "audits": found}
    report |= {"judge": {"asked": judge.asked, "answered": judge.answered}, "starts": life.starts}
    report |= {"by_kind": by_kind(storm.faults), "faults": [asdict(fault) for fault in storm.faults]}
    return finished(report, config, folder)


def make_tasks(folder: Path) -> None:
    """Training tasks whose reward is half ours and half the judge's."""
    generate(folder / "world", split="train", worlds=4, tasks=24, seed=0)
    for about in sorted((folder / "world" / "tasks").glob("*/bartleby.json")):
        told = json.loads(about.read_text())
        about.write_text(json.dumps({**told, "rubric": [CRITERION]}, indent=1) + "\n")


def life_of(config: Config, folder: Path, run: Path, judge: StallingJudge, temporary: Path) -> Life:
    """The run: one arm, small steps, saved every second, more steps than the time allows."""
    options = {
        "out": run,
        "train": folder / "world" / "tasks",
        "steps": 100_000,
        "groups": 2,
        "group-size": 4,
        "max-running": 8,
        "save-every": 2,
        "max-retries": 20,
        "tasks-held-out": 3,
        "attempts": 1,
        "deadline-s": 60,
        "trainer-s": 60,
        "judge-endpoint": judge.endpoint,
        "judge-model": "scripted",
        "judge-s": 8,
        **({} if config.fleet == "local" else {"fleet": config.fleet}),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return Life(
        [sys.executable, str(ROOT / "experiments" / "train.py"), *words],
        ["--resume", "True"],
        folder=run,
        log=folder / "log",
        environment={**os.environ, "TMPDIR": str(temporary)},
    )


def left_behind(temporary: Path, place: Path) -> list[str]:
    """Processes, mounts, sockets and files that are there when the run is over; what is dying gets its time."""
    deadline = time.monotonic() + 20
    while (found := _left(temporary, place)) and time.monotonic() < deadline:
        bury(set())
        time.sleep(0.1)
    return found


def bury(keep: set[int]) -> None:
    """Waits for orphans that fell to this process and are dead, as init would: the sandbox of one ends only then."""
    for pid in kernel.children():
        if pid not in keep:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _left(temporary: Path, place: Path) -> list[str]:
    mounts = [mount for mount in (*mounts_below(temporary), *mounts_below(place)) if mount != place]
    sockets = [
        line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if str(temporary) in line
    ]
    return [
        *(f"process {p.pid} {p.name} ({p.state}): {p.command[:100]}" for p in descendants(os.getpid())),
        *(f"mount {mount}" for mount in mounts),
        *(f"socket {socket}" for socket in sockets),
        *(f"file {path}" for path in temporary.rglob("*")),
        *(f"file {path}" for path in place.rglob("*.partial")),
        *(f"file {path}" for path in place.rglob("run.lock")),
    ]


def audited(run: Path) -> dict[str, list[str]]:
    """What does not hold, by audit; nothing where all is well."""
    try:
        history = read_history(run, tags=TAGS, name="policy/0")
    except (ValueError, OSError) as error:
        return {"journal": [str(error)]}
    found = {name: audit(history) for name, audit in AUDITS.items()}
    found["rewards"] = reward_faults(history, judged=is_met, judge=CRITERION["id"])
    found["tokens"] = token_faults(run) if history.rows else []
    replay = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "replay.py"), str(run)],
        capture_output=True,
        text=True,
        check=False,
    )
    found["replay.py"] = [replay.stderr.strip()] if replay.returncode else []
    return found


def token_faults(run: Path) -> list[str]:
    """Where the trainer used another token than the engine emitted, or other weights than it sampled with."""
    told = check_tokens.main(check_tokens.Config(run=run))
    largest = max(told["gaps"], default=0.0)
    return told["faults"] + ([f"mismatch is {largest}"] if largest > check_tokens.Config.mismatch else [])


def counted(run: Path) -> dict[str, Any]:
    """How much there was to audit."""
    history = read_history(run, tags=TAGS, name="policy/0")
    steps, _ = surviving_steps(history.entries)
    taken = sum(1 for entry in history.entries for action in entry.actions if action["type"] == "Train")
    kinds = [line["outcome"]["kind"] for line in history.trials]
    return {
        "steps": len(steps),
        "steps_taken": taken,
        "groups": ledger(history).counts,
        "trials": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "events": len(history.entries),
    }


def by_kind(faults: list[Fault]) -> dict[str, dict[str, Any]]:
    """The faults of each kind and what came of them."""
    told: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(fault.kind for fault in sorted(faults, key=lambda fault: fault.kind)):
        own = [fault for fault in faults if fault.kind == kind]
        up = sorted(fault.up_s for fault in own if fault.up_s is not None)
        told[kind] = {
            "faults": len(own),
            "went on": sum(fault.outcome == "went on" for fault in own),
            "ended": sum(fault.outcome.startswith("exit") for fault in own),
            "up again after s": up[len(up) // 2] if up else None,
            "wrong": sum(bool(fault.wrong) for fault in own),
        }
    return told


def finished(report: dict[str, Any], config: Config, folder: Path) -> dict[str, Any]:
    """The report with its verdict, written and shown."""
    minutes = report["seconds"] / 60
    least = {"faults": config.least_faults * minutes, "steps": config.least_steps * minutes}
    got = {"faults": len(report["faults"]), "steps": report["steps"]}
    report["audits"]["enough"] = [
        f"{name} must be {least[name]:.0f} at least, got {got[name]}"
        for name in least
        if got[name] < least[name]
    ]
    wrong = {name: faults for name, faults in report["audits"].items() if faults}
    report["passed"] = not wrong
    text = as_text(report)
    for place in (folder / "chaos", *([config.record] if config.record else [])):
        write_json(place.with_suffix(".json"), report)
        place.with_suffix(".md").write_text(text)
    print(text)
    if wrong:
        first = next(iter(wrong.values()))[0]
        raise RunError(
            f"{', '.join(wrong)} must hold, got {sum(map(len, wrong.values()))} faults, first: {first}"
        )
    return report


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    groups = ", ".join(f"{count} {fate}" for fate, count in report["groups"].items())
    trials = ", ".join(f"{count} {kind}" for kind, count in report["trials"].items())
    lines = [
        f"# Chaos: {len(report['faults'])} faults, {report['steps']} steps in {report['seconds'] / 60:.1f} minutes",
        "",
        f"`{report['command']}` at {report['commit']}, {report['machine']}. A full disk is {report['disk']}.",
        "",
        "| fault | struck | the run went on | it ended, and was resumed | up again after, median s |",
        "|---|---|---|---|---|",
        *(
            f"| {kind} | {row['faults']} | {row['went on']} | {row['ended']} | {_shown(row['up again after s'])} |"
            for kind, row in report["by_kind"].items()
        ),
        "",
        f"{report['starts']} starts, {report['steps_taken']} steps taken, {report['steps']} on the surviving line.",
        f"Groups: {groups}. Trials: {trials}. {report['events']} events.",
        "",
        "| audit | faults |",
        "|---|---|",
        *(f"| {name} | {len(faults) or 'none'} |" for name, faults in report["audits"].items()),
        "",
        *(f"- {name}: {fault}" for name, faults in report["audits"].items() for fault in faults[:20]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    command_line("chaos", main, Config)
