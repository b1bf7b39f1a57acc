"""The event log of a run: every event the reducer saw and every action it answered, one JSON line each.

The first line of a run holds its settings, so that `core.schedule.replay` can drive the run again.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from core.schedule import Event, Settings


def record_of(value: Any) -> dict[str, Any]:
    """A frozen record as a JSON object that names its type: {"type": "StartTrial", ...}."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {"type": type(value).__name__, **fields}


class Journal:
    """Append-only and flushed line by line, so that a killed run leaves a readable prefix.

    Args:
        path: of the file; several runs may share it.
        tags: what tells this run's lines from the others'.
        settings: of the schedule.
    """

    def __init__(self, path: Path, *, tags: dict[str, Any], settings: Settings) -> None:
        self.file = path.open("a", buffering=1)
        self.start = time.monotonic()
        self.tags = tags
        self._line({"settings": dataclasses.asdict(settings)})

    def write(self, event: Event, actions: tuple[Any, ...]) -> None:
        """One event and what followed from it."""
        told = [record_of(action) for action in actions]
        self._line({"event": record_of(event), "actions": told})

    def close(self) -> None:
        """Closes the file."""
        self.file.close()

    def _line(self, content: dict[str, Any]) -> None:
        line = {**self.tags, "seconds": round(time.monotonic() - self.start, 3), **content}
        self.file.write(json.dumps(line) + "\n")


def read_journal(
    path: Path, *, tags: dict[str, Any]
) -> tuple[Settings, list[tuple[Event, list[dict[str, Any]]]]]:
    """Settings of one run, and every event with the actions as they were written.

    Raises:
        ValueError: the file has no run with these tags.
    """
    kinds = {kind.__name__: kind for kind in get_args(Event)}
    settings: Settings | None = None
    events: list[tuple[Event, list[dict[str, Any]]]] = []
    for line in _lines(path, tags):
        if "settings" in line:
            fields: dict[str, Any] = line["settings"]
            fields["evaluate_at"] = tuple(fields["evaluate_at"])
            settings = Settings(**fields)
        else:
            fields = dict(line["event"])
            events.append((kinds[fields.pop("type")](**fields), line["actions"]))
    if settings is None:
        raise ValueError(f"journal must hold the settings of {tags}, got {path} without them")
    return settings, events


def _lines(path: Path, tags: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in map(json.loads, file):
            if all(line[name] == value for name, value in tags.items()):
                yield line
