"""What our environment promises Harbor, without a trial around it; run by `run.sh`."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor.environments.base", reason="tests/harbor/run.sh runs these on Python 3.12")

from harbor.environments.base import HealthcheckError
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths
from scripted_engine import Script, ScriptedEngine

from system.harbor.environment import BartlebyEnvironment
from system.harness.chat import Chat, ToolCall, call_text
from system.sandbox import SandboxError

CLERK = Path(__file__).resolve().parents[2] / "policies" / "clerk"
CHAT = Chat(CLERK)
SPEC = {
    "policy": str(CLERK),
    "instruction": "Work.",
    "harness": "code",
    "toolset": "full",
    "seed": 0,
    "deadline_s": 300.0,
    "tool_timeout_s": 60.0,
    "limits": {
        "context": 6000,
        "turn_tokens": 2000,
        "turns": 9,
        "repairs": 0,
        "result_characters": 4000,
        "nudge_ratio": 0.0,
        "temperature": 1.0,
    },
}
SCRATCH = Path(tempfile.gettempdir()) / f"bartleby-harbor-{os.getuid()}"


def environment(
    folder: Path, *, config: EnvironmentConfig | None = None, **changed: Any
) -> BartlebyEnvironment:
    (folder / "environment" / "world").mkdir(parents=True, exist_ok=True)
    (folder / "environment" / "world" / "notes.txt").write_text("Ann is a client.")
    paths = TrialPaths(trial_dir=folder / "trial")
    paths.mkdir()
    return BartlebyEnvironment(
        environment_dir=folder / "environment",
        environment_name="office",
        session_id="office__env",
        trial_paths=paths,
        task_env_config=config or EnvironmentConfig(),
        network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
        **changed,
    )


def within(folder: Path, act: Callable[[BartlebyEnvironment], Awaitable[Any]], **changed: Any) -> Any:
    """What something gives that is done in a started environment, of which then nothing is left."""

    async def all_of_it() -> Any:
        place = environment(folder, **changed)
        await place.start(False)
        try:
            return await act(place)
        finally:
            await place.stop(True)

    result = asyncio.run(all_of_it())
    assert not list(SCRATCH.glob("trial-*"))
    return result


def test_a_command_sees_the_world_its_variables_and_no_network(tmp_path: Path):
    async def act(place: BartlebyEnvironment) -> Any:
        seen = await place.exec(
            "pwd; cat notes.txt; echo; echo $GIVEN; echo wrong >&2; exit 3", env={"GIVEN": "yes"}
        )
        elsewhere = await place.exec("pwd", cwd="/logs/agent")
        network = await place.exec(
            "python3 -c \"import socket; socket.create_connection(('1.1.1.1', 53), 2)\" 2>&1 | tail -1"
        )
        office = await place.exec("python3 -c 'import openpyxl, docx, pptx, pdfplumber; print(1)'")
        ours = await place.exec("python3 -c 'import system'; ls " + str(Path(__file__).parents[2]))
        return seen, elsewhere, network, office, ours

    seen, elsewhere, network, office, ours = within(tmp_path, act)
    assert (seen.stdout, seen.stderr, seen.return_code) == ("/world\nAnn is a client.\nyes\n", "wrong\n", 3)
    assert elsewhere.stdout == "/logs/agent\n" and office.stdout == "1\n"
    assert "unreachable" in network.stdout.lower()
    assert "No module named 'system'" in ours.stderr and "No such file" in ours.stderr


def test_what_a_command_leaves_running_ends_with_it_and_what_it_wrote_stays(tmp_path: Path):
    async def act(place: BartlebyEnvironment) -> Any:
        await place.exec(
            "(setsid sh -c 'while :; do echo x >> ticks; sleep 0.01; done' &); sleep 0.2; echo 1 > /tmp/kept"
        )
        first = await place.exec(
            "wc -c < ticks; cat /tmp/kept; ps aux 2>/dev/null | wc -l; ls /proc | grep -c '^[0-9]'"
        )
        await asyncio.sleep(0.2)
        return first, await place.exec("wc -c < ticks")

    first, second = within(tmp_path, act)
    assert first.stdout.split()[0] == second.stdout.split()[0] and int(second.stdout) > 0
    assert first.stdout.split()[1] == "1" and int(first.stdout.split()[-1]) <= 8


def test_a_late_command_is_a_result_and_an_order_taken_back_is_none(tmp_path: Path):
    async def act(place: BartlebyEnvironment) -> Any:
        late = await place.exec("echo first; sleep 600", timeout_sec=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(place.exec("echo there > there; sleep 600"), timeout=1.5)
        return late, await place.exec("cat there")

    begun = time.monotonic()
    late, after = within(tmp_path, act)
    assert (late.stdout, late.return_code) == ("first\n", 124) and "must end within 1 s" in late.stderr
    assert after.stdout == "there\n" and after.return_code == 0
    assert time.monotonic() - begun < 120


def test_files_and_folders_go_in_and_out_whole_and_links_stay_where_they_are(tmp_path: Path):
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "data").write_bytes(os.urandom(3 << 20))
    secret = tmp_path / "secret"
    secret.write_text("host")

    async def act(place: BartlebyEnvironment) -> Any:
        await place.upload_dir(source, "/solution")
        await place.upload_file(source / "data", "/world/new/data.bin")
        ran = await place.exec(
            f"/solution/deep/run.sh; ln -s {secret} /solution/link; mkfifo /solution/pipe; ls -A /solution"
        )
        await place.download_dir("/solution", tmp_path / "back")
        await place.download_file("/world/new/data.bin", tmp_path / "one" / "data.bin")
        with pytest.raises(RuntimeError, match="get /nowhere: no such folder: /nowhere"):
            await place.download_dir("/nowhere", tmp_path / "none")
        with pytest.raises(RuntimeError, match="put /etc/passwd: .*Read-only file system"):
            await place.upload_file(source / "data", "/etc/passwd")
        return ran

    ran = within(tmp_path, act)
    assert ran.stdout.split() == ["ran", "data", "deep", "link", "pipe"]
    back = sorted(at.relative_to(tmp_path / "back").as_posix() for at in (tmp_path / "back").rglob("*"))
    assert back == ["data", "deep", "deep/run.sh"]
    assert (tmp_path / "back" / "data").read_bytes() == (source / "data").read_bytes()
    assert (tmp_path / "one" / "data.bin").read_bytes() == (source / "data").read_bytes()
    assert os.access(tmp_path / "back" / "deep" / "run.sh", os.X_OK)


def test_limits_hold_the_tasks_own_first(tmp_path: Path):
    async def act(place: BartlebyEnvironment) -> Any:
        written = await place.exec("head -c 60000000 /dev/zero > big; stat -c %s big")
        grown = await place.exec("python3 -c 'x = bytearray(1 << 30)'")
        return written, grown

    config = EnvironmentConfig(memory_mb=512, storage_mb=48)
    written, grown = within(tmp_path, act, config=config)
    assert int(written.stdout) < 49 << 20 and "MemoryError" in grown.stderr
    with pytest.raises(ValueError, match="^limits must be among memory_bytes, .*, got 'memory'$"):
        environment(tmp_path, limits={"memory": 1})


def test_a_keeper_that_is_killed_is_a_fault_of_the_system_and_leaves_nothing(tmp_path: Path):
    async def act() -> None:
        place = environment(tmp_path)
        await place.start(False)
        assert place._keeper is not None
        os.kill(place._keeper.pid, signal.SIGKILL)
        with pytest.raises(HealthcheckError, match="^exec: the keeper is gone$"):
            await place.exec("true")
        with pytest.raises(
            SandboxError, match="the keeper of office__env was killed: it broke off; removed trial-"
        ):
            await place.stop(True)
        await place.stop(True)
        with pytest.raises(RuntimeError, match="must be started"):
            await place.exec("true")

    asyncio.run(act())
    assert not list(SCRATCH.glob("trial-*"))


def test_a_stop_during_a_command_ends_it(tmp_path: Path):
    async def act() -> Any:
        place = environment(tmp_path)
        await place.start(False)
        running = asyncio.create_task(place.exec("sleep 600"))
        await asyncio.sleep(1)
        await place.stop(True)
        return await asyncio.gather(running, return_exceptions=True)

    begun = time.monotonic()
    (ended,) = asyncio.run(act())
    assert isinstance(ended, RuntimeError) and str(ended) == "the environment was stopped meanwhile"
    assert time.monotonic() - begun < 120
    assert not list(SCRATCH.glob("trial-*"))


def test_an_agent_that_is_ended_leaves_what_it_wrote_and_nothing_that_runs(tmp_path: Path):
    """It is ended while it waits for its engine, which is when a deadline finds it."""
    asked = threading.Event()

    def script() -> Script:
        yield call_text(ToolCall("bash", {"command": "echo 1 > done; (setsid sleep 600 &)"}))
        asked.set()
        yield 600.0

    async def act(place: BartlebyEnvironment) -> Any:
        playing = asyncio.create_task(
            place.play(SPEC | {"engine_address": str(engine.path), "trial_id": "ended"})
        )
        while not asked.is_set():
            await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        return await place.exec("cat done; ls; ls /proc | grep -c '^[0-9]'")

    with ScriptedEngine(tmp_path / "s", CHAT) as engine:
        engine.scripts["ended"] = script()
        seen = within(tmp_path, act)
    assert seen.stdout.split()[:3] == ["1", "done", "notes.txt"] and int(seen.stdout.split()[-1]) <= 8


def test_a_tool_server_that_dies_is_started_again_by_the_keeper(tmp_path: Path):
    keeper: list[int] = []

    def script() -> Script:
        assert (yield call_text(ToolCall("bash", {"command": "echo 1 > done"}))) == "no output"
        (server,) = servers(keeper[0])
        os.kill(server, signal.SIGKILL)
        assert "broke off" in (yield call_text(ToolCall("bash", {"command": "cat done"})))
        assert (yield call_text(ToolCall("bash", {"command": "cat done"}))) == "1"
        yield "Done."

    async def act(place: BartlebyEnvironment) -> Any:
        assert place._keeper is not None
        keeper.append(place._keeper.pid)
        return await place.play(SPEC | {"engine_address": str(engine.path), "trial_id": "lost"})

    with ScriptedEngine(tmp_path / "s", CHAT) as engine:
        engine.scripts["lost"] = script()
        played = within(tmp_path, act)
    assert played["answer"] == "Done." and played["tool_restarts"] == 1 and played["truncated"] is None


def servers(keeper: int) -> list[int]:
    """Children of a keeper that live in another pid namespace: its tool server."""
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return [
        int(pid) for pid in children if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    ]


def test_a_task_without_a_world_is_refused_because_no_image_is_built(tmp_path: Path):
    place = environment(tmp_path)
    world = place.environment_dir / "world"
    (world / "notes.txt").unlink()
    world.rmdir()
    (place.environment_dir / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(
        FileNotFoundError, match="^environment must hold world, for no image is built here, got none in"
    ):
        place._validate_definition()
