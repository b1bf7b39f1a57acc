"""What each event says."""

from __future__ import annotations

from dataclasses import replace

from ..outcome import group_verdict
from ..staleness import accepted_at
from .evaluation import start_evaluation
from .message import (
    CancelTrial,
    Event,
    Opened,
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


def _end_trial(settings: Settings, state: State, event: TrialEnded) -> Step:
    if event.trial_id not in state.running:
        return state, ()
    group_id, index = state.running[event.trial_id]
    state = replace(state, running={k: v for k, v in state.running.items() if k != event.trial_id})
    if group_id not in state.groups:
        return state, ()
    group = state.groups[group_id]
    samples = list(group.samples)
    samples[index] = _ended(settings, samples[index], event)
    group = replace(group, samples=tuple(samples))
    return _settle(settings, put(state, group), group)


def _ended(settings: Settings, sample: Sample, event: TrialEnded) -> Sample:
    if event.valid:
        if event.reward is None or not abs(event.reward) < float("inf"):
            raise ValueError(f"a valid reward must be finite, got {event.reward}")
        oldest = sample.version if event.version_min is None else event.version_min
        return replace(sample, status="valid", reward=event.reward, version=oldest)
    if event.kind == "system_error" and sample.attempt < settings.max_retries:
        return replace(sample, status="waiting", attempt=sample.attempt + 1)
    return replace(sample, status="lost")


def _settle(settings: Settings, state: State, group: Group) -> Step:
    """The fate of a training group, as far as it is known."""
    if group.purpose == "eval":
        return state, ()
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
        return state, ()
    reward = [sample.reward for sample in group.samples if sample.status == "valid"]
    flat = max(reward) - min(reward) <= settings.tolerance
    if flat and state.zero_variance < settings.max_zero_variance:
        return drop(replace(state, zero_variance=state.zero_variance + 1), group, "zero_variance")
    return put(state, replace(group, ready=True)), ()


def _end_early(state: State, reason: str) -> Step:
    """Let go of all training trials; a running evaluation, step or weight transfer still comes to its end."""
    if state.ending:
        return state, ()
    cancelled = tuple(
        CancelTrial(trial_id=trial)
        for trial, (group_id, _) in state.running.items()
        if group_id in state.groups and state.groups[group_id].purpose == "train"
    )
    kept = {k: g for k, g in state.groups.items() if g.purpose == "eval"}
    return replace(state, groups=kept, ending=reason), cancelled
