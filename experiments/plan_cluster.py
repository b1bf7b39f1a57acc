"""How many nodes should sample and how many should train: the schedule itself, under a virtual clock.

python experiments/plan_cluster.py --preset 397b
python experiments/plan_cluster.py --hardware mine.json --nodes 6
python experiments/plan_cluster.py --from out/train/RUN

A preset states every input; each can be given, and what is not measured is an assumption. The sampler's speed is
bounded by memory traffic, the trainer's by operations; turns, tokens and tool times are drawn from a distribution, or
from a recorded trajectories.jsonl with --from. With --from and the folder of a run the plan is for that run on its
own machines, whose rates are fitted to it: the trainer stays, and engines are added until it does not wait any more.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from command import claim, command_line, withdraw
from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from core.capacity import admitted_trajectories, runnable_trajectories
from core.schedule import Settings
from system.record.metrics import commit_hash, write_json
from system.record.plan_figure import Point, draw_plan
from system.simulator import LognormalWorkload, Recorded, Workload, report_of, simulate
from system.simulator.advice import WAITS, Advice, Tried, advise
from system.simulator.hardware import Hardware
from system.simulator.measured import Measured, Took, read_measured
from system.simulator.run import StepRecord

ROOT = Path(__file__).resolve().parent.parent

H200 = {"gpu_bytes": 141e9, "gpu_bandwidth": 4.8e12, "gpu_flops": 989e12, "node_hour": 8 * 3.5}
H100 = {"gpu_bytes": 80e9, "gpu_bandwidth": 3.35e12, "gpu_flops": 989e12, "node_hour": 8 * 2.5}
SHARED = {"other_bytes": 5e9, "decode_efficiency": 0.6, "train_efficiency": 0.25, "kv_value_bytes": 2}

HARDWARE = {
    "397b": Hardware(
        **H200,
        **SHARED,
        kv_utilization=0.93,
        tensor_parallel=8,
        weight_bytes=794e9,
        active_parameters=17e9,
        attention_layers=15,
        kv_heads=2,
        head_dim=256,
        square_width=15 * 32 * 256,
        prefill_tokens_per_s=20_000,
    ),
    "35b": Hardware(
        **H100,
        **SHARED,
        kv_utilization=0.85,
        tensor_parallel=8,
        weight_bytes=70e9,
        active_parameters=3e9,
        attention_layers=10,
        kv_heads=2,
        head_dim=256,
        square_width=10 * 16 * 256,
        prefill_tokens_per_s=60_000,
    ),
}
"""The article's two models on the cards that its recipe names; widths, prices and efficiencies are assumptions."""

NODES = {"397b": (12, 8, 70_000.0), "35b": (10, 4, 96_300.0)}
"""Inference nodes, training nodes, and the mean context that gives the article's number of running trajectories."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """See the docstring of the script; `python experiments/plan_cluster.py --help` lists these."""

    preset: Literal["397b", "35b"] = "397b"
    """Whose cluster."""
    hardware: Path | None = None
    """A JSON file with the fields of system.simulator.hardware.Hardware, instead of a preset; goes with --nodes."""
    from_run: Annotated[Path | None, arg(name="from")] = None
    """The folder of a run, for advice on its own machines; or a trajectories.jsonl alone, whose trials are drawn."""
    cores: float = 0.0
    """Cores that engines, trainer and trials of the run have in common; this machine's if 0, or none with other engines
    than the embedded ones. Goes with the folder of a run."""
    nodes: int = 0
    """Nodes in all; the preset's if 0."""
    batch_groups: int = 16
    """Groups in one step."""
    group_size: int = 16
    """Trials of one task."""
    max_staleness: int = 3
    """Versions that a trained token may lag behind."""
    mean_context: float = 0.0
    """Tokens of a trajectory while it runs, averaged over those under way; the preset's if 0, and with other hardware
    that of the trials as they are drawn."""
    median_length: float = 60_000
    """Of a trajectory, in tokens."""
    sigma: float = 0.8
    """Of the logarithm of its length."""
    sampled_share: float = 0.2
    """Of a trajectory's tokens, those that the policy sampled."""
    turn_tokens: float = 590
    """Sampled tokens of a turn."""
    tool_s: float = 3.0
    """Mean of a tool call."""
    start_s: float = 10.0
    """Of a sandbox."""
    verify_s: float = 20.0
    """Of grading."""
    sync_s: float = 30.0
    """Until new weights are in the engines."""
    steps: int = 30
    """Simulated for each split."""
    order: Literal["oldest", "completion", "admission"] = "oldest"
    """Which ready groups are trained."""
    late_group: Literal["wait", "drop", "mask", "train"] = "mask"
    """What becomes of a group that would get too old."""
    max_late: int = 4
    """Where such groups are masked: how many a step may leave too old; rather than leave more it waits."""
    in_order_steps: int = 4
    """So many first steps in the order of admission."""
    seed: int = 0
    """Of the drawing."""
    out: Path | None = None
    """Folder of plan.json, the numbers, and figure.png; by default out/plan_cluster/<time>."""

    def __post_init__(self) -> None:
        if not self.steps >= 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        for name in ("max_late", "in_order_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("median_length", "turn_tokens"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("mean_context", "sigma", "tool_s", "start_s", "verify_s", "sync_s", "cores"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if not 0 < self.sampled_share <= 1:
            raise ValueError(f"sampled_share must lie above 0 and at most at 1, got {self.sampled_share}")
        if not (self.nodes == 0 or self.nodes >= 2):
            raise ValueError(f"nodes must be at least 2, one of each kind, got {self.nodes}")
        if self.cores and not (self.from_run and self.from_run.is_dir()):
            raise ValueError(f"cores must go with the folder of a run in from, got {self.cores}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a plan is made from, all of it stated."""

    name: str
    hardware: Hardware
    inference_nodes: int
    "The preset's; 0 where there is none."
    training_nodes: int
    nodes: int
    mean_context: float
    context_from: str
    "What the mean context rests on."


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What follows from the inputs by formula, without a simulation, for one way to share the nodes."""

    admitted: int
    token_bytes: int
    engine_tokens: int
    engines: int
    runnable: int
    node_hours_price: float
    "Of all nodes for an hour."

    def told(self, config: Config, inputs: Inputs) -> list[str]:
        """Each number with its formula."""
        h = inputs.hardware
        on_gpu = max(1, h.kv_heads // h.tensor_parallel)
        return [
            f"admitted: (S + 1) * groups * group size = ({config.max_staleness} + 1) * {config.batch_groups} * "
            f"{config.group_size} = {self.admitted:,} trajectories",
            f"a token of context: 2 * {h.attention_layers} layers * {on_gpu} heads * {h.head_dim} * "
            f"{h.kv_value_bytes} bytes = {self.token_bytes:,} bytes of a GPU",
            f"an engine holds: ({h.gpu_bytes / 1e9:g} GB * {h.kv_utilization:g} - {h.weight_bytes / 1e9:g} GB / "
            f"{h.tensor_parallel} of weights - {h.other_bytes / 1e9:g} GB) / {self.token_bytes:,} bytes = "
            f"{self.engine_tokens:,} tokens",
            f"can run: {self.engines} engines * {self.engine_tokens:,} / mean context {inputs.mean_context:,.0f} = "
            f"{self.runnable:,} trajectories; that number follows only from {inputs.context_from} and this geometry",
            f"price: {inputs.nodes} nodes * {h.node_hour:g} $ = {self.node_hours_price:g} $ an hour",
        ]


def inputs_of(config: Config, workload: Workload) -> Inputs:
    """The preset's, or those of the user's hardware."""
    if config.hardware is None:
        inference, training, context = NODES[config.preset]
        why = f"an assumed mean context of {config.mean_context or context:,.0f} tokens"
        return Inputs(
            name=config.preset,
            hardware=HARDWARE[config.preset],
            inference_nodes=0 if config.nodes else inference,
            training_nodes=0 if config.nodes else training,
            nodes=config.nodes or inference + training,
            mean_context=config.mean_context or context,
            context_from=why,
        )
    if not config.nodes:
        raise ValueError("nodes must be given with hardware, got none")
    return Inputs(
        name=config.hardware.stem,
        hardware=read_hardware(config.hardware),
        inference_nodes=0,
        training_nodes=0,
        nodes=config.nodes,
        mean_context=config.mean_context or running_context(workload),
        context_from="the mean context that was given"
        if config.mean_context
        else "the lengths of the trials",
    )


def read_hardware(file: Path) -> Hardware:
    """From a JSON file of its fields."""
    known = {field.name for field in fields(Hardware)}
    try:
        told = json.loads(file.read_text())
        if unknown := sorted(set(told) - known):
            raise ValueError(f"unknown field {unknown[0]!r}")
        hardware = Hardware(**told)
        if not hardware.engines(1) and not hardware.engines(1000):
            raise ValueError("no room for an engine")
        if not hardware.engine_tokens:
            raise ValueError("no memory beside the weights")
        return hardware
    except (OSError, ValueError, TypeError, ZeroDivisionError) as error:
        told = " ".join(str(error).split()).replace("Hardware.__init__() ", "")
        raise ValueError(
            f"hardware must be a file with the fields of Hardware as JSON, got {file}: {told}"
        ) from None


def running_context(workload: Workload, *, tasks: int = 512) -> float:
    """Tokens of a trajectory while it runs: its length at each of its sampled tokens, averaged over all of them."""
    weighed = sampled = 0.0
    for task in range(tasks):
        plan = workload.trial(task=task, group=task, sample=0, attempt=0)
        context = plan.prompt
        for turn in plan.turns:
            weighed += turn.tokens * (context + turn.tokens / 2)
            sampled += turn.tokens
            context += turn.tokens + turn.observed - turn.forgotten
    return weighed / sampled


def derived(config: Config, inputs: Inputs, *, inference_nodes: int) -> Derived:
    """The numbers of one way to share the nodes."""
    hardware = inputs.hardware
    engines = hardware.engines(inference_nodes)
    return Derived(
        admitted=admitted_trajectories(
            max_staleness=config.max_staleness, batch_groups=config.batch_groups, group_size=config.group_size
        ),
        token_bytes=hardware.token_bytes,
        engine_tokens=hardware.engine_tokens,
        engines=engines,
        runnable=runnable_trajectories(
            engines=engines, tokens=hardware.engine_tokens, mean_length=inputs.mean_context
        ),
        node_hours_price=inputs.nodes * hardware.node_hour,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to share the nodes, and what came of it."""

    inference_nodes: int
    training_nodes: int
    runnable: int
    steps_per_hour: float
    trainer_idle: float
    engine_idle: float
    sampling_share: float
    "Trials under way, of those that could run."
    mean_age: float
    ages: dict[int, float]
    "Share of the trained tokens by age."
    fresh_tokens_per_hour: float
    step_cost: float


def main(config: Config) -> None:
    """A plan for a cluster, or advice to a run."""
    if config.from_run and config.from_run.is_dir():
        return advised(config, config.from_run)
    workload = drawn(config)
    inputs = inputs_of(config, workload)
    if not any(derived(config, inputs, inference_nodes=n).runnable for n in range(1, inputs.nodes)):
        per = inputs.hardware.gpus_per_node
        raise ValueError(f"nodes must hold an engine and a trajectory, got {inputs.nodes} of {per} GPUs")
    folder, written = opened(config)
    try:
        planned(config, inputs, workload, folder, written)
    except ValueError:
        withdraw(folder)
        raise


def opened(config: Config) -> tuple[Path, dict[str, Any]]:
    """The folder of this plan with its config.json, and what stands there."""
    folder = config.out or Path("out/plan_cluster") / time.strftime("%Y%m%d-%H%M%S")
    claim(folder)
    told = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(config).items()}
    command = shlex.join(["python", "experiments/plan_cluster.py", *sys.argv[1:]])
    written = {**told, "command": command, "commit": commit_hash(ROOT)}
    write_json(folder / "config.json", written)
    return folder, written


def planned(
    config: Config, inputs: Inputs, workload: Workload, folder: Path, written: Mapping[str, Any]
) -> None:
    """Simulates every split of the nodes and says which is best, and on what that rests."""
    console = Console()
    shown = inputs.inference_nodes or inputs.nodes // 2
    given = derived(config, inputs, inference_nodes=shown)
    console.print(f"{inputs.name}, {shown} of {inputs.nodes} nodes to sample:")
    for line in given.told(config, inputs):
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    splits = []
    for here in range(1, inputs.nodes):
        runnable = derived(config, inputs, inference_nodes=here).runnable
        if running := min(given.admitted, runnable):
            splits.append(tried(config, inputs.hardware, workload, here, inputs.nodes - here, running))
            console.print(f"  {here} + {inputs.nodes - here}: {splits[-1].steps_per_hour:.2f} steps an hour")
    best = max(splits, key=lambda split: split.fresh_tokens_per_hour)
    article = [s for s in splits if s.inference_nodes == inputs.inference_nodes]
    console.print(table_of(splits, best, article[0] if article else None))
    for split in dict.fromkeys(map(id, [best, *article])):
        one = next(s for s in splits if id(s) == split)
        console.print(
            f"{one.inference_nodes} + {one.training_nodes}: {limit(one)}", highlight=False, soft_wrap=True
        )
    write_json(
        folder / "plan.json",
        {
            "config": written,
            "hardware": asdict(inputs.hardware),
            "derived": asdict(given) | {"mean_context": inputs.mean_context},
            "splits": [asdict(split) for split in splits],
            "best": asdict(best),
            "limit": limit(best),
        },
    )
    marks = {best.inference_nodes: "best"}
    for one in article:
        marks[one.inference_nodes] = " and ".join(
            [*([marks[one.inference_nodes]] if one is best else []), "the article's"]
        )
    draw_plan(
        [Point(s.inference_nodes, s.steps_per_hour, s.trainer_idle, s.engine_idle) for s in splits],
        best.ages,
        folder / "figure.png",
        title=f"{inputs.name}, {inputs.nodes} nodes: {best.inference_nodes} to sample and {best.training_nodes} to "
        f"train get the most trained; {limit(best)}",
        marks=marks,
        places="nodes that sample",
        throughput="optimizer steps an hour",
        command=written["command"],
        commit=written["commit"],
    )
    console.print(
        f"best: {best.inference_nodes} to sample, {best.training_nodes} to train; {folder}/plan.json, figure.png"
    )


def limit(split: Split) -> str:
    """What limits a split, in a sentence."""
    if min(split.trainer_idle, split.engine_idle) > WAITS:
        both = f"engines wait {split.engine_idle:.0%} and the trainer {split.trainer_idle:.0%} of the time"
        return f"neither limits it: {both}; tools, sandboxes or the bound on staleness do"
    if split.trainer_idle > WAITS:
        return f"inference limits it: the trainer waits {split.trainer_idle:.0%} of the time"
    return f"training limits it: the trainer waits {split.trainer_idle:.0%} of the time"


def advised(config: Config, run: Path) -> None:
    """Turns what a run waited for into advice."""
    measured = read_measured(run, cores=config.cores or None)
    advice = advise(measured)
    folder, written = opened(config)
    console = Console()
    now = advice.measured
    idle = (
        "" if advice.engine_idle is None else f", its engines were idle {advice.engine_idle:.0%} of the time"
    )
    console.print(
        f"{run}: {now.steps_per_minute:.2g} steps a minute; the trainer waited {advice.waited_s:.1f} s for a step, "
        f"{now.trainer_idle:.0%} of the time{idle}; a trained token was {now.mean_age:.2f} versions old",
        highlight=False,
        soft_wrap=True,
    )
    console.print(advice_table(advice, measured))
    console.print(advice.told(), highlight=False, soft_wrap=True)
    write_json(folder / "plan.json", {"config": written, "advice": asdict(advice), "told": advice.told()})
    draw_plan(
        [Point(t.engines, t.figures.steps_per_minute, t.figures.trainer_idle, None) for t in all_of(advice)],
        age_shares(measured.steps),
        folder / "figure.png",
        title=advice.told(),
        marks={measured.engines: "the run's", advice.best.engines: "advised"}
        if advice.tried
        else {measured.engines: "the run's"},
        places="engines",
        throughput="optimizer steps a minute",
        command=written["command"],
        commit=written["commit"],
    )
    console.print(f"{folder}/plan.json, figure.png")


def all_of(advice: Advice) -> list[Tried]:
    """As it was, and with more engines."""
    return [advice.simulated, *advice.tried]


def advice_table(advice: Advice, run: Measured) -> Table:
    """A row a number of engines."""
    table = Table(title="the same run with more engines")
    for name in ("engines", "side by side", "steps/min", "trainer idle", "mean age"):
        table.add_column(name, justify="right")
    rows = [(f"{run.engines} measured", run.settings.max_running, advice.measured)]
    rows += [(f"{t.engines} simulated", t.max_running, t.figures) for t in all_of(advice)]
    rows.append(("a trainer twice as fast", run.settings.max_running, advice.faster_trainer))
    for name, running, figures in rows:
        table.add_row(
            name,
            f"{running:,}",
            f"{figures.steps_per_minute:.2f}",
            f"{figures.trainer_idle:.0%}",
            f"{figures.mean_age:.2f}",
        )
    return table


def drawn(config: Config) -> Workload:
    """The trials of the run."""
    if config.from_run:
        try:
            return Recorded.read(config.from_run, seed=config.seed)
        except (OSError, ValueError, KeyError, TypeError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"from must hold recorded trials, got {config.from_run}: {told}") from None
    return LognormalWorkload(
        median=config.median_length,
        sigma=config.sigma,
        lowest=2_000,
        highest=160_000,
        sampled=config.sampled_share,
        turn_tokens=config.turn_tokens,
        tool_s=config.tool_s,
        seed=config.seed,
    )


def tried(
    config: Config, hardware: Hardware, workload: Workload, inference: int, training: int, running: int
) -> Split:
    """One split, simulated."""
    cluster = hardware.cluster(
        inference_nodes=inference,
        training_nodes=training,
        sync_s=config.sync_s,
        start_s=config.start_s,
        verify_s=config.verify_s,
    )
    settings = Settings(
        steps=config.steps,
        batch_groups=config.batch_groups,
        group_size=config.group_size,
        max_staleness=config.max_staleness,
        max_running=running,
        max_retries=2,
        min_valid=2,
        tolerance=1e-6,
        max_zero_variance=0,
        max_lost=10**6,
        order=config.order,
        in_order_steps=config.in_order_steps,
        late_group=config.late_group,
        max_late=config.max_late if config.late_group == "mask" else None,
        requeue_stale=True,
        task_count=1_928,
        seed=config.seed,
        save_every=0,
        evaluate_at=(),
        evaluation_tasks=0,
        evaluation_samples=1,
    )
    record = simulate(settings, cluster, workload)
    skip = config.steps // 3
    mean = fmean(n for step in record.steps for n in step.lengths)
    report = report_of(record, mean_length=mean, skip=skip)
    trained = fmean(sum(step.ages.values()) for step in record.steps[skip:])
    return Split(
        inference_nodes=inference,
        training_nodes=training,
        runnable=running,
        steps_per_hour=report.steps_per_hour,
        trainer_idle=report.trainer_idle,
        engine_idle=report.engine_idle,
        sampling_share=report.running / running,
        mean_age=report.mean_age,
        ages=age_shares(record.steps),
        fresh_tokens_per_hour=trained * report.steps_per_hour,
        step_cost=(inference + training) * hardware.node_hour / report.steps_per_hour,
    )


def age_shares(steps: Sequence[StepRecord] | Sequence[Took]) -> dict[int, float]:
    """Share of the trained tokens by age."""
    ages: dict[int, float] = {}
    for age, tokens in (told for step in steps for told in step.ages.items()):
        ages[age] = ages.get(age, 0.0) + tokens
    return {age: tokens / sum(ages.values()) for age, tokens in sorted(ages.items())}


def table_of(splits: Sequence[Split], best: Split, article: Split | None) -> Table:
    """A row a split."""
    told = ", *: the best" + ", =: the article's" * (article is not None)
    table = Table(title=f"nodes to sample + to train{told}")
    table.add_column("nodes")
    for name in (
        "can run",
        "steps/h",
        "trainer idle",
        "engines idle",
        "sampling",
        "age",
        "tokens/h",
        "$/step",
    ):
        table.add_column(name, justify="right")
    for split in splits:
        mark = " *" * (split is best) + " =" * (split is article)
        table.add_row(
            f"{split.inference_nodes} + {split.training_nodes}{mark}",
            f"{split.runnable:,}",
            f"{split.steps_per_hour:.2f}",
            f"{split.trainer_idle:.0%}",
            f"{split.engine_idle:.0%}",
            f"{split.sampling_share:.0%}",
            f"{split.mean_age:.2f}",
            f"{split.fresh_tokens_per_hour / 1e6:.1f} M",
            f"{split.step_cost:.0f}",
        )
    return table


if __name__ == "__main__":
    command_line("plan_cluster.py", main, Config)
