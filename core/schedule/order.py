"""Which groups make the next step, and which are too old for it."""

from __future__ import annotations

import math
from dataclasses import replace

from .message import Action, Train
from .settings import Settings
from .state import Group, State, Step, drop, trial_id


def drop_stale(settings: Settings, state: State) -> Step:
    """Groups whose oldest trained token would be too old for the next step."""
    next_version = state.trained + bool(state.training)
    actions: tuple[Action, ...] = ()
    for group in list(state.groups.values()):
        oldest = min((s.version for s in group.samples if s.status == "valid"), default=next_version)
        if group.purpose == "train" and next_version - oldest > settings.max_staleness:
            state, more = drop(state, group, "stale")
            actions += more
            if settings.requeue_stale:
                state = replace(state, requeued=(*state.requeued, group.task))
    return state, actions


def train(settings: Settings, state: State) -> Step:
    """The next step, from the oldest groups that are ready, if it makes no other group too old."""
    in_step = state.training or state.syncing or state.applied != state.trained
    if in_step or state.ending or state.trained >= settings.steps:
        return state, ()
    groups = [g for g in state.groups.values() if g.purpose == "train"]
    ready = sorted((g for g in groups if g.ready), key=lambda g: (_born(g), g.group_id))
    batch = ready[: settings.batch_groups]
    started = [g for g in groups if not g.ready and _born(g) < math.inf]
    if len(batch) < settings.batch_groups:
        return state, ()
    if settings.late_group == "wait" and not _in_time(settings, state, started):
        return state, ()
    chosen = tuple(g.group_id for g in batch)
    kept = {k: g for k, g in state.groups.items() if k not in chosen}
    trials = tuple(trial_id(g, i) for g in batch for i, s in enumerate(g.samples) if s.status == "valid")
    state = replace(state, training=chosen, groups=kept, zero_variance=0, lost=0)
    return state, (Train(version=state.trained, group_ids=chosen, trial_ids=trials),)


def _born(group: Group) -> float:
    """The oldest version that a trajectory of this group can have; infinity if none has started."""
    return min((s.version for s in group.samples if s.status in ("running", "valid")), default=math.inf)


def _in_time(settings: Settings, state: State, groups: list[Group]) -> bool:
    """Whether these groups under way can still be trained before they are too old, if this step goes without them.

    Earliest deadline first succeeds exactly when, for every deadline, what is due by then fits the steps
    left. Groups that are ready need no look: the oldest go first, and admission never let in more than fit.
    """
    deadline = sorted(_born(g) + settings.max_staleness for g in groups)
    steps_left = [last - state.trained for last in deadline]
    return all(due <= left * settings.batch_groups for due, left in enumerate(steps_left, start=1))
