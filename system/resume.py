"""A killed run's journal, trajectories and checkpoint, put together again."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core.schedule import (
    Action,
    Event,
    Reopened,
    Saved,
    Settings,
    State,
    StepTrained,
    TrialEnded,
    react,
    trial_id,
)
from system.checkpoint import Checkpoint, last_checkpoint
from system.journal import Entry, read_journal, record_of, replayed
from system.loop import Resumed, trial_ended
from system.record.metrics import is_of, lines_of
from system.run import RunError


class Found(NamedTuple):
    """What is left of a run: with what to go on, from which weights, and what is to be said about it.

    What had happened unheard is in the state already. It goes into the journal, but what followed from it is not
    carried out: that was for the run that was killed.
    """

    resumed: Resumed
    checkpoint: Checkpoint | None
    version: int
    entries: list[Entry]
    unheard: list[tuple[Event, tuple[Action, ...]]]
    notes: list[str]

    @property
    def happened(self) -> list[tuple[Event, list[dict[str, Any]]]]:
        """Every event with its actions, the unheard ones last."""
        unheard = [(event, [record_of(action) for action in actions]) for event, actions in self.unheard]
        return [(entry.event, entry.actions) for entry in self.entries] + unheard

    @property
    def seconds(self) -> float:
        """How long it had run when it was last heard of."""
        return self.entries[-1].seconds if self.entries else 0.0


def find_run(
    folder: Path,
    checkpoints: Path,
    *,
    tags: dict[str, Any],
    name: str,
    settings: Settings,
    about: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Found:
    """Where a killed run stood.

    Args:
        folder: of the run: events.jsonl and trajectories.jsonl.
        checkpoints: folder of its versions.
        tags: of its lines.
        name: that begins its trial ids.
        settings: what the schedule would be given now.
        about: what the checkpoint would be told of now.
        defaults: of that, where the checkpoint was told nothing of it.

    Raises:
        RunError: the settings differ, the checkpoint is of a run with others, or the journal is not what the reducer
            would write.
    """
    try:
        before, entries = read_journal(folder / "events.jsonl", tags=tags)
        if changed := differing(before, settings):
            raise RunError(f"a run must go on with its own settings, got others: {changed}")
        state, difference = replayed(settings, entries)
    except ValueError as error:
        raise RunError(str(error)) from error
    if difference:
        raise RunError(
            f"event {difference.number} of the journal must replay, got other actions; see replay.py"
        )
    known = {*state.saved, *([state.trained] if state.saving else [])}
    checkpoint, notes = last_checkpoint(checkpoints, known=known)
    version = checkpoint.version if checkpoint else 0
    if checkpoint and (changed := differences({**(defaults or {}), **checkpoint.about}, about or {})):
        raise RunError(f"checkpoint {checkpoint.folder} must be of this run, got one of another: {changed}")
    kept, lines = _kept(state), {}
    for line in lines_of(folder / "trajectories.jsonl", tags):
        trial = line["trial_id"].removeprefix(f"{name}/")
        if trial in kept or trial in state.running:
            lines[trial] = line
    events: list[Event] = [trial_ended(trial, lines[trial]) for trial in lines if trial in state.running]
    if events:
        notes.append(f"{len(events)} trials had ended that the journal does not tell of: they count")
    if state.saving and version == state.trained:
        events.insert(0, Saved(version=version))
    unheard = []
    for event in events:
        state, actions = react(settings, state, event)
        unheard.append((event, actions))
    if version not in state.saved:
        on_disk = " or ".join(map(str, state.saved))
        told = "; ".join([f"got none in {checkpoints}", *notes])
        raise RunError(f"a checkpoint must be of version {on_disk}, {told}")
    kept = _kept(state)
    results = {trial: lines[trial] for trial in lines if trial in kept}
    if missing := sorted(kept - results.keys()):
        raise RunError(
            f"trajectories.jsonl must hold every trial that is not trained for good, got no {missing[0]}"
        )
    resumed = Resumed(state=state, events=(Reopened(version=version),), results=results, gone=_gone(state))
    return Found(resumed, checkpoint, version, entries, unheard, notes)


def differing(before: Settings, now: Settings) -> str:
    """The settings that are not the same: "steps was 4, is 8"."""
    return differences(dataclasses.asdict(before), dataclasses.asdict(now))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is not as it was, of all that there is now: "steps was 4, is 8"."""
    pairs = [(name, before.get(name), value) for name, value in now.items()]
    return ", ".join(f"{name} was {old}, is {new}" for name, old, new in pairs if old != new)


def _kept(state: State) -> set[str]:
    """Trials that may be trained yet."""
    groups = [g for g in state.groups.values() if g.purpose == "train"]
    batches = [g for batch in (*state.unsaved, *state.redo) for g in batch]
    return {
        trial_id(g, i) for g in (*groups, *batches) for i, s in enumerate(g.samples) if s.status == "valid"
    }


def _gone(state: State) -> frozenset[int]:
    """Groups that are over: all that were opened but those that may be trained yet."""
    batches = {g.group_id for batch in (*state.unsaved, *state.redo) for g in batch}
    return frozenset(set(range(state.next_group)) - state.groups.keys() - batches)


class Intervals(NamedTuple):
    """What happened before which step: trials that ended, and groups that were dropped for want of a signal."""

    step: dict[str, int]
    zero_variance: dict[int, int]


def intervals(entries: Iterable[tuple[Event, Iterable[Mapping[str, Any]]]]) -> Intervals:
    """Of a journal, as far as it goes; where steps were taken again, their trials are those before either time."""
    step: dict[str, int] = {}
    dropped: Counter[int] = Counter()
    next_step = 1
    for event, actions in entries:
        match event:
            case TrialEnded(trial_id=trial):
                step[trial] = next_step
            case StepTrained(version=version) | Reopened(version=version):
                next_step = version + 1
            case _:
                pass
        dropped[next_step] += sum(action.get("reason") == "zero_variance" for action in actions)
    return Intervals(step, {number: count for number, count in dropped.items() if count})


def later_than(tags: dict[str, Any], version: int) -> Callable[[dict[str, Any]], bool]:
    """Which lines of metrics.jsonl are of later versions of a run: those steps are taken again, and told again."""

    def later(line: dict[str, Any]) -> bool:
        told = line.get("step", line.get("version", 0))
        return is_of(line, tags) and told > version

    return later
