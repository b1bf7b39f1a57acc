"""The injected faults, one row each: what is wrong, where, by what means, and the outcome that is right.

`python tests/faults/fault_table.py` prints them as a table.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broken_engine import Act, AtRelease, Wire, Wrong
from fault_stage import LATE_S, RIGHT, TOOL_S, WRONG, Edit, Expected, Fault, Stage, replaced
from fault_traces import await_state, command, descendants, holder_of, parent_of, server_of
from judge_server import refused, said

from system.engine.client import HEADER, frame
from system.harness.chat import ToolCall, call_text
from system.record.audit import markdown_table

# Outcomes

SOLVED = Expected(kind="solved", reward=1.0)
FAILED = Expected(kind="failed", reward=0.0)
CANCELLED = Expected(kind="cancelled")
NOBODY_ASKS = Expected(kind="")


def cut(reason: str) -> Expected:
    """The policy met a limit and was graded."""
    return Expected(kind="truncated", reason=reason, reward=0.0)


def broken(phase: str, cause: str) -> Expected:
    """A system error, which has no reward."""
    return Expected(kind="system_error", phase=phase, cause=cause)


# What the policy says


def call(name: str, /, **arguments: Any) -> str:
    """A turn that calls a tool."""
    return call_text(ToolCall(name, arguments))


def look(fault: str, times: int = 1) -> str:
    """A read that breaks the first times."""
    return call("look", fault=fault, times=times)


def change(fault: str, times: int = 1) -> str:
    """A write that breaks the first times."""
    return call("change", fault=fault, times=times)


def code(text: str, seconds: int = 5) -> str:
    """A turn that runs a program in the sandbox."""
    return call("run_code", code=text, seconds=seconds)


LOOK, CHANGE = call("look"), call("change")
COUNT_CHANGES = call("count", name="change")
LIST = call("list_files")
FULL = {"toolset": "full", "limits": {"context": 60_000, "turn_tokens": 6000}}
HASTY = {"tool_timeout_s": TOOL_S}
LATE = rf"no answer within {TOOL_S:g} s; the call may have taken effect"
BROKE_OFF = "broke off during this call, which may have taken effect"


# What happens meanwhile


def to_server(number: signal.Signals) -> Act:
    """A signal to the tool server, which has had its effect before the next turn."""

    def act(trial: int) -> None:
        server = server_of(trial)
        os.kill(server, number)
        await_state(server, "ZXT")

    return act


def to_trial(number: signal.Signals) -> Act:
    """A signal to the trial's process."""
    return lambda trial: os.kill(trial, number)


def kill_place(trial: int) -> None:
    """The first process of the sandbox dies, and everything in it."""
    server = server_of(trial)
    os.kill(holder_of(trial), signal.SIGKILL)
    await_state(server, "ZX")


def kill_bwrap(trial: int) -> None:
    """bwrap itself dies, as when memory is short."""
    server = server_of(trial)
    os.kill(parent_of(holder_of(trial)), signal.SIGKILL)
    await_state(server, "ZX")


def kill_parent(trial: int) -> None:
    """The parent of all trials dies."""
    os.kill(parent_of(trial), signal.SIGKILL)


def kill_driver(trial: int) -> None:
    """The process that has the fleet dies."""
    os.kill(parent_of(parent_of(trial)), signal.SIGKILL)


def kill_driver_and_parent(trial: int) -> None:
    """Both at once: nobody is left to clear up."""
    parent = parent_of(trial)
    driver = parent_of(parent)
    os.kill(parent, signal.SIGSTOP)
    os.kill(driver, signal.SIGKILL)
    os.kill(parent, signal.SIGKILL)


def limit(which: int, value: int) -> Act:
    """The trial's process may have no more than so much from now on."""

    def act(trial: int) -> None:
        resource.prlimit(trial, which, (value, value))

    return act


def sleeps(stage: Stage, trial_id: str) -> bool:
    """Whether a program `sleep` runs in the trial."""
    return any(command(pid) == "sleep" for pid in descendants(stage.fleet.parent_pid))


def sleeps_in(stage: Stage, trial_id: str) -> bool:
    """The same, of a trial whose engine has been asked."""
    trial = stage.engine.pid(trial_id)
    return trial > 0 and any(command(pid) == "sleep" for pid in descendants(trial))


def asks_engine(stage: Stage, trial_id: str) -> bool:
    """Whether the trial waits for the engine, or has."""
    return stage.engine.pid(trial_id) > 0


# Tasks that are spoilt


def written(name: str, text: str) -> Edit:
    """A file with another content."""

    def edit(folder: Path) -> None:
        replaced(folder / name, text)

    return edit


def without(name: str) -> Edit:
    """A file or folder is missing."""

    def edit(folder: Path) -> None:
        place = folder / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    return edit


def no_world(folder: Path) -> None:
    """The world is a link to nowhere."""
    shutil.rmtree(folder / "environment" / "world")
    (folder / "environment" / "world").symlink_to("/nonexistent/world")


def graded_by(script: str, *, seconds: float = 60.0, executable: bool = True) -> Edit:
    """A foreign task: tests/test.sh alone grades it."""

    def edit(folder: Path) -> None:
        (folder / "tests" / "checks.json").unlink()
        (folder / "bartleby.json").unlink()
        settings = f"timeout_sec = {seconds}"
        text = (folder / "task.toml").read_text().replace("timeout_sec = 30.0", settings)
        replaced(folder / "task.toml", text.replace("[metadata]", '[metadata]\nbartleby_tools = "brief"'))
        replaced(folder / "tests" / "test.sh", f"#!/bin/sh\n{script}\n")
        (folder / "tests" / "test.sh").chmod(0o755 if executable else 0o644)

    return edit


def in_steps(first: str, second: str) -> Edit:
    """A task of two steps, each graded by a script of its own."""

    def edit(folder: Path) -> None:
        for name in ("tests/checks.json", "bartleby.json", "instruction.md"):
            (folder / name).unlink()
        replaced(folder / "task.toml", STEPS)
        replaced(folder / "tests" / "test.sh", "#!/bin/sh\nexec sh /tests/own.sh\n")
        for name, script in (("draft", first), ("send", second)):
            (folder / "steps" / name / "tests").mkdir(parents=True)
            (folder / "steps" / name / "instruction.md").write_text(f"The {name}.")
            (folder / "steps" / name / "tests" / "own.sh").write_text(script)

    return edit


STEPS = """
schema_version = "1.4"
[task]
name = "office/letter"
[metadata]
bartleby_tools = "brief"
[environment]
network_mode = "no-network"
[[steps]]
name = "draft"
[[steps]]
name = "send"
"""

REWARD = "/logs/verifier/reward"
ONE = f"echo 1 > {REWARD}.txt"


# Engines


def refusing_socket(stage: Stage) -> str:
    """A socket that nobody listens on any more."""
    path = stage.folder / "deserted"
    if not path.exists():
        with socket.socket(socket.AF_UNIX) as deserted:
            deserted.bind(os.fspath(path))
    return os.fspath(path)


def many_tokens(request: dict[str, Any]) -> dict[str, Any]:
    """More tokens than were asked for."""
    length = request["max_tokens"] + 1
    ids = [20] * (length - 1) + [request["stop_token_ids"][0]]
    return {"token_ids": ids, "logprob": [-0.5] * length, "policy_version": [7] * length}


def _tokens(*ids: Any, **more: Any) -> Wrong:
    fields = {"token_ids": list(ids), "logprob": [-0.5] * len(ids), "policy_version": [7] * len(ids)}
    return Wrong(fields | more)


def stopped(*ids: Any) -> Wrong:
    """These tokens, and then a stop token."""

    def fields(request: dict[str, Any]) -> dict[str, Any]:
        all_ids = [*ids, request["stop_token_ids"][0]]
        count = len(all_ids)
        return {"token_ids": all_ids, "logprob": [-0.5] * count, "policy_version": [7] * count}

    return Wrong(fields)


# Programs that an agent runs

FILL = """
import os
size = 0
try:
    while True:
        with open(f'{place}/fill{{size}}', 'wb') as file: file.write(bytes(1 << 20))
        size += 1
except OSError as error: print('after', size, 'MB:', error.strerror)
"""
FILL_INODES = """
import os
try:
    for n in range(100_000): open(f'file{n}', 'w').close()
except OSError as error: print('after', n, 'files:', error.strerror)
for m in range(n): os.unlink(f'file{m}')
"""
FORK_BOMB = """
import os, time
while True:
    try:
        if os.fork() == 0: os.setsid() if hasattr(os, 'setsid') else None
    except OSError: time.sleep(0.05)
"""
ORPHANS = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(1000)
        os._exit(0)
print('left behind')
"""
LONG_FILE = """
try:
    with open('/tmp/long', 'wb') as file:
        for _ in range(64): file.write(bytes(1 << 20))
except OSError as error: print(error.strerror)
"""
MANY_FILES = """
kept = []
try:
    while True: kept.append(open('/dev/null'))
except OSError as error: print('after', len(kept), error.strerror)
"""

POLICY = (
    Fault(
        name="nothing, and the answer is right",
        layer="policy",
        how="the policy answers",
        then=SOLVED,
        restarts=0,
    ),
    Fault(
        name="nothing, and the answer is wrong by one",
        layer="policy",
        how="the policy answers",
        turns=(LIST, WRONG),
        then=FAILED,
        restarts=0,
    ),
    Fault(
        name="calls that cannot be read",
        layer="policy",
        how="the policy writes broken JSON again and again",
        turns=("<tool_call>{",) * 3,
        then=FAILED,
        told=("not closed",),
    ),
    Fault(
        name="a turn without end",
        layer="policy",
        how="the policy writes more than a turn may have",
        turns=("word " * 400,),
        spec={"limits": {"turn_tokens": 50}},
        then=cut("turn_cap"),
    ),
    Fault(
        name="turns without end",
        layer="policy",
        how="the policy calls a tool in every turn",
        turns=(LIST,) * 3,
        spec={"limits": {"turns": 3}},
        then=cut("step_cap"),
    ),
    Fault(
        name="a window that is full",
        layer="policy",
        how="the policy reads more than its window holds",
        turns=(look("20 MB"), RIGHT),
        server="fragile",
        spec={"limits": {"result_characters": 30_000}},
        then=cut("context"),
    ),
    Fault(
        name="a tool that is not there",
        layer="policy",
        how="the policy calls it by a wrong name",
        turns=(call("reed_sheet", path="x"), RIGHT),
        then=SOLVED,
        told=("no such tool reed_sheet",),
    ),
)

SERVER = (
    Fault(
        name="server killed in a read",
        layer="tools",
        how="SIGKILL to itself in the call",
        turns=(look("is killed"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^look 2$",),
        restarts=1,
    ),
    Fault(
        name="server killed in a write",
        layer="tools",
        how="SIGKILL to itself in the call",
        turns=(change("is killed"), COUNT_CHANGES, RIGHT),
        server="fragile",
        then=SOLVED,
        told=(BROKE_OFF, "change ran 1 times"),
        restarts=1,
    ),
    Fault(
        name="server killed in a read, again and again",
        layer="tools",
        how="SIGKILL to itself in the call and in its repetition",
        turns=(look("is killed", 5), LOOK.replace("{}", '{"fault": ""}'), RIGHT),
        server="fragile",
        then=SOLVED,
        told=(BROKE_OFF, "^look 3$"),
        restarts=2,
    ),
    Fault(
        name="server killed before a read",
        layer="tools",
        how="SIGKILL between two calls",
        turns=(LOOK, to_server(signal.SIGKILL), LOOK, RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^look 1$", "^look 2$"),
        restarts=1,
    ),
    Fault(
        name="server killed before a write",
        layer="tools",
        how="SIGKILL between two calls",
        turns=(CHANGE, to_server(signal.SIGKILL), CHANGE, COUNT_CHANGES, RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^change 1$", BROKE_OFF, "change ran 1 times"),
        restarts=1,
    ),
    Fault(
        name="server killed after the last call",
        layer="tools",
        how="SIGKILL before the answer",
        turns=(LOOK, to_server(signal.SIGKILL), RIGHT),
        server="fragile",
        then=SOLVED,
    ),
    Fault(
        name="server crashes",
        layer="tools",
        how="it reads from address 0",
        turns=(look("crashes in C"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^look 2$",),
        restarts=1,
    ),
    Fault(
        name="server exits",
        layer="tools",
        how="os._exit in a write",
        turns=(change("exits"), COUNT_CHANGES, RIGHT),
        server="fragile",
        then=SOLVED,
        told=(BROKE_OFF, "change ran 1 times"),
        restarts=1,
    ),
    Fault(
        name="server quits",
        layer="tools",
        how="a tool raises SystemExit",
        turns=(change("quits"), COUNT_CHANGES, RIGHT),
        server="fragile",
        then=SOLVED,
        told=(BROKE_OFF, "change ran 1 times"),
        restarts=1,
    ),
    Fault(
        name="server stops",
        layer="tools",
        how="SIGSTOP to itself in a write",
        turns=(change("stops"), COUNT_CHANGES, RIGHT),
        server="fragile",
        spec=HASTY,
        then=SOLVED,
        told=(LATE, "change ran 1 times"),
        restarts=1,
    ),
    Fault(
        name="server stopped between calls",
        layer="tools",
        how="SIGSTOP from outside",
        turns=(LOOK, to_server(signal.SIGSTOP), LOOK, CHANGE, RIGHT),
        server="fragile",
        spec=HASTY,
        then=SOLVED,
        told=(LATE, "^change 1$"),
        restarts=1,
    ),
    Fault(
        name="call that never returns",
        layer="tools",
        how="a tool sleeps for 1000 s",
        turns=(look("hangs"), CHANGE, RIGHT),
        server="fragile",
        spec=HASTY,
        then=SOLVED,
        told=(LATE, "^change 1$"),
        restarts=1,
    ),
    Fault(
        name="half a line, then silence",
        layer="tools",
        how="a tool writes it on the wire and sleeps",
        turns=(look("half a line"), CHANGE, RIGHT),
        server="fragile",
        spec=HASTY,
        then=SOLVED,
        told=(LATE, "^change 1$"),
        restarts=1,
    ),
    Fault(
        name="half a line, then the end",
        layer="tools",
        how="a tool writes it on the wire and exits",
        turns=(change("half a line, then the end"), COUNT_CHANGES, RIGHT),
        server="fragile",
        then=SOLVED,
        told=(BROKE_OFF, "change ran 1 times"),
        restarts=1,
    ),
    Fault(
        name="lines of garbage",
        layer="tools",
        how="a tool writes all bytes and empty JSON on the wire, then answers",
        turns=(look("a line of garbage"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^look 1$",),
        restarts=0,
    ),
    Fault(
        name="garbage before the answer",
        layer="tools",
        how="a tool writes it on the wire without an end of line",
        turns=(look("garbage before the answer"), CHANGE, RIGHT),
        server="fragile",
        spec=HASTY,
        then=SOLVED,
        told=(LATE, "^change 1$"),
        restarts=1,
    ),
    Fault(
        name="answers to what nobody asked",
        layer="tools",
        how="a tool writes results with wrong ids on the wire, then answers",
        turns=(look("wrong ids too"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^look 1$",),
        restarts=0,
    ),
    Fault(
        name="wrong id",
        layer="tools",
        how="a tool writes results with wrong ids on the wire and no other",
        turns=(look("wrong ids only"), CHANGE, RIGHT),
        server="fragile",
        spec=HASTY,
        then=SOLVED,
        told=(LATE, "^change 1$"),
        restarts=1,
    ),
    Fault(
        name="a result that is none by the protocol",
        layer="tools",
        how="a tool writes {content: 5} with the right id on the wire",
        turns=(look("no protocol"), RIGHT),
        server="fragile",
        then=broken("agent", "the answer to look must be one by the protocol, got ValidationError"),
    ),
    Fault(
        name="a result that is not UTF-8",
        layer="tools",
        how="a tool writes a byte of Latin-1 with the right id on the wire",
        turns=(look("not UTF-8"), CHANGE, RIGHT),
        server="fragile",
        spec=HASTY,
        then=SOLVED,
        told=(LATE, "^change 1$"),
        restarts=1,
    ),
    Fault(
        name="a request from the server",
        layer="tools",
        how="a tool writes it on the wire",
        turns=(look("a request back"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^look 1$",),
        restarts=0,
    ),
    Fault(
        name="a stream that is closed",
        layer="tools",
        how="a tool shuts the socket down and sleeps",
        turns=(change("closes the stream"), COUNT_CHANGES, RIGHT),
        server="fragile",
        then=SOLVED,
        told=(BROKE_OFF, "change ran 1 times"),
        restarts=1,
    ),
    Fault(
        name="a result of 40 MB",
        layer="tools",
        how="a tool answers with it",
        turns=(change("40 MB"), COUNT_CHANGES, RIGHT),
        server="fragile",
        then=SOLVED,
        told=(BROKE_OFF, "change ran 1 times"),
        restarts=1,
    ),
    Fault(
        name="a result of 20 MB",
        layer="tools",
        how="a tool answers with it",
        turns=(change("20 MB"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("x\n\\[... cut ...\\]\nx",),
        restarts=0,
    ),
    Fault(
        name="a result with half a character",
        layer="tools",
        how="a tool answers with a lone surrogate",
        turns=(look("a surrogate"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^before . after$",),
    ),
    Fault(
        name="a result with NULs",
        layer="tools",
        how="a tool answers with them",
        turns=(look("NULs"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^before \0\0 after$",),
    ),
    Fault(
        name="a result that is None",
        layer="tools",
        how="a tool returns it",
        turns=(look("None"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("error: look must say what it did, got None",),
    ),
    Fault(
        name="a result that is a number",
        layer="tools",
        how="a tool returns it",
        turns=(look("a number"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("error: look must say what it did, got 42",),
    ),
    Fault(
        name="a tool that raises",
        layer="tools",
        how="LookupError with two lines",
        turns=(look("raises"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^error: .*the ledger is upside down$",),
    ),
    Fault(
        name="a tool that recurses",
        layer="tools",
        how="without end",
        turns=(look("recurses"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^error: .*recursion",),
    ),
    Fault(
        name="errors without end in the log",
        layer="tools",
        how="a tool writes 3 MB of them",
        turns=(look("shouts"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^look 1$",),
    ),
)

RESOURCES = (
    Fault(
        name="disk full",
        layer="sandbox",
        how="a program of the agent fills the world, then a tool writes",
        turns=(code(FILL.format(place=".")), call("write_file", path="more.txt", content="x" * 5000), RIGHT),
        spec=FULL | {"sandbox_limits": {"world_bytes": 4 << 20}},
        then=FAILED,
        told=("MB: No space left on device", "^error: .*[Nn]o space left"),
    ),
    Fault(
        name="/tmp full",
        layer="sandbox",
        how="a program of the agent fills it",
        turns=(code(FILL.format(place="/tmp")), LIST, RIGHT),
        spec=FULL | {"sandbox_limits": {"tmp_bytes": 4 << 20}},
        then=SOLVED,
        told=("MB: No space left on device", "minutes.txt"),
    ),
    Fault(
        name="no inode left",
        layer="sandbox",
        how="a program of the agent makes empty files, and removes them",
        turns=(code(FILL_INODES, 20), RIGHT),
        spec=FULL,
        then=SOLVED,
        told=("files: No space left on device",),
        random=False,
    ),
    Fault(
        name="out of memory in a tool",
        layer="sandbox",
        how="a tool asks for 8 GB",
        turns=(look("takes memory"), LOOK, RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^error: .*[Mm]emory", "^look 2$"),
    ),
    Fault(
        name="out of memory for good",
        layer="sandbox",
        how="a tool keeps what it allocates until nothing is left",
        turns=(look("leaks memory"), RIGHT),
        server="fragile",
        spec={"sandbox_limits": {"memory_bytes": 64 << 20}},
        then=SOLVED,
    ),
    Fault(
        name="out of memory in a program",
        layer="sandbox",
        how="a program of the agent asks for 8 GB",
        turns=(code("bytearray(8 << 30)"), RIGHT),
        spec=FULL,
        then=SOLVED,
        told=("MemoryError",),
    ),
    Fault(
        name="fork bomb",
        layer="sandbox",
        how="a program of the agent forks until it is stopped",
        turns=(code(FORK_BOMB, 1), LIST, RIGHT),
        spec=FULL,
        then=SOLVED,
        told=("code must end within 1 s", "minutes.txt"),
        random=False,
    ),
    Fault(
        name="processes that are left running",
        layer="sandbox",
        how="a program of the agent leaves twenty in sessions of their own",
        turns=(code(ORPHANS), LIST, RIGHT),
        spec=FULL,
        then=SOLVED,
        told=("left behind", "minutes.txt"),
    ),
    Fault(
        name="zombie children",
        layer="sandbox",
        how="a tool forks thirty and waits for none",
        turns=(look("leaves zombies"), LOOK, RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^look 1$", "^look 2$"),
    ),
    Fault(
        name="a file that is too long",
        layer="sandbox",
        how="a program of the agent writes 64 MB",
        turns=(code(LONG_FILE), RIGHT),
        spec=FULL,
        then=SOLVED,
        told=("File too large",),
    ),
    Fault(
        name="a file of a tool that is too long",
        layer="sandbox",
        how="a tool writes 64 MB",
        turns=(look("writes a long file"), LOOK, RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^error: .*File too large", "^look 2$"),
    ),
    Fault(
        name="too many open files",
        layer="sandbox",
        how="a program of the agent opens them",
        turns=(code(MANY_FILES), RIGHT),
        spec=FULL,
        then=SOLVED,
        told=("Too many open files",),
    ),
    Fault(
        name="too many open files in the server",
        layer="sandbox",
        how="a tool opens them and keeps them",
        turns=(look("leaks descriptors"), RIGHT),
        server="fragile",
        then=SOLVED,
        told=("^error: .*[Tt]oo many open files",),
    ),
)

START = (
    Fault(
        name="bwrap missing",
        layer="start",
        how="a search path without it",
        bwrap="",
        then=broken("start", "^bwrap not found$"),
    ),
    Fault(
        name="bwrap refuses",
        layer="start",
        how="another bwrap says why and exits with 1",
        bwrap="echo 'bwrap: No permissions to create new namespace' >&2; exit 1",
        then=broken("start", "^bwrap: No permissions to create new namespace$"),
    ),
    Fault(
        name="bwrap ends without a word",
        layer="start",
        how="another bwrap exits with 3",
        bwrap="exit 3",
        then=broken("start", "^bwrap ended at once"),
    ),
    Fault(
        name="sandbox start that hangs",
        layer="start",
        how="another bwrap sleeps",
        bwrap="exec sleep 1000",
        spec={"sandbox_limits": {"start_s": LATE_S}},
        then=broken("start", "^bwrap was not ready within 1 s"),
    ),
    Fault(
        name="sandbox start that hangs half-way",
        layer="start",
        how="another bwrap runs its command and never says its pid",
        bwrap="echo; exec sleep 1000",
        spec={"sandbox_limits": {"start_s": LATE_S}},
        then=broken("start", "^bwrap must name its child, got b''$"),
    ),
    Fault(
        name="bwrap says nonsense",
        layer="start",
        how="another bwrap says no JSON",
        bwrap="echo; echo nonsense >&3; exec sleep 1000",
        then=broken("start", r"^bwrap must name its child, got b'nonsense\\n'$"),
    ),
    Fault(
        name="start later than its deadline",
        layer="start",
        how="another bwrap sleeps longer than the trial may take to start",
        bwrap="exec sleep 1000",
        spec={"start_s": LATE_S},
        then=broken("start", "^deadline: 1 s$"),
    ),
    Fault(
        name="sandbox slow to start",
        layer="start",
        how="another bwrap sleeps a second first",
        bwrap='sleep 1; exec $real "$@"',
        then=SOLVED,
    ),
    Fault(
        name="limits that are none",
        layer="start",
        how="a world's file system of no bytes",
        spec={"sandbox_limits": {"world_bytes": 0}},
        then=broken("start", "world_bytes must be positive, got 0"),
    ),
    Fault(
        name="no place for scratch",
        layer="start",
        how="the scratch folder is a file",
        spec={"scratch": lambda stage: os.fspath(stage.task / "instruction.md")},
        then=broken("start", "File exists|Not a directory"),
    ),
    Fault(
        name="missing tool",
        layer="start",
        how="the server offers two tools less",
        server="lacking",
        then=broken("start", "^tools missing: read_sheet$"),
    ),
    Fault(
        name="extra tool",
        layer="start",
        how="the server offers three tools more",
        server="fragile",
        then=SOLVED,
        restarts=0,
    ),
    Fault(
        name="server slow to be ready",
        layer="start",
        how="it sleeps for a second",
        server="slow",
        then=SOLVED,
        restarts=0,
    ),
    Fault(
        name="server too slow to be ready",
        layer="start",
        how="it sleeps for longer than a call may take",
        server="too slow",
        spec=HASTY,
        then=broken("start", "the tools could not be listed"),
    ),
    Fault(
        name="server that never answers",
        layer="start",
        how="another program serves",
        server="deaf",
        spec=HASTY,
        then=broken("start", "the tools could not be listed"),
    ),
    Fault(
        name="server that ends at once",
        layer="start",
        how="another program serves",
        server="absent",
        then=broken("start", "^tool server exit 0"),
    ),
    Fault(
        name="server that lacks a package",
        layer="start",
        how="another program serves",
        server="unimportable",
        then=broken("start", "^tool server exit 1 ModuleNotFoundError: No module named 'no_such_package'$"),
    ),
    Fault(
        name="server of another protocol",
        layer="start",
        how="another program says HTTP and ends",
        server="babbling",
        then=broken("start", "^tool server exit 0"),
    ),
    Fault(
        name="place dead between calls",
        layer="sandbox",
        how="SIGKILL to the first process of its pid namespace",
        turns=(LOOK, kill_place, LOOK, RIGHT),
        server="fragile",
        then=broken("agent", "tool server exit -9.*everything in the sandbox is dead"),
    ),
    Fault(
        name="bwrap dead between calls",
        layer="sandbox",
        how="SIGKILL to it",
        turns=(LOOK, kill_bwrap, LOOK, RIGHT),
        server="fragile",
        then=broken("agent", "tool server exit -9.*everything in the sandbox is dead"),
    ),
    Fault(
        name="sandbox stop that hangs",
        layer="stop",
        how="another bwrap sleeps after its end",
        bwrap='$real "$@"; exec sleep 1000',
        spec={"sandbox_limits": {"stop_s": LATE_S}},
        then=broken("teardown", r"^bwrap \d+ does not die$"),
    ),
    Fault(
        name="stop later than its deadline",
        layer="stop",
        how="another bwrap sleeps after its end, longer than the trial may take to stop",
        bwrap='$real "$@"; exec sleep 1000',
        spec={"stop_s": LATE_S},
        then=broken("teardown", "^deadline: 1 s$"),
    ),
)

TASK = (
    Fault(
        name="world missing",
        layer="task",
        how="the folder is removed",
        task=without("environment/world"),
        then=broken("start", "task must bring a world in environment/world"),
    ),
    Fault(
        name="world unreadable",
        layer="task",
        how="a link to nowhere in its place",
        task=no_world,
        then=broken("start", "task must bring a world in environment/world"),
    ),
    Fault(
        name="task.toml broken",
        layer="task",
        how="half a line",
        task=written("task.toml", '[task]\nname = "half'),
        then=broken("start", "task.toml"),
    ),
    Fault(
        name="task.toml with an unknown key",
        layer="task",
        how="a key that the schema does not have",
        task=written("task.toml", 'schema_version = "1.4"\n[agent]\ntimeout_seconds = 3\n'),
        then=broken("start", "timeout_seconds"),
    ),
    Fault(
        name="task.toml missing",
        layer="task",
        how="the file is removed",
        task=without("task.toml"),
        then=broken("start", "task must hold task.toml"),
    ),
    Fault(
        name="instruction missing",
        layer="task",
        how="the file is removed",
        task=without("instruction.md"),
        then=broken("start", "task must hold instruction.md"),
    ),
    Fault(
        name="instruction empty",
        layer="task",
        how="a file of blanks",
        task=written("instruction.md", " \n"),
        then=broken("start", "instruction.md must not be empty"),
    ),
    Fault(
        name="task missing",
        layer="task",
        how="another folder is named",
        spec={"task": "/nonexistent/task"},
        then=broken("start", "task must be a directory, got /nonexistent/task"),
    ),
    Fault(
        name="policy missing",
        layer="task",
        how="another folder is named",
        spec={"policy": "/nonexistent/policy"},
        then=broken("agent", "policy folder must hold tokenizer.json, got /nonexistent/policy"),
    ),
    Fault(
        name="harness unknown",
        layer="task",
        how="another name",
        spec={"harness": "none"},
        then=broken("start", "harness must be one of office, code, got 'none'"),
    ),
)

ENGINE = (
    Fault(
        name="engine gone",
        layer="engine",
        how="no socket",
        spec={"engine_address": "/nonexistent/engine"},
        then=broken("agent", "No such file.*|/nonexistent/engine"),
    ),
    Fault(
        name="engine refuses the connection",
        layer="engine",
        how="a socket that nobody listens on",
        spec={"engine_address": refusing_socket},
        then=broken("agent", "Connection refused"),
    ),
    Fault(
        name="engine dies in a turn",
        layer="engine",
        how="the connection ends without a reply",
        turns=(LIST, Wire(b"")),
        then=broken("agent", "engine at .* closed the connection"),
    ),
    Fault(
        name="engine dies in a reply",
        layer="engine",
        how="the connection ends after half of it",
        turns=(LIST, Wire(frame({"token_ids": [5]})[:12])),
        then=broken("agent", "engine at .* closed the connection"),
    ),
    Fault(
        name="engine hangs",
        layer="engine",
        how="no reply within what a turn may take",
        turns=(LIST, 1000.0),
        spec={"engine_s": LATE_S},
        then=broken("agent", "engine at .* did not answer within 1 s$"),
    ),
    Fault(
        name="engine too slow for the agent's clock",
        layer="engine",
        how="no reply by the agent's deadline",
        turns=(LIST, 1000.0),
        spec={"deadline_s": 2 * LATE_S},
        then=cut("wall_clock"),
    ),
    Fault(
        name="engine speaks another protocol",
        layer="engine",
        how="HTTP on its socket",
        turns=(Wire(b"HTTP/1.1 503 Service Unavailable\r\n\r\n"),),
        then=broken("agent", r"engine at .* must answer \d+ bytes at most"),
    ),
    Fault(
        name="engine speaks no JSON",
        layer="engine",
        how="a frame of text",
        turns=(Wire(HEADER.pack(8) + b"out of m"),),
        then=broken("agent", "engine at .* must answer a JSON object, got b'out of m'"),
    ),
    Fault(
        name="engine leaves a field out",
        layer="engine",
        how="a reply without logprobs",
        turns=(Wire(frame({"request_id": "1", "token_ids": [5]})),),
        then=broken("agent", "engine at .* must answer logprob, policy_version, finish_reason, got none"),
    ),
    Fault(
        name="engine reports an error",
        layer="engine",
        how="a reply that is one",
        turns=(Wrong({"error": "CUDA out of memory"}),),
        then=broken("agent", "CUDA out of memory"),
    ),
    Fault(
        name="engine gives up",
        layer="engine",
        how="a reply that was aborted",
        turns=(LIST, Wrong({"finish_reason": "abort"})),
        then=broken("agent", "engine gave up request"),
    ),
    Fault(
        name="engine answers ids beyond the vocabulary",
        layer="engine",
        how="token ids of 10^9",
        turns=(stopped(10**9),),
        then=broken("agent", "token_ids of a reply must be from 0 to 639, got 1000000000"),
    ),
    Fault(
        name="engine answers negative ids",
        layer="engine",
        how="a token id of -3",
        turns=(stopped(-3),),
        then=broken("agent", "token_ids of a reply must be from 0 to 639, got -3"),
    ),
    Fault(
        name="engine answers texts for ids",
        layer="engine",
        how="a token id that is a text",
        turns=(stopped("the"),),
        then=broken("agent", "token_ids of a reply must be from 0 to 639, got 'the'"),
    ),
    Fault(
        name="engine answers nothing",
        layer="engine",
        how="no token, and a stop",
        turns=(_tokens(),),
        then=broken("agent", "a reply must have 1 to 3000 token_ids, got 0"),
    ),
    Fault(
        name="engine stops without a stop token",
        layer="engine",
        how="another last token",
        turns=(_tokens(20, 21),),
        then=broken("agent", "a reply that stops must end with a stop token, got 21"),
    ),
    Fault(
        name="engine answers more than was asked",
        layer="engine",
        how="a token too many",
        turns=(Wrong(many_tokens),),
        spec={"limits": {"turn_tokens": 40}},
        then=broken("agent", "a reply must have 1 to 40 token_ids, got 41"),
    ),
    Fault(
        name="engine answers another request",
        layer="engine",
        how="the id of another trial's turn",
        turns=(Wrong({"request_id": "another/3"}),),
        then=broken("agent", "request_id of a reply must be .*/0, got another/3"),
    ),
    Fault(
        name="engine dies after the last turn",
        layer="engine",
        how="the connection ends when the trial lets go of it",
        turns=(LIST, AtRelease(Wire(b"")), RIGHT),
        then=broken("teardown", "engine at .* closed the connection"),
    ),
    Fault(
        name="engine hangs after the last turn",
        layer="engine",
        how="no reply when the trial lets go of it",
        turns=(LIST, AtRelease(1000.0), RIGHT),
        spec={"engine_s": LATE_S},
        then=broken("teardown", "engine at .* did not answer within 1 s$"),
    ),
    Fault(
        name="engine loses logprobs",
        layer="engine",
        how="a list that is shorter",
        turns=(LIST, Wrong({"logprob": [-0.5]})),
        then=broken("agent", "token_ids, logprob and policy_version must be equally long"),
    ),
    Fault(
        name="engine says NaN",
        layer="engine",
        how="a logprob that is NaN",
        turns=(
            Wrong(
                lambda request: {
                    "token_ids": [request["stop_token_ids"][0]],
                    "logprob": [float("nan")],
                    "policy_version": [7],
                }
            ),
        ),
        then=broken("agent", "logprob .*nan"),
    ),
)

CLOCK = (
    Fault(
        name="agent's deadline in a call",
        layer="agent",
        how="a tool sleeps for 1000 s",
        turns=(look("hangs"), RIGHT),
        server="fragile",
        spec={"deadline_s": 2 * LATE_S},
        then=cut("wall_clock"),
    ),
    Fault(
        name="clock that leaps",
        layer="agent",
        how="time.time leaps by days to and fro, in the trial and in its tools (replaced: the machine's is not ours)",
        turns=(LIST, LOOK, CHANGE, RIGHT),
        server="fragile",
        spec={"clock": "leaps"},
        then=SOLVED,
        restarts=0,
    ),
)

VERIFIER = (
    Fault(
        name="verifier crashes",
        layer="verifier",
        how="test.sh kills itself",
        task=graded_by("kill -9 $$"),
        then=broken("verify", "^reward_missing: .*exit 137"),
    ),
    Fault(
        name="verifier hangs",
        layer="verifier",
        how="test.sh sleeps after a forged reward",
        task=graded_by(f"{ONE}; sleep 1000", seconds=LATE_S),
        then=broken("verify", "^script_timeout: test.sh must end within 1 s"),
    ),
    Fault(
        name="verifier later than its deadline",
        layer="verifier",
        how="test.sh sleeps longer than the trial may take to verify",
        task=graded_by(f"{ONE}; sleep 1000"),
        spec={"verify_s": LATE_S},
        then=broken("verify", "^deadline: 1 s$"),
    ),
    Fault(
        name="verifier writes no reward",
        layer="verifier",
        how="test.sh ends well",
        task=graded_by("exit 0"),
        then=broken("verify", "^reward_missing: .*exit 0"),
    ),
    Fault(
        name="verifier writes NaN",
        layer="verifier",
        how='{"reward": NaN}',
        task=graded_by(f"echo '{{\"reward\": NaN}}' > {REWARD}.json"),
        then=broken("verify", "^reward_unreadable: reward.json must hold finite numbers"),
    ),
    Fault(
        name="verifier writes no JSON",
        layer="verifier",
        how="reward.json holds half of it",
        task=graded_by(f"echo '{{\"reward\": ' > {REWARD}.json; {ONE}"),
        then=broken("verify", "^reward_unreadable: reward.json must hold finite numbers"),
    ),
    Fault(
        name="verifier writes an empty file",
        layer="verifier",
        how="reward.txt of no bytes",
        task=graded_by(f": > {REWARD}.txt"),
        then=broken("verify", "^reward_unreadable: reward.txt must not be empty"),
    ),
    Fault(
        name="reward out of range",
        layer="verifier",
        how="reward.txt says 37",
        task=graded_by(f"echo 37 > {REWARD}.txt"),
        then=broken("verify", "^reward_unreadable: .* between 0 and 1, got 37"),
    ),
    Fault(
        name="reward below zero",
        layer="verifier",
        how="reward.json says -0.5",
        task=graded_by(f"echo '{{\"reward\": -0.5}}' > {REWARD}.json"),
        then=broken("verify", "^reward_unreadable: .* between 0 and 1, got -0.5"),
    ),
    Fault(
        name="verifier prints without end",
        layer="verifier",
        how="test.sh prints 100 MB before its reward",
        task=graded_by(f"head -c 100000000 /dev/zero; {ONE}"),
        then=SOLVED,
    ),
    Fault(
        name="verifier fills its disk",
        layer="verifier",
        how="test.sh writes 1 GB, then no reward",
        task=graded_by(f"head -c 1000000000 /dev/zero > /tmp/x || exit 1; {ONE}"),
        then=broken("verify", "^reward_missing: .*exit (1|153)"),
    ),
    Fault(
        name="test.sh not executable",
        layer="verifier",
        how="mode 644",
        task=graded_by(ONE, executable=False),
        then=SOLVED,
    ),
    Fault(
        name="verifier needs a package",
        layer="verifier",
        how="test.sh imports what is not installed",
        task=graded_by(f"python3 -c 'import no_such_package' && {ONE}"),
        then=broken("verify", "^reward_missing: .*No module named 'no_such_package'"),
    ),
    Fault(
        name="verifier leaves processes",
        layer="verifier",
        how="test.sh leaves a writer of rewards in the background",
        task=graded_by(
            f"(trap '' HUP; while :; do {ONE}; done) >/dev/null 2>&1 &\n"
            f"echo '{{\"reward\": 0}}' > {REWARD}.json"
        ),
        then=FAILED,
    ),
    Fault(
        name="agent breaks the verifier",
        layer="verifier",
        how="the agent leaves a file on which test.sh breaks, and on the untouched world it does not",
        turns=(call("write_file", path="trap.txt", content="x"), RIGHT),
        task=graded_by(f"[ -e trap.txt ] && exit 1; {ONE}"),
        then=FAILED,
    ),
    Fault(
        name="verifier without a sandbox",
        layer="verifier",
        how="another bwrap refuses to make the verifier's place",
        task=graded_by(ONE),
        bwrap='case "$*" in *--hostname\\ verifier*) echo "bwrap: No space left" >&2; exit 1;; esac; exec $real "$@"',
        then=broken("verify", "^sandbox: bwrap did not start: bwrap: No space left$"),
    ),
    Fault(
        name="checks broken",
        layer="verifier",
        how="checks.json is no JSON",
        task=written("tests/checks.json", "[{"),
        then=broken("verify", "^task: .*JSON"),
    ),
    Fault(
        name="checks unknown",
        layer="verifier",
        how="checks.json names a check that is not there",
        task=written("tests/checks.json", '[{"kind": "vibes"}]'),
        then=broken("verify", "^task: .*kind of a check must be one of"),
    ),
)

STEPWISE = (
    Fault(
        name="nothing, in two steps",
        layer="steps",
        how="the policy answers twice",
        turns=("drafted", "sent"),
        task=in_steps(ONE, ONE),
        then=SOLVED,
        restarts=0,
    ),
    Fault(
        name="server killed in the second step",
        layer="steps",
        how="SIGKILL to itself in a read",
        turns=(CHANGE, "drafted", look("is killed"), "sent"),
        server="fragile",
        task=in_steps(ONE, ONE),
        then=SOLVED,
        restarts=1,
    ),
    Fault(
        name="verifier of the first step crashes",
        layer="steps",
        how="its test.sh kills itself",
        turns=("drafted", "sent"),
        task=in_steps("kill -9 $$", ONE),
        then=broken("verify", "^reward_missing: .*exit 137"),
    ),
    Fault(
        name="verifier of the first step hangs",
        layer="steps",
        how="its test.sh sleeps after a forged reward",
        turns=("drafted", "sent"),
        task=in_steps(f"{ONE}; sleep 1000", ONE),
        spec={"verify_s": LATE_S},
        then=broken("verify", "^deadline: 1 s$"),
    ),
    Fault(
        name="verifier of the second step writes no reward",
        layer="steps",
        how="its test.sh ends well",
        turns=("drafted", "sent"),
        task=in_steps(ONE, "exit 0"),
        then=broken("verify", "^reward_missing: .*exit 0"),
    ),
    Fault(
        name="no sandbox for the second step",
        layer="steps",
        how="another bwrap refuses the second place for tools",
        turns=("drafted", "sent"),
        task=in_steps(ONE, ONE),
        bwrap='case "$*" in *--hostname\\ verifier*) exec $real "$@";; esac\n'
        'if mkdir "$0.used" 2>/dev/null; then exec $real "$@"; fi\n'
        'echo "bwrap: No space left" >&2; exit 1',
        then=broken("start", "^bwrap: No space left$"),
        random=False,
    ),
    Fault(
        name="trial killed between steps",
        layer="steps",
        how="SIGKILL in the first turn of the second",
        turns=("drafted", to_trial(signal.SIGKILL), "sent"),
        task=in_steps(ONE, ONE),
        then=broken("process", "^exit -9$"),
    ),
)

YES = {"criterion_1": {"rationale": "It does.", "met": True}}
NO = {"criterion_1": {"rationale": "It does not.", "met": False}}

JUDGE = (
    Fault(name="judge says yes", layer="judge", how="it answers", judge=[said(YES)], then=SOLVED),
    Fault(name="judge says no", layer="judge", how="it answers", judge=[said(NO)], then=FAILED),
    Fault(
        name="judge missing",
        layer="judge",
        how="a rubric, and no judge's socket",
        judge=[said(YES)],
        spec={"judge_socket": ""},
        then=broken("verify", "^judge_missing: "),
    ),
    Fault(
        name="judge's process gone",
        layer="judge",
        how="no socket",
        judge=[said(YES)],
        spec={"judge_socket": "/nonexistent/judge"},
        then=broken("verify", "^judge_gone: "),
    ),
    Fault(
        name="judge's process hangs up",
        layer="judge",
        how="the socket of a program that closes every connection",
        judge=[said(YES)],
        spec={"judge_socket": lambda stage: stage.engine.socket_path},
        then=broken("verify", "^judge_gone: .*the judge closed the connection"),
    ),
    Fault(
        name="judge 429",
        layer="judge",
        how="every call",
        judge=[refused(429)],
        then=broken("verify", "^judge_limited: .*429"),
    ),
    Fault(
        name="judge 429, and to wait for an hour",
        layer="judge",
        how="Retry-After: 3600",
        judge=[refused(429, headers={"Retry-After": "3600"})],
        then=broken("verify", "^judge_limited: "),
    ),
    Fault(
        name="judge 500",
        layer="judge",
        how="every call",
        judge=[refused(500)],
        then=broken("verify", "^judge_busy: .*500"),
    ),
    Fault(
        name="judge 529",
        layer="judge",
        how="every call",
        judge=[refused(529, message="Overloaded")],
        then=broken("verify", "^judge_busy: .*529 Overloaded"),
    ),
    Fault(
        name="judge 404",
        layer="judge",
        how="every call",
        judge=[refused(404, message="no such model")],
        then=broken("verify", "^judge_fatal: .*404 no such model"),
    ),
    Fault(
        name="judge prose",
        layer="judge",
        how="every answer",
        judge=[said("I think that it is met.")],
        then=broken("verify", "^judge_unparsable: "),
    ),
    Fault(
        name="judge of two minds",
        layer="judge",
        how="two verdicts in an answer",
        judge=[said(json.dumps(YES) + json.dumps(NO))],
        then=broken("verify", "^judge_unparsable: .*2 values"),
    ),
    Fault(
        name="judge truncated",
        layer="judge",
        how="every answer ends at its token limit",
        judge=[said(json.dumps(YES), finish="length")],
        then=broken("verify", "^judge_truncated: "),
    ),
    Fault(
        name="judge timeout",
        layer="judge",
        how="no answer",
        judge=[said(YES, delay_s=4.0)],
        judge_settings={"timeout_s": 2 * LATE_S, "attempt_s": LATE_S / 2},
        then=broken("verify", "^judge_timeout: "),
    ),
    Fault(
        name="judge later than the verifier's deadline",
        layer="judge",
        how="no answer",
        judge=[said(YES, delay_s=4.0)],
        judge_settings={"timeout_s": 60.0, "attempt_s": 60.0},
        spec={"verify_s": LATE_S},
        then=broken("verify", "^deadline: 1 s$"),
        random=False,
    ),
    Fault(
        name="judge's key revoked",
        layer="judge",
        how="401, and it quotes the key",
        judge=[refused(401, message="no such key: key-4821")],
        then=broken("verify", "^judge_key: (?!.*4821)"),
    ),
    Fault(
        name="judge oversized",
        layer="judge",
        how="an answer of 3 MB",
        judge=[said(YES | {"padding": "x" * 3_000_000})],
        then=broken("verify", "^judge_oversized: "),
    ),
    Fault(
        name="judge closes the connection",
        layer="judge",
        how="without an answer",
        judge=[said(YES, close=True)],
        then=broken("verify", "^judge_connection: "),
    ),
    Fault(
        name="judge fails once",
        layer="judge",
        how="a 500 before the answer",
        judge=[refused(500), said(YES)],
        then=SOLVED,
    ),
)

PROCESS = (
    Fault(
        name="trial killed",
        layer="process",
        how="SIGKILL",
        turns=(LOOK, to_trial(signal.SIGKILL), RIGHT),
        server="fragile",
        then=broken("process", "^exit -9$"),
    ),
    Fault(
        name="trial crashes",
        layer="process",
        how="SIGSEGV",
        turns=(LOOK, to_trial(signal.SIGSEGV), RIGHT),
        server="fragile",
        then=broken("process", "^exit -11$"),
    ),
    Fault(
        name="trial told to end",
        layer="process",
        how="SIGTERM",
        turns=(to_trial(signal.SIGTERM), RIGHT),
        then=broken("process", "^exit -15$"),
    ),
    Fault(
        name="trial stopped",
        layer="process",
        how="SIGSTOP, until the fleet's deadline",
        turns=(to_trial(signal.SIGSTOP), RIGHT),
        spec={"deadline_s": LATE_S, "start_s": LATE_S, "verify_s": LATE_S, "stop_s": LATE_S},
        then=broken("process", r"^deadline: 10\.0 s$"),
        random=False,
    ),
    Fault(
        name="trial out of memory",
        layer="process",
        how="no more address space from the first turn on",
        turns=(LIST, limit(resource.RLIMIT_AS, 1 << 20), look("20 MB"), RIGHT),
        server="fragile",
        then=broken("agent", "^MemoryError$"),
    ),
    Fault(
        name="trial out of memory in the verifier",
        layer="process",
        how="no more address space before the answer",
        turns=(limit(resource.RLIMIT_AS, 1 << 20), RIGHT),
        task=graded_by(ONE),
        then=broken("verify", "MemoryError|^sandbox: .*(Cannot allocate memory|failed to map)"),
    ),
    Fault(
        name="trial out of descriptors",
        layer="process",
        how="no further one before the answer",
        turns=(limit(resource.RLIMIT_NOFILE, 3), RIGHT),
        then=broken("teardown", "Too many open files"),
    ),
    Fault(
        name="warm parent killed",
        layer="fleet",
        how="SIGKILL",
        turns=(LIST, kill_parent, RIGHT),
        then=broken("process", "^fleet parent died: exit -9$"),
        random=False,
    ),
    Fault(
        name="driver killed",
        layer="fleet",
        how="SIGKILL to the process that has the fleet",
        turns=(LIST, kill_driver, 1000.0),
        driver=True,
        then=NOBODY_ASKS,
        random=False,
    ),
    Fault(
        name="driver and warm parent killed",
        layer="fleet",
        how="SIGKILL to both",
        turns=(LIST, kill_driver_and_parent, 1000.0),
        driver=True,
        then=NOBODY_ASKS,
        random=False,
    ),
    Fault(
        name="cancelled in its start",
        layer="fleet",
        how="cancel while another bwrap sleeps",
        bwrap="sleep 1000",
        cancel=sleeps,
        then=CANCELLED,
        random=False,
    ),
    Fault(
        name="cancelled in a call",
        layer="fleet",
        how="cancel while a program of the agent sleeps",
        turns=(call("bash", command="sleep 1000"), RIGHT),
        spec={"harness": "code"},
        cancel=sleeps_in,
        then=CANCELLED,
    ),
    Fault(
        name="cancelled in a turn",
        layer="fleet",
        how="cancel while the engine samples",
        turns=(1000.0, RIGHT),
        cancel=asks_engine,
        then=CANCELLED,
    ),
    Fault(
        name="cancelled in its verifier",
        layer="fleet",
        how="cancel while test.sh sleeps",
        task=graded_by(f"{ONE}; sleep 1000"),
        cancel=sleeps_in,
        then=CANCELLED,
    ),
)

FAULTS = (
    *POLICY,
    *SERVER,
    *RESOURCES,
    *START,
    *TASK,
    *ENGINE,
    *CLOCK,
    *VERIFIER,
    *STEPWISE,
    *JUDGE,
    *PROCESS,
)

COLUMNS: dict[str, Callable[[Fault], str]] = {
    "layer": lambda fault: fault.layer,
    "fault": lambda fault: fault.name,
    "injected by": lambda fault: fault.how,
    "right outcome": lambda fault: fault.then.line,
    "reward": lambda fault: "none" if fault.then.reward is None else f"{fault.then.reward:g}",
}


def table() -> str:
    """The faults as a table of Markdown."""
    rows = [[told(fault) for told in COLUMNS.values()] for fault in FAULTS]
    return markdown_table(list(COLUMNS), rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
