"""The event log of a run: every event the reducer saw and every action it answered, one JSON line each.

The first line of a run holds its settings, so that `core.schedule.replay` can drive the run again; each line has a
number, so that one that is gone is missed.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any, NamedTuple, get_args

from core.schedule import Event, Settings, State, begin, react
from system.record.metrics import JsonLines, lines_of, read_jsonl


def record_of(value: Any) -> dict[str, Any]:
    """A frozen record as a JSON object that names its type: {"type": "StartTrial", ...}."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {"type": type(value).__name__, **fields}


class Journal:
    """Append-only and written line by line, so that a killed run leaves a readable prefix.

    Args:
        path: of the file; several runs may share it.
        tags: what tells this run's lines from the others'.
        settings: of the schedule.
        written: lines of this run that are there already; it goes on after them.
        seconds: that the run had lasted by then.
    """

    def __init__(
        self, path: Path, *, tags: dict[str, Any], settings: Settings, written: int = 0, seconds: float = 0.0
    ) -> None:
        self.lines = JsonLines(path)
        self.start = time.monotonic() - seconds
        self.tags, self.written = tags, written
        if not written:
            self._line({"settings": dataclasses.asdict(settings)})

    def write(self, event: Event, actions: tuple[Any, ...]) -> None:
        """One event and what followed from it."""
        told = [record_of(action) for action in actions]
        self._line({"event": record_of(event), "actions": told})

    def close(self) -> None:
        """Closes the file."""
        self.lines.close()

    def _line(self, content: dict[str, Any]) -> None:
        seconds = round(time.monotonic() - self.start, 3)
        self.lines.write({**self.tags, "n": self.written, "seconds": seconds, **content})
        self.written += 1


class Entry(NamedTuple):
    """An event, the actions as they were written, and when."""

    event: Event
    actions: list[dict[str, Any]]
    seconds: float


def read_journal(path: Path, *, tags: dict[str, Any]) -> tuple[Settings, list[Entry]]:
    """Settings of one run, and every event with the actions as they were written.

    Raises:
        ValueError: the file has no run with these tags, or a line of it is missing.
    """
    kinds = {kind.__name__: kind for kind in get_args(Event)}
    settings: Settings | None = None
    entries: list[Entry] = []
    for number, line in enumerate(lines_of(path, tags)):
        if line.get("n") != number:
            raise ValueError(f"journal must hold every event of {tags}, got none numbered {number} in {path}")
        try:
            if "settings" in line:
                fields: dict[str, Any] = line["settings"]
                fields["evaluate_at"] = tuple(fields["evaluate_at"])
                settings = Settings(**fields)
            else:
                fields = dict(line["event"])
                event = kinds[fields.pop("type")](**fields)
                entries.append(Entry(event, line["actions"], line["seconds"]))
        except (KeyError, TypeError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"line {number} of {tags} must be an event with its actions, got {told} in {path}"
            ) from None
    if settings is None:
        raise ValueError(f"journal must hold the settings of {tags}, got {path} without them")
    return settings, entries


def read_tags(path: Path) -> list[dict[str, Any]]:
    """The tags of every run in a file, in the order in which they began.

    Raises:
        ValueError: a line is of a run whose first line, that with its settings, is not there.
    """
    own = ("n", "seconds", "settings", "event", "actions")
    found: list[dict[str, Any]] = []
    for line in read_jsonl(path):
        tags = {k: v for k, v in line.items() if k not in own}
        if tags not in found:
            if "settings" not in line:
                raise ValueError(f"journal must hold the settings of {tags}, got {path} without them")
            found.append(tags)
    return found


class Difference(NamedTuple):
    """Where a replay and a journal part: the number of the event, what was written, what the reducer says."""

    number: int
    event: Event
    written: list[dict[str, Any]]
    said: list[dict[str, Any]]


def replayed(settings: Settings, entries: list[Entry]) -> tuple[State, Difference | None]:
    """The state after every event, and the first at which the reducer says something else than was written.

    Raises:
        ValueError: an event cannot have come where it stands.
    """
    state = begin()
    for number, entry in enumerate(entries, start=1):
        try:
            state, actions = react(settings, state, entry.event)
        except ValueError as error:
            raise ValueError(f"event {number} of the journal cannot have come there: {error}") from error
        said = [_as_written(record_of(action)) for action in actions]
        if said != entry.actions:
            return state, Difference(number, entry.event, entry.actions, said)
    return state, None


def _as_written(record: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in record.items()}
