"""The gap between engine and trainer in a real run: what is there by nature, and what was planted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.drift import Drift
from system.trainer.gap import Gap, rows_by_step

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

import check_mismatch  # noqa: E402

SMALL = ["--steps", "2", "--groups", "2", "--group-size", "4", "--max-running", "8", "--context", "500"]


def check(*options: str) -> tuple[int, dict[str, Any], str]:
    script = str(ROOT / "experiments" / "check_mismatch.py")
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, timeout=600)
    folder = options[options.index("--of" if "--of" in options else "--out") + 1]
    report = Path(folder, "mismatch.json")
    return (
        done.returncode,
        json.loads(report.read_text()) if report.exists() else {},
        done.stdout + done.stderr,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[str, Any], str]:
    """Two real steps; the second is trained on tokens of two versions."""
    folder = tmp_path_factory.mktemp("mismatch") / "run"
    code, report, output = check(*SMALL, "--learning-rate", "1e-3", "--out", str(folder))
    assert code == 0, output
    return folder, report, output


def planted(run: Path, copy: Path, change: Any) -> Path:
    """The run with every row of its trainer's input changed."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("tasks", "mismatch.json"))
    path = copy / "trainer_input.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))
    return copy


def test_a_healthy_run_passes_and_age_is_told_from_fault(run):
    """At the first step nothing differs; later what a loss sees is the age of the tokens, and what old caches hold."""
    _, report, output = run
    first, second = report["steps"]
    assert report["passed"] and "passed: at equal weights" in output
    assert first["seen"] < 1e-5 and first["found"] == []
    assert second["exact"] < 1e-5 and second["engine"] < 0.03
    assert set(second["found"]) <= {"stale_version", "stale_cache"}


def test_a_prompt_that_was_tokenised_again_is_found(run, tmp_path):
    def other_prompt(line):
        *_, (_, start, _) = line["requests"]
        line["token_ids"][start - 4 : start - 1] = [7, 8, 9]
        return line

    _, report, _ = check("--of", str(planted(run[0], tmp_path / "run", other_prompt)))
    assert report["steps"][0]["found"] == ["retokenised"]


def test_another_temperature_is_found(run, tmp_path):
    copy = planted(run[0], tmp_path / "run", lambda line: line)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"temperature": 1.3}))
    code, report, _ = check("--of", str(copy), "--gate", "0.005")
    assert code == 1 and "temperature" in report["steps"][0]["found"]
    assert report["faults"][0].startswith("step 0: mean |trainer - engine| must be below 0.005, got 0.0")


def test_rows_without_a_logprob_of_the_engine_are_a_fault(run, tmp_path):
    def without(line):
        line["rollout_logprob"] = [
            -9999.0 if on else x for on, x in zip(line["loss_mask"], line["rollout_logprob"])
        ]
        return line

    code, report, _ = check("--of", str(planted(run[0], tmp_path / "run", without)))
    assert code == 1 and any("every trained token must have a logprob" in fault for fault in report["faults"])


def gap(engine: float) -> Gap:
    return Gap(
        step=0, tokens=1, unusable=0, seen=engine, engine=engine, exact=0.0, k3=0.0, share={}, found=[]
    )


def test_the_gate_is_on_equal_weights_and_a_gap_that_grows_is_an_alarm():
    steady, growing = Drift(0.0, 0.5, False), Drift(0.01, 0.001, True)
    assert check_mismatch.report([gap(0.029)], steady, gate=0.03)["passed"]
    assert not check_mismatch.report([gap(0.03)], steady, gate=0.03)["passed"]
    (fault,) = check_mismatch.report([gap(0.001)], growing, gate=0.03)["faults"]
    assert fault.startswith("the gap must not grow while the weights stand still, got 0.01 a step, p = 0.001")


def test_a_step_that_was_taken_twice_counts_once():
    line = {
        "trial_id": "t",
        "group_id": 0,
        "requests": [["r", 1, 2]],
        "advantage": 1.0,
        "token_ids": [1, 2],
        "loss_mask": [0, 1],
        "rollout_logprob": [0.0, -1.0],
        "policy_version": [-1, 0],
    }
    told = [line | {"version": v, "row_id": name} for v, name in [(0, "a"), (1, "b"), (0, "c"), (1, "d")]]
    assert {v: [r.row_id for r in rows] for v, rows in rows_by_step(told).items()} == {0: ["c"], 1: ["d"]}
    with pytest.raises(ValueError, match="line 1 must be a row of a step, got KeyError: 'version'"):
        rows_by_step([line])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--of", "/nowhere"], "check_mismatch: of must be the folder of a run of this script, got /nowhere"),
        (["--of", str(ROOT), "--gate", "0"], "gate must be positive and finite, got 0"),
        (["--of", str(ROOT), "--seeds", "2"], "seeds must be 1"),
    ],
)
def test_bad_options_are_one_line(options, told):
    code, _, output = check(*options)
    assert code == 2 and told in output and output.count("\n") == 1
