"""What trials without a sandbox do in tests/fleet, in the fleet's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from system.fleet.starting import started
from system.sandbox import SandboxError


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Do the action that the spec names."""
    return ACTIONS[spec["action"]](spec)


def answer(spec: dict[str, Any]) -> dict[str, Any]:
    """An ordinary short trial, with a result as long as asked."""
    if spec.get("burn"):
        end = time.process_time() + spec["burn"]
        while time.process_time() < end:
            pass
    return {
        "outcome": {"kind": "solved"},
        "cpu_seconds": {"engine": 1.5},
        "padding": "x" * spec.get("length", 0),
        "torch": "torch" in sys.modules,
        "environment": dict(os.environ),
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
    }


def fail(spec: dict[str, Any]) -> dict[str, Any]:
    """End in one of the ways in which a trial can go wrong."""
    if spec["how"] == "raise":
        raise LookupError("no such thing")
    if spec["how"] == "sandbox":
        raise SandboxError("freeze", "it does not die")
    if spec["how"] == "exit":
        os._exit(3)
    if spec["how"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if spec["how"] == "text":
        return "done"  # type: ignore[return-value]
    return {"value": {1, 2}}


def linger(spec: dict[str, Any]) -> dict[str, Any]:
    """Note the pid, start processes that hide in sessions of their own, and wait to be killed."""
    note = Path(spec["notes"], spec["trial_id"])
    commands = [["sleep", "1000"], ["sh", "-c", "trap '' INT TERM HUP; sleep 1000 & sleep 1000"]]
    others = [subprocess.Popen(command, start_new_session=True) for command in commands]
    note.write_text(" ".join(str(pid) for pid in [os.getpid(), *(other.pid for other in others)]))
    time.sleep(spec.get("for_s", 1000))
    for other in others:
        other.kill()
        other.wait()
    return {"outcome": {"kind": "solved"}}


def start_slowly(spec: dict[str, Any]) -> dict[str, Any]:
    """Say after a while that this trial is up, and live on; when that was, and in which scratch folder."""
    begun_s = time.monotonic()
    time.sleep(spec.get("starting_s", 0.0))
    up_s = time.monotonic()
    started()
    started()  # what was said already is not said again
    time.sleep(spec.get("for_s", 0.0))
    times = {"begun_s": begun_s, "up_s": up_s, "ended_s": time.monotonic()}
    return {"outcome": {"kind": "solved"}, "scratch": spec["scratch"], **times}


def warm_with_torch() -> None:
    """A warm-up that loads what must not be loaded."""
    sys.modules["torch"] = sys


ACTIONS = {function.__name__: function for function in (answer, fail, linger, start_slowly)}
