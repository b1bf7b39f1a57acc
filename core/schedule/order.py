"""Which groups make the next step, and which are too old for it."""

from __future__ import annotations

import math
from dataclasses import replace

from .message import Action, Train
from .settings import Settings
from .state import Group, State, Step, drop, trial_id


def drop_stale(settings: Settings, state: State) -> Step:
    """Groups that the next step would find too old."""
    next_version = state.trained + len(state.redo) + bool(state.training)
    actions: tuple[Action, ...] = ()
    for group in _too_old(settings, state, next_version - settings.max_staleness):
        state, more = drop(state, group, "stale")
        actions += more
        if settings.requeue_stale:
            state = replace(state, requeued=(*state.requeued, group.task))
    return state, actions


def _too_old(settings: Settings, state: State, min_version: int) -> list[Group]:
    """Groups that have a token that must not be trained; where such tokens are masked, those that have no other."""
    if settings.late_group == "train":
        return []
    if settings.late_group == "mask":
        return [g for g in state.groups.values() if g.ready and g.newest < min_version]
    return [g for g in state.groups.values() if g.oldest < min_version and g.purpose == "train"]


def train(settings: Settings, state: State) -> Step:
    """The next step, if enough groups are ready and it makes no more groups too old than may get so."""
    in_step = state.training or state.saving or state.syncing or state.applied != state.trained
    if in_step or state.ending or state.trained >= settings.steps:
        return state, ()
    if state.redo:
        return _step(settings, replace(state, redo=state.redo[1:]), list(state.redo[0]))
    batches = [_batch(settings, state, order) for order in _orders(settings, state)]
    batch = next((b for b in batches if _allowed(settings, state, b)), None)
    return (state, ()) if batch is None else _step(settings, state, batch)


def _step(settings: Settings, state: State, batch: list[Group]) -> Step:
    """Train on these groups."""
    chosen = tuple(g.group_id for g in batch)
    kept = {k: g for k, g in state.groups.items() if k not in chosen}
    trials = tuple(trial_id(g, i) for g in batch for i, s in enumerate(g.samples) if s.status == "valid")
    oldest = 0 if settings.late_group == "train" else max(0, state.trained - settings.max_staleness)
    action = Train(version=state.trained, group_ids=chosen, trial_ids=trials, min_version=oldest)
    unsaved = (*state.unsaved, tuple(batch)) if settings.save_every else ()
    state = replace(state, training=chosen, unsaved=unsaved, groups=kept, zero_variance=0, lost=0)
    return state, (action,)


def _orders(settings: Settings, state: State) -> tuple[str, ...]:
    """The order that is asked for; where that would leave too many too old, oldest first goes on in the end."""
    asked = "admission" if state.trained < settings.in_order_steps else settings.order
    return (asked, "oldest") if asked == "completion" else (asked,)


def _late_allowed(settings: Settings) -> float:
    """How many groups a step may leave too old."""
    if settings.late_group == "wait":
        return 0
    return math.inf if settings.max_late is None else settings.max_late


def _batch(settings: Settings, state: State, order: str) -> list[Group]:
    """The groups of the next step, or fewer than it needs."""
    groups = [g for g in state.groups.values() if g.purpose == "train"]
    if order == "admission":
        first = sorted(groups, key=lambda g: g.group_id)[: settings.batch_groups]
        return [g for g in first if g.ready]
    ready = [g for g in groups if g.ready]
    if order == "completion":
        return sorted(ready, key=lambda g: g.ready)[: settings.batch_groups]
    return sorted(ready, key=lambda g: (g.born, g.group_id))[: settings.batch_groups]


def _allowed(settings: Settings, state: State, batch: list[Group]) -> bool:
    """Whether a step may be taken on these: there are enough, and it leaves few enough groups that get too late."""
    if len(batch) < settings.batch_groups:
        return False
    chosen = {g.group_id for g in batch}
    left = [g for g in state.groups.values() if g.purpose == "train" and g.group_id not in chosen]
    return _late(settings, state, left) <= _late_allowed(settings)


def _late(settings: Settings, state: State, groups: list[Group]) -> int:
    """How many of the groups that this step leaves are too old whatever is trained next, and when.

    Earliest deadline first, which passes over a group that no longer fits, trains as many in time as can be.
    """
    in_time = 0
    deadlines = sorted(g.born + settings.max_staleness for g in groups)
    for deadline in deadlines:
        in_time += in_time < (deadline - state.trained) * settings.batch_groups
    return len(deadlines) - in_time
