"""Turns what the loop reports into lines: metrics.jsonl a step, trajectories.jsonl a trial, and the live view."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from core.estimate import Behaviour, behaviour_rates
from core.schedule import DropGroup, StartTrial, Train
from core.staleness import staleness, staleness_histogram
from system.record.metrics import JsonLines
from system.record.progress import Progress
from system.trainer import StepMetrics

Result = Mapping[str, Any]

ENGINE_COUNTERS = ("steps", "sampled_tokens", "context_tokens", "prefill_tokens", "cpu_s", "busy_s")
"""Of what the engines did so far, by what `system.simulator.fit` learns how fast they are."""


class Recorder:
    """The observer of one arm and seed.

    Args:
        arm, seed: named in every line.
        tasks: purpose ("train", "eval") to the description of each task: task, level, family, domain.
        metrics, trajectories: files shared by all arms of the run.
        progress: the live view.
    """

    def __init__(
        self,
        *,
        arm: str,
        seed: int,
        tasks: Mapping[str, Sequence[Mapping[str, Any]]],
        metrics: JsonLines,
        trajectories: JsonLines,
        progress: Progress,
    ) -> None:
        self.tags = {"arm": arm, "seed": seed}
        self.tasks, self.metrics, self.trajectories, self.progress = tasks, metrics, trajectories, progress
        self.begun = self.interval_begun = time.monotonic()
        self.taken = 0
        self.since: dict[int, list[tuple[int, Result]]] = {}
        """Valid training trials with their levels, by the step before which they ended."""
        levels = [task["level"] for task in tasks["train"]]
        self.level_share = {level: levels.count(level) / len(levels) for level in sorted(set(levels))}
        self.level_scores: dict[int, tuple[float, float]] = {}
        self.by_version: dict[int, dict[int, list[float]]] = {}
        self.system_errors, self.trials, self.recalled = 0, 0, 0
        self.zero_variance: Counter[int] = Counter()
        self.first_step_at: float | None = None
        self.idle_s, self.worked_s = 0.0, 0.0
        self.ages: list[int] = []
        self.trainer_cpu_s = 0.0
        self.cpu_seconds = {"agent": 0.0, "tools": 0.0}
        self.evaluated: dict[str, Any] | None = None

    def trial(self, action: StartTrial, result: Result, *, valid: bool) -> None:
        """A trial ended."""
        told = self.tasks[action.purpose][action.task]
        self._tally(action.purpose, action.policy_version, told, result, valid=valid)
        cpu = result.get("cpu_seconds", {})
        self.cpu_seconds["agent"] += cpu.get("agent", 0.0)
        self.cpu_seconds["tools"] += cpu.get("trial", 0.0) - cpu.get("agent", 0.0)
        if valid and action.purpose == "train":
            self.since.setdefault(self.taken + 1, []).append((told["level"], result))
        about = {
            "purpose": action.purpose,
            "group_id": action.group_id,
            "version_started": action.policy_version,
        }
        self.trajectories.write({**self.tags, **about, **told, **result})
        self.progress.trial_done()

    def _tally(
        self, purpose: str, version: int, task: Mapping[str, Any], result: Result, *, valid: bool
    ) -> None:
        self.trials += 1
        self.system_errors += result["outcome"]["kind"] == "system_error"
        if valid and purpose == "train":
            scores = self.by_version.setdefault(version, {})
            scores.setdefault(task["level"], []).append(result["reward"])

    def recall(
        self,
        trials: Iterable[tuple[Result, bool, int]],
        metrics: Iterable[Mapping[str, Any]],
        *,
        version: int,
        zero_variance: Mapping[int, int],
        seconds: float,
    ) -> None:
        """Takes in what a killed run had written of the steps up to the version from which it goes on.

        What their processes worked is not told; the CPU seconds are of what has ended since.

        Args:
            trials: with whether their reward is valid, and the step before which they ended.
            metrics: of those steps.
            version: from which it goes on.
            zero_variance: groups that were dropped for it, by the step before which they were.
            seconds: that it had run.
        """
        self.begun -= seconds
        self.taken = version
        self.zero_variance.update(zero_variance)
        for result, valid, step in trials:
            self._tally(result["purpose"], result["version_started"], result, result, valid=valid)
            self.recalled += 1
            if valid and result["purpose"] == "train":
                self.since.setdefault(step, []).append((result["level"], result))
        for step in sorted(step for step in self.since if step <= version):
            self._score_levels(self.since.pop(step))
        for line in metrics:
            if line.get("eval"):
                self.evaluated, self.by_version = dict(line), {}
            elif "staleness" in line:
                self.ages += [int(age) for age, count in line["staleness"].items() for _ in range(count)]
                self.first_step_at = self.first_step_at or self.begun + line["seconds"]
                self.worked_s += line.get("step_seconds", 0.0)
                self.idle_s += line["trainer_idle"] * line.get("step_seconds", 0.0)
            if line.get("eval") or "step" in line:  # the others are of the curve
                self.progress.record(line)

    def dropped(self, action: DropGroup) -> None:
        """A group left without being trained."""
        self.zero_variance[self.taken + 1] += action.reason == "zero_variance"

    def step(
        self,
        action: Train,
        results: Sequence[Result],
        metrics: StepMetrics,
        *,
        idle_s: float,
        engine: Mapping[str, Any],
    ) -> None:
        """An optimizer step was taken."""
        now = time.monotonic()
        self.first_step_at = self.first_step_at or now
        step_seconds = now - self.interval_begun
        self.idle_s += idle_s
        self.worked_s += step_seconds
        self.taken = metrics.policy_version
        since = self.since.pop(self.taken, [])
        self.trainer_cpu_s = metrics.cpu_s
        ages = [staleness(versions(r), version=action.version) for r in results]
        self.ages += ages
        sampled = [sum(v >= 0 for v in versions(r)) for r in results]
        self.metrics.write(
            line := {
                **self.tags,
                "step": metrics.policy_version,
                "seconds": round(now - self.begun, 2),
                **graded([result for _, result in since]),
                **self._balanced(since),
                "staleness": {str(age): count for age, count in staleness_histogram(ages).items()},
                "versions_in_trajectory_max": max(len({v for v in versions(r) if v >= 0}) for r in results),
                "trainer_idle": idle_s / step_seconds,
                "step_seconds": step_seconds,
                "train_seconds": metrics.seconds,
                "trainer_cpu_s": metrics.cpu_s,
                "driver_cpu_s": time.process_time(),
                "engine": {name: engine[name] for name in ENGINE_COUNTERS if name in engine},
                "grad_norm": metrics.grad_norm,
                "masked_share": metrics.masked_share,
                "unusable": metrics.unusable,
                "mismatch": metrics.mismatch,
                "entropy": metrics.entropy,
                "groups": len(action.group_ids),
                "rows": metrics.rows,
                "zero_variance": self.zero_variance.pop(self.taken, 0),
                "trained_tokens": metrics.trained_tokens,
                "system_errors": self.system_errors,
                "sampled_tokens_min": min(sampled),
                "sampled_tokens_max": max(sampled),
            }
        )
        self.progress.record(line)
        self.interval_begun = now

    def _write_curve(self) -> None:
        """Mean reward of the training trials of each level by the version at which they were started.

        By the time at which they ended, the first steps would be short tasks only and the last ones long tasks only.
        """
        for version, levels in sorted(self.by_version.items()):
            told = {str(level): {"trials": len(r), "reward": fmean(r)} for level, r in sorted(levels.items())}
            self.metrics.write({**self.tags, "version": version, "levels": told})
        self.by_version = {}

    def _balanced(self, since: Sequence[tuple[int, Result]]) -> dict[str, Any]:
        """Reward and share passed since the last step, each level weighed by its share of the training tasks.

        What ends in an interval is short first and long last, so a plain mean would follow the schedule more than the
        policy. A level that brought no trial keeps its last score, and has no weight before its first.
        """
        self._score_levels(since)
        if not self.level_scores:
            return {"reward": None, "passed": None}
        known = {level: self.level_share[level] for level in self.level_scores}
        pairs = [(share / sum(known.values()), *self.level_scores[level]) for level, share in known.items()]
        return {"reward": sum(w * r for w, r, _ in pairs), "passed": sum(w * p for w, _, p in pairs)}

    def _score_levels(self, since: Sequence[tuple[int, Result]]) -> None:
        by_level: dict[int, list[Result]] = {}
        for level, result in since:
            by_level.setdefault(level, []).append(result)
        for level, results in by_level.items():
            told = graded(results)
            self.level_scores[level] = (told["reward"], told["passed"])

    @property
    def trainer_idle(self) -> float:
        """Share of the time from the start to the last step in which the trainer waited for a batch.

        What a killed run did for steps that were taken again does not count.
        """
        return self.idle_s / max(1e-9, self.worked_s)

    def evaluation(self, version: int, trials: Sequence[tuple[StartTrial, Result]]) -> None:
        """An evaluation at a fixed version ended, with these valid trials.

        What the training trials before it got is complete by now.
        """
        self._write_curve()
        by_task: dict[int, list[Result]] = {}
        for action, result in trials:
            by_task.setdefault(action.task, []).append(result)
        tasks = [
            {
                **self.tasks["eval"][task],
                "rewards": [r["reward"] for r in results],
                "passed": [bool(r["passed"]) for r in results],
            }
            for task, results in sorted(by_task.items())
        ]
        scored = [result for results in by_task.values() for result in results]
        self.evaluated = {**self.tags, "eval": True, "version": version, **graded(scored), "tasks": tasks}
        self.metrics.write(self.evaluated)
        self.progress.record(self.evaluated)

    def note(self, text: str) -> None:
        """A line that stays."""
        self.progress.note(f"{self.tags['arm']}/{self.tags['seed']}: {text}")

    def tick(self) -> None:
        """Lets the clock of the live view move."""
        self.progress.tick()


def versions(result: Result) -> list[int]:
    """The policy version of every token of a trial, NOT_SAMPLED where none was."""
    return [v for row in result["rows"] for v in row["policy_version"]]


def behaviour(result: Result) -> Behaviour:
    """What one trial did."""
    calls = [turn for turn in result["turns"] if turn["tool"]]
    return Behaviour(
        turns=len(result["turns"]),
        sampled_tokens=sum(v >= 0 for v in versions(result)),
        tool_calls=len(calls),
        tool_errors=sum(turn["error"] for turn in calls),
        context_exhausted=result["outcome"]["reason"] == "context",
    )


def graded(results: Sequence[Result]) -> dict[str, Any]:
    """Mean reward, share passed and behaviour of some trials; None where there are none."""
    if not results:
        return dict.fromkeys(
            ("reward", "passed", "turns", "tokens_per_turn", "tool_success", "context_exhausted")
        )
    rates = behaviour_rates([behaviour(result) for result in results])
    return {
        "reward": sum(r["reward"] for r in results) / len(results),
        "passed": sum(bool(r["passed"]) for r in results) / len(results),
        "nudged": sum(bool(r["nudged"]) for r in results) / len(results),
        "turns": rates.turns,
        "tokens_per_turn": rates.tokens_per_turn,
        "tool_success": rates.tool_success,
        "context_exhausted": rates.context_exhausted,
    }
