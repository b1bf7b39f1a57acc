"""A fleet gives one result for each trial, whatever becomes of the trial, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_sandbox import WRITER, both_kinds, needs_bubblewrap

from core.outcome import Outcome
from system.fleet import FleetError
from system.fleet.local import LocalFleet
from system.sandbox import reap
from system.world.company import make_company
from system.world.office import write_world

TARGET = "fleet_trials:run"
WITH_SANDBOX = "sandbox_trials:run"


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The fleet's folder."""
    return tmp_path / "scratch"


@pytest.fixture
def fleet(scratch: Path) -> Iterator[LocalFleet]:
    """A fleet without a warm-up."""
    with LocalFleet(scratch, target=TARGET, warm=(), grace_s=0.5) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A company."""
    return write_world(make_company(7, split="train"), tmp_path_factory.mktemp("company") / "world")


def collect(fleet: LocalFleet, *, timeout_s: float = 30) -> dict[str, dict[str, Any]]:
    """All results that are due, by id."""
    results: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while fleet.running and time.monotonic() < deadline:
        for result in fleet.poll(1.0):
            assert result["trial_id"] not in results
            results[result["trial_id"]] = result
    assert not fleet.running
    return results


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 10) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def noted_pids(notes: Path, trial_id: str) -> list[int]:
    """The pids that a trial noted, once it has."""
    assert wait_for(lambda: (notes / trial_id).exists() and (notes / trial_id).read_text() != "")
    return [int(pid) for pid in (notes / trial_id).read_text().split()]


def alive(pids: list[int]) -> list[int]:
    """Those that still run."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found


def test_each_trial_gives_one_result_with_its_cost(fleet: LocalFleet) -> None:
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
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BARTLEBY_TEST_SECRET", "4821")
    with LocalFleet(scratch, target=TARGET, warm=()) as fleet:
        fleet.start({"trial_id": "a", "deadline_s": 20, "action": "linger", "notes": f"{scratch}"})
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
def test_a_trial_that_fails_is_a_system_error(fleet: LocalFleet, how: str, phase: str, cause: str) -> None:
    fleet.start({"trial_id": "bad", "deadline_s": 20, "action": "fail", "how": how})
    fleet.start({"trial_id": "good", "deadline_s": 20, "action": "answer"})
    results = collect(fleet)
    assert results["bad"]["outcome"] == {"kind": "system_error", "phase": phase, "cause": cause}
    assert results["bad"]["cpu_seconds"]["trial"] >= 0
    assert results["good"]["outcome"] == {"kind": "solved"}


def test_a_late_trial_is_killed_with_everything_it_started(fleet: LocalFleet, tmp_path: Path) -> None:
    fleet.start({"trial_id": "late", "deadline_s": 0.3, "action": "linger", "notes": f"{tmp_path}"})
    fleet.start(
        {"trial_id": "fine", "deadline_s": 20, "action": "linger", "notes": f"{tmp_path}", "for_s": 1.5}
    )
    late, fine = noted_pids(tmp_path, "late"), noted_pids(tmp_path, "fine")
    (result,) = fleet.poll(5)
    assert result["outcome"] == {"kind": "system_error", "phase": "process", "cause": "deadline: 0.8 s"}
    assert alive(late) == [] and alive(fine) == fine
    assert collect(fleet)["fine"]["outcome"] == {"kind": "solved"}


def test_a_cancelled_trial_is_killed_and_says_so(fleet: LocalFleet, tmp_path: Path) -> None:
    fleet.start({"trial_id": "long", "deadline_s": 20, "action": "linger", "notes": f"{tmp_path}"})
    pids = noted_pids(tmp_path, "long")
    fleet.cancel("nobody")
    fleet.cancel("long")
    assert Outcome(**collect(fleet)["long"]["outcome"]) == Outcome(kind="cancelled")
    assert alive(pids) == []


def test_results_longer_than_every_buffer_come_back_whole(fleet: LocalFleet) -> None:
    for index in range(4):
        fleet.start({"trial_id": f"t{index}", "deadline_s": 20, "action": "answer", "length": 3_000_000})
    time.sleep(0.5)  # nobody reads meanwhile
    assert [len(result["padding"]) for result in collect(fleet).values()] == [3_000_000] * 4


def test_orders_longer_than_every_buffer_do_not_block(fleet: LocalFleet) -> None:
    for index in range(6):
        spec = {"trial_id": f"t{index}", "deadline_s": 20, "action": "answer", "length": 2_000_000}
        fleet.start({**spec, "ballast": "x" * 2_000_000})
    assert len(collect(fleet)) == 6


def test_sigint_does_not_reach_trials(fleet: LocalFleet, tmp_path: Path) -> None:
    fleet.start({"trial_id": "t", "deadline_s": 20, "action": "linger", "notes": f"{tmp_path}", "for_s": 0.5})
    trial = noted_pids(tmp_path, "t")[0]
    parent = int(Path(f"/proc/{trial}/stat").read_text().rpartition(")")[2].split()[1])
    assert os.getsid(parent) != os.getsid(0) and os.getsid(trial) != os.getsid(parent)
    for pid in (parent, trial):
        os.kill(pid, signal.SIGINT)
    assert collect(fleet)["t"]["outcome"] == {"kind": "solved"}
    assert "Traceback" not in fleet.log.read_text()


def test_a_dead_parent_is_a_system_error_for_every_trial_and_is_replaced(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        fleet.start({"trial_id": name, "deadline_s": 20, "action": "linger", "notes": f"{tmp_path}"})
    pids = noted_pids(tmp_path, "a")[:1] + noted_pids(tmp_path, "b")[:1]
    parent = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    results = collect(fleet)
    cause = "fleet parent died: exit -9"
    for name in ("a", "b"):
        assert results[name]["outcome"] == {"kind": "system_error", "phase": "process", "cause": cause}
    assert wait_for(lambda: alive(pids) == [])
    fleet.start({"trial_id": "c", "deadline_s": 20, "action": "answer"})
    assert collect(fleet)["c"]["outcome"] == {"kind": "solved"}


def test_close_kills_what_runs_and_is_final(scratch: Path, tmp_path: Path) -> None:
    fleet = LocalFleet(scratch, target=TARGET, warm=())
    fleet.start({"trial_id": "t", "deadline_s": 20, "action": "linger", "notes": f"{tmp_path}"})
    pids = noted_pids(tmp_path, "t")
    fleet.close()
    fleet.close()
    assert alive(pids) == [] and fleet.running == frozenset()
    with pytest.raises(FleetError, match="the fleet is closed"):
        fleet.start({"trial_id": "u", "deadline_s": 20, "action": "answer"})


def test_specs_that_no_trial_could_run_are_refused(fleet: LocalFleet) -> None:
    with pytest.raises(ValueError, match="trial_id must be a text that is not empty, got None"):
        fleet.start({"deadline_s": 1})
    for wrong in (None, 0, float("nan")):
        with pytest.raises(ValueError, match="deadline_s must be positive, got"):
            fleet.start({"trial_id": "t", "deadline_s": wrong})
    fleet.start({"trial_id": "t", "deadline_s": 20, "action": "answer"})
    with pytest.raises(ValueError, match="trial_id must not be running already, got 't'"):
        fleet.start({"trial_id": "t", "deadline_s": 20, "action": "answer"})
    with pytest.raises(ValueError, match="grace_s must not be negative, got nan"):
        LocalFleet(Path("scratch"), grace_s=float("nan"))


@pytest.mark.parametrize(
    ("target", "warm", "cause"),
    [
        ("no_such_module:run", (), "ModuleNotFoundError: No module named 'no_such_module'"),
        ("fleet_trials:no_such", (), 'target must be "module:function" that exists, got'),
        (TARGET, ("fleet_trials:warm_with_torch",), "torch must not be imported in trial processes"),
    ],
)
def test_a_parent_that_cannot_start_says_why_in_one_line(
    scratch: Path, target: str, warm: tuple[str, ...], cause: str
) -> None:
    with pytest.raises(FleetError, match=cause) as raised:
        LocalFleet(scratch, target=target, warm=warm)
    assert "\n" not in str(raised.value)


DRIVER = """
import json, os, sys, time
from pathlib import Path
from system.fleet.local import LocalFleet
spec = json.loads(sys.argv[1])
fleet = LocalFleet(Path(spec["scratch"]), target="sandbox_trials:run", warm=())
for index in range(3):
    fleet.start({"trial_id": f"t{index}", "deadline_s": 60, **spec})
fleet.poll(1000)
"""


@both_kinds
@pytest.mark.parametrize("killed", ["driver", "parent", "both"])
def test_a_killed_run_leaves_nothing_after_the_next_start(
    scratch: Path, tmp_path: Path, world: Path, kind: str, killed: str
) -> None:
    spec = {"kind": kind, "world": f"{world}", "scratch": f"{scratch}", "notes": f"{tmp_path}"}
    spec |= {"action": "linger_in_a_sandbox", "calls": [WRITER]}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, json.dumps(spec)], env=environment)
    try:
        noted = [noted_pids(tmp_path, f"t{index}") for index in range(3)]
        trials, pids = [pids[0] for pids in noted], [pid for pids in noted for pid in pids]
        parent = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
        assert len(alive(pids)) >= (
            15 if kind == "bubblewrap" else 6
        )  # the server may have ended with its stream
        assert reap(scratch) == [], "the folders of living trials must be left alone"
        if killed != "driver":
            os.kill(parent, signal.SIGSTOP if killed == "both" else signal.SIGKILL)
        if killed != "parent":
            driver.kill()
            driver.wait()
        if killed == "both":
            os.kill(parent, signal.SIGKILL)
    finally:
        driver.kill()
        driver.wait()
    if killed == "driver":  # the parent notices and clears up by itself
        assert wait_for(lambda: alive([parent]) == [])
    else:
        assert wait_for(lambda: alive([parent, *(pids if kind == "bubblewrap" else trials)]) == [])
        reap(scratch)
    assert wait_for(lambda: alive(pids) == [])
    assert os.listdir(scratch) == ["fleet.log"]
    assert f"{scratch}" not in Path("/proc/self/mountinfo").read_text()


@needs_bubblewrap
def test_many_trials_side_by_side_leave_nothing(scratch: Path, world: Path) -> None:
    with LocalFleet(scratch, target=WITH_SANDBOX, warm=()) as fleet:
        calls = [["list_files", {}], ["write_file", {"path": "out.csv", "content": "a,1\n"}]]
        common = {"deadline_s": 60, "kind": "bubblewrap", "world": f"{world}", "scratch": f"{scratch}"}
        for index in range(24):
            fleet.start({"trial_id": f"t{index}", "action": "use_tools", "calls": calls, **common})
        results = collect(fleet, timeout_s=60)
        assert all(result.get("changed") == ["out.csv"] for result in results.values()), results
        assert os.listdir(scratch) == ["fleet.log"]
        assert [pid for pid in os.listdir("/proc") if f"{scratch}" in command_line(pid)] == []


def command_line(pid: str) -> str:
    """How a process was called, empty if it is gone."""
    try:
        return Path("/proc", pid, "cmdline").read_text(errors="replace")
    except OSError:
        return ""
