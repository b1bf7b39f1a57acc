"""The README's code blocks, as data and as commands that can be run in small.

`python tests/readme.py --out DIR` runs each experiment that README names, with options that make it short.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SMALL = ("--steps", "2", "--seeds", "1")


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Every command of the bash blocks, split into words; `a && b` is two."""
    lines = (line for block in blocks(text, "bash") for line in block.splitlines())
    parts = (part for line in lines if line.strip() for part in line.split("&&"))
    return [shlex.split(part, comments=True) for part in parts]


def experiments(text: str) -> list[list[str]]:
    """The commands that run a script of experiments/."""
    return [words for words in commands(text) if words[0] == "python" and words[1].startswith("experiments/")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="where the small runs write")
    options = parser.parse_args()
    for words in experiments((ROOT / "README.md").read_text(encoding="utf-8")):
        command = [sys.executable, *words[1:], *SMALL, "--out", options.out]
        print("+", shlex.join(command[1:]), flush=True)
        subprocess.run(command, cwd=ROOT, check=True)
