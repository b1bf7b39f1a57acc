"""One event in, actions out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .admission import fill
from .evaluation import end_evaluation
from .message import Action, Event, Finished, Reopened, Save, SyncWeights
from .order import drop_stale, train
from .report import take
from .settings import Settings
from .state import State, Step, begin


def react(settings: Settings, state: State, event: Event) -> Step:
    """The state after an event, and what to do about it.

    Raises:
        ValueError: if the event cannot follow: a step that nobody asked for, weights that nobody sent.
    """
    if state.finished and not isinstance(event, Reopened):
        return state, ()
    state, actions = take(settings, state, event)
    # Stale groups leave before a step is chosen, and again when its choice has made others too old.
    for rule in (drop_stale, end_evaluation, _save, _sync, train, drop_stale, fill, _finish):
        state, more = rule(settings, state)
        actions += more
    return state, actions


def replay(settings: Settings, events: Iterable[Event]) -> tuple[State, list[tuple[Action, ...]]]:
    """The state after all events, and the actions that followed each."""
    state = begin()
    history: list[tuple[Action, ...]] = []
    for event in events:
        state, actions = react(settings, state, event)
        history.append(actions)
    return state, history


def _save(settings: Settings, state: State) -> Step:
    """A version that is due is put on disk, once."""
    due = settings.save_every and (
        state.trained % settings.save_every == 0 or state.trained == settings.steps
    )
    if not due or state.saving or state.training or state.saved[-1] >= state.trained or state.ending:
        return state, ()
    return replace(state, saving=True), (Save(version=state.trained),)


def _sync(settings: Settings, state: State) -> Step:
    """New weights go to the engine, unless an evaluation holds them back."""
    behind = state.applied is not None and state.applied < state.trained
    if not behind or state.syncing or state.evaluating is not None or state.ending:
        return state, ()
    return replace(state, syncing=True), (SyncWeights(version=state.trained),)


def _finish(settings: Settings, state: State) -> Step:
    """Say so when all is done, or when the end was asked for and nothing is in flight."""
    opened = state.applied is not None or state.ending
    busy = state.training or state.saving or state.syncing or state.running or state.evaluating is not None
    over = state.ending or (state.trained >= settings.steps and state.applied == state.trained)
    if busy or not opened or not over:
        return state, ()
    return replace(state, finished=True), (Finished(reason=state.ending or "all steps trained"),)
