"""Runs a foreign task's tests/test.sh over a copy of the frozen world, in a sandbox of its own, and reads its reward.

The rules are Harbor's: reward.json (a flat object of finite numbers) goes before reward.txt (one number), what lay
there before does not count, the exit code does not either. The agent's processes are dead, its world is a copy,
and nothing that the script starts outlives it; the reward is read after that, by this process.

A script that breaks on what an agent left would be a fault of the system, and a way for the agent not to get its 0.
So who is to blame is tried: a script that grades the untouched world was broken by the agent.
"""

from __future__ import annotations

import functools
import json
import math
import os
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..sandbox import kernel, scratch
from ..sandbox.frozen import FrozenWorld
from .fault import VerifyError
from .verdict import Criterion, Verdict
from .world import GradedWorld

WHOLE = 1.0 - 1e-6
"""A reward from which on a trial counts as passed."""

_LARGEST_REWARD = 1 << 16
_CHUNK = 1 << 16
_KEPT_OUTPUT = 2_000
_UID = 1000

_OF_THE_WORLD = ("script_timeout", "reward_missing", "reward_unreadable")
"""Faults that a world may have brought about."""
_PART = 0.25
"""A world on which a script is out of time is to blame if the untouched one takes this part of the time at most."""

_OWN = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONSAFEPATH": "1",
    "PYTHONPATH": "/tests",
    "GIT_CONFIG_COUNT": "2",
    **{"GIT_CONFIG_KEY_0": "core.hooksPath", "GIT_CONFIG_VALUE_0": os.devnull},
    **{"GIT_CONFIG_KEY_1": "core.fsmonitor", "GIT_CONFIG_VALUE_1": "false"},
}
"""Of the script's environment. It works in the agent's world: Python imports nothing, git runs nothing from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptLimits:
    """What a test script may use. Example: `ScriptLimits(seconds=60.0)`."""

    seconds: float = 600.0
    "Of the clock."
    memory_bytes: int = 2 << 30
    "Address space of each process."
    file_bytes: int = 64 << 20
    "Size of one file that it writes."
    tmp_bytes: int = 256 << 20
    "All that it writes into /tmp."
    world_bytes: int = 256 << 20
    "Size of the world that is copied for it."
    world_files: int = 20_000
    "Number of its files."
    stop_s: float = 10.0
    "Deadline of the confirmed end."


class WorldTooLarge(VerifyError):
    """A world that is not copied for a script."""

    def __init__(self, detail: str) -> None:
        super().__init__("sandbox", detail)


def who_is_to_blame(
    grade: Callable[[GradedWorld, str, float], Verdict], world: GradedWorld, answer: str, *, seconds: float
) -> Verdict:
    """The verdict of a script; 0 if it breaks on what the agent left and not on the world as it was at first.

    A script that breaks for once is run again.

    Args:
        grade: runs the script over a world and an answer, for so long at most.
        seconds: what the script may take.

    Raises:
        VerifyError: the script breaks on the untouched world too, or the machine is at fault.
    """
    try:
        return grade(world, answer, seconds)
    except VerifyError as error:
        if error.cause not in _OF_THE_WORLD and not isinstance(error, WorldTooLarge):
            raise
        fault = error
    try:
        part = _PART * seconds if fault.cause == "script_timeout" else seconds
        grade(FrozenWorld(lower=world.lower, root=world.lower), "", part)
    except VerifyError:
        raise fault from None
    if fault.cause in ("reward_missing", "reward_unreadable"):
        try:
            return grade(world, answer, seconds)
        except VerifyError as again:
            fault = again
    if fault.cause not in _OF_THE_WORLD and not isinstance(fault, WorldTooLarge):
        raise fault
    detail = f"{fault}; it grades the world as it was at first"
    return Verdict(
        reward=0.0,
        passed=False,
        criteria=(Criterion(name="gradable", met=False, detail=detail, gate=True),),
    )


def run_script(
    tests: Path,
    world: GradedWorld,
    answer: str,
    *,
    workdir: str = "/world",
    environment: Mapping[str, str] | None = None,
    scratch_root: Path | None = None,
    limits: ScriptLimits | None = None,
) -> Verdict:
    """The verdict of tests/test.sh; every number of its reward is a criterion, "reward" is the reward.

    Args:
        tests: the task's tests folder; the script sees it as /tests, read-only.
        answer: the agent's last words, for the script in /logs/agent/answer.txt.
        workdir: where the script sees the world, and works.
        environment: of the script, on top of PATH, HOME, LANG, and what keeps Python and git from running what
            lies in the world.
        scratch_root: where its copies lie while it runs; `system.sandbox.reap` clears it after a killed run.

    Raises:
        VerifyError: the script could not be run, did not end in time, or left no reward that can be read.
    """
    limits = limits or ScriptLimits()
    if not (tests / "test.sh").is_file():
        raise VerifyError("task", f"tests must hold test.sh, got none in {tests}")
    if (
        not PurePosixPath(workdir).is_absolute()
        or ".." in PurePosixPath(workdir).parts
        or workdir in ("/", "/tests")
    ):
        raise VerifyError("task", f"workdir must be an absolute folder of its own, got {workdir!r}")
    place = scratch.new_folder(scratch_root or Path(tempfile.gettempdir()) / "bartleby-verify")
    try:
        try:
            _lay_out(place, tests, world, answer, limits)
            status, said = _run(place, workdir, dict(environment or {}), limits)
        except OSError as error:
            raise VerifyError("sandbox", f"{error.strerror}: {error.filename or ''}".strip(": ")) from error
        rewards = read_rewards(place / "verifier", said=f"exit {status}; {said}")
    finally:
        scratch.remove_folder(place)
    return _verdict(rewards, f"exit {status}")


def read_rewards(folder: Path, *, said: str = "") -> dict[str, float]:
    """The numbers in reward.json, else in reward.txt under the name "reward".

    Raises:
        VerifyError: neither is there, or the one that counts is not a small plain file of finite numbers.
    """
    for name in ("reward.json", "reward.txt"):
        content = _plain_content(folder / name)
        if content is None:
            continue
        if not content.strip():
            raise VerifyError("reward_unreadable", f"{name} must not be empty, got nothing; {said}")
        try:
            rewards = _numbers(json.loads(content)) if name == "reward.json" else {"reward": float(content)}
        except (ValueError, RecursionError):
            rewards = {}
        if not rewards or not all(math.isfinite(value) for value in rewards.values()):
            told = content[:80].decode(errors="replace")
            raise VerifyError("reward_unreadable", f"{name} must hold finite numbers, got {told!r}; {said}")
        return rewards
    raise VerifyError("reward_missing", f"the script left neither reward.json nor reward.txt; {said}")


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError("no object")
    for number in value.values():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError("no number")
    return {str(name): float(number) for name, number in value.items()}


def _plain_content(place: Path) -> bytes | None:
    """A small plain file's content, following no link; None if there is nothing of that name."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise VerifyError(
            "reward_unreadable", f"{place.name} must be a plain file: {error.strerror}"
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise VerifyError("reward_unreadable", f"{place.name} must be a plain file, got another kind")
        content = os.read(fd, _LARGEST_REWARD + 1)
    finally:
        os.close(fd)
    if len(content) > _LARGEST_REWARD:
        raise VerifyError(
            "reward_unreadable", f"{place.name} must have {_LARGEST_REWARD} bytes at most, got more"
        )
    return content


def _verdict(rewards: dict[str, float], detail: str) -> Verdict:
    """Of several numbers the one named "reward" counts; of one number that one."""
    if "reward" not in rewards and len(rewards) != 1:
        raise VerifyError("reward_unreadable", f"reward.json must hold a reward, got only {sorted(rewards)}")
    reward = rewards.get("reward", next(iter(rewards.values())))
    if not 0 <= reward <= 1:
        raise VerifyError("reward_unreadable", f"a reward must lie between 0 and 1, got {reward:g}; {detail}")
    criteria = tuple(
        Criterion(name=name, met=value >= WHOLE, detail=f"{value:g}, {detail}", gate=False)
        for name, value in rewards.items()
    )
    return Verdict(reward=reward, passed=reward >= WHOLE, criteria=criteria, numbers=rewards)


def _lay_out(place: Path, tests: Path, world: GradedWorld, answer: str, limits: ScriptLimits) -> None:
    """The copies that the script works on; links, pipes, devices and closed files of the agent's are left out."""
    for name in ("world", "verifier", "agent"):
        (place / name).mkdir(mode=0o755)
    shutil.copytree(tests, place / "tests", symlinks=True)
    (place / "agent" / "answer.txt").write_text(answer, errors="replace")
    left, names = limits.world_bytes, world.files()
    if len(names) > limits.world_files:
        raise WorldTooLarge(f"the world must have {limits.world_files} files at most, got {len(names)}")
    for name in names:
        source = world.path(name)
        if source is None or not os.access(source, os.R_OK, effective_ids=True):
            continue
        left -= source.lstat().st_size
        if left < 0:
            raise WorldTooLarge(f"the world must have {limits.world_bytes} bytes at most, got more")
        target = place / "world" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target, follow_symlinks=False)


def _run(place: Path, workdir: str, environment: dict[str, str], limits: ScriptLimits) -> tuple[int, str]:
    """Runs the script to its end; its exit code and the end of what it printed. All of it is dead afterwards."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise VerifyError("sandbox", "bwrap not found: a foreign test script needs bubblewrap")
    deadline = time.monotonic() + limits.seconds
    info, info_there = os.pipe()
    hold_there, hold = os.pipe()
    process: subprocess.Popen[bytes] | None = None
    init = -1
    try:
        process = subprocess.Popen(
            [bwrap, *_view(place, workdir, environment, limits), "--info-fd", str(info_there)]
            + ["--block-fd", str(hold_there), "--"]
            + ["/bin/sh", "-c", "[ -x /tests/test.sh ] && exec /tests/test.sh; exec sh /tests/test.sh"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={},
            pass_fds=[info_there, hold_there],
            start_new_session=True,
            preexec_fn=functools.partial(_limit, limits),
        )
        os.close(info_there)
        info_there = -1
        told = _told(info, deadline)
        if told:
            init = os.pidfd_open(json.loads(told)["child-pid"])
        os.write(hold, b"\n")  # the script starts only now that its place can be watched to the end
        assert process.stdout is not None
        said = _drained(process.stdout.fileno(), init, deadline)
        if init < 0:
            raise VerifyError("sandbox", f"bwrap did not start: {said or 'it said nothing'}")
        if not kernel.wait_handle(init, deadline):
            raise VerifyError(
                "script_timeout", f"test.sh must end within {limits.seconds:g} s, got killed; {said}"
            )
        return process.wait(max(0.1, deadline - time.monotonic() + limits.stop_s)), said
    finally:
        for fd in (info, info_there, hold, hold_there):
            if fd >= 0:
                os.close(fd)
        _end(process, init, limits.stop_s)


def _end(process: subprocess.Popen[bytes] | None, init: int, stop_s: float) -> None:
    """Kills what is left and waits for it: the first process of a pid namespace goes only after all others."""
    if process is None:
        return
    deadline = time.monotonic() + stop_s
    if init >= 0:
        try:
            signal.pidfd_send_signal(init, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended
    process.kill()
    dead = init < 0 or kernel.wait_handle(init, deadline)
    if init >= 0:
        os.close(init)
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        dead = False
    if process.stdout is not None:
        process.stdout.close()
    if not dead:
        raise VerifyError("sandbox", "processes of the test script do not die")


def _drained(out: int, init: int, deadline: float) -> str:
    """Reads all output until everything is dead or the deadline; the last of it, on one line."""
    poller = select.poll()
    poller.register(out, select.POLLIN | select.POLLHUP)
    if init >= 0:
        poller.register(init, select.POLLIN)
    kept = b""
    while True:
        ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready or not any(fd == out for fd, _ in ready):
            break
        part = os.read(out, _CHUNK)
        if not part:
            break
        kept = (kept + part)[-_KEPT_OUTPUT:]
    return " ".join(kept.decode(errors="replace").split())[-200:]


def _told(fd: int, deadline: float) -> bytes:
    """What a pipe brings until it is closed at the other end; b"" if that is not in time."""
    poller = select.poll()
    poller.register(fd, select.POLLIN | select.POLLHUP)
    told = b""
    while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        part = os.read(fd, _CHUNK)
        if not part:
            return told
        told += part
    return b""


def _limit(limits: ScriptLimits) -> None:
    """Between fork and exec."""
    wanted = {
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _view(place: Path, workdir: str, environment: dict[str, str], limits: ScriptLimits) -> list[str]:
    """bwrap's arguments: the system, the interpreter, the tests, the copy of the world; no network, no host files."""
    shown: list[str] = []
    for folder in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(folder):
            shown += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            shown += ["--ro-bind", folder, folder]
    for file in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "alternatives"):
        if os.path.exists(f"/etc/{file}"):
            shown += ["--ro-bind", f"/etc/{file}", f"/etc/{file}"]
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)):
        for part in ("bin", "lib", "lib64", "pyvenv.cfg"):
            path = os.path.join(prefix, part)
            if os.path.exists(path) and not path.startswith(("/usr/", "/lib/", "/bin/")):
                shown += ["--ro-bind", path, path]
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), "/usr/local/bin", "/usr/bin", "/bin"])
    told = {"PATH": path} | _OWN | environment
    variables = [word for name, value in told.items() for word in ("--setenv", name, value)]
    return [
        *(
            "--unshare-user",
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ),
        *("--disable-userns", "--die-with-parent", "--new-session", "--uid", str(_UID), "--gid", str(_UID)),
        *("--cap-drop", "ALL", "--hostname", "verifier", "--proc", "/proc", "--dev", "/dev"),
        *("--size", str(limits.tmp_bytes), "--tmpfs", "/tmp"),
        *shown,
        *("--ro-bind", str(place / "tests"), "/tests"),
        *("--bind", str(place / "world"), workdir),
        *("--bind", str(place / "verifier"), "/logs/verifier"),
        *("--ro-bind", str(place / "agent"), "/logs/agent"),
        *variables,
        *("--chdir", workdir),
    ]
