"""A training run under the Ray fleet: the same script, one more option."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from needs_ray import needs_ray
from test_sandbox import needs_bubblewrap
from watching import those_called

from system.record.metrics import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("--steps", "1", "--groups", "2", "--group-size", "3", "--tasks", "16", "--worlds", "4"),
    *("--tasks-held-out", "4", "--attempts", "1", "--max-running", "6"),
)


@needs_ray
@needs_bubblewrap
def test_a_training_step_under_ray_loses_no_trial_and_leaves_nothing(tmp_path: Path) -> None:
    out, temporary = (
        tmp_path / "run",
        Path(tempfile.mkdtemp(prefix="r", dir="/tmp")),
    )  # short: sockets lie there
    script = str(ROOT / "experiments" / "train.py")
    call = [sys.executable, script, *SMALL, "--fleet", "ray", "--out", str(out)]
    environment = {**os.environ, "TMPDIR": f"{temporary}"}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["finished"] and summary["config"]["fleet"] == "ray"
    trials = list(read_jsonl(out / "trajectories.jsonl"))
    kinds = Counter(trial["outcome"]["kind"] for trial in trials)
    assert len(trials) >= 2 * 3 + 4 and not kinds["system_error"], kinds
    assert os.listdir(temporary) == [] and those_called(f"{temporary}") == []
    temporary.rmdir()
