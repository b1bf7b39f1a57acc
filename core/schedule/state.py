"""Where a run stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from .message import Action, CancelTrial, DropGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One place in a group: waiting, running, valid or lost.

    Args:
        version: a lower bound on its oldest token while running, that token's version once valid.
        reward: meaningful once valid.
    """

    attempt: int = 0
    status: Literal["waiting", "running", "valid", "lost"] = "waiting"
    version: int = 0
    reward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trials of one task; open until its fate is decided, then ready to be trained."""

    group_id: int
    task: int
    purpose: Literal["train", "eval"]
    ready: bool
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands. Values are never changed in place.

    Args:
        trained: optimizer steps the trainer has taken.
        applied: the version in the engine; None before the first weights.
        syncing: weights are on their way to the engine.
        training: groups of the step in flight.
        groups: by id, those that are open or ready; evaluation groups too.
        running: by trial id, its group and sample; trials of dropped groups too, until they end.
        next_group: the next group's id.
        drawn: training tasks drawn from the epochs so far.
        requeued: tasks to be drawn before the epochs go on.
        evaluating: the version under evaluation.
        zero_variance, lost: groups dropped for it since the last Train.
        ending: why the run ends early; empty otherwise.
        finished: Finished has been said.
    """

    trained: int = 0
    applied: int | None = None
    syncing: bool = False
    training: tuple[int, ...] = ()
    groups: Mapping[int, Group]
    running: Mapping[str, tuple[int, int]]
    next_group: int = 0
    drawn: int = 0
    requeued: tuple[int, ...] = ()
    evaluating: int | None = None
    zero_variance: int = 0
    lost: int = 0
    ending: str = ""
    finished: bool = False


Step = tuple[State, tuple[Action, ...]]


def begin() -> State:
    """The state before Opened."""
    return State(groups={}, running={})


def trial_id(group: Group, sample: int) -> str:
    """The name of the current attempt at a sample."""
    return f"{group.purpose}-{group.group_id}-{sample}-{group.samples[sample].attempt}"


def drop(state: State, group: Group, reason: Literal["zero_variance", "lost", "stale"]) -> Step:
    """The state without a group, and its running trials cancelled."""
    cancelled = tuple(
        CancelTrial(trial_id=trial_id(group, i)) for i, s in enumerate(group.samples) if s.status == "running"
    )
    state = replace(state, groups={k: g for k, g in state.groups.items() if k != group.group_id})
    return state, (DropGroup(group_id=group.group_id, task=group.task, reason=reason), *cancelled)


def put(state: State, group: Group) -> State:
    """The state with this group in the place of its former self."""
    return replace(state, groups={**state.groups, group.group_id: group})
