"""APEX-Agents: its records of tasks and worlds, read for evaluation, never for training.

The licence of that data forbids to train or fine-tune on it. A task directory written from it bears the mark
`evaluation_only = true` in [metadata] of task.toml, and whoever trains refuses tasks with that mark.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .task import Task, link

if TYPE_CHECKING:
    from system.verify.rubric import Rubric

NOTICE = "APEX-Agents is for evaluation only: its licence forbids to train or fine-tune on it"
TASKS_FILE = "tasks_and_rubrics.json"
WORLDS_FILE = "world_descriptions.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApexTask:
    """A task's record; evaluation only: `ApexTask(task_id="t1", criteria=(("v1", "States a fee of 48"),), ...)`.

    criteria are identifier and text; the task is solved if every one is met. input_files names what is laid over the
    world for this task. A text that the record leaves out, or null, is "".
    """

    task_id: str
    task_name: str
    world_id: str
    domain: str
    prompt: str
    criteria: tuple[tuple[str, str], ...]
    input_files: tuple[str, ...]
    expected_output: str
    gold_response: str
    gold_response_type: str

    @property
    def rubric(self) -> Rubric:
        """The criteria as the judge takes them, one question each; all of them must be met."""
        from system.verify.rubric import Rubric

        return Rubric(criteria=self.criteria, scoring="all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApexWorld:
    """A world's record; evaluation only: `ApexWorld(world_id="w7", world_name="Harbour deal", apps=["mail"], ...)`.

    apps is left as the record has it.
    """

    world_id: str
    world_name: str
    world_description: str
    apps: Any


def read_apex_tasks(folder: Path) -> list[ApexTask]:
    """The records of tasks_and_rubrics.json in a folder, for evaluation only.

    Raises:
        ValueError: the file is missing or broken, or a record lacks what a task needs.
    """
    tasks = [_task(record, where) for record, where in _records(folder / TASKS_FILE)]
    _refuse_repeated([task.task_id for task in tasks], f"task_id in {folder / TASKS_FILE}")
    return tasks


def read_apex_worlds(folder: Path) -> list[ApexWorld]:
    """The records of world_descriptions.json in a folder, for evaluation only.

    Raises:
        ValueError: the file is missing or broken, or a record lacks what a world needs.
    """
    worlds = [
        ApexWorld(
            world_id=_text(record, "world_id", where, needed=True),
            world_name=_text(record, "world_name", where),
            world_description=_text(record, "world_description", where),
            apps=record.get("apps"),
        )
        for record, where in _records(folder / WORLDS_FILE)
    ]
    _refuse_repeated([world.world_id for world in worlds], f"world_id in {folder / WORLDS_FILE}")
    return worlds


def write_apex_task(task: ApexTask, folder: Path, *, world: Path | None = None) -> Path:
    """Writes a record as a task directory that is marked as for evaluation only; gold responses stay out of it.

    Args:
        folder: of the task, must be new.
        world: the task's files as the agent finds them; linked into the directory where the file system can.

    Raises:
        ValueError: the folder exists.
    """
    if folder.exists():
        raise ValueError(f"task must be new, got {folder}")
    rubric = [{"id": name, "criterion": text} for name, text in task.criteria]
    files = {
        "instruction.md": task.prompt + "\n",
        "task.toml": _TASK_TOML.format(notice=NOTICE, **_quoted(task)),
        "bartleby.json": json.dumps({"rubric": rubric, "scoring": "all"}, indent=1) + "\n",
        "environment/Dockerfile": f"# {NOTICE}.\nFROM python:3.11-slim\n",
        "tests/test.sh": _TEST_SH,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if world is not None:
        shutil.copytree(world, folder / "environment" / "world", copy_function=link)
    return folder


def refuse_to_train(folder: Path | None, tasks: Iterable[Task] = ()) -> None:
    """Raises a ValueError in one line if a folder of tasks, or one of its tasks, is for evaluation only."""
    if folder is not None:
        found = [
            place for place in (folder, *folder.absolute().parents[:2]) if (place / TASKS_FILE).is_file()
        ]
        if found:
            raise ValueError(f"tasks to train on must not be APEX-Agents, got {found[0]}: {NOTICE}")
    for task in tasks:
        if task.evaluation_only:
            raise ValueError(
                f"tasks to train on must not be for evaluation only, got {task.folder} with evaluation_only = true"
            )


def _records(file: Path) -> list[tuple[dict[str, Any], str]]:
    """The records of a file, each with words that say where it stands."""
    if not file.is_file():
        raise ValueError(f"{file.name} must lie in {file.parent}, got none")
    try:
        records = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, got {error}") from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{file} must be a list of records, got {str(records)[:80]!r}")
    return [(record, f"record {number} of {file.name}") for number, record in enumerate(records)]


def _task(record: dict[str, Any], where: str) -> ApexTask:
    return ApexTask(
        **{
            key: _text(record, key, where, needed=True) for key in ("task_id", "world_id", "domain", "prompt")
        },
        **{key: _text(record, key, where) for key in ("task_name", "expected_output", "gold_response_type")},
        gold_response=_text(record, "gold_response", where),
        criteria=_criteria(record.get("rubric"), where),
        input_files=_names(record.get("task_input_files"), where),
    )


def _text(record: dict[str, Any], key: str, where: str, *, needed: bool = False) -> str:
    value = record.get(key)
    if value is None and not needed:
        return ""
    if not isinstance(value, str) or (needed and not value.strip()):
        raise ValueError(f"{key} of {where} must be a text, got {value!r}")
    return value


def _criteria(rubric: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(rubric, list) or not rubric or not all(isinstance(entry, dict) for entry in rubric):
        raise ValueError(f"rubric of {where} must be a list of criteria, got {rubric!r}")
    found = tuple(
        (
            _text(e, "verifier_id", f"rubric of {where}", needed=True),
            _text(e, "criteria", f"rubric of {where}", needed=True),
        )
        for e in rubric
    )
    _refuse_repeated([name for name, _ in found], f"verifier_id in rubric of {where}")
    return found


def _names(value: Any, where: str) -> tuple[str, ...]:
    names = [] if value in (None, "") else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"task_input_files of {where} must be a name or a list of names, got {value!r}")
    return tuple(names)


def _refuse_repeated(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} must differ, got {name!r} twice")
        seen.add(name)


def _quoted(task: ApexTask) -> dict[str, str]:
    """Texts as TOML writes them: JSON's quotes, but for the one character that JSON leaves bare."""
    texts = {"task_id": task.task_id, "world_id": task.world_id, "domain": task.domain}
    return {key: json.dumps(text).replace("\x7f", "\\u007f") for key, text in texts.items()}


_TASK_TOML = """\
# {notice}.
schema_version = "1.4"

[metadata]
evaluation_only = true
task_id = {task_id}
world_id = {world_id}
domain = {domain}

[environment]
network_mode = "no-network"
workdir = "/world"
"""

_TEST_SH = """\
#!/bin/sh
echo "this task is graded by a judge, from the rubric in bartleby.json" >&2
exit 1
"""
"""It leaves no reward behind: a runner that knows only this script must fail, not find a zero."""
