"""The event log of a run: every event the reducer saw and every action it answered, one JSON line each."""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from core.schedule import Event


def record_of(value: Any) -> dict[str, Any]:
    """A frozen record as a JSON object that names its type: {"type": "StartTrial", ...}."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {"type": type(value).__name__, **fields}


def read_events(path: Path, *, tags: dict[str, Any]) -> Iterator[tuple[Event, list[dict[str, Any]]]]:
    """Every event of one run in a journal, with the actions that followed it as they were written."""
    kinds = {kind.__name__: kind for kind in get_args(Event)}
    with path.open() as lines:
        for line in map(json.loads, lines):
            if all(line[name] == value for name, value in tags.items()):
                fields = dict(line["event"])
                yield kinds[fields.pop("type")](**fields), line["actions"]


class Journal:
    """Append-only and flushed line by line, so that a killed run leaves a readable prefix."""

    def __init__(self, path: Path, *, tags: dict[str, Any]) -> None:
        self.file = path.open("a", buffering=1)
        self.start = time.monotonic()
        self.tags = tags

    def write(self, event: Any, actions: tuple[Any, ...]) -> None:
        line = {
            **self.tags,
            "seconds": round(time.monotonic() - self.start, 3),
            "event": record_of(event),
            "actions": [record_of(action) for action in actions],
        }
        self.file.write(json.dumps(line, default=str) + "\n")

    def close(self) -> None:
        self.file.close()
