"""A whole run with vLLM in the engine's place: real trials, a step, an update, an evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from vllm_server import PYTHON, ROOT


def test_an_ablation_runs_with_vllm(tmp_path: Path):
    told = tmp_path / "vllm.json"
    told.write_text(json.dumps({"python": PYTHON, "dtype": "float32", "kv_gib": 1, "start_s": 1200}))
    small = {"groups": 2, "group-size": 2, "tasks": 2, "tasks-held-out": 2, "attempts": 1, "worlds": 3}
    options = [part for name, value in small.items() for part in (f"--{name}", f"{value}")]
    out = tmp_path / "run"
    ran = subprocess.run(
        [sys.executable, "experiments/train.py", "--engine", "vllm", "--vllm", str(told), "--steps", "1"]
        + ["--out", str(out), "--deadline-s", "300", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    trials = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    assert trials and all(trial["outcome"]["kind"] != "system_error" for trial in trials)
    sampled = [v for trial in trials for row in trial["rows"] for v in row["policy_version"] if v >= 0]
    assert set(sampled) == {0, 1}
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    (step,) = [line for line in lines if "grad_norm" in line]
    assert step["mismatch"] < 1e-3  # what the engine said of its tokens is what the trainer finds
