"""`python -m system.sandbox.removal SCRATCH`: ends what dead trials left with Modal, by the journals below a folder.

A process of its own, because the client has threads and its answer can be long in coming.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import SandboxError, clean_environment, scratch, service
from .modal import ModalSettings, remove_named

SETTLE_S = 120.0
"""How long after it was asked for a container that nobody confirmed may still appear."""

STOP_S = 20.0


def outstanding(root: Path) -> list[str]:
    """Names of the folders of dead trials that may have left something elsewhere."""
    return [folder.name for folder in scratch.abandoned(root)]


def wait(running: subprocess.Popen[str], timeout_s: float = 60.0) -> str:
    """What a removal said before it ended; it is killed when it is late."""
    try:
        return running.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        running.kill()
        running.communicate()
        return f"the removal did not end within {timeout_s:g} s"


def start(root: Path, *, settle_s: float = SETTLE_S) -> subprocess.Popen[str] | None:
    """Begin to end what dead trials left elsewhere; None if there is nothing to do."""
    if not scratch.abandoned(root):
        return None
    return subprocess.Popen(
        [sys.executable, "-m", "system.sandbox.removal", os.fspath(root), str(settle_s)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(),
    )


def reap_remote(root: Path, *, timeout_s: float = 60.0, settle_s: float = SETTLE_S) -> dict[str, str]:
    """End what dead trials left elsewhere and remove their folders; what stays, by folder, and why."""
    running = start(root, settle_s=settle_s)
    if running is None:
        return {}
    said = wait(running, timeout_s)
    causes: dict[str, str] = {}
    for line in said.splitlines():
        name, _, cause = line.partition(": ")
        causes[name] = cause
    last = (said.strip().splitlines() or ["no answer"])[-1]
    return {name: causes.get(name, last) for name in outstanding(root)}


def remove_abandoned(folder: Path, *, settle_s: float) -> str:
    """End the container of one dead trial and remove its folder; why it cannot be done yet, or ""."""
    lines = scratch.journal_of(folder)
    asked = [line for line in lines if line["event"] == "intent" and "name" in line]
    if asked:
        where: dict[str, Any] = next(line["modal"] for line in lines if "modal" in line)
        confirmed = any(line["event"] == "confirmed" for line in lines)
        try:
            ended = _end(where, asked[-1]["name"], folder.name)
        except SandboxError as error:
            return error.cause
        except (service.Refused, service.Late) as error:
            return str(error) or f"Modal did not confirm the end within {STOP_S:g} s"
        if not ended and not confirmed and time.time() - asked[-1]["time"] < settle_s:
            return f"whether Modal made {asked[-1]['name']} cannot be known yet"
        scratch.note(folder, "removed", sync=True)
    scratch.remove_folder(folder)
    return ""


def _end(where: dict[str, Any], name: str, folder: str) -> int:
    modal = ModalSettings(image="-", **where).connected()
    try:
        return remove_named(modal, name, folder, time.monotonic() + STOP_S)
    finally:
        modal.close()


def main(root: str, settle_s: str = str(SETTLE_S)) -> int:
    """Remove what can be removed; one line for each that cannot."""
    left = 0
    for folder in scratch.abandoned(Path(root)):
        cause = remove_abandoned(folder, settle_s=float(settle_s))
        if cause:
            left += 1
            print(f"{folder.name}: {cause}", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
