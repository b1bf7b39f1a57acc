"""Which trials start: evaluation first, then groups under way, then new groups as far as staleness allows."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..counter import permutation
from ..staleness import accepted_at, admission_capacity
from .message import Action, StartTrial
from .settings import Settings
from .state import Group, Sample, State, Step, put, trial_id


def fill(settings: Settings, state: State) -> Step:
    """Start trials while slots are free: evaluation first, then the oldest group, then a new group."""
    if state.applied is None:
        return state, ()
    # While steps are taken again the weights are older than those that these trials would be trained from.
    caught_up = state.applied >= state.caught_up_at
    begun = (g for g in state.groups.values() if caught_up or g.purpose == "eval")
    waiting = [(g.purpose == "train", g.group_id, i) for g in begun for i in g.waiting]
    actions: list[Action] = []
    places = sorted(waiting)
    while len(state.running) < _room(settings, state):
        if not places:
            if not _capacity(settings, state):
                break
            state, group = _open_group(settings, state)
            places = [(True, group.group_id, i) for i in range(settings.group_size)]
        _, group_id, index = places.pop(0)
        state, action = _start(state, state.groups[group_id], index)
        actions.append(action)
    return state, tuple(actions)


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


def _open_group(settings: Settings, state: State) -> tuple[State, Group]:
    if state.requeued:
        task, state = state.requeued[0], replace(state, requeued=state.requeued[1:])
    else:
        task, state = task_at(settings, state.drawn), replace(state, drawn=state.drawn + 1)
    samples = (Sample(),) * settings.group_size
    group = Group(group_id=state.next_group, task=task, purpose="train", ready=0, samples=samples)
    return put(replace(state, next_group=state.next_group + 1), group), group


def _start(state: State, group: Group, index: int) -> tuple[State, StartTrial]:
    version = state.applied or 0
    samples = list(group.samples)
    samples[index] = replace(samples[index], status="running", version=version)
    group = replace(group, samples=tuple(samples))
    name = trial_id(group, index)
    state = replace(put(state, group), running={**state.running, name: (group.group_id, index)})
    return state, StartTrial(
        trial_id=name,
        group_id=group.group_id,
        task=group.task,
        sample=index,
        attempt=samples[index].attempt,
        purpose=group.purpose,
        policy_version=version,
    )
