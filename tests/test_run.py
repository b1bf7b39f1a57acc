"""The whole loop in small: real engine, trainer, sandboxes and tools, two optimizer steps, and what they leave."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from core.schedule import StartTrial, begin, react
from system.engine import EngineError, RestartRule
from system.journal import read_journal, record_of
from system.loop import Loop
from system.run import machinery

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

import ablate_aggregation  # noqa: E402
import ablation  # noqa: E402
import check_tokens  # noqa: E402

SMALL = [
    *("--steps", "2", "--groups", "2", "--group-size", "4", "--tasks", "16", "--worlds", "4"),
    *("--tasks-held-out", "3", "--attempts", "1", "--max-running", "8"),
]
FILES = (
    "config.json events.jsonl metrics.jsonl trajectories.jsonl engine.jsonl trainer_input.jsonl summary.json "
    "figure.png report.html"
).split()


def command(*options: str) -> list[str]:
    return [sys.executable, str(ROOT / "experiments" / "ablate_aggregation.py"), *options]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def left_behind(temporary: Path) -> list[str]:
    """What is left in the temporary folder of a run, mounts below it, and processes that know it."""
    found = [str(path) for path in temporary.iterdir()]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(temporary) in line]
    for process in psutil.process_iter():
        try:
            known = [*process.cmdline(), *process.environ().values(), *(f.path for f in process.open_files())]
        except psutil.Error:  # ended meanwhile
            continue
        if any(str(temporary) in text for text in known):
            found.append(str(process))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "small"
    temporary = tmp_path_factory.mktemp("t")
    done = subprocess.run(
        command(*SMALL, "--out", str(folder)),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_behind(temporary) == []
    return folder


def test_a_run_writes_every_file(run):
    for name in FILES:
        assert (run / name).stat().st_size > 0, name
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["arms"]) == {"token_mean", "sequence_mean", "prompt_mean"} and summary["warm_start"]
    assert len(summary["comparisons"]) == 3
    for arm in summary["arms"].values():
        assert 0 <= arm["pass_at_1"]["mean"] <= 1 and arm["pass_at_1"]["se"] >= 0
    steps = [line for line in lines(run / "metrics.jsonl") if "step" in line]
    assert [line["step"] for line in steps] == [1, 2] * 3


def test_all_arms_begin_with_the_same_trials(run):
    first: dict[str, list] = {}
    for trial in lines(run / "trajectories.jsonl"):
        if (
            trial["purpose"] == "train"
            and trial["version_started"] == 0
            and trial["trial_id"].endswith("/train-0-0-0")
        ):
            first.setdefault(trial["arm"], []).append(trial["rows"][0]["token_ids"][:150])
    assert len(first) == 3 and len({str(ids) for ids in first.values()}) == 1


def test_the_trainer_used_what_the_engine_emitted(run):
    told = check_tokens.main(check_tokens.Config(run=run))
    assert told["rows"] > 0 and told["faults"] == []
    assert told["gaps"] and max(told["gaps"]) < 1e-5


def drifted_token(row: dict) -> None:
    at = row["requests"][0][1]
    row["token_ids"][at] = (row["token_ids"][at] + 1) % 600


def shifted_mask(row: dict) -> None:
    row["loss_mask"] = [0, *row["loss_mask"][:-1]]


def retokenised_turn(row: dict) -> None:
    _, start, end = row["requests"][0]
    letters = [i for token in row["token_ids"][start : end - 1] for i in (token, token)]
    for name, value in (
        ("token_ids", None),
        ("loss_mask", 1),
        ("rollout_logprob", -0.1),
        ("policy_version", 0),
    ):
        new = letters if value is None else [value] * len(letters)
        row[name] = row[name][:start] + new + row[name][end - 1 :]
    grown = len(letters) - (end - 1 - start)
    row["requests"] = [[n, a + grown * (k > 0), b + grown] for k, (n, a, b) in enumerate(row["requests"])]


@pytest.mark.parametrize("plant", [drifted_token, shifted_mask, retokenised_turn])
def test_planted_drift_fails_the_check(run, tmp_path, plant):
    for name in ("engine.jsonl", "metrics.jsonl", "trainer_input.jsonl"):
        shutil.copy(run / name, tmp_path / name)
    rows = lines(tmp_path / "trainer_input.jsonl")
    plant(rows[len(rows) // 2])
    (tmp_path / "trainer_input.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check_tokens.main(check_tokens.Config(run=tmp_path))["faults"]


def test_the_journal_replays_to_the_same_actions(run):
    settings, events = read_journal(run / "events.jsonl", tags={"arm": "prompt_mean", "seed": 0})
    state = begin()
    for event, written, _ in events:
        state, actions = react(settings, state, event)
        assert json.loads(json.dumps([record_of(action) for action in actions])) == written
    assert state.finished and len(events) > 10


def test_a_second_run_into_the_same_folder_is_refused(run):
    with pytest.raises(ValueError, match="out must be a new folder"):
        ablate_aggregation.main(ablation.Config(out=run))


def broken_task(folder: Path) -> Path:
    (folder / "tasks" / "one").mkdir(parents=True)
    (folder / "tasks" / "one" / "task.toml").write_text('schema_version = "1.4"\n')
    return folder / "tasks"


def foreign_tasks(folder: Path, *parts: str) -> Path:
    """A folder with one Harbor task that is not ours."""
    task = folder / "one"
    for part in ("environment", *parts):
        (task / part).mkdir(parents=True, exist_ok=True)
    (task / "task.toml").write_text('schema_version = "1.4"\n')
    (task / "instruction.md").write_text("Say 42.\n")
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (task / "tests" / "test.sh").write_text("exit 0\n")
    return folder


def test_bad_input_is_refused_in_one_line_before_anything_starts(tmp_path):
    policy = shutil.copytree(ROOT / "policies" / "clerk", tmp_path / "policy")
    (policy / "tokenizer.json").unlink()
    start = ablation.Config(out=tmp_path / "out")
    cases = {
        "policy must be a folder with tokenizer.json, got": {"policy": policy},
        "environment/Dockerfile": {"train": broken_task(tmp_path)},
        "group_size must be at least 2, got 1": {"group_size": 1},
        "tasks must lie in a folder": {"held_out": tmp_path / "nowhere"},
        "a task must bring a world in environment/world, got": {
            "train": foreign_tasks(tmp_path / "a", "tests")
        },
        "tests must hold checks.json, got": {
            "train": foreign_tasks(tmp_path / "b", "tests", "environment/world")
        },
        "context must be at most max_position_embeddings 2048 of the policy, got 2049": {"context": 2049},
        "worlds must be more for 500 different tasks, got 1": {"worlds": 1, "tasks": 500},
        "max_running must be at least 1, got 0": {"max_running": 0},
        "learning_rate must be finite and not negative, got nan": {"learning_rate": math.nan},
        "nudge_ratio must lie between 0 and 1, got 2": {"nudge_ratio": 2.0},
        "with a file there": {"out": policy / "config.json"},
        "out must be a folder that can be made": {"out": policy / "config.json" / "run"},
    }
    if not torch.cuda.is_available():
        cases["device must be cpu where torch finds no GPU, got cuda"] = {"device": "cuda"}
    for message, changed in cases.items():
        with pytest.raises(ValueError) as error:
            ablate_aggregation.main(replace(start, **changed))
        assert message in str(error.value) and "\n" not in str(error.value)
        assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("options", [["--group-size", "1"], ["--no-such-option"]])
def test_the_script_ends_with_one_line_and_exit_code_2(options, tmp_path):
    done = subprocess.run(command(*options), capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
    assert options[0].removeprefix("--").replace("-", "") in done.stderr.replace("-", "").replace("_", "")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_a_run_with_nothing_left_and_its_files_readable(tmp_path):
    folder, temporary = tmp_path / "run", tmp_path / "t"
    temporary.mkdir()
    options = [*SMALL, "--steps", "50", "--out", str(folder)]
    process = subprocess.Popen(
        command(*options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        deadline = time.monotonic() + 120
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert left_behind(temporary) == []
    assert lines(folder / "metrics.jsonl") and lines(folder / "trajectories.jsonl")


def test_an_engine_that_ended_too_often_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    with (
        pytest.raises(EngineError, match="engine 0 must end at most 0 times in 600 s, .* exit code -9"),
        machinery(
            policy=ROOT / "policies" / "clerk",
            engine_log=tmp_path / "engine.jsonl",
            sandbox="process",
            max_context=64,
            max_sessions=2,
            threads=1,
            device="cpu",
            restart=RestartRule(most=0),
        ) as machine,
    ):
        alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
        engines = [p for p in alive if "system.engine.embedded" in p.cmdline()]
        engines[0].kill()
        while True:
            machine.engine.poll()
    assert not (tmp_path / "t").exists() or list((tmp_path / "t").iterdir()) == []


def test_an_evaluation_counts_valid_trials_only():
    """A trial that ran out of time was graded, but the clock also measures the machine."""
    parts: dict[str, Any] = dict.fromkeys(("settings", "spec", "advantage", "journal"), None)
    parts["crew"] = Mock(engine=Mock(release=lambda trial, failed: ""))
    loop = Loop(**parts, name="arm/0", observer=Mock())
    outcomes = {
        "solved": {"kind": "solved"},
        "late": {"kind": "truncated", "reason": "wall_clock"},
        "broken": {"kind": "system_error", "phase": "verify", "cause": "no disk"},
    }
    for sample, (name, outcome) in enumerate(outcomes.items()):
        loop.started[name] = StartTrial(
            trial_id=name, group_id=0, task=0, sample=sample, attempt=0, purpose="eval", policy_version=0
        )
        loop._trial_ended({"trial_id": f"arm/0/{name}", "outcome": outcome, "reward": 1.0})
    assert [action.trial_id for action, _ in loop.evaluated] == ["solved"]


def test_scripts_say_what_they_are():
    for script in sorted((ROOT / "experiments").glob("*.py")):
        spec = importlib.util.spec_from_file_location(script.stem, script)
        assert spec is not None and (script.read_text().startswith('"""')), script
