"""What the attacks do in the fleet's processes: trials, and calls of many tools in one sandbox."""

from __future__ import annotations

from typing import Any

from system.trial import run_trial


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """A trial, or the action that the spec names."""
    return ACTIONS[spec["action"]](spec) if "action" in spec else run_trial(spec)


ACTIONS: dict[str, Any] = {}
