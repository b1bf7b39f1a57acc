"""What each event says."""

from __future__ import annotations

from dataclasses import replace

from ..outcome import group_verdict
from ..staleness import accepted_at
from .evaluation import start_evaluation
from .message import (
    Action,
    CancelTrial,
    CapacityChanged,
    Event,
    Opened,
    Reopened,
    Saved,
    StepTrained,
    StopAsked,
    SyncWeights,
    TrialEnded,
    WeightsApplied,
)
from .settings import Settings
from .state import Group, Sample, State, Step, drop, put


def take(settings: Settings, state: State, event: Event) -> Step:
    """The state with the event in it, and what the event itself asks for."""
    match event:
        case Opened(version=version):
            return _open(settings, state, version)
        case Reopened(version=version):
            return _reopen(settings, state, version)
        case CapacityChanged(max_running=max_running):
            if not max_running >= 1:
                raise ValueError(f"max_running must be positive, got {max_running}")
            return replace(state, max_running=max_running), ()
        case Saved(version=version):
            if not state.saving or version != state.trained:
                raise ValueError(f"Saved must follow Save of {state.trained}, got version {version}")
            kept = (*state.saved, version)[-2:]
            unsaved = state.unsaved[kept[0] - state.saved[0] :]
            return replace(state, saved=kept, saving=False, unsaved=unsaved), ()
        case TrialEnded():
            return _end_trial(settings, state, event)
        case StepTrained(version=version):
            if not state.training or version != state.trained + 1:
                raise ValueError(f"StepTrained must follow Train from {state.trained}, got version {version}")
            return replace(state, trained=version, training=()), ()
        case WeightsApplied(version=version):
            if not state.syncing or version != state.trained:
                raise ValueError(
                    f"WeightsApplied must follow SyncWeights of {state.trained}, got version {version}"
                )
            return start_evaluation(settings, replace(state, applied=version, syncing=False))
        case StopAsked():  # pragma: no branch: there is no other event
            return _end_early(state, "stop asked")


def _open(settings: Settings, state: State, version: int) -> Step:
    if state.applied is not None or state.syncing:
        raise ValueError(f"Opened must come once, got it again with version {version}")
    if not 0 <= version <= settings.steps:
        raise ValueError(f"version must lie between 0 and {settings.steps} steps, got {version}")
    drawn = accepted_at(version, batch_groups=settings.batch_groups)
    return replace(state, trained=version, drawn=drawn, syncing=True), (SyncWeights(version=version),)


def _reopen(settings: Settings, state: State, version: int) -> Step:
    """Back to what was saved, with all that has ended since."""
    if not settings.save_every:
        raise ValueError(f"save_every must be positive for a run to be reopened, got {settings.save_every}")
    if version not in state.saved:
        told = " or ".join(map(str, state.saved))
        raise ValueError(f"Reopened must be of a version that is on disk, {told}, got {version}")
    again = state.unsaved[version - state.saved[0] :]
    train = {k: _begun_again(g) for k, g in state.groups.items() if g.purpose == "train"}
    state = replace(
        state,
        trained=version,
        applied=None,
        syncing=True,
        training=(),
        saving=False,
        saved=tuple(kept for kept in state.saved if kept <= version),
        unsaved=state.unsaved[: version - state.saved[0]],
        redo=(*again, *state.redo),
        caught_up_at=version + len(again) + len(state.redo),
        groups=train,
        running={},
        evaluating=None,
        recent=() if state.ending else state.recent,
        ending="",
        finished=False,
    )
    return state, (SyncWeights(version=version),)


def _begun_again(group: Group) -> Group:
    """Its trials that were under way wait for another attempt, which is nobody's error."""
    again = (
        replace(s, status="waiting", attempt=s.attempt + 1) if s.status == "running" else s
        for s in group.samples
    )
    return replace(group, samples=tuple(again))


def _end_trial(settings: Settings, state: State, event: TrialEnded) -> Step:
    if event.trial_id not in state.running:
        return state, ()
    running = dict(state.running)
    group_id, index = running.pop(event.trial_id)
    state = replace(state, running=running, recent=_recent(settings, state, event))
    actions: tuple[Action, ...] = ()
    if group_id in state.groups:
        group = state.groups[group_id]
        group = group.with_sample(index, _ended(settings, group.samples[index], event))
        state, actions = _settle(settings, state, group)
    state, more = _judge(settings, state)
    return state, actions + more


def _recent(settings: Settings, state: State, event: TrialEnded) -> tuple[bool, ...]:
    """Which of the last trials the system broke; those of which that can be said."""
    if event.kind == "cancelled" or event.blameless:
        return state.recent
    return (*state.recent, event.kind == "system_error")[-settings.error_window :]


def _judge(settings: Settings, state: State) -> Step:
    """A run of whose last trials the system broke too many comes to an end: what is left is a biased sample."""
    errors, window = sum(state.recent), settings.error_window
    if len(state.recent) < window or errors / window <= settings.max_error_share:
        return state, ()
    told = f"{errors} of the last {window} trials were system errors"
    return _end_early(state, f"{told}, more than max_error_share {settings.max_error_share}")


def _ended(settings: Settings, sample: Sample, event: TrialEnded) -> Sample:
    if event.valid:
        if event.reward is None or not abs(event.reward) < float("inf"):
            raise ValueError(f"a valid reward must be finite, got {event.reward}")
        oldest = sample.version if event.version_min is None else event.version_min
        newest = oldest if event.version_max is None else event.version_max
        return replace(sample, status="valid", reward=event.reward, version=oldest, newest=newest)
    errors = sample.errors + (not event.blameless)
    if event.kind == "system_error" and errors <= settings.max_retries:
        return replace(sample, status="waiting", attempt=sample.attempt + 1, errors=errors)
    return replace(sample, status="lost")


def _settle(settings: Settings, state: State, group: Group) -> Step:
    """The state with what a group has become, and the fate of a training group, as far as it is known."""
    if group.purpose == "eval":
        return put(state, group), ()
    status = [sample.status for sample in group.samples]
    verdict = group_verdict(
        size=settings.group_size,
        valid=status.count("valid"),
        lost=status.count("lost"),
        retriable=sum(s.status == "waiting" and s.attempt > 0 for s in group.samples),
        min_valid=settings.min_valid,
    )
    if verdict == "drop":
        state, actions = drop(replace(state, lost=state.lost + 1), group, "lost")
        if state.lost <= settings.max_lost:
            return state, actions
        state, more = _end_early(state, "too many lost groups")
        return state, actions + more
    if verdict not in ("complete", "survivors"):
        return put(state, group), ()
    reward = [sample.reward for sample in group.samples if sample.status == "valid"]
    flat = max(reward) - min(reward) <= settings.tolerance
    if flat and state.zero_variance < settings.max_zero_variance:
        return drop(replace(state, zero_variance=state.zero_variance + 1), group, "zero_variance")
    ready = state.made_ready + 1
    return put(replace(state, made_ready=ready), replace(group, ready=ready)), ()


def _end_early(state: State, reason: str) -> Step:
    """Let go of all training trials; a running evaluation, step or weight transfer still comes to its end.

    Groups that are ready stay, and the tasks of the others are drawn first, should the run be reopened.
    """
    if state.ending:
        return state, ()
    cancelled = tuple(
        CancelTrial(trial_id=trial)
        for trial, (group_id, _) in state.running.items()
        if group_id in state.groups and state.groups[group_id].purpose == "train"
    )
    kept = {k: g for k, g in state.groups.items() if g.purpose == "eval" or g.ready}
    tasks = tuple(g.task for k, g in state.groups.items() if k not in kept)
    return replace(state, groups=kept, requeued=(*tasks, *state.requeued), ending=reason), cancelled
