"""Which trials start: evaluation first, then groups under way, then new groups as far as staleness allows."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from ..counter import permutation
from ..staleness import accepted_at, admission_capacity
from .message import StartTrial
from .settings import Settings
from .state import Group, Sample, State, Step, trial_id


def fill(settings: Settings, state: State) -> Step:
    """Start trials while slots are free: evaluation first, then the oldest group, then a new group."""
    room = _room(settings, state) - len(state.running)
    if state.applied is None or room <= 0:
        return state, ()
    # While steps are taken again the weights are older than those that these trials would be trained from.
    caught_up = state.applied >= state.caught_up_at
    begun = (g for g in state.groups.values() if caught_up or g.purpose == "eval")
    waiting = sorted((g.purpose == "train", g.group_id, i) for g in begun for i in g.waiting)
    places = [(group_id, i) for _, group_id, i in waiting]
    wanted = math.ceil((room - len(places)) / settings.group_size)
    if wanted > 0 and (capacity := _capacity(settings, state)):
        state, opened = _open_groups(settings, state, min(wanted, capacity))
        places += [(group_id, i) for group_id in opened for i in range(settings.group_size)]
    return _start(state, places[:room]) if places else (state, ())


def _room(settings: Settings, state: State) -> int:
    """Trials that may run side by side."""
    return settings.max_running if state.max_running is None else state.max_running


def _capacity(settings: Settings, state: State) -> int:
    """How many training groups may be opened now."""
    if state.ending or state.applied is None or state.applied < state.caught_up_at:
        return 0
    train = [g for g in state.groups.values() if g.purpose == "train"]
    ready = sum(g.ready > 0 for g in train)
    accepted = accepted_at(state.trained, batch_groups=settings.batch_groups) + len(state.training) + ready
    by_staleness = admission_capacity(
        version=state.applied,
        accepted=accepted,
        running=len(train) - ready,
        batch_groups=settings.batch_groups,
        max_staleness=settings.max_staleness,
        max_running=_room(settings, state),
    )
    needed = settings.steps * settings.batch_groups - accepted - (len(train) - ready)
    return max(0, min(by_staleness, needed))


def task_at(settings: Settings, index: int) -> int:
    """The training task that is drawn as number `index`: position in an epoch, in that epoch's own order."""
    epoch, position = divmod(index, settings.task_count)
    return _epoch_order(settings.task_count, settings.seed, epoch)[position]


@lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    return permutation(count, seed, epoch)


def _open_groups(settings: Settings, state: State, count: int) -> tuple[State, range]:
    """The state with so many new groups, of the tasks that were dropped first, and their ids."""
    again = state.requeued[:count]
    drawn = range(state.drawn, state.drawn + count - len(again))
    tasks = (*again, *(task_at(settings, index) for index in drawn))
    opened = range(state.next_group, state.next_group + count)
    samples = (Sample(),) * settings.group_size
    groups = {
        group_id: Group(group_id=group_id, task=task, purpose="train", ready=0, samples=samples)
        for group_id, task in zip(opened, tasks, strict=True)
    }
    state = replace(
        state,
        groups={**state.groups, **groups},
        next_group=opened.stop,
        drawn=drawn.stop,
        requeued=state.requeued[count:],
    )
    return state, opened


def _start(state: State, places: list[tuple[int, int]]) -> Step:
    """The state in which these places have a trial under way; the tables are copied once for all of them."""
    groups, running = dict(state.groups), dict(state.running)
    actions: list[StartTrial] = []
    for group_id, index in places:
        group, version = groups[group_id], state.applied or 0
        sample = replace(group.samples[index], status="running", version=version)
        groups[group_id] = group = group.with_sample(index, sample)
        start = StartTrial(
            trial_id=trial_id(group, index),
            group_id=group_id,
            task=group.task,
            sample=index,
            attempt=sample.attempt,
            purpose=group.purpose,
            policy_version=version,
        )
        running[start.trial_id] = (group_id, index)
        actions.append(start)
    return replace(state, groups=groups, running=running), tuple(actions)
