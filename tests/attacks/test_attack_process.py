"""docs/sandboxes.md lists what the process sandbox does not stop: neither less nor more than is so."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attack_stage import Stage
from attacking import fails, gives_up, says, tries

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sandboxes.md"
LINES: list[tuple[str, str]] = re.findall(r"^\| (.+?) \| `(.+)` \|$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture
def names(stage: Stage, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the expressions of the page speak of."""
    shared = Path("/dev/shm", f"bartleby-attack-{os.getpid()}")
    shared.write_text("y")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield {
            "TASK": os.fspath(stage.tasks["find"]),
            "SCRATCH": os.fspath(stage.scratch),
            "ENGINE": os.fspath(stage.engine.path),
            "OUTSIDE": os.fspath(tmp_path),
            "NAME": shared.name,
            "PID": os.getpid(),
            "TCP": listening.getsockname(),
        }
    shared.unlink()


@pytest.mark.parametrize(("what", "how"), LINES, ids=[what for what, _ in LINES])
def test_what_the_page_says_is_so(stage: Stage, names: dict[str, Any], what: str, how: str) -> None:
    expression = f"(lambda {', '.join(names)}: {how})(*{tuple(names.values())!r})"
    said = {}
    for kind in ("bubblewrap", "process"):
        answers: list[str] = []
        fails(stage.trial(says([tries(expression)], answers, gives_up()), sandbox=kind))
        said[kind] = answers[0].split()[0]
    assert said == {"bubblewrap": "refused", "process": "reached"}


def test_the_page_has_them_all() -> None:
    assert len(LINES) >= 9


KEPT = [
    "os.kill(os.getppid(), 9)",
    "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "open(f'/proc/{os.getppid()}/environ').read()",
    "os.open(f'/proc/{os.getppid()}/fd/3', 2)",
    "os.kill(-1, 0) and 1 / 0",
    "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
]


def test_what_the_process_sandbox_promises_it_keeps(stage: Stage) -> None:
    """The server is as safe there."""
    answers: list[str] = []
    result = stage.trial(says([tries(*KEPT)], answers, gives_up()), sandbox="process")
    fails(result)
    assert answers[0].count("refused ") == len(KEPT) and result["tool_restarts"] == 0, answers
