"""What trials with a sandbox do in test_sandbox.py and tests/fleet, in the fleet's processes."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
from mcp import MCPError

from system.sandbox import Limits, Sandbox, SandboxError, frozen, kernel, open_sandbox
from system.sandbox.serve import open_client, serve


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Do the action that the spec names."""
    return ACTIONS[spec["action"]](spec)


def opened(spec: dict[str, Any]) -> Sandbox:
    """The sandbox of a spec."""
    if spec.get("old_kernel"):
        frozen.can_hold_marks = lambda folder: False
    limits = Limits(**spec.get("limits", {}))
    return open_sandbox(
        spec["kind"],
        Path(spec["world"]),
        Path(spec["scratch"]),
        serve,
        limits,
        trial=spec["trial_id"],
        agent_s=spec["deadline_s"],
        modal=spec.get("modal"),
    )


def use_tools(spec: dict[str, Any]) -> dict[str, Any]:
    """Call tools, freeze, and say what they answered and what the world then was."""
    with opened(spec) as sandbox:
        answers = anyio.run(call_all, sandbox, spec["calls"], spec.get("timeout_s", 20.0))
        died = sandbox.died()
        frozen = sandbox.freeze()
        files = {rel: frozen.path(rel) for rel in frozen.files()}
        layer = frozen.upper or frozen.root
        assert layer is not None
        return {
            **answers,
            "died": died,
            "changed": frozen.changed(),
            "texts": {rel: at.read_bytes()[:2000].decode("latin-1") for rel, at in files.items() if at},
            "asked": {rel: str(frozen.path(rel)) for rel in spec.get("ask", [])},
            "layer": sorted(at.relative_to(layer).as_posix() for at in layer.rglob("*")),
            "children": kernel.children(),
        }


async def call_all(sandbox: Sandbox, calls: list[list[Any]], timeout_s: float) -> dict[str, Any]:
    """Texts of the answers in order, up to the first call that gets none, its error and how long it took."""
    answers: list[str] = []
    begun = time.monotonic()
    try:
        async with open_client(sandbox.connect(), timeout_s=timeout_s) as client:
            for name, arguments in calls:
                begun = time.monotonic()
                result = await client.call_tool(name, arguments)
                answers.append("\n".join(part.text for part in result.content if part.type == "text"))
    except MCPError as error:
        return {"answers": answers, "error": str(error), "waited": time.monotonic() - begun}
    return {"answers": answers, "error": None}


def lose_server(spec: dict[str, Any]) -> dict[str, Any]:
    """Call tools while something outside kills the server, as the kernel does when memory is short."""
    with opened(spec) as sandbox:
        answers = anyio.run(call_all_and_kill, sandbox, spec["calls"], spec["kill_after_s"])
        return {**answers, "died": sandbox.died()}


async def call_all_and_kill(sandbox: Sandbox, calls: list[list[Any]], after_s: float) -> dict[str, Any]:
    """`call_all` with a server that has so long to live."""

    async def kill() -> None:
        await anyio.sleep(after_s)
        os.kill(sandbox._server, 9)  # type: ignore[attr-defined]

    async with anyio.create_task_group() as group:
        group.start_soon(kill)
        answers = await call_all(sandbox, calls, 20.0)
    return answers


def restart_server(spec: dict[str, Any]) -> dict[str, Any]:
    """Call tools, kill the server, start it again, call more."""
    with opened(spec) as sandbox:
        first = anyio.run(call_all, sandbox, spec["calls"], 20.0)
        os.kill(sandbox._server, 9)  # type: ignore[attr-defined]
        died = sandbox.died()
        sandbox.restart()  # type: ignore[attr-defined]
        second = anyio.run(call_all, sandbox, spec["again"], 20.0)
        changed, late = sandbox.freeze().changed(), ""
        try:
            sandbox.restart()  # type: ignore[attr-defined]
        except SandboxError as error:
            late = str(error)
        return {"first": first, "died": died, "second": second, "changed": changed, "late": late}


def go_on(spec: dict[str, Any]) -> dict[str, Any]:
    """Call tools, freeze, thaw, call more; what had changed each time, and how `ticks` grew after the last thaw."""
    found: list[list[str]] = []
    answers: list[dict[str, Any]] = []
    with opened(spec) as sandbox:
        for calls in spec["rounds"]:
            answers.append(anyio.run(call_all, sandbox, calls, 20.0))
            layer = sandbox.freeze()
            found.append(layer.changed())
            sandbox.thaw()  # type: ignore[attr-defined]
        try:
            sandbox.thaw()  # type: ignore[attr-defined]
        except SandboxError as error:
            twice = str(error)
        at = layer.path("ticks")
        assert at is not None
        first = at.stat().st_size
        time.sleep(0.2)
        grown = at.stat().st_size - first
        last = sandbox.freeze().changed()
    return {"answers": answers, "changed": found, "twice": twice, "grown": grown, "last": last}


def fail_to_thaw(spec: dict[str, Any]) -> dict[str, Any]:
    """A thaw that is not given the time to start; then what was frozen, and a thaw that succeeds."""
    with opened(spec) as sandbox:
        anyio.run(call_all, sandbox, spec["calls"], 20.0)
        sandbox.freeze()
        limits = sandbox._limits  # type: ignore[attr-defined]
        sandbox._limits = replace(limits, start_s=1e-9)  # type: ignore[attr-defined]
        try:
            sandbox.thaw()  # type: ignore[attr-defined]
        except SandboxError as error:
            cause = str(error)
        children = len(kernel.children())
        sandbox._limits = limits  # type: ignore[attr-defined]
        changed = sandbox.freeze().changed()
        sandbox.thaw()  # type: ignore[attr-defined]
        again = anyio.run(call_all, sandbox, spec["again"], 20.0)
        return {"cause": cause, "children": children, "changed": changed, "again": again}


def watch_a_writer(spec: dict[str, Any]) -> dict[str, Any]:
    """Whether a file still grows after the freeze, and whether it grew before."""
    with opened(spec) as sandbox:
        anyio.run(call_all, sandbox, spec["calls"], 20.0)
        frozen = sandbox.freeze()
        at = frozen.path("ticks")
        assert at is not None
        first = at.read_text()
        time.sleep(0.2)
        return {"first": len(first), "later": len(at.read_text()), "children": kernel.children()}


def change_frozen(spec: dict[str, Any]) -> dict[str, Any]:
    """Whether even the trial itself can still write the diff after the freeze."""
    with opened(spec) as sandbox:
        frozen = sandbox.freeze()
        assert frozen.upper is not None
        try:
            (frozen.upper / "late.txt").write_text("late")
        except OSError as error:
            return {"refused": error.strerror}
        return {"refused": None}


def fail_to_open(spec: dict[str, Any]) -> dict[str, Any]:
    """The error of a sandbox that cannot start, and what is left below the scratch folder."""
    os.environ["PATH"] = spec.get("path", os.environ["PATH"])
    stop = threading.Event()
    if spec.get("thread"):
        threading.Thread(target=stop.wait, daemon=True).start()
    left = set(os.listdir(spec["scratch"]))
    try:
        opened(spec).close()
        return {"error": None}
    except SandboxError as error:
        return {"error": str(error), "left": sorted(set(os.listdir(spec["scratch"])) - left)}
    finally:
        stop.set()


def linger_in_a_sandbox(spec: dict[str, Any]) -> dict[str, Any]:
    """Open a sandbox with a background writer in it, note it, and wait to be killed."""
    with opened(spec) as sandbox:
        answers = anyio.run(call_all, sandbox, spec["calls"], 20.0)
        assert answers["error"] is None, answers
        pids = [os.getpid(), *descendants(os.getpid())]
        Path(spec["notes"], spec["trial_id"]).write_text(" ".join(map(str, pids)))
        time.sleep(1000)
    return {}


def descendants(pid: int) -> list[int]:
    """All processes below one that still run, as /proc tells."""
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
        except OSError:  # gone
            continue
        if fields[0] in "ZX":
            continue
        parents.setdefault(int(fields[1]), []).append(int(name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


ACTIONS = {
    function.__name__: function
    for function in (
        use_tools,
        lose_server,
        restart_server,
        go_on,
        fail_to_thaw,
        watch_a_writer,
        change_frozen,
        fail_to_open,
        linger_in_a_sandbox,
    )
}
