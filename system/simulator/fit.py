"""A cluster and a workload from what runs took: `Cluster` and `Recorded` that would have taken as long.

Where engines, trainer and trials share cores, seconds tell of the others as much as of a part itself. What a part
works is then told by its CPU time, which hardly depends on who else was at work; where each has its own machine, by
its seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import fmean, quantiles

import numpy as np
from numpy.typing import NDArray

from core.schedule import Settings

from .cluster import Cluster
from .measured import Figures, Measured, Ran, measured_of, pooled
from .run import simulate
from .workload import Recorded, TrialPlan, whole


def fitted(runs: Sequence[Measured]) -> Cluster:
    """The machines on which these runs took what they took; all of them the same ones.

    - decode_s, decode_request_s, decode_context_s, prefill_s: what the engines worked between two steps, by rounds,
      sampled tokens, tokens of context behind each of them, and tokens of prompts
    - step_s, train_token_s, train_square_s: what the trainer worked for a step, by its tokens and their squares
    - trial_load: the CPU share of those trials that had most of it (one in twenty has more)
    - start_s, verify_s: means over the trials, of their work where cores are shared
    - sync_s: mean, at the speed that the trainer had
    - others: with which runs like these take as long as they took: the driver, what else went on on the machine, and
      what no part tells of
    """
    if not runs:
        raise ValueError("runs must be at least one, got none")
    shared = math.isfinite(runs[0].cores)
    load = trial_load(runs) if shared else 1.0
    trials = [(trial, slowed(trial, load) if shared else 1.0) for run in runs for trial in run.trials]
    engine = engine_rates(runs, shared=shared)
    trainer, speed = trainer_rates(runs, shared=shared)
    syncs = [seconds for run in runs for seconds in run.sync_s]
    found = Cluster(
        engines=runs[0].engines,
        **engine,
        prefill_stops=1.0,
        **trainer,
        sync_s=fmean(syncs) * speed if syncs else 0.0,
        cores=runs[0].cores,
        trial_load=load,
        start_s=fmean(trial.start_s * share for trial, share in trials),
        verify_s=fmean(trial.end_s * share for trial, share in trials),
    )
    return replace(found, others=others_of(runs, found)) if shared else found


MOST_OTHERS = 100.0


def others_of(runs: Sequence[Measured], cluster: Cluster, *, rounds: int = 5) -> float:
    """With what else at work runs like these take as long, by halving; a setting with more trials counts for more."""
    alike: dict[Settings, list[Measured]] = defaultdict(list)
    for run in runs:
        alike[replace(run.settings, seed=0)].append(run)
    measured = {settings: pooled(run.figures() for run in same) for settings, same in alike.items()}

    weight = {settings: sum(len(run.trials) for run in same) for settings, same in alike.items()}

    def too_fast(others: float) -> bool:
        there = replace(cluster, others=others)
        simulated = {settings: predicted(settings, there, runs, draws=4) for settings in measured}
        return 0 < sum(
            weight[settings] * math.log(simulated[settings].steps_per_minute / told.steps_per_minute)
            for settings, told in measured.items()
        )

    if not too_fast(0.0):
        return 0.0
    low, high = 0.0, 0.5
    while too_fast(high) and high < MOST_OTHERS:
        low, high = high, 2 * high
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if too_fast(middle) else (low, middle)
    return (low + high) / 2


def workload_of(runs: Sequence[Measured], *, load: float, seed: int = 0) -> Recorded:
    """The groups of some runs, drawn again; where cores are shared a call takes what it works.

    Args:
        load: `Cluster.trial_load`.
        seed: of the drawing.
    """
    groups: dict[tuple[int, int], list[TrialPlan]] = defaultdict(list)
    for number, run in enumerate(runs):
        shared = math.isfinite(run.cores)
        for trial in run.trials:
            share = slowed(trial, load) if shared else 1.0
            turns = tuple(turn._replace(tool_s=turn.tool_s * share) for turn in trial.plan.turns)
            groups[number, trial.group].append(trial.plan._replace(turns=turns))
    return Recorded(whole(groups.values()), seed=seed)


def predicted(settings: Settings, cluster: Cluster, runs: Sequence[Measured], *, draws: int = 5) -> Figures:
    """The figures of a run with these settings, on these machines, with the trials of these runs.

    Args:
        draws: runs that are simulated, each with its trials drawn anew; the mean is told.
    """
    return pooled(
        measured_of(
            simulate(
                replace(settings, evaluate_at=(), seed=seed),
                cluster,
                workload_of(runs, load=cluster.trial_load, seed=seed),
            ),
            cluster,
        ).figures()
        for seed in range(draws)
    )


def slowed(trial: Ran, load: float) -> float:
    """What share of its own seconds a trial would have taken with nobody else at work."""
    return min(1.0, trial.cpu_s / load / trial.own_s) if trial.own_s > 0 and trial.cpu_s > 0 else 1.0


def trial_load(runs: Sequence[Measured]) -> float:
    """Share of a core that a trial takes of its own seconds, where it gets it."""
    shares = [t.cpu_s / t.own_s for run in runs for t in run.trials if t.own_s > 0 and t.cpu_s > 0]
    return min(1.0, quantiles(shares, n=20)[-1]) if len(shares) > 1 else 1.0


def engine_rates(runs: Sequence[Measured], *, shared: bool) -> dict[str, float]:
    """The four rates of an engine; one alone, from the trials' seconds, where the engines told nothing."""
    names = {
        "decode_s": "steps",
        "decode_request_s": "sampled_tokens",
        "decode_context_s": "context_tokens",
        "prefill_s": "prefill_tokens",
    }
    work = "cpu_s" if shared else "busy_s"
    rows: list[list[float]] = []
    worked: list[float] = []
    for before, after in (pair for run in runs for pair in pairwise(run.steps)):
        told = [name for name in (*names.values(), work) if name in before.engine and name in after.engine]
        if work in told and "steps" in told:
            rows.append([after.engine.get(n, 0.0) - before.engine.get(n, 0.0) for n in names.values()])
            worked.append(after.engine[work] - before.engine[work])
    kept = [at for at, seconds in enumerate(worked) if seconds > 0]
    if not kept:
        return {"decode_s": _seconds_per_token(runs)}
    plans = [trial.plan for run in runs for trial in run.trials]
    prompts = sum(plan.prompt + sum(turn.observed for turn in plan.turns[:-1]) for plan in plans)
    taken = sum(run.steps[-1].engine.get("prefill_tokens", 0.0) for run in runs)
    found = not_negative([rows[at] for at in kept], [worked[at] for at in kept])
    rates = dict(zip(names, found, strict=True))
    # Of what trials are told, an engine takes in only what it has not cached.
    rates["prefill_s"] *= min(1.0, taken / prompts) if prompts else 1.0
    return rates


def _seconds_per_token(runs: Sequence[Measured]) -> float:
    trials = [trial for run in runs for trial in run.trials]
    waited = sum(trial.ended_s - trial.begun_s - trial.own_s for trial in trials)
    return waited / max(1, sum(turn.tokens for trial in trials for turn in trial.plan.turns))


def trainer_rates(runs: Sequence[Measured], *, shared: bool) -> tuple[dict[str, float], float]:
    """The three rates of the trainer, and the share of its full speed that it had."""
    rows: list[list[float]] = []
    worked: list[float] = []
    seconds: list[float] = []
    for before, after in (pair for run in runs for pair in pairwise(run.steps)):
        took = after.ended_s - after.begun_s
        work = after.cpu_s - before.cpu_s if shared else took
        if work > 0:  # counters begin again where a run was resumed
            rows.append([1.0, float(sum(after.rows)), float(sum(n * n for n in after.rows))])
            seconds.append(took)
            worked.append(work)
    if not rows:
        raise ValueError(
            "a run must have taken two steps without a stop between them to be measured, got none"
        )
    found = not_negative(rows, worked)
    speed = min(1.0, sum(worked) / sum(seconds)) if shared and sum(seconds) > 0 else 1.0
    return dict(zip(("step_s", "train_token_s", "train_square_s"), found, strict=True)), speed


def not_negative(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The weights, none below 0, whose sums come nearest to what is wanted, each as a share of it.

    Of few columns, so every choice of those above 0 is tried.
    """
    given = np.array(rows, dtype=np.float64)
    target = np.array(wanted, dtype=np.float64)
    weighed: NDArray[np.float64] = given / target[:, None]
    scale = np.abs(weighed).max(axis=0)
    scale[scale == 0] = 1.0
    best, least = [0.0] * given.shape[1], math.inf
    for count in range(1, given.shape[1] + 1):
        for chosen in combinations(range(given.shape[1]), count):
            columns = list(chosen)
            found, *_ = np.linalg.lstsq(
                weighed[:, columns] / scale[columns], np.ones(len(target)), rcond=1e-9
            )
            if (found < 0).any():
                continue
            error = float(((weighed[:, columns] / scale[columns]) @ found - 1).__pow__(2).sum())
            if error < least * (1 - 1e-6):
                least, best = error, [0.0] * given.shape[1]
                for column, value in zip(columns, found / scale[columns], strict=True):
                    best[column] = float(value)
    return best
