"""The event log of a run: every event the reducer saw and every action it answered, one JSON line each."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any


def record_of(value: Any) -> dict[str, Any]:
    """A frozen record as a JSON object that names its type: {"type": "StartTrial", ...}."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {"type": type(value).__name__, **fields}


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
