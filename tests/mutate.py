"""Breaks core by machine, one file at a time, and asks whether the file's own laws notice.

    pip install -e '.[test,mutation]'
    python tests/mutate.py [part of a path ...] [--sample 50]

mutmut makes the mutants and runs, in a forked process with a time limit, those laws that call the broken function:
of `tests/property/test_<file>.py` and `tests/oracle/test_<file>_oracle.py` only. Same examples each time. The table
of `docs/mutants.md` is brought up to date; a survivor that has no reason there is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "mutants.md"
WANTED = 0.95

LAWS = {
    "balance": ("pack",),
    "bins": ("bins", "pack"),
    "cause": ("attribution",),
    "check": ("staleness", "budget", "outcome"),
    "footprint": ("footprint", "attribution"),
    "locate": ("attribution",),
    "rescore": ("rescore", "attribution"),
    "shapes": ("shapes", "segment", "mask", "loss"),
    "shard": ("shard", "logprob"),
}
"""Files whose laws stand under another name than their own, because they are part of another file's work.

Laws of all tensor functions are every tensor file's; laws of a folder stand under the folder's name.
"""

KILLED, TIMED_OUT, SURVIVED, UNTESTED = {1, 3}, {36, -24, 24, 152, 255}, {0}, {5, 33}
"""Exit codes of a mutant's run, as mutmut records them."""

SETTINGS = """
[tool:pytest]
pythonpath = . tests
addopts = --strict-markers --strict-config -p no:cacheprovider
filterwarnings = error

[mutmut]
source_paths = core
only_mutate = {file}
use_git_change_detection = 0
timeout_multiplier = 5
timeout_constant = 2
pytest_add_cli_args_test_selection =
    {laws}
pytest_add_cli_args =
    --hypothesis-profile=mutants
    -k
    not compile and not graph and not of_100 and not ten_thousand
"""
# The switch between mutants cannot be compiled; laws over a hundred steps, or ten thousand runs, take a minute each.


class Survivor(NamedTuple):
    """A mutant that no law noticed. Example: `Survivor("loss.py", "cispo", "a < b", "a <= b")`."""

    file: str
    function: str
    old: str
    new: str


class Result(NamedTuple):
    """What became of the mutants of one file."""

    file: str
    made: int
    killed: int
    timed_out: int
    survivors: tuple[Survivor, ...]
    broken: tuple[str, ...]

    @property
    def tried(self) -> int:
        return self.killed + self.timed_out + len(self.survivors) + len(self.broken)


def laws_of(path: Path) -> list[str]:
    """The tests that a file of core is held against."""
    name = path.stem if path.parent.name == "core" else path.parent.name
    tensors = "\nimport torch\n" in path.read_text(encoding="utf-8")
    tables = ["property/test_dtype_device.py", "property/test_arguments.py"] if tensors else []
    wanted = [
        f"{place}.py"
        for law in LAWS.get(name, (name,))
        for place in (f"property/test_{law}", f"oracle/test_{law}_oracle")
    ]
    own = [f"tests/{law}" for law in wanted if (ROOT / "tests" / law).exists()]
    return own + [f"tests/{table}" for table in tables if own]


def _python(folder: Path, code: str, *words: str) -> str:
    environment = {**os.environ, "CI": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{code} {words} ended with {done.returncode}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
        )
    return done.stdout


def _mutmut(folder: Path, *words: str) -> str:
    return _python(folder, "from mutmut.__main__ import cli; cli()", *words)


def _names(folder: Path, file: str) -> list[str]:
    """The mutants that mutmut will make of a file, before it tries one."""
    code = (
        "import sys; from mutmut.mutation.file_mutation import mutate_file_contents as mutants;"
        "print(*mutants(sys.argv[1], open(sys.argv[1]).read()).mutant_names, sep='\\n')"
    )
    module = file.removesuffix(".py").replace("/", ".")
    return [f"{module}.{name}" for name in _python(folder, code, file).split()]


def _change(folder: Path, file: str, mutant: str) -> Survivor:
    """The lines that a mutant takes away and puts in their place."""
    lines = _mutmut(folder, "show", mutant).splitlines()
    old, new = (
        " ".join(
            line[1:].strip() for line in lines if line.startswith(sign) and not line.startswith(3 * sign)
        )
        for sign in "-+"
    )
    function = re.sub(r"^x(_|ǁ)|__mutmut_\d+$", "", mutant.split(".")[-1]).replace("ǁ", ".")
    return Survivor(file, function, old, new)


def mutate(path: Path, *, sample: int | None, seed: int) -> Result | None:
    """Try the mutants of one file; None where it has none."""
    file, name, laws = str(path.relative_to(ROOT)), str(path.relative_to(ROOT / "core")), laws_of(path)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for part in ("core", "tests"):
            ignore = shutil.ignore_patterns("__pycache__", ".hypothesis")
            shutil.copytree(ROOT / part, folder / part, ignore=ignore)
        (folder / "setup.cfg").write_text(SETTINGS.format(file=file, laws="\n    ".join(laws)))
        names = _names(folder, file)
        if not names or not laws:
            return Result(name, len(names), 0, 0, (), ("has no laws of its own",)) if names else None
        chosen = names if sample is None else random.Random(seed).sample(names, min(sample, len(names)))
        _mutmut(folder, "run", "--max-children", "1", *(chosen if sample is not None else ()))
        codes = json.loads((folder / "mutants" / f"{file}.meta").read_text())["exit_code_by_key"]
        codes = {mutant: codes[mutant] for mutant in chosen}
        alive = [mutant for mutant, code in codes.items() if code in SURVIVED | UNTESTED]
        known = KILLED | TIMED_OUT | SURVIVED | UNTESTED
        return Result(
            file=name,
            made=len(names),
            killed=sum(code in KILLED for code in codes.values()),
            timed_out=sum(code in TIMED_OUT for code in codes.values()),
            survivors=tuple(_change(folder, name, mutant) for mutant in alive),
            broken=tuple(f"{mutant} {code}" for mutant, code in codes.items() if code not in known),
        )


def _item(survivor: Survivor) -> str:
    return f"- `{survivor.function}`: `{survivor.old}` → `{survivor.new}`"


def listed(page: str) -> set[str]:
    """The survivors that have a reason in the page: headings name the file, items the change, then the reason."""
    found, file = set(), ""
    for line in page.splitlines():
        if heading := re.match(r"### `(.+)`", line):
            file = heading[1]
        elif item := re.match(r"(- `.+?`: `.*?` → `.*?`)\. \S", line):
            found.add(f"{file} {item[1]}")
    return found


def _row(result: Result, path: Path) -> str:
    """One line of the table, with the last commit of the file or its laws."""
    log = ["git", "log", "-1", "--format=%as %h", "--", str(path), *laws_of(path)]
    commit = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    caught = result.killed + result.timed_out
    cells = (result.made, result.tried, result.killed, result.timed_out, len(result.survivors))
    share = f"{100 * caught / result.tried:.1f}"
    return f"| `{result.file}` | {' | '.join(map(str, cells))} | {share} | {commit} |"


def with_row(page: str, row: str) -> str:
    """The page with one row of its table set; rows stay sorted, the total is added up anew."""
    lines = page.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    end = next((i for i in range(head + 1, len(lines)) if not lines[i].startswith("|")), len(lines))
    rows = {line.split("|")[1]: line for line in lines[head + 1 : end] if not line.startswith("| all ")}
    rows[row.split("|")[1]] = row
    sums = [sum(int(line.split("|")[column]) for line in rows.values()) for column in range(2, 7)]
    caught = f"{100 * (sums[2] + sums[3]) / sums[1]:.1f}"
    total = f"| all | {' | '.join(map(str, sums))} | {caught} | |"
    return "\n".join([*lines[: head + 1], *sorted(rows.values()), total, *lines[end:]]) + "\n"


def main() -> int:
    """Print a line a file and every survivor without a reason; 1 if there is one, or too few are killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", help="of the paths below core; all files if left out")
    parser.add_argument(
        "--sample", type=int, help="at most so many mutants of each file; the table stays as it is"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args()
    os.nice(10)
    tried = caught = open_ends = 0
    for path in sorted((ROOT / "core").rglob("*.py")):
        name = str(path.relative_to(ROOT / "core"))
        if options.part and not any(part in name for part in options.part):
            continue
        result = mutate(path, sample=options.sample, seed=options.seed)
        if result is None:
            continue
        known = listed(PAGE.read_text(encoding="utf-8"))
        new = [item for item in map(_item, result.survivors) if f"{name} {item}" not in known]
        print(_row(result, path), flush=True)
        print(*new, *result.broken, sep="\n", flush=True)
        if options.sample is None and not result.broken:
            PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), _row(result, path)), encoding="utf-8")
        tried, caught = tried + result.tried, caught + result.killed + result.timed_out
        open_ends += len(new) + len(result.broken)
    print(f"{caught} of {tried} caught; {open_ends} that docs/mutants.md gives no reason for")
    return int(open_ends > 0 or caught < WANTED * tried)


if __name__ == "__main__":
    sys.exit(main())
