"""What trials do in the contract of sandboxes, in the fleet's processes, whatever the kind."""

from __future__ import annotations

import os
import time
from typing import Any

import anyio
import sandbox_trials
from sandbox_trials import call_all, opened

from system.sandbox import Sandbox, SandboxError
from system.sandbox.serve import open_client


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Do the action that the spec names."""
    found = {function.__name__: function for function in (use_up, restart_server)}
    action = {**sandbox_trials.ACTIONS, **found}[spec["action"]]
    return {**action(spec), "left": sorted(set(os.listdir(spec["scratch"])) - {"fleet.log"})}


def use_up(spec: dict[str, Any]) -> dict[str, Any]:
    """List the tools, then try what a sandbox allows once or never."""
    said: dict[str, Any] = {}
    with opened(spec) as sandbox:
        said["kind"], said["root"] = sandbox.kind, str(sandbox.root)
        said["tools"] = anyio.run(_tools, sandbox)
        said["connect"] = _refusal(sandbox.connect)
        first, second = sandbox.freeze(), sandbox.freeze()
        said["same"], said["changed"] = first is second, first.changed()
    sandbox.close()
    return said


async def _tools(sandbox: Sandbox) -> list[str]:
    async with open_client(sandbox.connect(), timeout_s=30) as client:
        return sorted(tool.name for tool in (await client.list_tools()).tools)


def _refusal(call: Any) -> str:
    try:
        call()
    except SandboxError as error:
        return str(error)
    return "none"


_KILL_THERE = """
import os
def words(pid):
    try: return open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
    except OSError: return []
os.kill(max(int(pid) for pid in os.listdir("/proc") if pid.isdigit() and b"serve" in words(pid)), 9)
"""


async def _call_and_kill(sandbox: Sandbox, spec: dict[str, Any]) -> dict[str, Any]:
    """`call_all`, and the server is killed from outside after a while, as the kernel does when memory is short."""

    def kill() -> None:
        if sandbox.kind == "modal":
            deadline = time.monotonic() + 60
            sandbox._run_there("freeze", "kill", (_KILL_THERE,), deadline, len)  # type: ignore[attr-defined]
        else:
            os.kill(sandbox._server, 9)  # type: ignore[attr-defined]

    async def later() -> None:
        await anyio.sleep(spec["kill_after_s"])
        await anyio.to_thread.run_sync(kill)

    async with anyio.create_task_group() as group:
        group.start_soon(later)
        said = await call_all(sandbox, spec["calls"], 60.0)
    return said


def restart_server(spec: dict[str, Any]) -> dict[str, Any]:
    """Make calls until the server is killed, start it again, make more."""
    with opened(spec) as sandbox:
        alive = sandbox.died()
        first = anyio.run(_call_and_kill, sandbox, spec)
        died = sandbox.died()
        restart = sandbox.restart  # type: ignore[attr-defined]
        restart()
        second = anyio.run(call_all, sandbox, spec["again"], 60.0)
        said = {"alive": alive, "first": first, "died": died, "second": second}
        return {**said, "changed": sandbox.freeze().changed(), "late": _refusal(restart)}
