"""What trials with a harness do in test_trial.py, in the fleet's processes."""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from system.fleet.office import load
from system.harness.connection import NotReady, open_tools
from system.harness.serving import _serve
from system.sandbox import Sandbox, open_sandbox
from system.tools.registration import Tool, tool
from system.tools.server import serve_tools
from system.trial import run_trial


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """A trial, or the action that the spec names."""
    return ACTIONS[spec["action"]](spec) if "action" in spec else run_trial(spec)


def peek(root: Path, deaths: int = 0) -> str:
    """Read; the server dies at the first so many times."""
    return _counted(root, "peek", deaths)


def poke(root: Path, deaths: int = 0) -> str:
    """Write; the server dies at the first so many times."""
    return _counted(root, "poke", deaths)


def _counted(root: Path, name: str, deaths: int) -> str:
    with open(root / name, "a") as file:
        file.write("x")
    times = len((root / name).read_text())
    if times <= deaths:
        os._exit(9)
    return f"{name} {times}"


def sleep(root: Path, seconds: int) -> str:
    """Take so long."""
    time.sleep(seconds)
    return "awake"


def temporary(root: Path) -> str:
    """Where a temporary file would lie, and whether one can."""
    with tempfile.NamedTemporaryFile() as file:
        return str(Path(file.name).parent)


def flood(root: Path, millions: int) -> str:
    """Answer with so many million characters."""
    return "x" * (millions * 1_000_000)


def fragile() -> dict[str, Tool]:
    """Tools that break."""
    offered = (tool(peek, reads=True), tool(poke), tool(sleep, limit_s=None), tool(flood), tool(temporary))
    return {one.name: one for one in offered}


class Rigid:
    """A sandbox that cannot start its server again."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.kind, self.root = sandbox.kind, sandbox.root
        self.connect, self.died = sandbox.connect, sandbox.died


def use_fragile_tools(spec: dict[str, Any]) -> dict[str, Any]:
    """Calls one after the other; what each answered or raised, and what then lay in the world."""
    build = partial(serve_tools, tools=fragile())
    serve = partial(_serve, build)
    with open_sandbox(spec["sandbox"], Path(spec["world"]), Path(spec["scratch"]), serve) as sandbox:
        answers, restarts, seconds = anyio.run(call_all, spec, sandbox)
        frozen = sandbox.freeze()
        texts = {name: at.read_text() for name in ("peek", "poke") if (at := frozen.path(name))}
    return {"answers": answers, "restarts": restarts, "seconds": seconds, "texts": texts}


async def call_all(spec: dict[str, Any], sandbox: Any) -> tuple[list[list[Any]], int, float]:
    if spec.get("rigid"):
        sandbox = Rigid(sandbox)
    answers: list[list[Any]] = []
    begun = time.monotonic()
    try:
        async with open_tools(sandbox, expected=spec.get("expected", ()), timeout_s=spec["tool_s"]) as tools:
            patience = spec.get("patience_s") or [60] * len(spec["calls"])
            for (name, arguments), patience_s in zip(spec["calls"], patience, strict=True):
                with anyio.move_on_after(patience_s):
                    try:
                        answers.append(list(await tools.call(name, arguments)))
                    except ConnectionError as error:
                        answers.append(["ConnectionError", str(error)])
        return answers, tools.restarts, time.monotonic() - begun
    except NotReady as error:
        return [["NotReady", str(error)]], 0, time.monotonic() - begun


def warm(spec: dict[str, Any]) -> dict[str, Any]:
    """Every tool of a kit is called once, as the parent of the trials does."""
    load(spec["kit"])
    return {"warm": True}


ACTIONS = {function.__name__: function for function in (use_fragile_tools, warm)}
