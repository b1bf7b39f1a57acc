"""What the attacks do in the fleet's processes: trials, and calls of many tools in one sandbox."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio

from system.harness.connection import open_tools
from system.harness.serving import expected_tools, serving
from system.sandbox import FrozenWorld, Sandbox, open_sandbox
from system.trial import run_trial


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """A trial, or the action that the spec names."""
    return ACTIONS[spec["action"]](spec) if "action" in spec else run_trial(spec)


def call_tools(spec: dict[str, Any]) -> dict[str, Any]:
    """Calls one after the other, and what each answered; then what changed, and how the tools describe themselves."""
    harness, toolset = spec["harness"], spec["toolset"]
    serve = serving(harness, toolset, result_characters=20_000, longest_call_s=20.0)
    with open_sandbox(spec["sandbox"], Path(spec["world"]), Path(spec["scratch"]), serve) as sandbox:
        expected = expected_tools(harness, toolset)
        schemas, answers, restarts = anyio.run(_call_all, sandbox, expected, spec["calls"])
        frozen: FrozenWorld = sandbox.freeze()
        changed = frozen.changed()
    left = sorted(os.listdir(spec["outside"])) if spec.get("outside") else []
    return {"schemas": schemas, "answers": answers, "restarts": restarts, "changed": changed, "left": left}


async def _call_all(
    sandbox: Sandbox, expected: tuple[str, ...], calls: list[tuple[str, dict[str, Any]]]
) -> tuple[list[dict[str, Any]], list[list[Any]], int]:
    async with open_tools(sandbox, expected=expected, timeout_s=20.0) as tools:
        answers = [list(await tools.call(name, arguments)) for name, arguments in calls]
        return tools.schemas, answers, tools.restarts


ACTIONS: dict[str, Any] = {"call_tools": call_tools}
