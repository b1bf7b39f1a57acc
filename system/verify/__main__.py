"""Grades the world inside a Harbor environment and writes reward.json; run by the test.sh of our tasks.

The final answer is read from a file that the harness leaves; without one the answer is empty.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..sandbox.frozen import FrozenWorld
from .checks import grade, read_checks


def main(arguments: list[str] | None = None) -> None:
    """Reads checks.json and the pristine world from --tests, grades --world, writes --reward."""
    parser = argparse.ArgumentParser(prog="python -m system.verify", description=__doc__)
    parser.add_argument(
        "--tests", type=Path, required=True, help="folder with checks.json and world/, unchanged"
    )
    parser.add_argument("--world", type=Path, required=True, help="the world as the agent left it")
    parser.add_argument("--answer", type=Path, required=True, help="text file with the final answer")
    parser.add_argument("--reward", type=Path, required=True, help="where reward.json goes")
    given = parser.parse_args(arguments)
    answer = given.answer.read_text(errors="replace") if given.answer.is_file() else ""
    world = FrozenWorld(lower=given.tests / "world", root=given.world)
    verdict = grade(read_checks(given.tests / "checks.json"), world, answer)
    given.reward.parent.mkdir(parents=True, exist_ok=True)
    given.reward.write_text(json.dumps({"reward": verdict.reward, "passed": float(verdict.passed)}) + "\n")


if __name__ == "__main__":
    main()
