"""Task directories: writes ours, reads any Harbor task directory of schema 1.4 without importing Harbor.

    instruction.md   task.toml   environment/Dockerfile   environment/world/   tests/test.sh
    tests/checks.json   tests/world/   bartleby.json

environment/world, which the agent gets, and tests/world, which the grader compares with, are hard links to
one written world. A task of several steps has steps/<name>/instruction.md and steps/<name>/tests/ instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .archipelago import Archipelago, archipelago
from .assignment import Assignment
from .company import Company
from .settings import read_settings, seconds

if TYPE_CHECKING:
    from system.verify.rubric import Rubric

TOOLSETS = ("brief", "full")
"""The sets of office tools that a task may name as [metadata] bartleby_tools."""

REWARD_STRATEGIES = ("mean", "final")
"""What a task of several steps earns: the mean of its steps' rewards, or the last one's."""

_ID_LENGTH = 12
_AGENT_S = 3600.0
_VERIFIER_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One instruction and its tests: `Step(name="draft", instruction="Draft the letter.", ...)`.

    tests is the step's own folder of tests; shared_tests, of the whole task, lies below it where a file has the same
    name (None if there is none). min_reward maps a reward's name to the least value with which the steps go on.
    """

    name: str
    instruction: str
    tests: Path | None
    shared_tests: Path | None
    agent_timeout_s: float
    verifier_timeout_s: float
    min_reward: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task directory as read: `Task(id="3fa9c01b2d4e", steps=(Step(...),), family="find", ...)`.

    id is a hash of the directory's own files, worlds left out. world is the pristine world's folder, None if
    the directory brings none. family, split, domain are "" and level, seed are 0 if bartleby.json does not give
    them. toolset is what [metadata] bartleby_tools says; without it, "brief" for tasks that we made and "full" for
    others. rubric is the task's own, for a judge. archipelago is its archipelago.json, None if it brings none.
    evaluation_only is True where the licence forbids to train on the task. The expected
    values are not here: they stay in tests/.
    """

    id: str
    folder: Path
    steps: tuple[Step, ...]
    reward_strategy: str
    world: Path | None
    toolset: str
    rubric: Rubric | None
    archipelago: Archipelago | None
    evaluation_only: bool
    family: str
    level: int
    split: str
    domain: str
    seed: int

    @property
    def only_step(self) -> Step:
        """The step of a task that has one; a ValueError in one line for a task of several."""
        if len(self.steps) != 1:
            raise ValueError(f"task must have a single step here, got {len(self.steps)} in {self.folder}")
        return self.steps[0]

    @property
    def instruction(self) -> str:
        """The instruction of a task of one step."""
        return self.only_step.instruction

    @property
    def agent_timeout_s(self) -> float:
        """How long the agent may work on a task of one step."""
        return self.only_step.agent_timeout_s

    @property
    def verifier_timeout_s(self) -> float:
        """How long the grading of a task of one step may take."""
        return self.only_step.verifier_timeout_s


def write_task(
    assignment: Assignment, company: Company, *, tasks: Path, world: Path, distractors: int = 0
) -> Path:
    """Writes one assignment as a task directory `tasks/<id>` and returns that folder.

    Args:
        world: the folder in which the company's world is written.
        distractors: how many files the world holds beside the company's own; noted in [metadata] if there are any.

    Raises:
        ValueError: the directory exists.
    """
    files = {
        "instruction.md": assignment.instruction + "\n",
        "task.toml": _TASK_TOML.format(
            name=f"bartleby/{assignment.family}",
            level=assignment.level,
            more=f"\ndistractors = {distractors}" if distractors else "",
            **_about(company),
        ),
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST_SH,
        "tests/checks.json": json.dumps(assignment.checks, indent=1) + "\n",
        "bartleby.json": json.dumps(
            {"world": company.id, "family": assignment.family, "level": assignment.level, **_about(company)},
            indent=1,
        )
        + "\n",
    }
    folder = tasks / _content_id({name: text.encode() for name, text in files.items()})
    if folder.exists():
        raise ValueError(f"task must be new, got {folder}")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "tests" / "test.sh").chmod(0o755)
    for part in ("environment", "tests"):
        shutil.copytree(world, folder / part / "world", copy_function=link)
    return folder


def read_task(folder: Path) -> Task:
    """Reads a Harbor task directory.

    Raises:
        ValueError: a part is missing, a table or key of task.toml is unknown, or a value is out of range.
    """
    files = _own_files(folder)
    if "task.toml" not in files:
        raise ValueError(f"task must hold task.toml, got none in {folder}")
    settings = read_settings(folder)
    steps = _several_steps(folder, settings, files) or (_single_step(folder, settings, files),)
    about = _read_about(folder)
    metadata = settings.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata must be a table, got {metadata!r} in {folder}")
    ours = "full" if about["family"] == "" else "brief"
    world = folder / "environment" / "world"
    return Task(
        id=_content_id(files),
        folder=folder,
        steps=steps,
        reward_strategy=_one_of(
            REWARD_STRATEGIES, settings, "multi_step_reward_strategy", REWARD_STRATEGIES[0], folder
        ),
        world=world if world.is_dir() else None,
        toolset=_one_of(TOOLSETS, metadata, "bartleby_tools", ours, folder),
        rubric=_rubric(folder),
        archipelago=_archipelago(folder),
        evaluation_only=_one_of((False, True), metadata, "evaluation_only", False, folder),
        **about,
    )


class Part(NamedTuple):
    """What a trial knows of a step beforehand: `Part("draft", "Draft ...", 600.0, {"reward": 1.0})`; see `Step`."""

    name: str
    instruction: str
    agent_timeout_s: float
    min_reward: Mapping[str, float]


class Opening(NamedTuple):
    """What a trial knows of a task before its sandbox stands: `Opening(folder, (Part(...),), "mean", ...)`.

    The one part of a task that has no steps has no name.
    """

    folder: Path
    parts: tuple[Part, ...]
    reward_strategy: str
    world: Path | None
    toolset: str


def read_opening(folder: Path) -> Opening:
    """The beginning of a task; a child reads the task, so that nothing else of it is in this process.

    A sandbox's server is forked from this process: tests that had been read would lie in its memory.

    Raises:
        ValueError: as `read_task`, or a step needs what no trial of ours gives.
    """
    from system.verify.bounded import OutOfBounds, bounded

    def read() -> dict[str, Any]:
        try:
            task = read_task(folder)
            _refuse_what_no_trial_gives(task)
            parts = [[s.name, s.instruction, s.agent_timeout_s, dict(s.min_reward)] for s in task.steps]
            told = {"parts": parts, "strategy": task.reward_strategy}
            return {**told, "world": task.world is not None, "toolset": task.toolset}
        except (ValueError, OSError) as error:
            return {"fault": str(error)}

    try:
        told = bounded(read, seconds=60.0, memory_bytes=1 << 30, result_bytes=1 << 24)
    except OutOfBounds as reason:
        raise ValueError(f"task must be readable, got {folder}: {reason}") from None
    if "fault" in told:
        raise ValueError(told["fault"])
    world = folder / "environment" / "world" if told["world"] else None
    parts = tuple(Part(*part) for part in told["parts"])
    return Opening(folder, parts, told["strategy"], world, told["toolset"])


def _refuse_what_no_trial_gives(task: Task) -> None:
    """Steps are run and graded; what Harbor does besides, before a step, is not, and nobody judges a part."""
    named = [step.name for step in task.steps if step.name]
    tables = read_settings(task.folder).get("steps", [])
    needed = [
        f"steps/{name}/workdir" for name in named if (task.folder / "steps" / name / "workdir").is_dir()
    ]
    needed += [f"a healthcheck of {table['name']}" for table in tables if "healthcheck" in table]
    needed += ["a rubric"] if named and task.rubric is not None else []
    if needed:
        raise ValueError(f"a task of several steps must do without {needed[0]} in a trial, got {task.folder}")


def _about(company: Company) -> dict[str, Any]:
    return {"domain": company.domain, "split": company.split, "seed": company.seed}


def link(source: str, target: str) -> None:
    """Gives a file a second name, or copies it where that cannot be."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _own_files(folder: Path) -> dict[str, bytes]:
    """Relative name → content of all files but the worlds, hidden files and Python caches."""
    if not folder.is_dir():
        raise ValueError(f"task must be a directory, got {folder}")
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in ("world", "__pycache__") and not f.startswith(".")]
        for name in names:
            file = Path(place) / name
            if not name.startswith(".") and file.is_file():
                found[file.relative_to(folder).as_posix()] = file.read_bytes()
    return found


def _content_id(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return digest.hexdigest()[:_ID_LENGTH]


def _single_step(folder: Path, settings: dict[str, Any], files: dict[str, bytes]) -> Step:
    if any(name.startswith("steps/") for name in files):
        raise ValueError(f"task must name its steps in [[steps]], got just a folder steps in {folder}")
    if "tests/test.sh" not in files:
        raise ValueError(f"task must hold tests/test.sh, got none in {folder}")
    return Step(
        name="",
        instruction=_instruction(folder, files, "instruction.md"),
        tests=folder / "tests",
        shared_tests=None,
        agent_timeout_s=seconds(settings.get("agent", {}), "agent", _AGENT_S, folder),
        verifier_timeout_s=seconds(settings.get("verifier", {}), "verifier", _VERIFIER_S, folder),
        min_reward={},
    )


def _several_steps(folder: Path, settings: dict[str, Any], files: dict[str, bytes]) -> tuple[Step, ...]:
    """The steps in their order, none for a task without [[steps]]."""
    tables = settings.get("steps", [])
    names = [table.get("name") for table in tables]
    if wrong := [name for name in names if not isinstance(name, str) or not _STEP_NAME.fullmatch(name)]:
        raise ValueError(
            f"a step's name must be letters, digits, '.', '_' and '-', got {wrong[0]!r} in {folder}"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"names of steps must differ, got {names} in {folder}")
    found = sorted({name.split("/")[1] for name in files if name.startswith("steps/")})
    if names and (more := [name for name in found if name not in names]):
        raise ValueError(f"steps must have only {', '.join(names)}, got steps/{more[0]} in {folder}")
    agent_s = seconds(settings.get("agent", {}), "agent", _AGENT_S, folder)
    return tuple(_step(folder, table, files, agent_s) for table in tables)


def _step(folder: Path, table: dict[str, Any], files: dict[str, bytes], agent_s: float) -> Step:
    name, here = table["name"], f"steps/{table['name']}"
    if f"{here}/tests/test.sh" not in files and "tests/test.sh" not in files:
        raise ValueError(f"task must hold {here}/tests/test.sh or tests/test.sh, got neither in {folder}")
    own, shared = folder / here / "tests", folder / "tests"
    return Step(
        name=name,
        instruction=_instruction(folder, files, f"{here}/instruction.md"),
        tests=own if own.is_dir() else None,
        shared_tests=shared if shared.is_dir() else None,
        agent_timeout_s=seconds(table.get("agent", {}), f"{here} agent", agent_s, folder),
        verifier_timeout_s=seconds(table.get("verifier", {}), f"{here} verifier", _VERIFIER_S, folder),
        min_reward=_least(table.get("min_reward", {}), here, folder),
    )


def _least(value: Any, where: str, folder: Path) -> dict[str, float]:
    """A number is the least value of the reward called `reward`."""
    least = value if isinstance(value, dict) else {"reward": value}
    for number in least.values():
        if isinstance(number, bool) or not isinstance(number, int | float) or number != number:
            raise ValueError(f"{where} min_reward must be a number, got {number!r} in {folder}")
    return {str(name): float(number) for name, number in least.items()}


def _instruction(folder: Path, files: dict[str, bytes], name: str) -> str:
    if name not in files:
        raise ValueError(f"task must hold {name}, got none in {folder}")
    try:
        text = files[name].decode().strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be UTF-8, got {folder}: {error}") from None
    if not text:
        raise ValueError(f"{name} must not be empty, got an empty one in {folder}")
    return text


def _one_of(allowed: tuple[Any, ...], table: dict[str, Any], key: str, default: Any, folder: Path) -> Any:
    value = table.get(key, default)
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise ValueError(f"{key} must be one of {', '.join(map(str, allowed))}, got {value!r} in {folder}")
    return value


def _rubric(folder: Path) -> Rubric | None:
    if not any("rubric" in (_json(folder, name) or {}) for name in ("bartleby.json", "archipelago.json")):
        return None
    from system.verify.rubric import (
        read_rubric,
    )  # brings openpyxl, which a reader of other tasks need not load

    try:
        rubric = read_rubric(folder)
    except ValueError as error:
        raise ValueError(f"{' '.join(str(error).split())} in {folder}") from None
    if rubric is None:
        raise ValueError(f"rubric must have a criterion, got none in {folder}")
    return rubric


def _archipelago(folder: Path) -> Archipelago | None:
    table = _json(folder, "archipelago.json")
    try:
        return None if table is None else archipelago(table)
    except ValueError as error:
        raise ValueError(f"{error} in {folder}") from None


def _json(folder: Path, name: str) -> dict[str, Any] | None:
    """The table in a file of JSON, None if there is no such file."""
    if not (folder / name).is_file():
        return None
    try:
        table = json.loads((folder / name).read_text())
    except ValueError as error:
        raise ValueError(f"{name} must be JSON, got {folder}: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{name} must be a table, got {table!r} in {folder}")
    return table


def _read_about(folder: Path) -> dict[str, Any]:
    """What bartleby.json says of a task that we made; for others it may hold a rubric alone."""
    empty = {"family": "", "level": 0, "split": "", "domain": "", "seed": 0}
    about = _json(folder, "bartleby.json")
    if about is None:
        return empty
    wanted = {"world", *empty}
    given, rubric = set(about) - _OF_A_RUBRIC, set(about) & _OF_A_RUBRIC
    if given != wanted and (given or not rubric):
        must = ", ".join(sorted(wanted))
        raise ValueError(
            f"bartleby.json must have just {must}, a rubric, or both, got {sorted(about)} in {folder}"
        )
    if rubric and "rubric" not in rubric:
        raise ValueError(f"{min(rubric)} must stand beside a rubric, got none in {folder}")
    return {key: about.get(key, value) for key, value in empty.items()}


_STEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OF_A_RUBRIC = {"rubric", "scoring", "batched"}

_TASK_TOML = """\
schema_version = "1.4"

[task]
name = "{name}"

[metadata]
domain = "{domain}"
split = "{split}"
level = {level}
seed = {seed}{more}

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
network_mode = "no-network"
workdir = "/world"
"""

_DOCKERFILE = """\
# The world alone. tests/test.sh runs `python3 -P -m system.verify`: add Bartleby to the image for that.
FROM python:3.11-slim
RUN pip install --no-cache-dir openpyxl
COPY world /world
WORKDIR /world
"""

_TEST_SH = """\
#!/bin/sh
# Compares /world with its pristine copy in /tests/world; the final answer is in /logs/agent/answer.txt.
# -P: no module is looked for in /world, where an agent could have put one of that name.
exec python3 -P -m system.verify --tests /tests --world /world \\
  --answer /logs/agent/answer.txt --reward /logs/verifier/reward.json
"""
