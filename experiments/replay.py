"""Is a recorded run what the schedule would do? Its events go through the reducer again; every action must be the same.

An event that is gone, a line that was changed or a reducer that decides otherwise now is told with its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from command import command_line

from system.journal import read_journal, read_tags, replayed
from system.run import RunError


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run's folder, or its events.jsonl."""

    run: Annotated[Path, tyro.conf.Positional]
    """What to replay."""


def main(config: Config) -> None:
    """Replays every arm and seed; raises RunError at the first that differs."""
    path = config.run / "events.jsonl" if config.run.is_dir() else config.run
    if not path.is_file():
        raise ValueError(f"run must be a folder with events.jsonl, got {config.run}")
    if not (runs := read_tags(path)):
        raise ValueError(f"run must have a journal that holds a run, got {path} without one")
    for tags in runs:
        name = " ".join(f"{key} {value}" for key, value in tags.items()) or "run"
        try:
            settings, entries = read_journal(path, tags=tags)
            state, difference = replayed(settings, entries)
        except ValueError as error:
            raise RunError(f"{name}: {error}") from error
        if difference:
            raise RunError(
                f"{name}: event {difference.number}, {difference.event}: written {difference.written}, "
                f"but the reducer says {difference.said}"
            )
        end = "finished" if state.finished else "not finished"
        print(f"{name}: {len(entries)} events, every action the same; {state.trained} steps, {end}")


if __name__ == "__main__":
    command_line("replay.py", main, Config)
