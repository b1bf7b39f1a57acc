"""How many nodes should sample and how many should train: the schedule itself, under a virtual clock.

A preset states every input; each can be given, and what is not measured is an assumption. The sampler's speed is
bounded by memory traffic, the trainer's by operations; turns, tokens and tool times are drawn from a distribution, or
from a recorded run with --source.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from command import command_line
from rich.console import Console
from rich.table import Table

from core.capacity import admitted_trajectories, runnable_trajectories
from core.schedule import Settings
from system.simulator import LognormalWorkload, Recorded, Workload, report_of, simulate
from system.simulator.hardware import Hardware

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

NODES = {"397b": (12, 8, 70_000.0), "35b": (10, 4, 96_000.0)}
"""Inference nodes, training nodes, and the mean context that gives the article's number of running trajectories."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """See the docstring of the script; `python experiments/plan_cluster.py --help` lists these."""

    preset: Literal["397b", "35b"] = "397b"
    """Whose cluster."""
    nodes: int = 0
    """Nodes in all; the preset's if 0."""
    batch_groups: int = 16
    """Groups in one step."""
    group_size: int = 16
    """Trials of one task."""
    max_staleness: int = 3
    """Versions that a trained token may lag behind."""
    mean_context: float = 0.0
    """Tokens of a trajectory while it runs, averaged over those under way; the preset's if 0."""
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
    source: Path | None = None
    """A trajectories.jsonl whose trials are drawn instead."""
    order: Literal["oldest", "completion", "admission"] = "oldest"
    """Which ready groups are trained."""
    late_group: Literal["wait", "drop", "mask", "train"] = "wait"
    """What becomes of a group that would get too old."""
    seed: int = 0
    """Of the drawing."""
    out: Path = Path("out/plan_cluster")
    """Folder of plan.json, the numbers."""

    def __post_init__(self) -> None:
        if not self.steps >= 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        for name in ("median_length", "turn_tokens"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("mean_context", "sigma", "tool_s", "start_s", "verify_s", "sync_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if not 0 < self.sampled_share <= 1:
            raise ValueError(f"sampled_share must lie above 0 and at most at 1, got {self.sampled_share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to share the nodes, and what came of it."""

    inference_nodes: int
    training_nodes: int
    runnable: int
    steps_per_hour: float
    trainer_idle: float
    sampling_share: float
    "Trials under way, of those that could run."
    mean_age: float
    fresh_tokens_per_hour: float
    step_cost: float


def main(config: Config) -> None:
    """Simulates every split of the nodes and says which is best, and on what that rests."""
    hardware, (inference, training, context) = HARDWARE[config.preset], NODES[config.preset]
    nodes = config.nodes or inference + training
    context = config.mean_context or context
    admitted = admitted_trajectories(
        max_staleness=config.max_staleness, batch_groups=config.batch_groups, group_size=config.group_size
    )
    workload = drawn(config)
    if config.out.exists() and not config.out.is_dir():
        raise ValueError(f"out must be a folder, got the file {config.out}")
    if nodes < 2:
        raise ValueError(f"nodes must be at least 2, one of each kind, got {nodes}")
    splits = []
    console = Console()
    console.print(
        f"{config.preset}: staleness {config.max_staleness} admits {admitted:,} trajectories; a token of context takes "
        f"{hardware.token_bytes:,} bytes of a GPU, so an engine holds {hardware.engine_tokens:,} tokens"
    )
    for here in range(1, nodes):
        if engines := hardware.engines(here):
            runnable = runnable_trajectories(
                engines=engines, tokens=hardware.engine_tokens, mean_length=context
            )
            if runnable >= 1:
                splits.append(tried(config, hardware, workload, here, nodes - here, min(admitted, runnable)))
                console.print(f"  {here} + {nodes - here}: {splits[-1].steps_per_hour:.2f} steps an hour")
    if not splits:
        raise ValueError(f"nodes must hold an engine, got {nodes} of {hardware.gpus_per_node} GPUs")
    best = max(splits, key=lambda split: split.fresh_tokens_per_hour)
    console.print(table_of(splits, best, given=(inference, training) if not config.nodes else None))
    config.out.mkdir(parents=True, exist_ok=True)
    told = {"config": asdict(config) | {"out": str(config.out), "source": str(config.source or "")}}
    told |= {"hardware": asdict(hardware), "splits": [asdict(split) for split in splits]}
    (config.out / "plan.json").write_text(json.dumps(told, indent=1) + "\n")
    console.print(
        f"best: {best.inference_nodes} to sample, {best.training_nodes} to train; {config.out}/plan.json"
    )


def drawn(config: Config) -> Workload:
    """The trials of the run."""
    if config.source:
        try:
            return Recorded.read(config.source, seed=config.seed)
        except (OSError, ValueError, KeyError, TypeError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"source must hold recorded trials, got {config.source}: {told}") from None
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
        in_order_steps=0,
        late_group=config.late_group,
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
        sampling_share=report.running / running,
        mean_age=report.mean_age,
        fresh_tokens_per_hour=trained * report.steps_per_hour,
        step_cost=(inference + training) * hardware.node_hour / report.steps_per_hour,
    )


def table_of(splits: list[Split], best: Split, *, given: tuple[int, int] | None) -> Table:
    """A row a split."""
    table = Table(title="nodes to sample + to train")
    for name in (
        "nodes",
        "can run",
        "steps/h",
        "trainer idle",
        "sampling",
        "mean age",
        "fresh tokens/h",
        "$/step",
    ):
        table.add_column(name, justify="right")
    for split in splits:
        marks = " best" * (split is best)
        marks += " the article's" * ((split.inference_nodes, split.training_nodes) == given)
        table.add_row(
            f"{split.inference_nodes} + {split.training_nodes}{marks}",
            f"{split.runnable:,}",
            f"{split.steps_per_hour:.2f}",
            f"{split.trainer_idle:.0%}",
            f"{split.sampling_share:.0%}",
            f"{split.mean_age:.2f}",
            f"{split.fresh_tokens_per_hour / 1e6:.1f} M",
            f"{split.step_cost:.0f}",
        )
    return table


if __name__ == "__main__":
    command_line("plan_cluster.py", main, Config)
