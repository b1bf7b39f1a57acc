"""Does the simulator say what a live run does? Each setting is predicted from runs with other settings, and measured.

One command: `python benchmarks/simulator.py` (or `python -m benchmarks.simulator`), on a machine at rest.
`--measured benchmarks/recorded/simulator.jsonl` predicts again from what was measured.

Three settings of `experiments/train.py` on the embedded default, three runs each with other seeds, in turns, so that
what else the machine does falls on all of them alike; and a fourth setting, with two trials side by side, that is not
predicted: from it one learns what a trial takes by itself. The runs of a setting are predicted from all the others: the
rates of engine, trainer and trials are fitted to them (`system/simulator/fit.py`), and their trials are drawn again.

Columns. measured: mean of the runs, from the end of the first step to that of the last, and their standard deviation,
the spread. idle: share of the time in which the trainer took no step. age: of a trained token, in versions. A figure
holds where the prediction lies within 15 % of the measured mean, or within twice the spread.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from system.record.audit import machine_name, markdown_table  # noqa: E402
from system.record.metrics import JsonLines, commit_hash, read_jsonl  # noqa: E402
from system.simulator import Cluster  # noqa: E402
from system.simulator.fit import fitted, predicted  # noqa: E402
from system.simulator.measured import Figures, Measured, read_measured  # noqa: E402

SETTINGS = {
    "four groups": {"groups": 4, "max_staleness": 2, "max_running": 24},
    "synchronous": {"groups": 2, "max_staleness": 0, "max_running": 24},
    "few at a time": {"groups": 6, "max_staleness": 3, "max_running": 12},
    "alone": {"groups": 1, "max_staleness": 0, "max_running": 2},
}
PREDICTED = ("four groups", "synchronous", "few at a time")
COMMON = {"tasks": 96, "worlds": 24, "tasks_held_out": 1, "attempts": 1}

BOUND = 0.15
UNITS = {"steps_per_minute": "steps/min", "trainer_idle": "idle", "mean_age": "age"}

Runs = dict[str, list[Measured]]


class Line(NamedTuple):
    """A figure of a setting: what was measured, how far the runs lie apart, what was predicted."""

    setting: str
    figure: str
    measured: float
    spread: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured if self.measured else float(self.predicted == 0)

    @property
    def holds(self) -> bool:
        return abs(self.predicted - self.measured) <= max(BOUND * self.measured, 2 * self.spread)


def measure(steps: int, repeats: int, raw: JsonLines) -> Runs:
    """Runs every setting and keeps what is needed of each run."""
    runs: Runs = {}
    for repeat in range(repeats):
        for setting, options in SETTINGS.items():
            if setting not in PREDICTED and repeat > 0:
                continue
            begun, load = time.monotonic(), os.getloadavg()[0]
            run = one(options | COMMON | {"steps": steps, "seed": repeat})
            about = {"setting": setting, "repeat": repeat, "load_before": load, "commit": commit_hash(ROOT)}
            raw.write(about | {"figures": asdict(run.figures())} | run.record())
            runs.setdefault(setting, []).append(run)
            print(
                f"{setting}, run {repeat}: {time.monotonic() - begun:.0f} s, {told(run.figures())}",
                flush=True,
            )
    return runs


def one(options: dict[str, Any]) -> Measured:
    """A run in a process of its own; its folder goes with it."""
    with tempfile.TemporaryDirectory(prefix="bartleby-simulator-") as scratch:
        words = [
            word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", f"{value}")
        ]
        script = [sys.executable, str(ROOT / "experiments" / "train.py")]
        done = subprocess.run(
            [*script, "--out", f"{scratch}/run", *words], capture_output=True, text=True, cwd=scratch
        )
        if done.returncode:
            raise RuntimeError(f"a run must come to its end, got {done.stderr.strip() or done.returncode}")
        return read_measured(Path(scratch) / "run")


def read(path: Path) -> Runs:
    """What was measured before."""
    runs: Runs = {}
    for line in read_jsonl(path):
        runs.setdefault(line["setting"], []).append(Measured.of(line))
    return runs


def compare(runs: Runs) -> tuple[list[Line], dict[str, Cluster]]:
    """Each setting that is to be predicted, from the runs of the others."""
    lines: list[Line] = []
    clusters: dict[str, Cluster] = {}
    for setting in PREDICTED:
        others = [run for name, some in runs.items() if name != setting for run in some]
        clusters[setting] = fitted(others)
        found = predicted(runs[setting][0].settings, clusters[setting], others, draws=8)
        figures = [run.figures() for run in runs[setting]]
        for name in UNITS:
            values = [getattr(one, name) for one in figures]
            spread = stdev(values) if len(values) > 1 else 0.0
            lines.append(Line(setting, name, fmean(values), spread, getattr(found, name)))
    return lines, clusters


def told(figures: Figures) -> str:
    """In a line."""
    return ", ".join(f"{unit} {getattr(figures, name):.3g}" for name, unit in UNITS.items())


def report(lines: Sequence[Line], clusters: dict[str, Cluster], runs: Runs) -> str:
    """The table, and on what it rests."""
    rows = [
        (
            line.setting,
            UNITS[line.figure],
            f"{line.measured:.3f}",
            f"{line.spread:.3f}",
            f"{line.predicted:.3f}",
            f"{line.ratio:.2f}",
            "yes" if line.holds else "NO",
        )
        for line in lines
    ]
    table = markdown_table(("setting", "figure", "measured", "spread", "predicted", "ratio", "holds"), rows)
    count = {name: len(some) for name, some in runs.items()}
    fits = [
        f"{name}: "
        + ", ".join(f"{k} {v:.4g}" for k, v in asdict(cluster).items() if v not in (0.0, float("inf")))
        for name, cluster in clusters.items()
    ]
    held = sum(line.holds for line in lines)
    return "\n".join(
        [
            f"{machine_name()}, commit {commit_hash(ROOT)}; runs: {count}",
            "",
            table,
            "",
            f"{held} of {len(lines)} within {BOUND:.0%} or twice the spread",
            "",
            "fitted, without the runs of:",
            *fits,
            "",
        ]
    )


def main() -> None:
    """Measures, predicts, writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measured", type=Path, help="predict again from this file instead of measuring")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "recorded" / "simulator")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    if asked.measured:
        runs = read(asked.measured)
    else:
        path = asked.out.with_suffix(".jsonl")
        path.unlink(missing_ok=True)
        raw = JsonLines(path)
        runs = measure(asked.steps, asked.repeats, raw)
        raw.close()
    text = report(*compare(runs), runs)
    asked.out.with_suffix(".txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
