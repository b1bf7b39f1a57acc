"""The fleet of many nodes: where trials go, what is lost with a worker or a node, what a node must see."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs_ray import SLOTS, needs_ray
from watching import alive, collect, command_line, left_in, noted_pids, parent_of, those_called, wait_for

from system.fleet import FleetError
from system.fleet.ray_fleet import RayFleet

pytestmark = needs_ray

TARGET = "fleet_trials:run"


@pytest.fixture(scope="module")
def cluster(one_node: Any) -> Any:
    """The cluster, with a second node."""
    one_node.add_node(num_cpus=0, resources={"trials": SLOTS})
    return one_node


@pytest.fixture
def fleet(cluster: Any, scratch: Path) -> Iterator[RayFleet]:
    """A fleet on both nodes of the cluster."""
    with RayFleet(scratch, target=TARGET, warm=()) as fleet:
        assert wait_ready(fleet, 2)
        yield fleet


def wait_ready(fleet: RayFleet, nodes: int) -> bool:
    """Whether so many nodes are ready in time; the fleet looks while it is polled."""
    return wait_for(lambda: fleet.poll(0.1) == [] and len(fleet.nodes) == nodes, timeout_s=90)


def linger(fleet: RayFleet, notes: Path, *names: str, for_s: float = 1000.0) -> None:
    """Start trials that note their pids and stay."""
    for name in names:
        spec = {"trial_id": name, "deadline_s": 120, "action": "linger", "notes": f"{notes}"}
        fleet.start({**spec, "for_s": for_s})


def worker_of(trial: int) -> int:
    """The Ray worker above a trial: the parent of the parent of the trials."""
    worker = parent_of(parent_of(trial))
    assert command_line(str(worker)).startswith("ray::NodeFleet")
    return worker


def test_nodes_are_filled_alike_and_no_further_than_their_slots(fleet: RayFleet) -> None:
    assert sorted(fleet.nodes.values()) == [SLOTS, SLOTS]
    for index in range(2 * SLOTS + 6):
        spec = {"trial_id": f"t{index}", "deadline_s": 60, "action": "start_slowly", "scratch": "here"}
        fleet.start({**spec, "for_s": 2.0 if index < 2 * SLOTS else 0.0})
    results = collect(fleet)
    first = [results[f"t{index}"] for index in range(2 * SLOTS)]
    assert sorted(Counter(result["scratch"] for result in first).values()) == [SLOTS, SLOTS]
    later = [results[f"t{index}"] for index in range(2 * SLOTS, 2 * SLOTS + 6)]
    assert min(result["begun_s"] for result in later) >= min(result["ended_s"] for result in first)


def test_a_dead_worker_takes_its_own_trials_only_and_is_replaced(fleet: RayFleet, tmp_path: Path) -> None:
    linger(fleet, tmp_path, "a", "b", "c", "d", for_s=15.0)
    pids = {name: noted_pids(tmp_path, name) for name in "abcd"}
    workers = {name: worker_of(pids[name][0]) for name in "abcd"}
    assert sorted(Counter(workers.values()).values()) == [2, 2]
    os.kill(workers["a"], signal.SIGKILL)
    with_a = [name for name in "abcd" if workers[name] == workers["a"]]
    results = collect(fleet)
    for name in "abcd":
        if name not in with_a:
            assert results[name]["outcome"] == {"kind": "solved"}
            continue
        cause = "Ray worker died: ActorDiedError"
        assert results[name]["outcome"] == {"kind": "system_error", "phase": "process", "cause": cause}
        assert results[name]["blameless"] is True
        assert wait_for(lambda name=name: alive(pids[name]) == [])
    assert wait_ready(fleet, 2)
    linger(fleet, tmp_path, "e", "f", for_s=0.0)
    assert {result["outcome"]["kind"] for result in collect(fleet).values()} == {"solved"}


def test_a_lost_node_takes_its_own_trials_only_and_a_new_one_takes_more(
    cluster: Any, fleet: RayFleet, tmp_path: Path
) -> None:
    node = cluster.add_node(num_cpus=0, resources={"trials": 2})
    assert wait_ready(fleet, 3) and sorted(fleet.nodes.values()) == [2, SLOTS, SLOTS]
    linger(fleet, tmp_path, *"abcdefghi", for_s=60.0)
    pids = {name: noted_pids(tmp_path, name) for name in "abcdefghi"}
    workers = {name: worker_of(pids[name][0]) for name in pids}
    raylet = node.all_processes["raylet"][0].process.pid
    there = [name for name in pids if parent_of(workers[name]) == raylet]
    assert 1 <= len(there) <= 2
    cluster.remove_node(node, allow_graceful=False)
    results: dict[str, dict[str, Any]] = {}
    while len(results) < len(there):
        results |= {result["trial_id"]: result for result in fleet.poll(5.0)}
    assert sorted(results) == there
    for name in there:
        outcome = results[name]["outcome"]
        assert (outcome["kind"], outcome["phase"] in ("node", "process")) == ("system_error", True)
        assert results[name]["blameless"] is True
        assert wait_for(lambda name=name: alive(pids[name]) == [])
    for name in set(pids) - set(there):
        assert alive(pids[name]) == pids[name]
        fleet.cancel(name)
    assert {result["outcome"]["kind"] for result in collect(fleet).values()} == {"cancelled"}
    assert wait_ready(fleet, 2)
    linger(fleet, tmp_path, *(f"{name}-again" for name in there), for_s=0.0)
    assert {result["outcome"]["kind"] for result in collect(fleet).values()} == {"solved"}


def test_a_worker_that_dies_again_and_again_is_given_up(
    fleet: RayFleet, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = None
    for attempt in range(4):
        assert wait_ready(fleet, 2)
        names = [f"{attempt}{letter}" for letter in "ab"]
        linger(fleet, tmp_path, *names)
        workers = {name: worker_of(noted_pids(tmp_path, name)[0]) for name in names}
        raylets = {parent_of(worker): worker for worker in workers.values()}
        first = first or min(raylets)
        os.kill(raylets[first], signal.SIGKILL)
        for name, worker in workers.items():
            if worker != raylets[first]:
                fleet.cancel(name)
        collect(fleet)
    assert list(fleet.nodes.values()) == [SLOTS]
    assert "its worker died 4 times, at last: Ray worker died: ActorDiedError" in capfd.readouterr().err


def test_a_node_that_does_not_see_what_trials_need_is_refused_in_one_line(
    cluster: Any, fleet: RayFleet, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, engine = tmp_path / "file", Path(tempfile.mkdtemp(prefix="reach-")) / "engine.sock"
    file.touch()
    with socket.socket(socket.AF_UNIX) as listening, socket.create_server(("127.0.0.1", 0)) as service:
        listening.bind(f"{engine}")
        listening.listen()
        url = f"http://127.0.0.1:{service.getsockname()[1]}"
        fleet.reach([f"{tmp_path}", f"{file}", f"{engine}", url])
    for what, cause in (
        (f"{engine}", "Connection refused"),
        (url, "Connect call failed"),
        ("/no/such/engine.sock", "no such file that can be read"),
    ):
        with pytest.raises(
            FleetError, match=f"node .* at .*: {what} must be there for its trials, got .*{cause}"
        ):
            fleet.reach([what])
    engine.unlink()
    engine.parent.rmdir()
    node = cluster.add_node(num_cpus=0, resources={"trials": 2})  # it is asked for all of these, and has not
    assert wait_for(
        lambda: bool(fleet.poll(0.2)) or "takes no trials" in capfd.readouterr().err, timeout_s=90
    )
    assert sorted(fleet.nodes.values()) == [SLOTS, SLOTS]
    cluster.remove_node(node)


def test_without_ray_one_line_names_the_extra() -> None:
    code = "import sys; sys.modules['ray'] = None\nfrom system.fleet.ray_fleet import RayFleet, Path\n"
    code += "from system.fleet import FleetError\ntry: RayFleet(Path('s'))\nexcept FleetError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == 'the ray fleet must have ray: pip install "bartleby[ray]"\n', done.stderr


def test_slots_are_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="slots must be positive, got 0"):
        RayFleet(tmp_path, slots=0)


DRIVER = """
import json, sys, time
from pathlib import Path
from system.fleet.ray_fleet import RayFleet
spec = json.loads(sys.argv[1])
fleet = RayFleet(Path(spec["folder"]), target="fleet_trials:run", warm=(), slots=3)
for name in "abcd":
    fleet.start({"trial_id": name, "deadline_s": 60, **spec})
while spec["wait"]:
    time.sleep(1)
print(len(fleet.nodes), len(fleet.poll(60)) > 0)
fleet.close()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_the_ray_that_a_fleet_starts_for_itself_goes_with_it(
    scratch: Path, tmp_path: Path, killed: bool
) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    spec = {"folder": f"{scratch}", "notes": f"{tmp_path}", "wait": killed}
    spec |= {"action": "linger", "for_s": 1000 if killed else 1.0}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": f"{temporary}"}
    call = [sys.executable, "-c", DRIVER, json.dumps(spec)]
    driver = subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        noted = noted_pids(tmp_path, "a", timeout_s=120)
        pids = [*noted, parent_of(noted[0]), worker_of(noted[0])]
        if killed:
            driver.kill()
        said, _ = driver.communicate(timeout=120)
        assert said == ("" if killed else "1 True\n")
    finally:
        driver.kill()
        driver.wait()
    assert wait_for(lambda: alive(pids) == [] and those_called(f"{temporary}") == [], timeout_s=60)
    assert wait_for(lambda: left_in(scratch) == [])
    folders = list(temporary.glob("bartleby-ray-*"))
    assert len(folders) == killed
    if killed:
        remove = "from system.fleet.ray_fleet import _remove_dead; _remove_dead()"
        subprocess.run([sys.executable, "-c", remove], env=environment, check=True, timeout=60)
    assert list(temporary.glob("bartleby-ray-*")) == []
    shutil.rmtree(temporary)


def test_a_fleet_without_nodes_gives_up_after_its_patience(
    fleet: RayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_patience_s", 0.5)
    monkeypatch.setattr(fleet._ray, "nodes", lambda: [])
    begun_s = time.monotonic()
    with pytest.raises(FleetError, match="a node must take trials, got none for 0.5 s"):
        while time.monotonic() < begun_s + 60:
            fleet.poll(1.0)
