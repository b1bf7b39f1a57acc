"""What trials do with Modal's sandbox alone: a program that needs no library of the office, and one step at a time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from system.sandbox import Limits, Sandbox, SandboxError, open_sandbox
from system.sandbox.probe import answer


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Open a sandbox, do the steps of the spec, and say what became of each."""
    begun = time.monotonic()
    said: dict[str, Any] = {}
    try:
        sandbox = open_sandbox(
            "modal",
            Path(spec["world"]),
            Path(spec["scratch"]),
            answer,
            Limits(**spec["limits"]),
            trial=spec["trial_id"],
            agent_s=spec["deadline_s"],
            modal=spec["modal"],
        )
    except (SandboxError, ValueError) as error:
        said["start"] = str(error)
    else:
        for step in spec["steps"]:
            try:
                said[step] = STEPS[step](sandbox)
            except SandboxError as error:
                said[step] = str(error)
    said["left"] = [name for name in os.listdir(spec["scratch"]) if name.startswith(f"trial-{os.getpid()}-")]
    return {**said, "seconds": time.monotonic() - begun}


def _hear(sandbox: Sandbox) -> str:
    with sandbox.connect() as stream:
        stream.settimeout(60)
        return stream.recv(1).decode()


def _until_dead(sandbox: Sandbox) -> str | None:
    deadline = time.monotonic() + 60
    while sandbox.died() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return sandbox.died()


def _note_and_wait(sandbox: Sandbox) -> None:
    del sandbox
    time.sleep(1000)


STEPS = {
    "hear": _hear,
    "until_dead": _until_dead,
    "freeze": lambda sandbox: sandbox.freeze().changed(),
    "close": lambda sandbox: sandbox.close(),
    "linger": _note_and_wait,
}
