"""Where a run stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from .message import Action, CancelTrial, DropGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One place in a group: waiting, running, valid or lost.

    Args:
        attempt: how many trials of this place came before the one that waits or runs, or that ended it.
        errors: how many of them the system broke.
        version: a lower bound on its oldest token while running, that token's version once valid.
        newest: the version of its newest token once valid.
        reward: meaningful once valid.
    """

    attempt: int = 0
    errors: int = 0
    status: Literal["waiting", "running", "valid", "lost"] = "waiting"
    version: int = 0
    newest: int = 0
    reward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Group:
    """The trials of one task; open until its fate is decided, then ready to be trained.

    What every event asks of every group is worked out once a group.

    Args:
        ready: its place in the order in which groups got ready, from 1; 0 while it is open.
    """

    group_id: int
    task: int
    purpose: Literal["train", "eval"]
    ready: int
    samples: tuple[Sample, ...]

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """Places of which no trial is under way but should be."""
        return tuple(i for i, s in enumerate(self.samples) if s.status == "waiting")

    @cached_property
    def over(self) -> bool:
        """Whether every trial of it has ended for good."""
        return all(s.status in ("valid", "lost") for s in self.samples)

    @cached_property
    def born(self) -> float:
        """The oldest version that a token of it can have; infinity if no trial has started."""
        return min((s.version for s in self.samples if s.status in ("running", "valid")), default=math.inf)

    @cached_property
    def oldest(self) -> float:
        """The oldest version of a token of a valid trial; infinity if there is none."""
        return min((s.version for s in self.samples if s.status == "valid"), default=math.inf)

    @cached_property
    def newest(self) -> float:
        """The newest version of a token of a valid trial; infinity if there is none."""
        return max((s.newest for s in self.samples if s.status == "valid"), default=math.inf)

    def with_sample(self, index: int, sample: Sample) -> Group:
        """The group with this sample in one of its places."""
        return replace(self, samples=(*self.samples[:index], sample, *self.samples[index + 1 :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands. Values are never changed in place.

    Args:
        trained: optimizer steps the trainer has taken.
        applied: the version in the engine; None before the first weights.
        syncing: weights are on their way to the engine.
        training: groups of the step in flight.
        saved: the last two versions that are on disk, older first; a killed run goes on from either.
        saving: another is being written.
        unsaved: the batches of the steps since the older one, that in flight included, in order.
        redo: batches that are trained again because the run was killed after them.
        caught_up_at: the version with which that is done; no training trial starts from an older one.
        groups: by id, those that are open or ready; evaluation groups too.
        running: by trial id, its group and sample; trials of dropped groups too, until they end.
        next_group: the next group's id.
        made_ready: groups that got ready so far.
        drawn: training tasks drawn from the epochs so far.
        requeued: tasks to be drawn before the epochs go on.
        evaluating: the version under evaluation.
        zero_variance, lost: groups dropped for it since the last Train.
        recent: of the last trials that ended, whether the system broke it; empty after an early end, since whoever
            reopens the run then knows.
        max_running: trials side by side, if that has changed.
        ending: why the run ends early; empty otherwise.
        finished: Finished has been said.
    """

    trained: int = 0
    applied: int | None = None
    syncing: bool = False
    training: tuple[int, ...] = ()
    saved: tuple[int, ...] = (0,)
    saving: bool = False
    unsaved: tuple[tuple[Group, ...], ...] = ()
    redo: tuple[tuple[Group, ...], ...] = ()
    caught_up_at: int = 0
    max_running: int | None = None
    groups: Mapping[int, Group]
    running: Mapping[str, tuple[int, int]]
    next_group: int = 0
    made_ready: int = 0
    drawn: int = 0
    requeued: tuple[int, ...] = ()
    evaluating: int | None = None
    zero_variance: int = 0
    lost: int = 0
    recent: tuple[bool, ...] = ()
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
