"""The figures of a simulated run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from .run import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Shares lie between 0 and 1; lengths are relative to `mean_length`, that of the trajectories as they are drawn."""

    steps: int
    seconds: float
    steps_per_hour: float
    trainer_idle: float
    "Share of the time in which the trainer neither trains nor moves weights."
    engine_idle: float
    stale_share: float
    "Of the trained tokens, those older than the bound."
    masked_share: float
    "Of the sampled tokens in trained batches, those that were left out of the loss."
    wasted_share: float
    "Of all sampled tokens, those of trials that were cancelled, dropped or lost."
    mean_age: float
    "Of a trained token, in versions."
    length: float
    "Mean length of the trained trajectories."
    first_length: float
    "The same in the first steps."
    running: float
    "Mean number of trials under way."


def report_of(record: Record, *, mean_length: float, first: int = 5, skip: int = 0) -> Report:
    """Sum a run up.

    Args:
        record: from `simulate`.
        mean_length: of a trajectory, as drawn.
        first: how many steps are the first.
        skip: steps at the beginning that the shares of time leave out.
    """
    steps, bound = record.steps, record.settings.max_staleness
    begun = steps[skip - 1].ended_s if skip else 0.0
    seconds = steps[-1].ended_s - begun
    busy = sum(s.ended_s - s.begun_s for s in steps[skip:])
    sync = record.sync_s * len(steps[skip:]) / len(steps)
    trained = {a: sum(s.ages.get(a, 0.0) for s in steps) for a in {a for s in steps for a in s.ages}}
    total, masked = sum(trained.values()), sum(s.masked for s in steps)
    late = sum(n for age, n in trained.items() if age > bound)
    lengths = [n for s in steps for n in s.lengths]
    early = [n for s in steps[:first] for n in s.lengths]
    return Report(
        steps=len(steps),
        seconds=record.seconds,
        steps_per_hour=3600 * len(steps[skip:]) / seconds if seconds else math.inf,
        trainer_idle=max(0.0, 1 - (busy + sync) / seconds) if seconds else 0.0,
        engine_idle=1 - record.engine_busy_s / record.seconds if record.seconds else 0.0,
        stale_share=late / max(total, 1e-9),
        masked_share=masked / max(total + masked, 1e-9),
        wasted_share=record.wasted / max(record.sampled, 1e-9),
        mean_age=sum(age * n for age, n in trained.items()) / max(total, 1e-9),
        length=fmean(lengths) / mean_length,
        first_length=fmean(early) / mean_length,
        running=record.running_s / record.seconds if record.seconds else 0.0,
    )
