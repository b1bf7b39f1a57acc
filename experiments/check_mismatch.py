"""Do engine and trainer compute the same log-probabilities? A few steps of training, the gap by step and by cause.

python experiments/check_mismatch.py
python experiments/check_mismatch.py --of out/check_mismatch/<time>

What a loss sees, |trainer - engine|, holds the age of the tokens too, which is no fault. So every token is scored
again under the weights that sampled it: what is left is the engine's fault or the trainer's, and the gate is on that.
With --learning-rate 0 the weights stand still, and a gap that grows all the same is state that the engine keeps.
Exit code 1 if the gate is not passed.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ablation
from ablation import Arm, command_line
from rich.console import Console
from rich.table import Table
from rich.text import Text

from core.aggregate import prompt_mean_weight
from core.attribution import rounding_noise
from core.drift import Drift, gap_drift
from core.loss import dppo_binary_tv
from system.policy import load_policy
from system.record.metrics import read_jsonl, write_json
from system.trainer.gap import Gap, Knobs, gap_of, rows_by_step
from system.trainer.rescoring import Rescorer

SIGNIFICAND_BITS = {"float32": 24, "bfloat16": 8}
"""Of the engine's arithmetic."""
ROUNDINGS = 2.5
"""A whole model is so many times as noisy as one rounding of its logits."""


@dataclass(frozen=True, kw_only=True)
class Config(ablation.Config):
    steps: int = 4
    """Optimizer steps."""
    tasks_held_out: int = 1
    """Held-out tasks, played after the last step."""
    attempts: int = 1
    """Trials of each."""
    of: Path | None = None
    """Folder of an earlier run of this script: look at that again instead of training."""
    gate: float = 0.03
    """Bound on a step's mean |trainer - engine| with every token under the weights that sampled it."""
    arithmetic: Literal["float32", "bfloat16"] = "float32"
    """Of the engine or the trainer, whichever is coarser: what rounding may explain."""
    largest_logit: float = 30.0
    """Its size sets the size of a rounding."""
    drift_level: float = 0.01
    """Chance of a false alarm about a gap that grows while the weights stand still."""
    drift_slope: float = 1e-4
    """Growth of the gap a step that matters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds != 1:
            raise ValueError(f"seeds must be 1, got {self.seeds}")
        for name in ("gate", "largest_logit", "drift_slope"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 < self.drift_level < 1:
            raise ValueError(f"drift_level must lie between 0 and 1, got {self.drift_level}")


def main(config: Config) -> dict[str, Any]:
    """Trains, unless a run is given, and says how far engine and trainer are apart and why."""
    folder = config.of or trained(config)
    policy, temperature = settings_of(folder)
    files = {
        int(path.stem.removeprefix("weights-")): path for path in (folder / "versions").glob("weights-*")
    }
    model, _ = load_policy(policy)
    rescorer = Rescorer(model, files, temperature=temperature, device=config.device)
    noise = ROUNDINGS * rounding_noise(
        largest_logit=config.largest_logit, significand_bits=SIGNIFICAND_BITS[config.arithmetic]
    )
    steps = rows_by_step(read_jsonl(folder / "trainer_input.jsonl"))
    if not steps:
        raise ValueError(f"trainer_input.jsonl must hold a step, got none in {folder}")
    told = {"knobs": Knobs(logit_noise=noise), "read": read_by_engines(folder)}
    gaps = [gap_of(rows, rescorer, version=version, **told) for version, rows in steps.items()]
    same = [hashlib.sha256(files[gap.step].read_bytes()).hexdigest() for gap in gaps]
    drift = gap_drift(
        [gap.engine for gap in gaps], same, level=config.drift_level, min_slope=config.drift_slope
    )
    told = report(gaps, drift, gate=config.gate)
    write_json(folder / "mismatch.json", told)
    print_gaps(gaps, told)
    print(f"report {folder / 'mismatch.json'}")
    return told


def trained(config: Config) -> Path:
    """The folder of a short run that keeps the weights of every version."""
    folder = config.out or Path("out") / "check_mismatch" / time.strftime("%Y%m%d-%H%M%S")
    bounds = {"delta_low": config.delta, "delta_high": config.delta, "max_ratio": config.max_ratio}
    arm = Arm(weight=prompt_mean_weight, loss=partial(dppo_binary_tv, **bounds))
    settings = replace(config, out=folder)
    ablation.run(settings, {"dppo": arm}, "experiments/check_mismatch.py", start=False, keep_weights=True)
    return folder


def settings_of(folder: Path) -> tuple[Path, float]:
    """Policy and temperature of a run that this script made."""
    try:
        written = json.loads((folder / "config.json").read_text())
        found = Path(written["policy"]), float(written["temperature"])
    except (OSError, ValueError, KeyError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"of must be the folder of a run of this script, got {folder}: {told}") from None
    for name in ("trainer_input.jsonl", "versions"):
        if not (folder / name).exists():
            raise ValueError(f"of must be the folder of a run of this script, got {folder} without {name}")
    return found


def read_by_engines(folder: Path) -> dict[str, list[int]]:
    """The ids of prompt and completion of every request, from the engines' own logs."""
    lines = (line for log in sorted(folder.glob("engine*.jsonl")) for line in read_jsonl(log))
    return {line["request_id"]: [*line["prompt_ids"], *line["token_ids"]] for line in lines}


def report(gaps: Sequence[Gap], drift: Drift, *, gate: float) -> dict[str, Any]:
    """What is written to mismatch.json; `faults` is empty if the gate is passed."""
    faults = [
        f"step {gap.step}: mean |trainer - engine| must be below {gate}, got {gap.engine:.4f} ({named(gap)})"
        for gap in gaps
        if not gap.engine < gate
    ]
    faults += [
        f"step {gap.step}: every trained token must have a logprob of the engine, got {gap.unusable} without"
        for gap in gaps
        if gap.unusable
    ]
    if drift.alarm:
        told = f"{drift.slope:.2g} a step, p = {drift.p_value:.2g}"
        faults.append(
            f"the gap must not grow while the weights stand still, got {told}: the engine keeps state"
        )
    return {
        "gate": gate,
        "passed": not faults,
        "faults": faults,
        "drift": drift._asdict(),
        "steps": [gap._asdict() for gap in gaps],
    }


def named(gap: Gap) -> str:
    """The causes that were found, with their shares."""
    return ", ".join(f"{name} {gap.share[name]:.0%}" for name in gap.found) or "no cause found"


def print_gaps(gaps: Sequence[Gap], told: dict[str, Any]) -> None:
    """A row a step, and the verdict."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for heading in ("step", "tokens", "as the loss\nsees it", "at equal\nweights", "same cache", "k3"):
        table.add_column(heading, justify="right")
    table.add_column("causes of what the loss sees")
    for gap in gaps:
        numbers = (f"{x:.2g}" for x in (gap.seen, gap.engine, gap.exact, gap.k3))
        table.add_row(str(gap.step), f"{gap.tokens:,}", *numbers, Text(named(gap)))
    console = Console()
    console.print(table)
    for fault in told["faults"]:
        console.print(Text(fault, style="red"))
    if told["passed"]:
        largest = max(gap.engine for gap in gaps)
        console.print(Text(f"passed: at equal weights {largest:.2g} at most, gate {told['gate']}"))


if __name__ == "__main__":
    if not command_line("check_mismatch", main, Config)["passed"]:
        raise SystemExit(1)
