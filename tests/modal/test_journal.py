"""kill -9 between any two steps of a sandbox's life: what the next run finds in the journal, and removes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import has, needs_modal
from test_sandbox import needs_bubblewrap

from system.run import remove, remove_dead_runs
from system.sandbox import clean_environment, reap, removal, scratch

LOCAL = ["intent", "confirmed", "removed"]
REMOTE = ["intent", "intent", "confirmed", "removed", "removed"]
"""The journal's lines, in order: the folder, the container asked for, made, ended, and the folder gone."""


def moments(lines: list[str]) -> list[str]:
    """Around and in the middle of every line, between the others, and none at all."""
    around = [
        f"{when}:{number}" for number in range(1, len(lines) + 1) for when in ("before", "torn", "after")
    ]
    return [*around, "working", "frozen", "removed", "never"]


CASES = [
    *[pytest.param("bubblewrap", moment, marks=needs_bubblewrap) for moment in moments(LOCAL)],
    *[pytest.param("modal", moment, marks=needs_modal) for moment in [*moments(REMOTE), "made"]],
]


@pytest.fixture(scope="module")
def modal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Modal's service, or None where its client is not installed."""
    if not has("modal"):
        yield None
        return
    from fake_modal import FakeModal

    with FakeModal(tmp_path_factory.mktemp("modal")) as modal:
        yield modal


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "a.txt").write_text("a")
    return tmp_path


def life(kind: str, moment: str, place: Path, modal: Any) -> subprocess.Popen[bytes]:
    """A process that opens a sandbox and dies at a moment of its life."""
    spec = {
        "kind": kind,
        "moment": moment,
        "world": f"{place}/world",
        "scratch": f"{place}/scratch",
        "modal": None,
    }
    if kind == "modal":
        spec["modal"] = {"image": "python:3.11", "config": str(modal.config)}
    script = os.fspath(Path(__file__).with_name("journal_trials.py"))
    command = [sys.executable, script, json.dumps(spec)]
    return subprocess.Popen(command, env=clean_environment(), start_new_session=True)


def left(place: Path) -> list[str]:
    """Processes and mounts that have to do with a folder."""
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{place}" in line]
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", name, "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(place) in words and int(name) != os.getpid():
            found.append(name)
    return found


@pytest.mark.parametrize(("kind", "moment"), CASES)
def test_a_run_killed_at_any_moment_leaves_nothing_that_the_next_does_not_remove(
    kind: str, moment: str, place: Path, modal: Any
) -> None:
    process = life(kind, "never" if moment == "made" else moment, place, modal)
    if moment == "made":  # the service has a container, and the trial never learns of it

        async def kill(modal: Any, request: Any) -> None:
            del modal, request
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.sleep(0.2)

        modal.inject("SandboxCreateV2 made", kill)
    code = process.wait(120)
    assert code == (0 if moment == "never" else -signal.SIGKILL)
    if moment == "made":
        assert len(modal.running()) == 1
        (journal,) = (place / "scratch").glob("*.json")
        assert "confirmed" not in journal.read_text()
    reap(place / "scratch")
    assert removal.reap_remote(place / "scratch", settle_s=0.0) == {}
    reap(place / "scratch")
    assert not (place / "scratch").exists() or os.listdir(place / "scratch") == []
    assert modal is None or modal.running() == []
    assert left(place) == []


@needs_modal
def test_a_container_that_may_still_appear_is_asked_for_again(place: Path, modal: Any) -> None:
    modal.calls.clear()
    modal.inject("SandboxCreateV2", "hang")
    process = life("modal", "never", place, modal)
    _until(lambda: bool(modal.asked("SandboxCreateV2")))
    process.kill()
    process.wait(60)
    request = modal.asked("SandboxCreateV2")[-1]
    (folder,) = scratch.abandoned(place / "scratch")
    assert reap(place / "scratch") == [], "what lies elsewhere is not forgotten"
    causes = removal.reap_remote(place / "scratch", settle_s=600.0)
    assert causes == {folder.name: f"whether Modal made {request.definition.name} cannot be known yet"}
    modal.run(modal.create(request, "late"))
    assert modal.running() == [request.definition.name]
    assert removal.reap_remote(place / "scratch", settle_s=600.0) == {}
    assert modal.running() == [] and os.listdir(place / "scratch") == []


@needs_modal
def test_a_service_that_is_away_at_the_start_of_a_run_is_told_and_nothing_is_forgotten(
    place: Path, modal: Any
) -> None:
    assert life("modal", "working", place, modal).wait(120) == -signal.SIGKILL
    text = modal.config.read_text()
    try:
        modal.config.write_text(text.replace("as-test", "as-else"))
        (cause,) = removal.reap_remote(place / "scratch", settle_s=0.0).values()
        assert cause == "Modal refuses the token: AuthError: no such token"
        assert len(modal.running()) == 1 and removal.outstanding(place / "scratch")
    finally:
        modal.config.write_text(text)
    assert removal.reap_remote(place / "scratch", settle_s=0.0) == {} and modal.running() == []


@needs_bubblewrap
def test_a_journal_says_what_is_made_where_and_for_whom(place: Path) -> None:
    folder = scratch.new_folder(place / "scratch", what="bubblewrap", trial="t1")
    scratch.note(folder, "confirmed")
    first, second = scratch.journal_of(folder)
    assert (first["event"], first["what"], first["trial"]) == ("intent", "bubblewrap", "t1")
    assert first["where"] == str(folder) and first["pid"] == os.getpid() and second["event"] == "confirmed"
    assert abs(time.time() - first["time"]) < 60
    assert reap(place / "scratch") == [], "the owner lives"
    scratch.remove_folder(folder)
    assert scratch.journal_of(folder) == [] and os.listdir(place / "scratch") == []


def test_a_journal_that_is_being_written_is_that_of_a_living_owner(tmp_path: Path) -> None:
    (tmp_path / f"trial-{os.getpid()}-0123abcd.json").write_text("")
    assert reap(tmp_path) == [] and len(os.listdir(tmp_path)) == 1
    (tmp_path / "trial-999999999-0123abcd.json").write_text('{"event": "int')
    assert reap(tmp_path) == ["trial-999999999-0123abcd"] and len(os.listdir(tmp_path)) == 1


def _until(true: Any) -> None:
    deadline = time.monotonic() + 90
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@needs_modal
def test_a_run_folder_stays_while_something_may_be_left_elsewhere(place: Path, modal: Any) -> None:
    own = place / "runs" / f"run-{os.getpid()}"
    own.mkdir(parents=True)
    (place / "world").rename(own / "world")
    assert life("modal", "working", own, modal).wait(120) == -signal.SIGKILL
    (own / "scratch").rename(own / "trials")
    remove(own)
    assert (own / "trials").is_dir()
    text = modal.config.read_text()
    modal.config.write_text(text.replace("as-test", "as-else"))
    remove_dead_runs(own.parent)
    kept = own.with_name(f"{own.name}.kept")
    modal.config.write_text(text)
    assert not own.exists() and kept.is_dir() and len(modal.running()) == 1
    remove_dead_runs(own.parent)
    assert not kept.exists() and modal.running() == []
