"""A fleet of any kind gives one result for each trial, whatever becomes of the trial, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from test_sandbox import needs_bubblewrap
from watching import OpenFleet, alive, collect, left_in, noted_pids, parent_of, those_called, wait_for

from core.outcome import Outcome
from system.fleet import Fleet, FleetError

TARGET = "fleet_trials:run"


def test_each_trial_gives_one_result_with_its_cost(fleet: Fleet) -> None:
    for index in range(6):
        fleet.start({"trial_id": f"t{index}", "deadline_s": 20, "action": "answer", "burn": 0.05 * index})
    assert len(fleet.running) == 6
    results = collect(fleet)
    assert sorted(results) == [f"t{index}" for index in range(6)]
    assert fleet.poll(0.0) == []
    for index, result in enumerate(results[f"t{i}"] for i in range(6)):
        assert result["outcome"] == {"kind": "solved"}
        assert result["cpu_seconds"]["engine"] == 1.5
        assert 0.05 * index <= result["cpu_seconds"]["trial"] < 0.05 * index + 0.5


def test_a_trial_inherits_neither_torch_nor_environment_nor_descriptors(
    open_fleet: OpenFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BARTLEBY_TEST_SECRET", "4821")
    fleet = open_fleet(target=TARGET)
    fleet.start({"trial_id": "a", "deadline_s": 20, "action": "linger", "notes": f"{tmp_path}"})
    fleet.start({"trial_id": "b", "deadline_s": 20, "action": "answer"})
    (result,) = fleet.poll(20)
    assert result["torch"] is False
    assert not {"BARTLEBY_TEST_SECRET", "HOME", "USER", "PYTHONPATH"} & set(result["environment"])
    assert result["descriptors"] == 5  # the standard three, the way back, and where to say that it is up


@pytest.mark.parametrize(
    ("how", "phase", "cause"),
    [
        ("raise", "process", "LookupError: no such thing"),
        ("sandbox", "freeze", "it does not die"),
        ("exit", "process", "exit 3"),
        ("kill", "process", "exit -9"),
        ("text", "process", "TypeError: a trial must return a dict, got str"),
        ("value", "process", "TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_a_trial_that_fails_is_a_system_error(fleet: Fleet, how: str, phase: str, cause: str) -> None:
    fleet.start({"trial_id": "bad", "deadline_s": 20, "action": "fail", "how": how})
    fleet.start({"trial_id": "good", "deadline_s": 20, "action": "answer"})
    results = collect(fleet)
    assert results["bad"]["outcome"] == {"kind": "system_error", "phase": phase, "cause": cause}
    assert results["bad"]["cpu_seconds"]["trial"] >= 0
    assert results["good"]["outcome"] == {"kind": "solved"}


def test_a_late_trial_is_killed_with_everything_it_started(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start({"trial_id": "late", "deadline_s": 0.3, "action": "linger", "notes": f"{tmp_path}"})
    fleet.start(
        {"trial_id": "fine", "deadline_s": 20, "action": "linger", "notes": f"{tmp_path}", "for_s": 1.5}
    )
    late, fine = noted_pids(tmp_path, "late"), noted_pids(tmp_path, "fine")
    (result,) = fleet.poll(5)
    assert result["outcome"] == {"kind": "system_error", "phase": "process", "cause": "deadline: 0.8 s"}
    assert alive(late) == [] and alive(fine) == fine
    assert collect(fleet)["fine"]["outcome"] == {"kind": "solved"}


def test_a_cancelled_trial_is_killed_and_says_so(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start({"trial_id": "long", "deadline_s": 20, "action": "linger", "notes": f"{tmp_path}"})
    pids = noted_pids(tmp_path, "long")
    fleet.cancel("nobody")
    fleet.cancel("long")
    assert Outcome(**collect(fleet)["long"]["outcome"]) == Outcome(kind="cancelled")
    assert alive(pids) == []


def test_results_longer_than_every_buffer_come_back_whole(fleet: Fleet) -> None:
    for index in range(4):
        fleet.start({"trial_id": f"t{index}", "deadline_s": 20, "action": "answer", "length": 3_000_000})
    time.sleep(0.5)  # nobody reads meanwhile
    assert [len(result["padding"]) for result in collect(fleet).values()] == [3_000_000] * 4


def test_orders_longer_than_every_buffer_do_not_block(fleet: Fleet) -> None:
    for index in range(6):
        spec = {"trial_id": f"t{index}", "deadline_s": 20, "action": "answer", "length": 2_000_000}
        fleet.start({**spec, "ballast": "x" * 2_000_000})
    assert len(collect(fleet)) == 6


def test_sigint_does_not_reach_trials(fleet: Fleet, scratch: Path, tmp_path: Path) -> None:
    fleet.start({"trial_id": "t", "deadline_s": 20, "action": "linger", "notes": f"{tmp_path}", "for_s": 0.5})
    trial = noted_pids(tmp_path, "t")[0]
    parent = parent_of(trial)
    assert os.getsid(parent) != os.getsid(0) and os.getsid(trial) != os.getsid(parent)
    for pid in (parent, trial):
        os.kill(pid, signal.SIGINT)
    assert collect(fleet)["t"]["outcome"] == {"kind": "solved"}
    assert all("Traceback" not in log.read_text() for log in scratch.rglob("fleet.log"))


def test_a_dead_parent_is_a_system_error_for_every_trial_and_is_replaced(
    fleet: Fleet, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        fleet.start({"trial_id": name, "deadline_s": 20, "action": "linger", "notes": f"{tmp_path}"})
    pids = noted_pids(tmp_path, "a")[:1] + noted_pids(tmp_path, "b")[:1]
    for parent in {parent_of(pid) for pid in pids}:
        os.kill(parent, signal.SIGKILL)
    results = collect(fleet)
    cause = "fleet parent died: exit -9"
    for name in ("a", "b"):
        assert results[name]["outcome"] == {"kind": "system_error", "phase": "process", "cause": cause}
        assert results[name]["blameless"] and results[name]["cpu_seconds"]["trial"] == 0
    assert wait_for(lambda: alive(pids) == [])
    fleet.start({"trial_id": "c", "deadline_s": 20, "action": "answer"})
    assert collect(fleet)["c"]["outcome"] == {"kind": "solved"}


def test_close_kills_what_runs_and_is_final(open_fleet: OpenFleet, scratch: Path, tmp_path: Path) -> None:
    fleet = open_fleet(target=TARGET, max_starting=2)
    for name in ("t", "u", "v", "w", "x", "y"):  # some of them wait
        fleet.start({"trial_id": name, "deadline_s": 20, "action": "linger", "notes": f"{tmp_path}"})
    pids = noted_pids(tmp_path, "t")
    parent = parent_of(pids[0])
    fleet.close()
    fleet.close()
    assert alive(pids) == [] and fleet.running == frozenset()
    assert wait_for(lambda: alive([parent]) == [])
    assert left_in(scratch) == [] and fleet.poll(0.0) == []
    with pytest.raises(FleetError, match="the fleet is closed"):
        fleet.start({"trial_id": "u", "deadline_s": 20, "action": "answer"})


def test_specs_that_no_trial_could_run_are_refused(fleet: Fleet) -> None:
    with pytest.raises(ValueError, match="trial_id must be a text that is not empty, got None"):
        fleet.start({"deadline_s": 1})
    for wrong in (None, 0, float("nan")):
        with pytest.raises(ValueError, match="deadline_s must be positive, got"):
            fleet.start({"trial_id": "t", "deadline_s": wrong})
    fleet.start({"trial_id": "t", "deadline_s": 20, "action": "answer"})
    with pytest.raises(ValueError, match="trial_id must not be running already, got 't'"):
        fleet.start({"trial_id": "t", "deadline_s": 20, "action": "answer"})
    assert list(collect(fleet)) == ["t"]


def test_settings_that_no_fleet_could_keep_are_refused(open_fleet: OpenFleet) -> None:
    for name, wrong, rule in (
        ("grace_s", float("nan"), "must not be negative, got nan"),
        ("max_starting", 0, "must be at least 1, got 0"),
        ("starts_per_s", 0.0, "must be positive, got 0.0"),
    ):
        with pytest.raises(ValueError, match=f"{name} {rule}"):
            open_fleet(**{name: wrong})


@pytest.mark.parametrize(
    ("target", "warm", "cause"),
    [
        ("no_such_module:run", (), "ModuleNotFoundError: No module named 'no_such_module'"),
        ("fleet_trials:no_such", (), 'target must be "module:function" that exists, got'),
        (TARGET, ("fleet_trials:warm_with_torch",), "torch must not be imported in trial processes"),
    ],
)
def test_a_parent_that_cannot_start_says_why_in_one_line(
    open_fleet: OpenFleet, target: str, warm: tuple[str, ...], cause: str
) -> None:
    with pytest.raises(FleetError, match=cause) as raised:
        open_fleet(target=target, warm=warm)
    assert "\n" not in str(raised.value)


def test_trials_wait_while_as_many_as_may_are_starting(open_fleet: OpenFleet) -> None:
    fleet = open_fleet(target=TARGET, max_starting=2)
    for index in range(12):
        spec = {"trial_id": f"t{index}", "deadline_s": 60, "action": "start_slowly"}
        fleet.start({**spec, "scratch": "here", "starting_s": 0.2, "for_s": 2.0})
    results = list(collect(fleet).values())
    assert [result["outcome"]["kind"] for result in results] == ["solved"] * 12
    for node in {result["scratch"] for result in results}:  # each node has a scratch folder of its own
        own = [result for result in results if result["scratch"] == node]
        assert most_at_once((result["begun_s"], result["up_s"]) for result in own) == 2
        assert most_at_once((result["begun_s"], result["ended_s"]) for result in own) > 2


def test_a_trial_that_never_says_that_it_is_up_holds_its_place_until_it_ends(open_fleet: OpenFleet) -> None:
    fleet = open_fleet(target=TARGET, max_starting=1)
    for index in range(6):
        fleet.start({"trial_id": f"t{index}", "deadline_s": 60, "action": "answer"})
    fleet.start({"trial_id": "bad", "deadline_s": 60, "action": "fail", "how": "kill"})
    fleet.start({"trial_id": "last", "deadline_s": 60, "action": "answer"})
    assert len(collect(fleet)) == 8


def test_no_more_trials_start_in_a_second_than_may(open_fleet: OpenFleet) -> None:
    fleet = open_fleet(target=TARGET, starts_per_s=8.0)
    begun_s = time.monotonic()
    for index in range(12):
        fleet.start({"trial_id": f"t{index}", "deadline_s": 60, "action": "start_slowly", "scratch": "here"})
    results = list(collect(fleet).values())
    nodes = len({result["scratch"] for result in results})
    assert max(result["begun_s"] for result in results) >= begun_s + (12 - nodes) / 8


def test_a_trial_that_waits_can_be_cancelled_and_its_deadline_has_not_begun(
    open_fleet: OpenFleet, tmp_path: Path
) -> None:
    fleet = open_fleet(target=TARGET, max_starting=1, grace_s=0.5)
    common = {"action": "linger", "notes": f"{tmp_path}"}
    for index in range(2):
        fleet.start({"trial_id": f"first{index}", "deadline_s": 60, "for_s": 2.5, **common})
    first = noted_pids(tmp_path, "first0")
    for index in range(2):
        fleet.start({"trial_id": f"patient{index}", "deadline_s": 2, **common, "for_s": 0.1})
        fleet.start({"trial_id": f"gone{index}", "deadline_s": 60, **common})
    for index in range(2):
        fleet.cancel(f"gone{index}")
    while len(results := [one for one in fleet.poll(5.0)]) == 0:
        continue
    assert {result["trial_id"] for result in results} <= {"gone0", "gone1"}
    assert alive(first) == first
    later = collect(fleet)
    assert {later[name]["outcome"]["kind"] for name in later if name.startswith("gone")} <= {"cancelled"}
    assert {later[f"patient{i}"]["outcome"]["kind"] for i in range(2)} == {"solved"}
    assert not (tmp_path / "gone0").exists() and not (tmp_path / "gone1").exists()


@needs_bubblewrap
def test_many_trials_side_by_side_leave_nothing(open_fleet: OpenFleet, scratch: Path, world: Path) -> None:
    fleet = open_fleet(target="sandbox_trials:run", max_starting=8)
    calls = [["list_files", {}], ["write_file", {"path": "out.csv", "content": "a,1\n"}]]
    common = {"deadline_s": 60, "kind": "bubblewrap", "world": f"{world}", "scratch": f"{scratch}"}
    for index in range(24):
        fleet.start({"trial_id": f"t{index}", "action": "use_tools", "calls": calls, **common})
    results = collect(fleet, timeout_s=120)
    assert all(result.get("changed") == ["out.csv"] for result in results.values()), results
    assert left_in(scratch) == []
    assert those_called(f"{scratch}") == []


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """Of spans of time, the most that lie over one moment."""
    known = list(spans)
    return max(sum(begun <= moment < ended for begun, ended in known) for moment, _ in known)
