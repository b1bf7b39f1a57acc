"""What the evaluations of a run come to: scores with their errors, and arms compared in pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from core.estimate import compare, mean_and_error, seeds_needed
from core.staleness import staleness_histogram
from system.record.recorder import Recorder
from system.run import RunError


def scores(recorders: Sequence[Recorder], key: str) -> list[dict[str, float]]:
    """Mean over attempts of each held-out task that every recorder has a graded attempt of, for each recorder."""
    found = [
        {task["task"]: fmean(float(x) for x in task[key]) for task in recorder.evaluated["tasks"]}
        for recorder in recorders
        if recorder.evaluated is not None
    ]
    common = set.intersection(*(set(told) for told in found))
    if not common:
        raise RunError("no held-out task was graded in every run: only system errors; see trajectories.jsonl")
    return [{task: told[task] for task in sorted(common)} for told in found]


def arm_summary(recorders: Sequence[Recorder], seconds: Sequence[float]) -> dict[str, Any]:
    """Held-out scores with standard errors over tasks (of the mean over seeds), behaviour, and what it took."""
    lines = [r.evaluated for r in recorders if r.evaluated is not None]

    def estimate(key: str) -> dict[str, float]:
        by_task = zip(*(told.values() for told in scores(recorders, key)), strict=True)
        mean, error = mean_and_error([fmean(values) for values in by_task])
        return {"mean": mean, "se": error}

    def mean(key: str) -> float:
        return fmean(line[key] for line in lines)

    return {
        "reward": estimate("rewards"),
        "pass_at_1": estimate("passed"),
        "turns": mean("turns"),
        "tokens_per_turn": mean("tokens_per_turn"),
        "tool_success": mean("tool_success"),
        "context_exhaustion": mean("context_exhausted"),
        "staleness": staleness_histogram(age for r in recorders for age in r.ages),
        "seconds": fmean(seconds) if seconds else None,
        "trainer_idle": fmean(r.trainer_idle for r in recorders) if seconds else None,
    }


def comparisons(
    recorders: Mapping[str, Sequence[Recorder]],
    pairs: Sequence[tuple[str, str]],
    *,
    confidence: float,
    assumed_seed_spread: float,
) -> list[dict[str, Any]]:
    """Held-out pass@1 of b against a, paired by task and seed; the intervals hold for all pairs together.

    Args:
        recorders: of every arm, one a seed.
        pairs: which arms to compare.
        confidence: of all intervals together.
        assumed_seed_spread: stands for the spread over seeds where a single seed cannot tell it.
    """
    each = 1 - (1 - confidence) / max(1, len(pairs))
    found = []
    for a, b in pairs:
        seeds = len(recorders[a])
        both = [list(told.values()) for told in scores([*recorders[a], *recorders[b]], "passed")]
        told = compare(both[:seeds], both[seeds:], confidence=each)
        measured = seeds > 1
        spread = told.seed_spread if measured else assumed_seed_spread
        tie = told.verdict == "tie" and abs(told.difference) > 1e-9  # less is rounding, and no seeds would do
        found.append(
            {
                "a": a,
                "b": b,
                "difference": told.difference,
                "low": told.low,
                "high": told.high,
                "confidence": confidence,
                "verdict": told.verdict,
                "seeds_needed": seeds_needed(
                    difference=told.difference, seed_spread=spread, power=0.8, confidence=each
                )
                if tie
                else None,
                "seed_spread": spread,
                "seed_spread_measured": measured,
            }
        )
    return found
