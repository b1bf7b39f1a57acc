"""`python journal_trials.py SPEC`: a sandbox from its start to its end, by a process that kills itself on the way."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from system.sandbox import Limits, open_sandbox, scratch
from system.sandbox.probe import answer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: str) -> None:
    """Die at "before:N", "torn:N" or "after:N" of the journal's Nth line, or after its last line."""
    when, _, number = moment.partition(":")
    add_line, count = scratch._add_line, iter(range(1, 100))

    def counted(journal: Path, line: dict[str, Any], flags: int, *, sync: bool) -> None:
        now = number == str(next(count))
        if now and when == "before":
            die()
        if now and when == "torn":
            fd = os.open(journal, os.O_WRONLY | os.O_APPEND | flags, 0o600)
            os.write(fd, json.dumps(line).encode()[:25])
            die()
        add_line(journal, line, flags, sync=sync)
        if now and when == "after":
            die()

    scratch._add_line = counted
    if moment == "removed":
        note = scratch.note

        def last(folder: Path, event: str, **facts: Any) -> None:
            note(folder, event, **facts)
            if event == "removed" and not folder.exists():
                die()

        scratch.note = last


def main(spec: dict[str, Any]) -> None:
    """Open, use, freeze, close."""
    arm(spec["moment"])
    sandbox = open_sandbox(
        spec["kind"],
        Path(spec["world"]),
        Path(spec["scratch"]),
        answer,
        Limits(start_s=60.0, stop_s=30.0),
        trial="t1",
        agent_s=60.0,
        modal=spec["modal"],
    )
    with sandbox.connect() as stream:
        stream.settimeout(60)
        assert stream.recv(1) == b"1"
    if spec["moment"] == "working":
        die()
    sandbox.freeze()
    if spec["moment"] == "frozen":
        die()
    sandbox.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
