"""What does the schedule cost, what does each order of consumption give up, and what do the rules of others?

One command: `python benchmarks/schedule.py --out benchmarks/recorded/schedule` (or `python -m benchmarks.schedule`).
Three parts, a table each; `--parts cost` runs one, and keeps what `--out` has of the others.

cost: processor time of one event in `core.schedule`, and of a mutable scheduler of the same count rule
(`benchmarks/peers.py`), which keeps no former states, so cannot be replayed, and knows no retries, filter or resume.

frontier: 16 groups of 16 a step, S = 3, 300 trials side by side, each a token a second; lognormal lengths (sigma 1)
that a task's trials share wholly, by half of the variance, or not; a trainer at 0.9 of the rollout rate. Every order
with every way to treat the late, the knob between masking and waiting, and other ideas.

peers: the rules of others and ours on the article's 397B cluster, as `experiments/plan_cluster.py` presets it, 300
trials side by side; and with two training nodes instead of eight, for with eight the preset's trainer waits for
whatever rule. "No bound" is what remains idle whatever the rule.

Columns. idle: of the time after the first steps, when the trainer neither trains nor moves weights. stale: of the
trained tokens, those more than S versions old. masked: of the sampled tokens of trained trajectories, those left out of
the loss for that. wasted: of all sampled tokens, those of trajectories that were dropped or cancelled. early: mean
length in the first five steps, over that of as many groups as they were drawn. ever: the same of the steps after the
first. longest tenth: the share of trained tokens that is of trajectories among the longest tenth, over the share that
was theirs as drawn: 1 is unbiased. start: the time that the first steps took, over the least. fresh: tokens trained
that are at most S versions old, as a share of what the trainer could train; at the cluster, millions an hour.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.figure import draw_frontier  # noqa: E402
from benchmarks.peers import (  # noqa: E402
    CountRule,
    DropByVersion,
    OldestFirst,
    OneStepOff,
    Oversampled,
    SplitAtTheBound,
    Synchronous,
)
from core.estimate import mean_and_error  # noqa: E402
from core.schedule import Event, Settings, task_at  # noqa: E402
from system.record.audit import machine_name, markdown_table  # noqa: E402
from system.record.metrics import commit_hash  # noqa: E402
from system.simulator import (  # noqa: E402
    Cluster,
    LognormalWorkload,
    Policy,
    Record,
    Reducer,
    TrialPlan,
    Workload,
    report_of,
    simulate,
)

Row = dict[str, Any]
TARGET_MS = 0.5

TOY = Settings(
    steps=10**6,
    batch_groups=16,
    group_size=16,
    max_staleness=3,
    max_running=300,
    max_retries=0,
    min_valid=2,
    tolerance=0.0,
    max_zero_variance=0,
    max_lost=10**6,
    order="oldest",
    in_order_steps=0,
    late_group="mask",
    requeue_stale=True,
    task_count=1_928,
    seed=0,
    save_every=0,
    evaluate_at=(),
    evaluation_tasks=0,
    evaluation_samples=1,
)
"""No group is filtered for its rewards, so that all rules see the same; runs are broken off before they end."""

RATE = 0.9 * TOY.max_running
TOY_CLUSTER = Cluster(decode_s=1.0, train_token_s=1 / RATE)
MEDIAN, SIGMA = 1_000, 1.0
CASES = {
    "frontier": {"wholly": 1.0, "by half": 0.5, "not at all": 0.0},
    "peers": {"12 + 8": 8, "12 + 2": 2},
}
"""How far lengths are shared by a task; nodes to sample + to train, the article's and those that match the sampling."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of a table."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    "Of the settings."
    policy: Callable[[Settings], Policy] = Reducer
    alike: int = 0
    "So many tasks that are drawn one after the other are put in the order of their expected lengths."


def core_rules() -> Iterable[Rule]:
    """Every order with every way to treat the late."""
    for order in ("completion", "oldest", "admission"):
        for late in ("train", "drop", "mask", "wait"):
            yield Rule(name=f"{order}, {late}", changes={"order": order, "late_group": late})


CHOSEN = {"max_late": 4, "in_order_steps": 4}
"""The cluster's default; see docs/decisions/005-consumption-order.md."""

NO_BOUND = Rule(name="no bound", policy=lambda settings: CountRule(replace(settings, max_staleness=1_000)))

FRONTIER = (
    NO_BOUND,
    *core_rules(),
    *(Rule(name=f"oldest, mask, max_late {n}", changes={"max_late": n}) for n in (1, 2, 4, 8)),
    *(Rule(name=f"oldest, mask, {n} in order", changes={"in_order_steps": n}) for n in (1, 4)),
    Rule(name="oldest, mask, max_late 4, 4 in order", changes=CHOSEN),
    Rule(name="oldest, mask, 32 groups of 8", changes={"batch_groups": 32, "group_size": 8}),
    Rule(name="oldest, mask, 64 groups of 4", changes={"batch_groups": 64, "group_size": 4}),
    Rule(name="oldest, wait, like lengths together", changes={"late_group": "wait"}, alike=128),
    Rule(name="oldest, mask, like lengths together", alike=128),
    Rule(name="16 of 20 oversampled, mask", policy=partial(Oversampled, spare=4)),
    Rule(name="not built: split at the bound", policy=SplitAtTheBound),
)

PEERS = (
    NO_BOUND,
    Rule(name="SkyRL: count rule, completion order", policy=CountRule),
    Rule(name="AReaL, Tinker: count rule, oldest first", policy=OldestFirst),
    Rule(name="synchronous", policy=Synchronous),
    Rule(name="verl: one step off", policy=OneStepOff),
    Rule(name="prime-rl: drop beyond S versions", policy=DropByVersion),
    Rule(name="ours: oldest, wait", changes={"late_group": "wait"}),
    Rule(name="ours: oldest, mask"),
    Rule(name="ours: oldest, mask, max_late 4, 4 in order", changes=CHOSEN),
    Rule(name="not built: split at the bound", policy=SplitAtTheBound),
)

RULES = {"frontier": FRONTIER, "peers": PEERS}


class Alike:
    """Another workload's trials, the tasks of each block of groups in the order of their expected lengths.

    A task's expected length is the mean of sixteen other trials of it, as an earlier epoch would leave behind.
    """

    def __init__(self, workload: Workload, settings: Settings, *, block: int) -> None:
        self.workload, self.settings, self.block = workload, settings, block
        self.order: list[int] = []

    def trial(self, *, task: int, group: int, sample: int, attempt: int) -> TrialPlan:
        while len(self.order) <= group:
            tasks = [task_at(self.settings, len(self.order) + i) for i in range(self.block)]
            self.order += sorted(tasks, key=self.expected)
        return self.workload.trial(task=self.order[group], group=group, sample=sample, attempt=attempt)

    def expected(self, task: int) -> float:
        return fmean(self.workload.trial(task=task, group=-1, sample=i, attempt=0).length for i in range(16))


class Remembered:
    """Another workload's trials, each drawn once: the rules of a table see the same."""

    def __init__(self, workload: Workload) -> None:
        self.trial = lru_cache(maxsize=None)(workload.trial)


def preset() -> Any:
    """The script that has the article's cluster; the other parts do without."""
    if str(ROOT / "experiments") not in sys.path:
        sys.path.append(str(ROOT / "experiments"))
    return import_module("plan_cluster")


@lru_cache(maxsize=1)
def workload_of(part: str, case: str, seed: int) -> Workload:
    """The trials of a run."""
    if part == "peers":
        plan = preset()
        return Remembered(plan.drawn(plan.Config(seed=seed)))
    return Remembered(LognormalWorkload(median=MEDIAN, sigma=SIGMA, shared=CASES[part][case], seed=seed))


def cluster_of(part: str, case: str) -> Cluster:
    """The machines of a run."""
    if part == "frontier":
        return TOY_CLUSTER
    plan = preset()
    config = plan.Config()
    return plan.HARDWARE["397b"].cluster(
        inference_nodes=plan.NODES["397b"][0],
        training_nodes=int(CASES[part][case]),
        sync_s=config.sync_s,
        start_s=config.start_s,
        verify_s=config.verify_s,
    )


@lru_cache(maxsize=2)
def as_drawn(part: str, case: str, seed: int, groups: int, size: int) -> list[tuple[int, int]]:
    """Length and sampled tokens of every trajectory of the groups of this size that are drawn first."""
    workload, settings = workload_of(part, case, seed), replace(TOY, seed=seed)
    plans = (
        workload.trial(task=task_at(settings, group), group=group, sample=sample, attempt=0)
        for group in range(groups)
        for sample in range(size)
    )
    return [(plan.length, sum(turn.tokens for turn in plan.turns)) for plan in plans]


def run(part: str, rule: Rule, case: str, seed: int, steps: int, skip: int) -> Row:
    """One simulated run as a line."""
    settings = replace(TOY, seed=seed, **rule.changes)
    workload, cluster = workload_of(part, case, seed), cluster_of(part, case)
    if rule.alike:
        workload = Alike(workload, settings, block=rule.alike)
    begun = time.process_time()
    record = simulate(settings, cluster, workload, policy=rule.policy(settings), stop_after=steps)
    spent = time.process_time() - begun
    row: Row = {"part": part, "rule": rule.name, "case": case, "seed": seed, "steps": steps, "skip": skip}
    population = as_drawn(part, case, seed, steps * settings.batch_groups, settings.group_size)
    return row | figures(record, population, skip) | {"cpu_s": spent}


def figures(record: Record, population: list[tuple[int, int]], skip: int) -> dict[str, float]:
    """The columns of a run."""
    batch = TOY.batch_groups * TOY.group_size
    report = report_of(record, mean_length=1.0, skip=skip)
    steps, first = record.steps[skip:], record.steps[:5]
    seconds = record.steps[-1].ended_s - record.steps[skip - 1].ended_s
    fresh = sum(n for step in steps for age, n in step.ages.items() if age <= TOY.max_staleness)
    stale = sum(n for step in steps for age, n in step.ages.items() if age > TOY.max_staleness)
    masked = sum(step.masked for step in steps)
    busy = [step.ended_s - step.begun_s for step in record.steps[:skip]]
    long = sorted(length for length, _ in population)[-len(population) // 10]
    pairs = [pair for step in steps for pair in zip(step.lengths, step.trained)]
    due = sum(n for length, n in population if length >= long) / sum(n for _, n in population)
    got = sum(n for length, n in pairs if length >= long) / sum(n for _, n in pairs)
    return {
        "idle": report.trainer_idle,
        "stale": stale / (fresh + stale),
        "masked": masked / (fresh + stale + masked),
        "wasted": report.wasted_share,
        "early": fmean(n for step in first for n in step.lengths)
        / fmean(n for n, _ in population[: 5 * batch]),
        "ever": fmean(n for n, _ in pairs) / fmean(n for n, _ in population[skip * batch :]),
        "longest": got / due,
        "start": record.steps[skip - 1].ended_s / (sum(busy) + record.sync_s * skip / len(record.steps)),
        "age": report.mean_age,
        "fresh": fresh / seconds,
    }


class Timed:
    """A policy whose processor time is noted, event by event, once the run is under way."""

    def __init__(self, policy: Policy, least_running: int) -> None:
        self.policy, self.least, self.spent, self.running = policy, least_running, list[float](), 0
        self.seen = list[int]()

    @property
    def finished(self) -> bool:
        return self.policy.finished

    def tell(self, event: Event) -> Sequence[Any]:
        begun = time.thread_time_ns()
        actions = self.policy.tell(event)
        spent = time.thread_time_ns() - begun
        running = len(self.policy.state.running if isinstance(self.policy, Reducer) else self.policy.running)  # type: ignore[attr-defined]
        if running >= self.least:
            self.spent.append(spent / 1e6)
            self.seen.append(running)
        return actions


def cost(running: int, rule: str, events: int) -> Row:
    """Milliseconds of an event with so many trials under way, and twice as many admitted."""
    settings = replace(
        TOY, max_running=running, batch_groups=running // 32, late_group="wait" if rule == "core" else "train"
    )
    timed = Timed(Reducer(settings) if rule == "core" else CountRule(settings), running * 3 // 4)
    workload = LognormalWorkload(median=MEDIAN, sigma=SIGMA, seed=0)
    cluster = replace(TOY_CLUSTER, train_token_s=1 / running)
    steps = max(2, events // (settings.batch_groups * settings.group_size))
    simulate(settings, cluster, workload, policy=timed, stop_after=steps)
    spent = sorted(timed.spent)
    return {
        "part": "cost",
        "rule": rule,
        "running": running,
        "events": len(spent),
        "mean": fmean(spent),
        "median": median(spent),
        "p99": spent[len(spent) * 99 // 100],
        "seen": fmean(timed.seen),
    }


def cost_table(rows: list[Row]) -> str:
    """Milliseconds of an event."""
    lines = []
    for running in sorted({row["running"] for row in rows}):
        found = {row["rule"]: row for row in rows if row["running"] == running}
        cells = [
            f"{found[name][key]:.3f}" for name in ("core", "mutable") for key in ("mean", "median", "p99")
        ]
        target = ("met" if found["core"]["mean"] < TARGET_MS else "missed") if running == 1_024 else ""
        lines.append((f"{running:,}", f"{found['core']['events']:,}", *cells, target))
    heads = ("mean", "median", "p99", "mutable: mean", "median", "p99", f"under {TARGET_MS} ms")
    return markdown_table(("trials under way", "events", *heads), lines)


COLUMNS = ("idle", "stale", "masked", "wasted", "early", "ever", "longest", "start", "age", "fresh")
HEADS = ("idle", "stale", "masked", "wasted", "early", "ever", "longest tenth", "start", "mean age", "fresh")


def table(rows: list[Row]) -> str:
    """A line a rule: means over seeds, with their standard errors."""
    lines = []
    for name in dict.fromkeys(row["rule"] for row in rows):
        some = [row for row in rows if row["rule"] == name]
        lines.append((name, *(cell(column, some) for column in COLUMNS)))
    return markdown_table(("rule", *HEADS), lines)


def unbeaten(rows: list[Row]) -> list[str]:
    """Rules that no other is as good as in idle time, old tokens and early bias, and better in one; by their means."""
    told: dict[str, tuple[float, float, float]] = {}
    for name in dict.fromkeys(row["rule"] for row in rows):
        some = [row for row in rows if row["rule"] == name]
        idle, stale, early = (fmean(row[key] for row in some) for key in ("idle", "stale", "early"))
        told[name] = idle, stale, abs(1 - early)

    def beats(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other))

    return [name for name, here in told.items() if not any(beats(there, here) for there in told.values())]


def cell(column: str, rows: list[Row]) -> str:
    """Mean and standard error of a column."""
    peers = rows[0]["part"] == "peers"
    unit = 1.0 if column != "fresh" else 3600 / 1e6 if peers else 1 / RATE
    found = mean_and_error([row[column] * unit for row in rows])
    if not any(row[column] for row in rows):
        return "0"
    error = "" if math.isnan(found.error) else f" ± {found.error:.{1 if column == 'fresh' and peers else 3}f}"
    return f"{found.mean:.{1 if column == 'fresh' and peers else 3}f}{error}"


def tables(rows: list[Row]) -> str:
    """All parts that there are, as Markdown."""
    told = []
    for head in (row for row in rows if row["part"] == "head"):
        some = [row for row in rows if row["part"] == head["of"]]
        told.append(f"## {head['of']}\n\n{head['told']}")
        if head["of"] == "cost":
            told.append(cost_table(some))
        for case in dict.fromkeys(row["case"] for row in some if "case" in row):
            title = f"Lengths shared by a task: {case}" if head["of"] == "frontier" else f"Nodes: {case}"
            here = [row for row in some if row["case"] == case]
            told += [title, table(here)]
            offered = [row for row in here if not row["rule"].startswith(("no bound", "not built"))]
            told.append("Beaten by no other in all of idle, stale and early: " + "; ".join(unbeaten(offered)))
    return "\n\n".join(told) + "\n"


def measured(part: str, options: argparse.Namespace) -> Iterator[Row]:
    """The lines of a part as they come, its head first."""
    told = f"{machine_name()}, commit {commit_hash(ROOT)}; "
    if part == "cost":
        told += "milliseconds of processor time of one event; admitted twice as many as run"
        yield {"part": "head", "of": part, "told": told}
        yield from (cost(n, rule, options.events) for n in options.running for rule in ("core", "mutable"))
        return
    told += f"{options.seeds} seeds, mean ± standard error; {options.steps} steps, of which the first {options.skip}"
    yield {"part": "head", "of": part, "told": told + " count for early and start only"}
    names = [rule.name for rule in RULES[part] if not options.rules or rule.name in options.rules]
    jobs = [(name, case, seed) for seed in range(options.seeds) for case in CASES[part] for name in names]
    work = partial(job, part, options.steps, options.skip)
    if options.jobs == 1:
        yield from map(work, jobs)
        return
    with ProcessPoolExecutor(options.jobs) as pool:
        yield from pool.map(work, jobs)


def job(part: str, steps: int, skip: int, what: tuple[str, str, int]) -> Row:
    """One run, told while one waits."""
    name, case, seed = what
    (rule,) = (rule for rule in RULES[part] if rule.name == name)
    row = run(part, rule, case, seed, steps, skip)
    print(f"{part}, {case}, {seed}, {name}: {row['cpu_s']:.1f} s", file=sys.stderr, flush=True)
    return row


def main(words: Sequence[str] | None = None) -> None:
    """Print the tables, keep them and draw the frontier."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("cost", "frontier", "peers")
    parser.add_argument("--parts", nargs="*", choices=parts, default=list(parts), help="none: tables only")
    parser.add_argument("--out", type=Path, help="path without ending of a .md, a .jsonl and a .png")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="of each simulated run")
    parser.add_argument("--skip", type=int, default=10, help="first of them, which are a start")
    parser.add_argument("--rules", nargs="+", help="only these lines of the frontier and the peers")
    parser.add_argument("--running", type=int, nargs="+", default=[128, 512, 1_024, 4_096])
    parser.add_argument("--events", type=int, default=10_000, help="about so many are timed")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options = parser.parse_args(words)
    if not 5 <= options.skip < options.steps:
        parser.error(f"skip must lie between 5 and steps {options.steps}, got {options.skip}")
    if any(n < 32 for n in options.running):
        parser.error(f"running must be at least 32, got {min(options.running)}")
    kept = options.out.with_suffix(".jsonl") if options.out else None
    rows = without(options.parts, kept)
    for part in options.parts:
        for row in measured(part, options):
            rows.append(row)
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps(row, separators=(",", ":")) + "\n")
    rows.sort(key=lambda row: parts.index(row.get("of", row["part"])))
    print(tables(rows))
    if kept:
        kept.with_suffix(".md").write_text(tables(rows))
        frontier = [row for row in rows if row["part"] == "frontier"]
        if frontier:
            draw_frontier(frontier, kept.with_suffix(".png"), commit=commit_hash(ROOT))


def without(parts: Sequence[str], kept: Path | None) -> list[Row]:
    """The lines of the other parts, which alone stay in the file."""
    if not kept:
        return []
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = kept.read_text().splitlines() if kept.exists() else []
    rows = [row for row in map(json.loads, lines) if row.get("of", row["part"]) not in parts]
    kept.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    return rows


if __name__ == "__main__":
    main()
