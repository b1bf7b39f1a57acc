"""The fleet of one machine: what a killed driver or parent leaves, and what the next start makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_sandbox import WRITER, both_kinds
from watching import alive, left_in, noted_pids, parent_of, wait_for

from system.sandbox import reap

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
        parent = parent_of(pids[0])
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
    assert left_in(scratch) == []
    assert f"{scratch}" not in Path("/proc/self/mountinfo").read_text()
