"""What a live run should change: the trainer is fixed, engines are added until it does not wait any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from core.schedule import Settings

from .cluster import Cluster
from .fit import fitted, predicted
from .measured import Figures, Measured

WAITS = 0.05
"""Up to this share of its time a trainer does not wait to speak of."""
GAIN = 0.03
"""What brings no more steps a minute than this is no help."""
MOST = 16
"""Times as many engines as there are, at most."""


class Tried(NamedTuple):
    """A run as it was, but for the number of its engines."""

    engines: int
    max_running: int
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a run did, and what would have become of it.

    Args:
        measured: as it was.
        engine_idle: share of the time in which an engine had nothing to do, where it told.
        waited_s: of the trainer, between two steps, on average.
        simulated: as it was, so that one sees what the simulator is worth here.
        tried: with more and more engines, until the trainer did not wait or it helped no more.
        faster_trainer: with as many engines and a trainer twice as fast.
        limit: what more of would help.
    """

    measured: Figures
    engine_idle: float | None
    waited_s: float
    simulated: Tried
    tried: list[Tried]
    faster_trainer: Figures
    limit: Literal["inference", "training", "neither"]

    @property
    def best(self) -> Tried:
        """The fewest engines that do."""
        return self.tried[-1] if self.tried else self.simulated

    def told(self) -> str:
        """One sentence."""
        now, then, more = self.simulated, self.best, self.best.engines - self.simulated.engines
        effect = (
            f"from {now.figures.steps_per_minute:.2g} to {then.figures.steps_per_minute:.2g} steps a minute, and its "
            f"idle share from {now.figures.trainer_idle:.0%} to {then.figures.trainer_idle:.0%}, as simulated"
        )
        if self.limit == "training":
            faster = self.faster_trainer.steps_per_minute
            return (
                f"training is the limit: the trainer waits {now.figures.trainer_idle:.0%} of the time; one twice as "
                f"fast would take the run from {now.figures.steps_per_minute:.2g} to {faster:.2g} steps a minute, as "
                "simulated"
            )
        if self.limit == "neither":
            return (
                "neither engines nor trainer are the limit: the trials' own work, the staleness that admits them or "
                "the number that run side by side is"
            )
        waits = "" if then.figures.trainer_idle <= WAITS else "; more than that helps no further"
        return (
            f"inference is the limit: keep the trainer and add {more} engine{'s' * (more != 1)} "
            f"({then.engines} in all, {then.max_running} trials side by side): this takes the run {effect}{waits}"
        )


def advise(run: Measured, *, draws: int = 3) -> Advice:
    """Simulates a run with more engines and with another trainer, on machines and trials fitted to it.

    An engine more is a machine more, with room for as many trials and, where cores are shared, as many cores.
    """
    cluster = fitted([run])

    def tried(engines: int, machines: Cluster = cluster) -> Tried:
        settings = running_on(run.settings, engines / run.engines)
        share = engines / run.engines
        cores, others = machines.cores * share, machines.others * share
        there = replace(machines, engines=engines, cores=cores, others=others)
        return Tried(engines, settings.max_running, predicted(settings, there, [run], draws=draws))

    now = tried(run.engines)
    quick = replace(cluster, **{name: getattr(cluster, name) / 2 for name in TRAINER})
    faster = tried(run.engines, quick).figures
    more: list[Tried] = []
    for engines in counts(run.engines):
        if (more[-1] if more else now).figures.trainer_idle <= WAITS:
            break
        following = tried(engines)
        if gain(more[-1] if more else now, following) < GAIN:
            break
        more.append(following)
    return Advice(
        measured=run.figures(),
        engine_idle=engine_idle(run),
        waited_s=run.figures().trainer_idle * 60 / run.figures().steps_per_minute,
        simulated=now,
        tried=more,
        faster_trainer=faster,
        limit=limit_of(now, more, faster),
    )


TRAINER = ("step_s", "train_token_s", "train_square_s")


def limit_of(
    now: Tried, more: Sequence[Tried], faster: Figures
) -> Literal["inference", "training", "neither"]:
    """What more of would help the run."""
    if more:
        return "inference"
    if faster.steps_per_minute > now.figures.steps_per_minute * (1 + GAIN):
        return "training"
    return "neither"


def gain(one: Tried, other: Tried) -> float:
    """Share of steps a minute that the other takes more."""
    return other.figures.steps_per_minute / one.figures.steps_per_minute - 1


def counts(engines: int) -> list[int]:
    """Numbers of engines to try: one more at a time for a few, then by a quarter."""
    found = [engines]
    while found[-1] < MOST * engines:
        found.append(max(found[-1] + 1, found[-1] * 5 // 4))
    return found[1:]


def running_on(settings: Settings, share: float) -> Settings:
    """The schedule where there is room for so many times the trials; never more than staleness admits."""
    admitted = (settings.max_staleness + 1) * settings.batch_groups * settings.group_size
    running = max(1, round(settings.max_running * share))
    return replace(settings, max_running=min(running, max(admitted, settings.max_running)))


def engine_idle(run: Measured) -> float | None:
    """Share of the time between the first and the last step in which an engine did nothing; None if it told nothing."""
    first, last = run.steps[0], run.steps[-1]
    if "busy_s" not in first.engine or "busy_s" not in last.engine:
        return None
    busy = last.engine["busy_s"] - first.engine["busy_s"]
    return max(0.0, 1 - busy / run.engines / max(last.ended_s - first.ended_s, 1e-9))
