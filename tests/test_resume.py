"""A run that is killed goes on; what was sampled, trained and dropped before is neither lost nor done twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_run import ROOT, check_tokens, command, lines
from test_simulator import SYNCHRONOUS

from core.schedule import (
    Opened,
    Reopened,
    Save,
    Saved,
    StepTrained,
    SyncWeights,
    Train,
    WeightsApplied,
    begin,
    react,
)
from system.checkpoint import last_checkpoint, write_checkpoint
from system.journal import Journal, read_journal, read_tags, replayed
from system.lock import held
from system.loop import trial_ended
from system.record.metrics import JsonLines, write_json
from system.resume import find_run
from system.run import RunError

OPTIONS = [
    *("--steps", "4", "--groups", "2", "--group-size", "4", "--tasks", "16", "--worlds", "4"),
    *("--tasks-held-out", "3", "--attempts", "1", "--max-running", "8", "--save-every", "2"),
]
TAGS = {"arm": "token_mean", "seed": 0}


def replay(path: Path) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "experiments" / "replay.py"), str(path)]
    return subprocess.run(script, capture_output=True, text=True, timeout=120)


def killed_at(folder: Path, wanted: str, count: int, *, resume: bool, log: Path) -> None:
    """Start or resume a run, and kill it when its journal has this text so often."""
    with log.open("ab") as out:
        more = ["--resume", "True"] if resume else []
        process = subprocess.Popen(
            command(*OPTIONS, "--out", str(folder), *more), stdout=out, stderr=out, start_new_session=True
        )
        deadline = time.monotonic() + 240
        events = folder / "events.jsonl"
        while not events.exists() or events.read_text().count(wanted) < count:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {})
    with held(tmp_path):
        for options, told in (
            ([], f"out must be a new folder, got {tmp_path} with a run in it of process {os.getpid()}"),
            (
                ["--resume", "True"],
                f"out must be a folder that no run is writing to, got {tmp_path} of process {os.getpid()}",
            ),
        ):
            done = subprocess.run(
                command(*OPTIONS, "--out", str(tmp_path), *options),
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed in its third step, killed again soon after and in its second arm, then left alone to its end."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    log = folder.parent / "log"
    killed_at(folder, '"type":"StepTrained","version":3', 1, resume=False, log=log)
    killed_at(folder, '"event":{"type":"Reopened"', 1, resume=True, log=log)
    killed_at(folder, '"arm":"sequence_mean"', 9, resume=True, log=log)
    done = subprocess.run(
        command(*OPTIONS, "--out", str(folder), "--resume", "True"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_every_step_is_on_the_last_line_of_weights_once_and_no_group_twice(run: Path) -> None:
    _, entries = read_journal(run / "events.jsonl", tags=TAGS)
    assert sum(isinstance(entry.event, Reopened) for entry in entries) == 2
    line: dict[int, dict[str, Any]] = {}
    for entry in entries:
        if isinstance(entry.event, Reopened):
            line = {version: train for version, train in line.items() if version < entry.event.version}
        line |= {a["version"]: a for a in entry.actions if a["type"] == Train.__name__}
    assert sorted(line) == [0, 1, 2, 3]
    groups = [group for train in line.values() for group in train["group_ids"]]
    assert len(groups) == len(set(groups)) == 8


def test_metrics_have_every_step_once_and_trials_end_once(run: Path) -> None:
    told = [m for m in lines(run / "metrics.jsonl") if m["arm"] == "token_mean"]
    assert [m["step"] for m in told if "step" in m] == [1, 2, 3, 4]
    trials = Counter(t["trial_id"] for t in lines(run / "trajectories.jsonl"))
    assert set(trials.values()) == {1}
    assert json.loads((run / "summary.json").read_text())["finished"]


def test_the_trainer_used_what_the_engine_emitted_in_every_life(run: Path) -> None:
    told = check_tokens.main(check_tokens.Config(run=run))
    assert told["rows"] > 0 and told["faults"] == []
    assert told["gaps"] and max(told["gaps"]) < 1e-5


def test_times_rewards_and_idle_shares_go_on(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    for arm in ("token_mean", "sequence_mean", "prompt_mean"):
        steps = [m for m in lines(run / "metrics.jsonl") if m["arm"] == arm and "step" in m]
        seconds = [step["seconds"] for step in steps]
        assert seconds == sorted(seconds) and all(step["reward"] is not None for step in steps)
        assert all(0 <= step["trainer_idle"] <= 1 for step in steps)
        _, entries = read_journal(run / "events.jsonl", tags={"arm": arm, "seed": 0})
        told = [entry.seconds for entry in entries]
        assert told == sorted(told)
        assert (
            0 < summary["arms"][arm]["trainer_idle"] < 1 and summary["arms"][arm]["seconds"] >= told[-1] - 1
        )
    assert summary["seconds"] > sum(summary["arms"][arm]["seconds"] for arm in summary["arms"]) - 1
    trials = len(lines(run / "trajectories.jsonl"))
    spent = sum(summary["arms"][arm]["seconds"] for arm in summary["arms"])
    assert summary["throughput"]["trials_per_minute"] < 60 * trials / spent + 1
    assert 0 < summary["throughput"]["first_step_seconds"] < summary["seconds"]


def test_a_run_that_was_done_but_for_its_summary_writes_it(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    before = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    arguments = command(*OPTIONS, "--out", str(folder), "--resume", "True")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    after = json.loads((folder / "summary.json").read_text())
    for arm, told in before["arms"].items():
        assert after["arms"][arm]["pass_at_1"] == told["pass_at_1"]
        assert after["arms"][arm]["trainer_idle"] == pytest.approx(told["trainer_idle"])
    assert after["throughput"]["cpu_seconds_per_trial"] == {}


def test_what_is_trained_again_is_the_same_to_the_token(run: Path) -> None:
    rows = [r for r in lines(run / "trainer_input.jsonl") if r["trial_id"].startswith("token_mean/0/")]
    again: dict[tuple[int, str], dict[str, Any]] = {}
    twice = 0
    for row in rows:
        key = row["version"], row["row_id"]
        twice += key in again
        assert again.setdefault(key, row) == row
    assert twice > 0


def test_the_run_replays_and_an_event_that_is_gone_is_told(run: Path, tmp_path: Path) -> None:
    assert replay(run).returncode == 0
    written = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_text("".join(written[:40] + written[41:]))
    told = replay(tmp_path)
    assert (
        told.returncode == 1
        and "must hold every event" in told.stderr
        and "got none numbered 40" in told.stderr
    )


def test_a_changed_action_is_told_with_its_number(run: Path, tmp_path: Path) -> None:
    written = (run / "events.jsonl").read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(written) if '"type":"Train"' in line)
    written[place] = written[place].replace('"type":"Train","version":0', '"type":"Train","version":7')
    (tmp_path / "events.jsonl").write_text("".join(written))
    told = replay(tmp_path / "events.jsonl")
    assert told.returncode == 1 and f"token_mean seed 0: event {place}" in told.stderr


def test_a_torn_last_line_is_left_out_and_its_event_comes_again(run: Path, tmp_path: Path) -> None:
    written = (run / "events.jsonl").read_bytes()
    torn = tmp_path / "events.jsonl"
    torn.write_bytes(written[:-20])
    whole = read_journal(run / "events.jsonl", tags=(last := read_tags(torn)[-1]))
    settings, entries = read_journal(torn, tags=last)
    assert len(entries) == len(whole[1]) - 1 and replayed(settings, entries)[1] is None
    Journal(torn, tags=last, settings=settings, written=len(entries) + 1).close()
    assert torn.read_bytes() == written[: written[:-1].rindex(b"\n") + 1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--steps", "8"], "a run must go on with its own settings, got others: steps was 4, is 8"),
        (["--learning-rate", "1"], "learning_rate was 0.00015, is 1.0"),
    ],
)
def test_other_settings_are_refused_by_name(run: Path, options: list[str], told: str) -> None:
    arguments = command(*OPTIONS, *options, "--out", str(run), "--resume", "True")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_folder_without_a_run_cannot_go_on(tmp_path: Path) -> None:
    arguments = command(*OPTIONS, "--out", str(tmp_path), "--resume", "True")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "out must be the folder of a run to be resumed" in done.stderr


# What had happened when the run was killed, and was not in the journal yet

SMALL = replace(SYNCHRONOUS, steps=2, tolerance=1e-6, requeue_stale=True, task_count=1, save_every=1)


def ended(sample: int) -> dict[str, Any]:
    """The line of a trial."""
    outcome = {"kind": "solved"}
    name = f"token_mean/0/train-0-{sample}-0"
    return {**TAGS, "trial_id": name, "group_id": 0, "outcome": outcome, "reward": float(sample), "rows": []}


def killed_after(folder: Path, *events: Any) -> None:
    """A run whose journal tells of these, and both of whose trials had ended."""
    journal, state = Journal(folder / "events.jsonl", tags=TAGS, settings=SMALL), begin()
    for event in events:
        state, actions = react(SMALL, state, event)
        journal.write(event, actions)
    journal.close()
    with JsonLines(folder / "trajectories.jsonl") as trajectories:
        for sample in (0, 1):
            trajectories.write(ended(sample))


def begun_and_ended(*samples: int) -> list[Any]:
    told = [trial_ended(f"train-0-{sample}-0", ended(sample)) for sample in samples]
    return [Opened(version=0), WeightsApplied(version=0), *told]


def test_a_step_that_an_unheard_trial_made_due_is_taken_only_after_the_weights_are_back(
    tmp_path: Path,
) -> None:
    killed_after(tmp_path, *begun_and_ended(0))
    found = find_run(tmp_path, tmp_path / "none", tags=TAGS, name="token_mean/0", settings=SMALL)
    ((_, void),) = found.unheard
    assert [type(action) for action in void] == [Train]
    assert found.resumed.events == (Reopened(version=0),)
    state, actions = react(SMALL, found.resumed.state, Reopened(version=0))
    assert actions == (SyncWeights(version=0),)
    _, actions = react(SMALL, state, WeightsApplied(version=0))
    assert actions == void and sorted(found.resumed.results) == ["train-0-0-0", "train-0-1-0"]


def test_a_checkpoint_that_was_whole_when_its_run_was_killed_counts(tmp_path: Path) -> None:
    killed_after(tmp_path, *begun_and_ended(0, 1), StepTrained(version=1))
    settings, entries = read_journal(tmp_path / "events.jsonl", tags=TAGS)
    assert any(action["type"] == Save.__name__ for action in entries[-1].actions)
    write_checkpoint(tmp_path / "versions", 1, save=saved("one"), about={})
    found = find_run(tmp_path, tmp_path / "versions", tags=TAGS, name="token_mean/0", settings=settings)
    assert found.version == 1 and [event for event, _ in found.unheard] == [Saved(version=1)]
    assert found.resumed.state.trained == 1


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"n":0,', '"n":9,', "got none numbered 0"),
        ('"WeightsApplied"', '"Moved"', "must be an event with its actions, got KeyError: 'Moved'"),
        ('"steps":2,', "", "missing 1 required keyword-only argument: 'steps'"),
        ('"settings"', '"event"', "must hold the settings of {'arm': 'token_mean', 'seed': 0}"),
    ],
)
def test_a_damaged_journal_is_told_in_one_line(tmp_path: Path, old: str, new: str, told: str) -> None:
    killed_after(tmp_path, *begun_and_ended())
    events = tmp_path / "events.jsonl"
    events.write_text(events.read_text().replace(old, new, 1))
    done = replay(tmp_path)
    assert done.returncode in (1, 2) and told in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_journal_without_a_run_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    done = replay(tmp_path)
    assert done.returncode == 2 and "must have a journal that holds a run" in done.stderr


# Checkpoints


def saved(text: str):
    def save(folder: Path) -> None:
        (folder / "weights").write_text(text)

    return save


def test_a_checkpoint_is_whole_or_left_aside(tmp_path: Path) -> None:
    for version in (2, 4, 6):
        write_checkpoint(tmp_path, version, save=saved(f"weights {version}"), about={"arm": "a"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-000004", "version-000006"]
    newest, damaged = last_checkpoint(tmp_path)
    assert newest is not None and (newest.version, newest.about, damaged) == (6, {"arm": "a"}, [])
    (tmp_path / "version-000006" / "weights").write_text("weights 7")
    older, damaged = last_checkpoint(tmp_path)
    assert older is not None and older.version == 4
    assert damaged == ["checkpoint version-000006 is left aside: weights is not what was written"]


def test_a_manifest_that_says_too_little_is_left_aside(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, save=saved("one"), about={})
    (tmp_path / "version-000001" / "manifest.json").write_text('{"files": {}}')
    newest, damaged = last_checkpoint(tmp_path)
    assert newest is None and damaged == ["checkpoint version-000001 is left aside: KeyError: 'version'"]


def test_a_checkpoint_that_was_being_written_is_not_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, save=saved("one"), about={})

    def broken(folder: Path) -> None:
        saved("half")(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path, 2, save=broken, about={})
    newest, damaged = last_checkpoint(tmp_path)
    assert newest is not None and newest.version == 1 and damaged == []
    write_checkpoint(tmp_path, 2, save=saved("two"), about={})
    assert last_checkpoint(tmp_path)[0].version == 2  # type: ignore[union-attr]


def test_a_checkpoint_that_was_told_of_other_settings_is_refused(tmp_path: Path) -> None:
    killed_after(tmp_path, *begun_and_ended(0, 1), StepTrained(version=1))
    write_checkpoint(tmp_path / "versions", 1, save=saved("one"), about={**TAGS, "learning_rate": 0.1})
    place = {"tags": TAGS, "name": "token_mean/0", "settings": SMALL}
    same = find_run(tmp_path, tmp_path / "versions", **place, about={**TAGS, "learning_rate": 0.1})
    assert same.version == 1
    with pytest.raises(
        RunError, match="must be of this run, got one of another: learning_rate was 0.1, is 0.2"
    ):
        find_run(tmp_path, tmp_path / "versions", **place, about={**TAGS, "learning_rate": 0.2})


def test_a_checkpoint_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    settings, _ = read_journal(run / "events.jsonl", tags=TAGS)
    write_checkpoint(tmp_path, 3, save=saved("odd"), about={})
    with pytest.raises(RunError, match="a checkpoint must be of version 2 or 4, got none"):
        find_run(run, tmp_path, tags=TAGS, name="token_mean/0", settings=settings)
