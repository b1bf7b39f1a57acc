"""APEX-Agents' records are read, judged by their criteria, and never trained on. The records here are made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from system.world.apex import (
    NOTICE,
    ApexTask,
    ApexWorld,
    read_apex_tasks,
    read_apex_worlds,
    refuse_to_train,
    write_apex_task,
)
from system.world.task import read_task

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))
# A script finds its neighbours by their bare names; from here they are only found after this.
import ablation

RECORD = {
    "task_id": "t1",
    "task_name": "Fee letter",
    "world_id": "w7",
    "domain": 'Law "and" \x7f order',
    "prompt": "Draft the letter on the fee.",
    "rubric": [
        {"verifier_id": "v1", "criteria": "States a fee of 48"},
        {"verifier_id": "v2", "criteria": "Names the client"},
    ],
    "task_input_files": "task_files/t1",
    "expected_output": None,
    "gold_response": "The fee is 48.",
    "gold_response_type": "text",
    "hours": 2,
}
WORLD = {"world_id": "w7", "world_name": "Harbour deal", "world_description": "A deal.", "apps": ["mail"]}


def write(folder: Path, name: str, content: object) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def test_records_become_tasks_and_worlds(tmp_path: Path):
    write(tmp_path, "tasks_and_rubrics.json", [RECORD, {**RECORD, "task_id": "t2", "task_input_files": None}])
    write(tmp_path, "world_descriptions.json", [WORLD])
    first, second = read_apex_tasks(tmp_path)
    assert first == ApexTask(
        task_id="t1", task_name="Fee letter", world_id="w7", domain=RECORD["domain"], prompt=RECORD["prompt"],
        criteria=(("v1", "States a fee of 48"), ("v2", "Names the client")), input_files=("task_files/t1",),
        expected_output="", gold_response="The fee is 48.", gold_response_type="text",
    )  # fmt: skip
    assert (second.task_id, second.input_files) == ("t2", ())
    assert (first.rubric.criteria, first.rubric.scoring) == (first.criteria, "all")
    assert read_apex_worlds(tmp_path) == [
        ApexWorld(world_id="w7", world_name="Harbour deal", world_description="A deal.", apps=["mail"])
    ]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({}, "must be a list of records, got"),
        ([3], "must be a list of records, got"),
        ([{**RECORD, "prompt": " "}], "prompt of record 0 of tasks_and_rubrics.json must be a text, got ' '"),
        (
            [RECORD, {**RECORD, "task_id": 7}],
            "task_id of record 1 of tasks_and_rubrics.json must be a text, got 7",
        ),
        ([RECORD, RECORD], "task_id in .* must differ, got 't1' twice"),
        ([{**RECORD, "rubric": []}], r"rubric of record 0 of .* must be a list of criteria, got \[\]"),
        (
            [{**RECORD, "rubric": [{"verifier_id": "v1"}]}],
            "criteria of rubric of record 0 of .* must be a text, got None",
        ),
        (
            [{**RECORD, "rubric": RECORD["rubric"][:1] * 2}],
            "verifier_id in rubric of record 0 .* got 'v1' twice",
        ),
        (
            [{**RECORD, "task_input_files": 3}],
            "task_input_files of record 0 .* must be a name or a list of names, got 3",
        ),
    ],
)
def test_a_broken_record_is_named(content: object, line: str, tmp_path: Path):
    with pytest.raises(ValueError, match=line) as caught:
        read_apex_tasks(write(tmp_path, "tasks_and_rubrics.json", content))
    assert "\n" not in str(caught.value)


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="world_descriptions.json must lie in .*, got none"):
        read_apex_worlds(tmp_path)
    (tmp_path / "world_descriptions.json").write_text("{")
    with pytest.raises(ValueError, match="world_descriptions.json must be JSON, got"):
        read_apex_worlds(tmp_path)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder of tasks with one that is written from a record."""
    (task,) = read_apex_tasks(write(tmp_path, "tasks_and_rubrics.json", [RECORD]))
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "notes.txt").write_text("text")
    write_apex_task(task, tmp_path / "a" / "b" / "tasks" / "t1", world=tmp_path / "world")
    return tmp_path / "a" / "b" / "tasks"


def test_a_written_task_bears_the_mark_the_notice_and_the_rubric_but_no_gold(written: Path):
    task = read_task(written / "t1")
    assert task.evaluation_only and task.instruction == RECORD["prompt"] and task.toolset == "full"
    assert task.rubric is not None and task.rubric.scoring == "all" and len(task.rubric.criteria) == 2
    assert task.world is not None and (task.world / "notes.txt").read_text() == "text"
    assert NOTICE in (written / "t1" / "task.toml").read_text()
    assert not any(b"The fee is 48." in file.read_bytes() for file in written.rglob("*") if file.is_file())
    with pytest.raises(ValueError, match="task must be new, got"):
        write_apex_task(read_apex_tasks(written.parents[2])[0], written / "t1")


def test_tasks_for_evaluation_only_are_never_trained_on(written: Path, tmp_path: Path):
    with pytest.raises(
        ValueError, match="tasks to train on must not be for evaluation only, got .*t1 with"
    ) as caught:
        refuse_to_train(written, [read_task(written / "t1")])
    assert "\n" not in str(caught.value)
    for folder in (tmp_path, tmp_path / "task_files", tmp_path / "task_files" / "t1"):
        with pytest.raises(
            ValueError, match="must not be APEX-Agents, got .*: APEX-Agents is for evaluation only"
        ):
            refuse_to_train(folder)
    refuse_to_train(None)


def test_a_training_script_refuses_the_mark(written: Path, tmp_path: Path):
    for folder, line in (
        (written, "must not be for evaluation only, got"),
        (tmp_path, "must not be APEX-Agents"),
    ):
        with pytest.raises(ValueError, match=line):
            ablation.run(ablation.Config(train=folder, sandbox="process", out=tmp_path / "run"), {}, "x.py")
        assert not (tmp_path / "run").exists()
