"""What the audits of a struck run find, and a short storm over a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_simulator import SYNCHRONOUS

from core.schedule import (
    Action,
    Event,
    Opened,
    Reopened,
    Save,
    Saved,
    StartTrial,
    State,
    StepTrained,
    SyncWeights,
    Train,
    WeightsApplied,
    begin,
    react,
)
from system.chaos.audit import AUDITS, History, ledger, read_history, reward_faults, surviving_steps
from system.chaos.disk import Disk
from system.chaos.judge import CRITERION, is_met
from system.chaos.life import Life
from system.journal import Journal
from system.loop import trial_ended
from system.record.metrics import JsonLines
from system.run import RunError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

import replay  # noqa: E402

TAGS = {"arm": "policy", "seed": 0}
NAME = "policy/0"
SETTINGS = replace(
    SYNCHRONOUS,
    **{"steps": 4, "group_size": 2, "batch_groups": 1, "tolerance": 1e-6, "max_zero_variance": 1},
    **{"requeue_stale": True, "task_count": 3, "save_every": 2},
)


# A small run that was killed twice, played by the reducer, with all its files


class Player:
    """Carries out what the schedule says, at once, and writes what a run writes."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder / "events.jsonl", tags=TAGS, settings=SETTINGS)
        self.trials = JsonLines(folder / "trajectories.jsonl")
        self.metrics = JsonLines(folder / "metrics.jsonl")
        self.rows = JsonLines(folder / "trainer_input.jsonl")
        self.state: State = begin()
        self.reward: dict[str, float] = {}
        self.seconds = 0.0

    def play(self, *events: Event, until: Callable[[Action], bool]) -> None:
        """From these events on, until an action is of that kind, which is not carried out."""
        waiting = list(events)
        while waiting:
            event = waiting.pop(0)
            self.state, actions = react(SETTINGS, self.state, event)
            self.journal.write(event, actions)
            for action in actions:
                if until(action):
                    return
                waiting += self.carry_out(action)

    def carry_out(self, action: Action) -> list[Event]:
        match action:
            case StartTrial():
                return [self.trial(action)]
            case SyncWeights(version=version):
                return [WeightsApplied(version=version)]
            case Save(version=version):
                return [Saved(version=version)]
            case Train(version=version):
                self.step(action)
                return [StepTrained(version=version + 1)]
            case _:
                return []

    def trial(self, action: StartTrial) -> Event:
        met = action.sample == 0 or action.group_id == 1  # of the second group both succeed: no signal
        criteria = [{"name": CRITERION["id"], "met": met, "gate": False}]
        outcome = {"kind": "solved" if met else "failed", "reason": ""}
        told = {"outcome": outcome, "reward": float(met), "answer": "7" if met else "", "criteria": criteria}
        full = f"{NAME}/{action.trial_id}"
        self.trials.write({**TAGS, "trial_id": full, **told, "rows": []})
        self.reward[action.trial_id] = float(met)
        return trial_ended(action.trial_id, told)

    def step(self, action: Train) -> None:
        mean = sum(self.reward[t] for t in action.trial_ids) / len(action.trial_ids)
        for trial in action.trial_ids:
            full = f"{NAME}/{trial}"
            about = {"version": action.version, "row_id": f"{full}#0", "trial_id": full, "token_ids": [1, 2]}
            self.rows.write({**about, "advantage": self.reward[trial] - mean})
        self.seconds += 1.0
        self.metrics.rewrite(lambda line: line["step"] > action.version)
        self.metrics.write({**TAGS, "step": action.version + 1, "seconds": self.seconds, "reward": mean})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Killed in its second step and in its fourth, then done."""
    player = Player(tmp_path)
    player.play(Opened(version=0), until=lambda a: isinstance(a, Train) and a.version == 1)
    player.play(Reopened(version=0), until=lambda a: isinstance(a, Train) and a.version == 3)
    player.play(Reopened(version=2), until=lambda a: False)
    assert player.state.finished and player.state.trained == 4
    return tmp_path


def history(folder: Path) -> History:
    return read_history(folder, tags=TAGS, name=NAME)


def found(folder: Path) -> dict[str, list[str]]:
    """Every audit that finds something."""
    told = {name: audit(history(folder)) for name, audit in AUDITS.items()}
    told["rewards"] = reward_faults(history(folder), judged=is_met, judge=CRITERION["id"])
    return {name: faults for name, faults in told.items() if faults}


def test_a_run_that_was_killed_and_went_on_passes_every_audit(run: Path) -> None:
    assert found(run) == {}
    assert ledger(history(run)).counts == {"trained": 4, "zero_variance": 1}
    steps, asked = surviving_steps(history(run).entries)
    assert sorted(steps) == [0, 1, 2, 3] and asked is None


def edited(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def renumbered(lines: list[dict[str, Any]]) -> None:
    for number, line in enumerate(lines):
        line["n"] = number


def trains(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [a for line in lines for a in line.get("actions", []) if a["type"] == "Train"]


def group_twice(lines: list[dict[str, Any]]) -> None:
    first, last = trains(lines)[0], trains(lines)[-1]
    last |= {"group_ids": first["group_ids"], "trial_ids": first["trial_ids"]}


def lost_event(lines: list[dict[str, Any]]) -> None:
    place = next(i for i, line in enumerate(lines) if line.get("event", {}).get("type") == "TrialEnded")
    del lines[place]
    renumbered(lines)


def lost_step(lines: list[dict[str, Any]]) -> None:
    place = [i for i, line in enumerate(lines) if line.get("event", {}).get("type") == "StepTrained"][-2]
    del lines[place]
    renumbered(lines)


def dropped_and_trained(lines: list[dict[str, Any]]) -> None:
    group = trains(lines)[-1]["group_ids"][0]
    started = next(
        line
        for line in lines
        for a in line.get("actions", [])
        if a["type"] == "StartTrial" and a["group_id"] == group
    )
    task = next(a["task"] for a in started["actions"] if a["group_id"] == group)
    started["actions"].append({"type": "DropGroup", "group_id": group, "task": task, "reason": "lost"})


def other_task(lines: list[dict[str, Any]]) -> None:
    starts = [a for line in lines for a in line.get("actions", []) if a["type"] == "StartTrial"]
    for start in starts:
        if start["group_id"] == starts[-1]["group_id"]:
            start["task"] = (start["task"] + 1) % 3


@pytest.mark.parametrize(
    ("change", "audits", "told"),
    [
        (group_twice, {"surviving line", "ledger of tasks", "trained rows", "replay"}, "is trained 2 times"),
        (lost_event, {"events", "rewards", "replay"}, "no end of it in the journal"),
        (lost_step, {"surviving line", "curve", "replay"}, "step 2 of the surviving line is missing"),
        (dropped_and_trained, {"ledger of tasks", "replay"}, "is lost, got"),
        (other_task, {"ledger of tasks", "replay"}, "must be of task"),
    ],
)
def test_a_planted_fault_of_the_journal_is_found(
    run: Path, change: Callable[[list[dict[str, Any]]], None], audits: set[str], told: str
) -> None:
    edited(run / "events.jsonl", change)
    faults = found(run)
    assert audits <= faults.keys(), faults
    assert any(told in fault for lines in faults.values() for fault in lines), faults


def test_an_event_that_is_gone_is_missed_by_its_number(run: Path) -> None:
    edited(run / "events.jsonl", lambda lines: lines.pop(5))
    with pytest.raises(ValueError, match="got none numbered 5"):
        history(run)


# What replay.py says of a journal that was tampered with


def duplicated(lines: list[dict[str, Any]], place: int) -> None:
    lines.insert(place, dict(lines[place]))


def swapped(lines: list[dict[str, Any]], place: int) -> None:
    lines[place], lines[place + 1] = lines[place + 1], lines[place]


def deleted(lines: list[dict[str, Any]], place: int) -> None:
    del lines[place]


def altered(lines: list[dict[str, Any]], place: int) -> None:
    event = lines[place]["event"]
    if "reward" in event:
        event |= {"reward": 1.0 - event["reward"], "trial_id": event["trial_id"] + "1"}
    else:
        event["version"] += 1


@pytest.mark.parametrize("tamper", [duplicated, swapped, deleted, altered])
@pytest.mark.parametrize("number_again", [False, True])
def test_replay_tells_a_line_that_is_gone_twice_elsewhere_or_another(
    run: Path, tamper: Callable[[list[dict[str, Any]], int], None], number_again: bool
) -> None:
    replay.main(replay.Config(run=run))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    unseen = []
    for place in range(1, len(events) - 1):
        lines = json.loads(json.dumps(events))
        tamper(lines, place)
        if number_again:
            renumbered(lines)
        (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            replay.main(replay.Config(run=run))
        except RunError as error:
            assert "\n" not in str(error)
        else:
            unseen.append(events[place])
    # With new numbers only that can pass of which nothing follows, and that a run went on twice before it did anything.
    assert number_again or unseen == []
    heard = [line for line in unseen if line["actions"] and line["event"]["type"] != Reopened.__name__]
    assert heard == [] and (unseen == [] or tamper in (duplicated, swapped))


FAILED = {"name": CRITERION["id"], "met": False, "gate": False}
BROKEN = {"kind": "system_error", "reason": ""}


def changed(name: str, place: int, **values: Any) -> Callable[[Path], None]:
    return lambda folder: edited(folder / name, lambda lines: lines[place].update(values))


def removed(name: str, place: int) -> Callable[[Path], None]:
    return lambda folder: edited(folder / name, lambda lines: lines.pop(place))


def doubled(name: str, place: int) -> Callable[[Path], None]:
    return lambda folder: edited(folder / name, lambda lines: lines.append(lines[place]))


@pytest.mark.parametrize(
    ("plant", "audit", "told"),
    [
        (changed("trajectories.jsonl", 0, reward=0.5), "rewards", "must be 1.0 as in the journal, got 0.5"),
        (changed("trajectories.jsonl", 0, criteria=[FAILED]), "rewards", "by its criteria"),
        (changed("trajectories.jsonl", 1, answer="9"), "rewards", "the judge must say True"),
        (changed("trajectories.jsonl", 0, outcome=BROKEN), "rewards", "must have a valid reward"),
        (removed("trajectories.jsonl", 0), "rewards", "got no record of that"),
        (doubled("trajectories.jsonl", 0), "rewards", "has 2 lines"),
        (changed("trainer_input.jsonl", 0, advantage=0.7), "trained rows", "must have advantage 0.5, got 0.7"),
        (changed("trainer_input.jsonl", 0, token_ids=[3]), "trained rows", "another when it is trained again"),
        (changed("trainer_input.jsonl", -1, version=9), "trained rows", "got no decision of it"),
        (removed("trainer_input.jsonl", -1), "trained rows", "got no row of it"),
        (removed("metrics.jsonl", 1), "curve", "got 3 after 1"),
        (doubled("metrics.jsonl", 1), "curve", "must tell of steps 1 to 4 once each"),
        (changed("metrics.jsonl", 2, reward=None), "curve", "step 3 must have a reward"),
        (changed("metrics.jsonl", 2, seconds=0.0), "curve", "step 3 must come after"),
    ],
)  # fmt: skip
def test_a_planted_fault_of_another_file_is_found(
    run: Path, plant: Callable[[Path], None], audit: str, told: str
) -> None:
    plant(run)
    faults = found(run)
    assert audit in faults and any(told in fault for fault in faults[audit]), faults


# A run as it is seen from outside


def test_a_journal_that_is_cut_off_and_written_on_is_read_on(tmp_path: Path) -> None:
    journal, told = tmp_path / "events.jsonl", [f'{{"n":{n},"x":"{"y" * 90}"}}\n' for n in range(3)]
    life = Life(["true"], [], folder=tmp_path, log=tmp_path, environment={})
    begun = '{"event":{"type":"Opened","version":0}}\n'
    again = '{"event":{"type":"Reopened","version":2}}\n'
    assert life.look() == 0
    journal.write_text(begun + told[0] + told[1][:-20])
    assert (life.look(), life.version) == (1, 0)
    journal.write_text(begun + told[0] + again)  # shorter than what was cut off
    assert (life.look(), life.version) == (2, 2)
    journal.write_text(begun + told[0])
    life.forget_the_last_line()
    journal.write_text(begun + told[0] + again + told[2])
    assert life.look() == 3


# A real run


@pytest.mark.parametrize("mounted", [True, False])
def test_a_disk_is_full_until_it_is_freed(
    tmp_path: Path, mounted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mounted and os.geteuid():
        pytest.skip("mounting a tmpfs takes root")
    if not mounted:
        monkeypatch.setattr("os.geteuid", lambda: 1000)
    with Disk(tmp_path / "disk") as disk:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(disk.place / "lines")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert writer.stdin is not None and writer.stdout is not None and disk.mounted == mounted
        told = []
        for change in (None, disk.fill, disk.free):
            if change is not None:
                change([writer.pid])
            writer.stdin.write(b"write\n")
            writer.stdin.flush()
            told.append(writer.stdout.readline().strip())
        writer.communicate()
    assert told[0] == told[2] == b"written" and told[1] in (b"No space left on device", b"File too large")
    assert list(tmp_path.iterdir()) == ([] if mounted else [tmp_path / "disk"])


WRITER = """
import os, sys
for _ in sys.stdin:
    try:
        with open(sys.argv[1], "ab") as file:
            file.write(b"x" * 9000)  # what there is room for in the last page is written, the rest fails
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def test_a_short_storm_over_a_real_run_leaves_nothing_wrong(tmp_path: Path) -> None:
    kinds = ["disk", "trainer", "tool server", "run, all at once", "second run"]
    words = [
        "--minutes",
        "0.4",
        "--gap-s",
        "0.5",
        "--least-faults",
        "0",
        "--least-steps",
        "0",
        "--kinds",
        *kinds,
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "chaos.py"), *words, "--out", str(tmp_path / "chaos")],
        capture_output=True,
        text=True,
        timeout=900,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    report = json.loads((tmp_path / "chaos" / "chaos.json").read_text())
    assert report["passed"] and len(report["faults"]) >= 2 and not any(report["audits"].values()), told
    assert (tmp_path / "chaos" / "chaos.md").read_text().startswith("# Chaos: ")
    for name in ("journal", "rewards", "replay.py"):
        assert report["audits"].get(name, []) == []


def test_a_kind_of_fault_that_there_is_not_is_refused(tmp_path: Path) -> None:
    script = [
        sys.executable,
        str(ROOT / "experiments" / "chaos.py"),
        "--kinds",
        "rain",
        "--out",
        str(tmp_path / "c"),
    ]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "kinds must be of" in done.stderr and len(done.stderr.splitlines()) == 1
