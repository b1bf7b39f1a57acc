"""What a run took, live or simulated, in the same words: its trials, its steps, and what each of them worked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from core.schedule import Settings
from system.journal import Entry, read_journal, read_tags
from system.record.metrics import lines_of

from .cluster import Cluster
from .run import Record, Trial
from .workload import TrialPlan, Turn, plan_of


class Ran(NamedTuple):
    """A training trial: `Ran(group=3, begun_s=0.1, ended_s=4.2, start_s=0.3, end_s=0.1, cpu_s=0.11, plan=...)`.

    Its plan's turns say what its calls took, on that machine under that load.
    """

    group: int
    begun_s: float
    ended_s: float
    start_s: float
    "Until it asked the engine for the first time."
    end_s: float
    "From its last token until it had ended."
    cpu_s: float
    "Of all its processes."
    plan: TrialPlan

    @property
    def own_s(self) -> float:
        """In which it did not wait for the engine."""
        return self.start_s + sum(turn.tool_s for turn in self.plan.turns) + self.end_s


class Took(NamedTuple):
    """An optimizer step: `Took(begun_s=8.0, ended_s=9.5, rows=[310], ages={0: 300.0}, cpu_s=1.4, engine={...})`."""

    begun_s: float
    ended_s: float
    rows: list[int]
    "Tokens of each row that it was given."
    ages: dict[int, float]
    "Trained tokens by age, in versions."
    cpu_s: float
    "That the trainer had worked by its end."
    engine: dict[str, float]
    "What the engines had done by its end."


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is predicted: `Figures(steps_per_minute=7.1, trainer_idle=0.42, mean_age=0.8)`."""

    steps_per_minute: float
    trainer_idle: float
    "Share of the time in which the trainer took no step."
    mean_age: float
    "Of a trained token, in versions."


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run's settings, and what became of it.

    Args:
        settings: of its schedule.
        engines: how many sampled.
        cores: common to all of it; without end where each has its own.
        trials: those for training that were seen to their end, in the order in which they ended.
        steps: in their order.
        sync_s: from the order to bring new weights to their arrival, each time but the first.
        driver_s: that the driver worked from the first step's end to the last one's.
    """

    settings: Settings
    engines: int
    cores: float
    trials: list[Ran]
    steps: list[Took]
    sync_s: list[float]
    driver_s: float = 0.0

    def figures(self) -> Figures:
        """From the end of the first step, in which everything is slow once, to that of the last."""
        begun, steps = self.steps[0].ended_s, self.steps[1:]
        if not steps or not steps[-1].ended_s > begun:
            raise ValueError(f"a run must have taken two steps to be measured, got {len(self.steps)}")
        seconds = steps[-1].ended_s - begun
        trained = [(age, tokens) for step in steps for age, tokens in step.ages.items()]
        return Figures(
            steps_per_minute=60 * len(steps) / seconds,
            trainer_idle=1 - sum(step.ended_s - step.begun_s for step in steps) / seconds,
            mean_age=sum(age * tokens for age, tokens in trained) / max(sum(n for _, n in trained), 1e-9),
        )

    def record(self) -> dict[str, Any]:
        """As JSON, short: every number a place in a list."""
        return {
            "settings": asdict(self.settings),
            "engines": self.engines,
            "cores": self.cores if self.cores < float("inf") else None,
            "trials": [[*trial[:-1], trial.plan] for trial in self.trials],
            "steps": list(self.steps),
            "sync_s": self.sync_s,
            "driver_s": self.driver_s,
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Measured:
        """From that JSON."""
        settings = record["settings"]
        trials = [
            Ran(
                group,
                begun,
                ended,
                start,
                end,
                cpu,
                TrialPlan(prompt, tuple(Turn(*t) for t in turns), reward),
            )
            for group, begun, ended, start, end, cpu, (prompt, turns, reward) in record["trials"]
        ]
        steps = [
            Took(begun, ended, rows, {int(age): n for age, n in ages.items()}, cpu, engine)
            for begun, ended, rows, ages, cpu, engine in record["steps"]
        ]
        return cls(
            settings=Settings(**{**settings, "evaluate_at": tuple(settings["evaluate_at"])}),
            engines=record["engines"],
            cores=float("inf") if record["cores"] is None else record["cores"],
            trials=trials,
            steps=steps,
            sync_s=record["sync_s"],
            driver_s=record["driver_s"],
        )


# A run that was simulated.


def measured_of(record: Record, cluster: Cluster) -> Measured:
    """A simulated run, as its files would tell of it had it been live."""
    worked = 0.0
    steps = []
    for step in record.steps:
        worked += step.work_s
        rows = [n for name in step.trial_ids for n in record.trials[name].plan.rows]
        steps.append(Took(step.begun_s, step.ended_s, rows, step.ages, worked, step.engine))
    trials = [t for t in record.trials.values() if t.kind != "cancelled" and t.action.purpose == "train"]
    return Measured(
        settings=record.settings,
        engines=cluster.engines,
        cores=cluster.cores,
        trials=[_simulated(trial, cluster) for trial in trials],
        steps=steps,
        sync_s=[record.sync_s / record.syncs] * record.syncs,
    )


def _simulated(trial: Trial, cluster: Cluster) -> Ran:
    start, *calls, end = trial.own
    turns = [turn._replace(tool_s=s) for turn, s in zip(trial.plan.turns, [*calls, 0.0], strict=True)]
    work = cluster.start_s + sum(turn.tool_s for turn in trial.plan.turns) + cluster.verify_s
    return Ran(
        group=trial.action.group_id,
        begun_s=trial.started_s,
        ended_s=trial.ended_s,
        start_s=start,
        end_s=end,
        cpu_s=cluster.trial_load * work,
        plan=trial.plan._replace(turns=tuple(turns)),
    )


# A run that left files.


def read_measured(folder: Path, *, cores: float | None = None) -> Measured:
    """A live run from its folder: its first arm and seed that took a step.

    Args:
        folder: with config.json, events.jsonl, metrics.jsonl and trajectories.jsonl.
        cores: common to engines, trainer and trials; by default this machine's, where the engines were embedded.

    Raises:
        ValueError: the folder is none of a run that took two steps.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        tags = next((t for t in read_tags(folder / "events.jsonl") if lines_with_steps(folder, t)), None)
        if tags is None:
            raise ValueError("got a run without steps")
        if cores is None:
            embedded = config.get("engine", "embedded") == "embedded"
            cores = float(len(os.sched_getaffinity(0))) if embedded else float("inf")
        return _read(folder, tags, engines=config.get("engines", 1), cores=cores)
    except (OSError, LookupError, TypeError, ValueError) as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"a run's folder must hold what it did in two steps or more, got {folder}: {told}"
        ) from None


def lines_with_steps(folder: Path, tags: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the metrics say of the steps of a run."""
    return [line for line in lines_of(folder / "metrics.jsonl", dict(tags)) if "step_seconds" in line]


def _read(folder: Path, tags: Mapping[str, Any], *, engines: int, cores: float) -> Measured:
    settings, entries = read_journal(folder / "events.jsonl", tags=dict(tags))
    told = {line["step"]: line for line in lines_with_steps(folder, tags)}
    clock = _Clock.of(entries)
    prefix = f"{tags['arm']}/{tags['seed']}/"
    trials: list[Ran] = []
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in lines_of(folder / "trajectories.jsonl", dict(tags)):
        name = str(record["trial_id"]).removeprefix(prefix)
        rows[name] = [{k: row[k] for k in ("loss_mask", "policy_version")} for row in record.get("rows", ())]
        if record["purpose"] == "train" and name in clock.ended and (plan := plan_of(record)):
            trials.append(_ran(record, plan, clock.group[name], clock.started[name], clock.ended[name]))
    steps = []
    # A step that was taken again after the run was killed counts as it was the last time.
    last = {train["version"]: (train, begun, ended) for train, begun, ended in clock.trained}
    for train, begun, ended in last.values():
        line = told.get(train["version"] + 1)
        if line is not None:
            given = [rows[name] for name in train["trial_ids"]]
            lengths = [len(row["loss_mask"]) for trial in given for row in trial]
            cpu = (
                line.get("trainer_cpu_s")
                or sum(step.ended_s - step.begun_s for step in steps) + ended - begun
            )
            steps.append(Took(begun, ended, lengths, _ages(train, given), cpu, line.get("engine", {})))
    if len(steps) < 2:
        raise ValueError(f"got {len(steps)} steps")
    worked = [line.get("driver_cpu_s", 0.0) for line in told.values()]
    return Measured(
        settings=replace(settings, evaluate_at=()),
        engines=engines,
        cores=cores,
        trials=trials,
        steps=steps,
        sync_s=clock.syncs[1:],
        driver_s=max(worked) - min(worked),
    )


@dataclass(slots=True, kw_only=True)
class _Clock:
    """When what happened, in seconds from the run's start."""

    started: dict[str, float]
    ended: dict[str, float]
    group: dict[str, int]
    trained: list[tuple[dict[str, Any], float, float]]
    syncs: list[float]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> _Clock:
        own = cls(started={}, ended={}, group={}, trained=[], syncs=[])
        train: tuple[dict[str, Any], float] | None = None
        sync = 0.0
        for event, actions, seconds in entries:
            match type(event).__name__:
                case "TrialEnded":
                    own.ended[event.trial_id] = seconds  # type: ignore[union-attr]
                case "StepTrained" if train is not None:
                    own.trained.append((*train, seconds))
                case "WeightsApplied":
                    own.syncs.append(seconds - sync)
                case _:
                    pass
            for action in actions:
                match action["type"]:
                    case "StartTrial":
                        own.started[action["trial_id"]] = seconds
                        own.group[action["trial_id"]] = action["group_id"]
                    case "Train":
                        train = action, seconds
                    case "SyncWeights":
                        sync = seconds
                    case _:
                        pass
        return own


def _ran(record: Mapping[str, Any], plan: TrialPlan, group: int, begun_s: float, ended_s: float) -> Ran:
    """A trial's times; what its agent did between two turns goes to the calls, what no phase tells to start and end."""
    seconds = record.get("seconds", {})
    told = {name: seconds.get(name, 0.0) for name in ("start", "ready", "agent", "engine")}
    calls = sum(turn.tool_s for turn in plan.turns)
    own = max(0.0, told["agent"] - told["ready"] - told["engine"] - calls)
    between = own / max(1, len(plan.turns) - 1)
    turns = [turn._replace(tool_s=round(turn.tool_s + between, 4)) for turn in plan.turns[:-1]]
    closing = sum(seconds.get(name, 0.0) for name in ("freeze", "verify", "teardown"))
    untold = max(0.0, ended_s - begun_s - told["start"] - told["agent"] - closing) / 2
    return Ran(
        group=group,
        begun_s=begun_s,
        ended_s=ended_s,
        start_s=round(told["start"] + told["ready"] + untold, 4),
        end_s=round(closing + untold + plan.turns[-1].tool_s, 4),
        cpu_s=round(record.get("cpu_seconds", {}).get("trial", 0.0), 4),
        plan=plan._replace(turns=(*turns, plan.turns[-1]._replace(tool_s=0.0))),
    )


def _ages(train: Mapping[str, Any], given: Iterable[list[dict[str, Any]]]) -> dict[int, float]:
    ages: dict[int, float] = {}
    for trial in given:
        for row in trial:
            for sampled, version in zip(row["loss_mask"], row["policy_version"], strict=True):
                if sampled and version >= train["min_version"]:
                    age = train["version"] - version
                    ages[age] = ages.get(age, 0.0) + 1
    return ages


def pooled(some: Iterable[Figures]) -> Figures:
    """The mean of several runs with the same settings."""
    told = list(some)
    return Figures(
        steps_per_minute=fmean(f.steps_per_minute for f in told),
        trainer_idle=fmean(f.trainer_idle for f in told),
        mean_age=fmean(f.mean_age for f in told),
    )
