"""Many trials side by side, one process each: what the loop asks of a fleet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

__all__ = ["Fleet", "FleetError", "check_spec", "kit_of", "lifetime_s", "lost"]


class FleetError(Exception):
    """The fleet itself, not one of its trials, cannot go on."""


def kit_of(harness: str, toolset: str) -> str:
    """Which tools these are, as the parent of the trials names them."""
    return "code" if harness == "code" else toolset


def lifetime_s(spec: dict[str, Any]) -> float:
    """Seconds in which a trial must have ended: its agent's deadline and those that the spec gives its other phases."""
    return spec["deadline_s"] + spec.get("start_s", 0) + spec.get("verify_s", 0) + 2 * spec.get("stop_s", 0)


def check_spec(spec: dict[str, Any], running: Collection[str]) -> None:
    """Refuses what no fleet could run.

    Raises:
        ValueError: the spec has no proper trial_id or deadline_s, or a trial of that id is running.
    """
    trial_id, deadline_s = spec.get("trial_id"), spec.get("deadline_s")
    if not isinstance(trial_id, str) or not trial_id:
        raise ValueError(f"trial_id must be a text that is not empty, got {trial_id!r}")
    if trial_id in running:
        raise ValueError(f"trial_id must not be running already, got {trial_id!r}")
    if not isinstance(deadline_s, int | float) or not deadline_s > 0:
        raise ValueError(f"deadline_s must be positive, got {deadline_s!r}")


def lost(trial_id: str, cause: str, *, phase: str = "process") -> dict[str, Any]:
    """The result of a trial that ended with something that it shared with others, through no fault of its own."""
    outcome = {"kind": "system_error", "phase": phase, "cause": cause}
    return {"trial_id": trial_id, "outcome": outcome, "blameless": True, "cpu_seconds": {"trial": 0.0}}


class Fleet(Protocol):
    """Starts trials and hands back one result for each; how many run at once is the caller's business.

    A result is what the trial returned, with `trial_id` and `cpu_seconds["trial"]` added. A trial that
    raised, died or was killed has `"outcome": {"kind": "system_error", "phase": .., "cause": ..}` instead,
    and `"blameless": True` if that was because of what it shares with others: their parent, their node.
    """

    @property
    def running(self) -> frozenset[str]:
        """Ids of the trials that were started and not yet returned."""
        ...

    def reach(self, needed: Sequence[str]) -> None:
        """See whether the trials will have these where they run: absolute paths of files and sockets, and URLs.

        Raises:
            FleetError: some will not.
        """
        ...

    def start(self, spec: dict[str, Any]) -> None:
        """Start a trial. spec is JSON and has at least trial_id (str) and deadline_s (seconds, positive).

        It is killed a while after `lifetime_s`: whatever has a deadline of its own should have kept it by then.
        """
        ...

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        """Results that have come in; waits up to timeout_s for the first, [] if none came."""
        ...

    def cancel(self, trial_id: str) -> None:
        """Kill a trial; its result comes with the outcome "cancelled". Unknown ids have no effect."""
        ...

    def close(self) -> None:
        """Kill what still runs and release everything."""
        ...
