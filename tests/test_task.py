"""Task directories: what we write we read; what is broken or unknown is named in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from system.world.assignment import draw_assignment
from system.world.company import make_company
from system.world.generate import generate
from system.world.task import read_task, write_task

FOREIGN = """
schema_version = "1.4"
source = "somewhere"
artifacts = ["/logs/artifacts", {source = "/app", destination = "app"}]
[task]
name = "org/name"
authors = [{name = "A", email = "a@b.example"}]
[metadata]
anything = {goes = ["here"]}
[agent]
timeout_sec = 900
[verifier]
environment_mode = "separate"
[verifier.environment]
docker_image = "python:3.11"
[environment]
docker_image = "python:3.11"
cpus = 2
[environment.healthcheck]
command = "true"
[[environment.mcp_servers]]
name = "office"
transport = "stdio"
command = "serve"
"""


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("set"), split="train", worlds=1, tasks=1, seed=0)[0]


@pytest.fixture
def ours(generated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(generated, tmp_path / "task"))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    folder = tmp_path / "foreign"
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "tests" / "test.sh").write_text("#!/bin/sh\n")
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "task.toml").write_text(FOREIGN)
    return folder


def test_read_task_gives_back_what_was_written(tmp_path: Path):
    company = make_company(4, split="heldout")
    assignment = draw_assignment(company, level=2, index=0)
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "notes.txt").write_text("text")
    task = read_task(write_task(assignment, company, tasks=tmp_path / "tasks", world=tmp_path / "world"))
    assert task.folder == tmp_path / "tasks" / task.id
    assert task.world == task.folder / "environment" / "world"
    assert (task.instruction, task.family, task.level) == (assignment.instruction, assignment.family, 2)
    assert (task.split, task.domain, task.seed) == ("heldout", company.domain, 4)
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (120.0, 30.0)
    with pytest.raises(ValueError, match="task must be new, got"):
        write_task(assignment, company, tasks=tmp_path / "tasks", world=tmp_path / "world")


def test_expected_values_lie_in_tests_only(generated: Path):
    checks = (generated / "tests" / "checks.json").read_text()
    assert '"expected"' in checks
    assert not (generated / "environment" / "world" / "checks.json").exists()
    assert "expected" not in repr(read_task(generated))


def test_id_stays_when_the_folder_moves_and_changes_with_any_word(generated: Path, ours: Path):
    assert read_task(ours).id == read_task(generated).id == generated.name
    (ours / ".DS_Store").write_text("x")
    assert read_task(ours).id == generated.name
    (ours / "bartleby.json").rename(ours / "bartleby.txt")
    assert read_task(ours).id != generated.name
    (ours / "bartleby.txt").rename(ours / "bartleby.json")
    (ours / "instruction.md").write_text("Do something else.\n")
    assert read_task(ours).id != generated.name


def test_read_task_reads_a_foreign_harbor_task(foreign: Path):
    task = read_task(foreign)
    assert (task.instruction, task.world, task.family, task.level) == ("Do it.", None, "", 0)
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (900.0, 600.0)


@pytest.mark.parametrize(
    ("gone", "line"),
    [
        ("instruction.md", r"task must hold instruction.md, got none in .*"),
        ("task.toml", r"task must hold task.toml, got none in .*"),
        ("tests/test.sh", r"task must hold tests/test.sh, got none in .*"),
        (
            "environment/Dockerfile",
            r"task must hold environment/Dockerfile or name a docker_image, got neither",
        ),
    ],
)
def test_read_task_names_a_missing_part(gone: str, line: str, ours: Path):
    (ours / gone).unlink()
    with pytest.raises(ValueError, match=line) as caught:
        read_task(ours)
    assert "\n" not in str(caught.value)


def test_read_task_refuses_a_path_that_is_no_directory(tmp_path: Path):
    with pytest.raises(ValueError, match="task must be a directory, got"):
        read_task(tmp_path / "nowhere")


def test_read_task_refuses_an_empty_instruction(ours: Path):
    (ours / "instruction.md").write_text(" \n")
    with pytest.raises(ValueError, match="instruction.md must not be empty"):
        read_task(ours)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("[agent]\ntimeout_sec", "[agent]\ntimeout_secs", r"agent must have only .*, got 'timeout_secs'"),
        ("[agent]", "[agents]", r"task.toml must have only .*, got 'agents'"),
        ("cpus", "cpu", r"environment must have only .*, got 'cpu'"),
        ('command = "true"', 'commands = "true"', r"environment.healthcheck must .*, got 'commands'"),
        ('transport = "stdio"', 'transports = "stdio"', r"environment.mcp_servers must .*, got 'transports'"),
        ('destination = "app"', 'dest = "app"', r"artifacts must have only .*, got 'dest'"),
        ('"1.4"', '"1.3"', r"schema_version must be '1.4', got '1.3'"),
        ('schema_version = "1.4"', "", r"schema_version must be '1.4', got None"),
        ("timeout_sec = 900", "timeout_sec = 0", r"agent.timeout_sec must be positive, got 0"),
        ("timeout_sec = 900", "timeout_sec = nan", r"agent.timeout_sec must be positive, got nan"),
        ("timeout_sec = 900", 'timeout_sec = "900"', r"agent.timeout_sec must be positive, got '900'"),
        ("[agent]\ntimeout_sec = 900", "", ""),
        ("[agent]", "[agent", r"task.toml must be TOML, got"),
        ("[metadata]", "[[steps]]\nname = 's'\n[metadata]", r"task must have a single step, got"),
        ("[agent]\ntimeout_sec = 900", "[[agent]]", r"agent must be a table, got \[{}\]"),
    ],
)  # fmt: skip
def test_read_task_names_what_is_wrong_in_task_toml(old: str, new: str, line: str, foreign: Path):
    text = FOREIGN.replace(old, new, 1)
    assert text != FOREIGN
    (foreign / "task.toml").write_text(text)
    if not line:
        assert read_task(foreign).agent_timeout_s == 3600.0
        return
    with pytest.raises(ValueError, match=line) as caught:
        read_task(foreign)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"), [("{", "bartleby.json must be JSON"), ("{}", "bartleby.json must have just")]
)
def test_read_task_refuses_a_broken_metadata_file(text: str, line: str, ours: Path):
    (ours / "bartleby.json").write_text(text)
    with pytest.raises(ValueError, match=line):
        read_task(ours)
