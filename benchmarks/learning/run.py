"""Is learning real? Three aggregations, three seeds, and the advantage's sign flipped, on 200 held-out tasks.

    python benchmarks/learning/run.py --jobs 1     # one after the other; more jobs where there are more cores

Each arm and seed is a process of its own with a run folder below --out; the tables are made of their summaries.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "experiments"))

from ablate_aggregation import WEIGHTS  # noqa: E402
from ablation import Arm, Config, command_line, run  # noqa: E402

from core.advantage import GroupAdvantage, group_mean_advantage  # noqa: E402
from core.loss import dppo_binary_tv  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Learning(Config):
    seeds: int = 3
    """Runs of each arm."""
    steps: int = 20
    """Optimizer steps of each run."""
    groups: int = 8
    """Groups in one step."""
    tasks: int = 384
    """Training tasks."""
    worlds: int = 48
    """Companies to train in."""
    tasks_held_out: int = 200
    """Held-out tasks, all of them used."""
    attempts: int = 4
    """Trials of each held-out task."""
    arms: tuple[str, ...] = (*WEIGHTS, "flipped", "warm_start")
    """What to run; flipped is prompt mean with the advantage's sign turned round."""
    jobs: int = 1
    """Runs side by side."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = (*WEIGHTS, "flipped", "warm_start")
        if not self.arms or not set(self.arms) <= set(known) or len(set(self.arms)) < len(self.arms):
            raise ValueError(f"arms must be different ones of {', '.join(known)}, got {', '.join(self.arms)}")
        if not self.jobs >= 1:
            raise ValueError(f"jobs must be at least 1, got {self.jobs}")

    @property
    def evaluation_tasks(self) -> int:
        """All held-out tasks, however few the steps."""
        return self.tasks_held_out


def flipped(advantage: Callable[..., GroupAdvantage], *arguments: Any) -> GroupAdvantage:
    """The advantage with its sign turned round: what was better becomes worse."""
    told = advantage(*arguments)
    return told._replace(advantage=-told.advantage)


def arm(name: str, config: Config) -> Arm:
    """The rules of an arm."""
    loss = partial(
        dppo_binary_tv, delta_low=config.delta, delta_high=config.delta, max_ratio=config.max_ratio
    )
    plain = partial(group_mean_advantage, tolerance=1e-6)
    if name == "flipped":
        return Arm(weight=WEIGHTS["prompt_mean"], loss=loss, advantage=partial(flipped, plain))
    return Arm(weight=WEIGHTS[name], loss=loss, advantage=plain)


def main(config: Learning) -> None:
    """All runs, `jobs` at a time; one of them alone if this is such a process."""
    folder = config.out or Path("out") / "learning" / time.strftime("%Y%m%d-%H%M%S")
    if len(config.arms) == 1 and config.seeds == 1:
        arms = {} if config.arms == ("warm_start",) else {config.arms[0]: arm(config.arms[0], config)}
        run(replace(config, out=folder), arms, "benchmarks/learning/run.py", start=not arms)
        return
    folder.mkdir(parents=True, exist_ok=True)
    runs = [
        (name, seed)
        for name in config.arms
        for seed in range(config.seed, config.seed + (1 if name == "warm_start" else config.seeds))
    ]

    def one(name: str, seed: int) -> int:
        place = folder / f"{name}-{seed}"
        own = ["--out", str(place), "--seed", str(seed), "--seeds", "1", "--arms", name]
        with place.with_suffix(".log").open("w") as log:
            command = [sys.executable, __file__, *sys.argv[1:], *own]
            return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode

    with ThreadPoolExecutor(config.jobs) as pool:
        codes = list(pool.map(one, *zip(*runs, strict=True)))
    print(f"{codes.count(0)} of {len(codes)} runs in {folder}")
    if any(codes):
        raise SystemExit(1)


if __name__ == "__main__":
    command_line("learning", main, Learning)
