"""`python -m system.harbor.export RUN OUT`: the recorded trials of a run as ATIF documents, one file each."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from system.harbor.atif import atif
from system.record.metrics import read_jsonl


def export(run: Path, out: Path) -> tuple[int, int]:
    """Writes `<out>/<line>-<trial>.json` for each trial of a run; how many, and how many had no conversation.

    Raises:
        ValueError: the run has no trajectories.jsonl, or its lines lack what a trajectory needs.
    """
    source = run / "trajectories.jsonl"
    if not source.is_file():
        raise ValueError(f"run must hold trajectories.jsonl, got none in {run}")
    out.mkdir(parents=True, exist_ok=True)
    version = _version()
    written = without = 0
    for number, result in enumerate(read_jsonl(source), start=1):
        if not result.get("messages"):
            without += 1
            continue
        try:
            document = atif(result, version=version)
        except KeyError as error:
            raise ValueError(
                f"a recorded trial must have {error}, got line {number} of {source} without"
            ) from None
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(result.get("trial_id", "trial")))
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        (out / f"{number:06d}-{name}.json").write_text(text, encoding="utf-8")
        written += 1
    return written, without


def _version() -> str:
    try:
        return importlib.metadata.version("bartleby")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def main(arguments: Sequence[str]) -> int:
    """Exit status 0 if something was exported, 1 if nothing could be, 2 for bad input; one line each."""
    usage = "usage: python -m system.harbor.export RUN OUT"
    if list(arguments) in (["-h"], ["--help"]):
        print(usage)
        return 0
    if len(arguments) != 2:
        print(usage, file=sys.stderr)
        return 2
    try:
        written, without = export(Path(arguments[0]), Path(arguments[1]))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{written} trajectories in {arguments[1]}; {without} trials ended before they had one")
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
