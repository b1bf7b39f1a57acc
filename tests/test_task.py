"""Task directories: what we write we read; what is broken or unknown is named in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from system.verify.rubric import Rubric
from system.world.archipelago import Archipelago, archipelago
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
        ("[metadata]", "[[steps]]\nname = 's'\n[metadata]", r"task must hold steps/s/instruction.md, got none"),
        ("[metadata]", "[[steps]]\nname = '../s'\n[metadata]", r"a step's name must be letters, .*, got '../s'"),
        ("[metadata]", "[[steps]]\nmin_rewards = 1\n[metadata]", r"steps must have only .*, got 'min_rewards'"),
        ("[metadata]", "[[steps]]\n[metadata]", r"a step's name must be letters, .*, got None"),
        ("[metadata]", "[[steps]]\nname = 's'\n[[steps]]\nname = 's'\n[metadata]", r"names of steps must differ"),
        ("[task]", "multi_step_reward_strategy = 'sum'\n[task]", r"multi_step_reward_strategy must be .*, got 'sum'"),
        ("[metadata]", "[metadata]\nbartleby_tools = 'all'", r"bartleby_tools must be one of brief, full, got 'all'"),
        ("[metadata]", "[metadata]\nevaluation_only = 1", r"evaluation_only must be one of False, True, got 1"),
        ("[metadata]", "[[metadata]]", r"metadata must be a table, got"),
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


STEPS = """
multi_step_reward_strategy = "final"
[[steps]]
name = "draft"
min_reward = 0.5
[steps.agent]
timeout_sec = 60
[[steps]]
name = "02-send"
min_reward = {style = 0.25}
[steps.verifier]
timeout_sec = 20
[task]"""


@pytest.fixture
def stepwise(foreign: Path) -> Path:
    """A task of two steps; only the first brings tests of its own."""
    (foreign / "task.toml").write_text(FOREIGN.replace("[task]", STEPS, 1))
    for name, text in (("draft", "Draft it."), ("02-send", "Send it.")):
        (foreign / "steps" / name).mkdir(parents=True)
        (foreign / "steps" / name / "instruction.md").write_text(text)
    (foreign / "steps" / "draft" / "tests").mkdir()
    (foreign / "steps" / "draft" / "tests" / "test.sh").write_text("#!/bin/sh\n")
    return foreign


def test_read_task_reads_steps_in_their_order(stepwise: Path):
    task = read_task(stepwise)
    first, second = task.steps
    assert (first.name, first.instruction, first.tests) == (
        "draft",
        "Draft it.",
        stepwise / "steps/draft/tests",
    )
    assert (first.agent_timeout_s, first.verifier_timeout_s, first.min_reward) == (
        60.0,
        600.0,
        {"reward": 0.5},
    )
    assert (second.name, second.instruction, second.tests) == ("02-send", "Send it.", None)
    assert (second.agent_timeout_s, second.verifier_timeout_s, second.min_reward) == (
        900.0,
        20.0,
        {"style": 0.25},
    )
    assert first.shared_tests == second.shared_tests == stepwise / "tests"
    assert task.reward_strategy == "final"


def test_a_task_of_several_steps_is_refused_where_one_is_wanted(stepwise: Path):
    for name in ("instruction", "agent_timeout_s", "verifier_timeout_s"):
        with pytest.raises(ValueError, match="task must have a single step here, got 2 in"):
            getattr(read_task(stepwise), name)


def test_steps_need_an_instruction_and_tests_each_and_no_folder_is_left_over(stepwise: Path):
    (stepwise / "steps" / "third").mkdir()
    (stepwise / "steps" / "third" / "instruction.md").write_text("More.")
    with pytest.raises(ValueError, match="steps must have only draft, 02-send, got steps/third in"):
        read_task(stepwise)
    shutil.rmtree(stepwise / "steps" / "third")
    before = read_task(stepwise).id
    (stepwise / "steps" / "draft" / "instruction.md").write_text("Draft it well.")
    assert read_task(stepwise).id != before
    (stepwise / "tests" / "test.sh").unlink()
    with pytest.raises(
        ValueError, match="task must hold steps/02-send/tests/test.sh or tests/test.sh, got neither"
    ):
        read_task(stepwise)
    (stepwise / "steps" / "02-send" / "instruction.md").unlink()
    (stepwise / "tests" / "test.sh").write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match="task must hold steps/02-send/instruction.md, got none"):
        read_task(stepwise)


@pytest.mark.parametrize("value", ["'much'", "true", "nan", "{a = 'b'}"])
def test_the_least_reward_of_a_step_is_a_number(value: str, stepwise: Path):
    text = (stepwise / "task.toml").read_text()
    (stepwise / "task.toml").write_text(text.replace("min_reward = 0.5", f"min_reward = {value}"))
    with pytest.raises(ValueError, match="steps/draft min_reward must be a number, got"):
        read_task(stepwise)


def test_a_folder_of_steps_without_their_names_is_refused(stepwise: Path):
    (stepwise / "task.toml").write_text(FOREIGN)
    with pytest.raises(
        ValueError, match=r"task must name its steps in \[\[steps\]\], got just a folder steps in"
    ):
        read_task(stepwise)


def test_tools_are_brief_for_our_tasks_and_full_for_others_unless_the_task_says_so(ours: Path, foreign: Path):
    assert (read_task(ours).toolset, read_task(foreign).toolset) == ("brief", "full")
    for folder, named in ((ours, "full"), (foreign, "brief")):
        text = (folder / "task.toml").read_text()
        (folder / "task.toml").write_text(
            text.replace("[metadata]", f'[metadata]\nbartleby_tools = "{named}"', 1)
        )
        assert read_task(folder).toolset == named


RUBRIC = {"rubric": [{"id": "r1", "criterion": "States a fee of 48"}], "scoring": "all", "batched": True}


def test_a_rubric_stands_in_the_metadata_of_our_tasks_and_of_others(ours: Path, foreign: Path):
    about = json.loads((ours / "bartleby.json").read_text())
    (ours / "bartleby.json").write_text(json.dumps({**about, **RUBRIC}))
    (foreign / "bartleby.json").write_text(json.dumps(RUBRIC))
    expected = Rubric(criteria=(("r1", "States a fee of 48"),), scoring="all", batched=True)
    assert read_task(ours).rubric == read_task(foreign).rubric == expected
    assert (read_task(ours).family, read_task(foreign).family) == (about["family"], "")
    assert (read_task(ours).toolset, read_task(foreign).toolset) == ("brief", "full")


@pytest.mark.parametrize(
    ("about", "line"),
    [
        ({"rubric": []}, "rubric must have a criterion, got none in"),
        ({"rubric": [{"id": "r1"}]}, "a criterion of a rubric must have an id and a text, got .* in"),
        ({**RUBRIC, "scoring": "mean"}, "scoring must be one of share, all, got 'mean' in"),
        ({"scoring": "all"}, "scoring must stand beside a rubric, got none in"),
        ({**RUBRIC, "level": 2}, "bartleby.json must have just .* a rubric, or both, got"),
        (["rubric"], "bartleby.json must be a table, got"),
    ],
)
def test_a_broken_rubric_is_named(about: object, line: str, foreign: Path):
    (foreign / "bartleby.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=line) as caught:
        read_task(foreign)
    assert "\n" not in str(caught.value)


ARCHIPELAGO = {
    "task_id": "t1",
    "task_slug": "fee-letter",
    "world_id": "w7",
    "ecr_image": "1.dkr.ecr.us-east-1.amazonaws.com/w7:v1",
    "required_env_keys": ["MAIL_KEY"],
    "needs_snapshot": False,
}


def test_an_archipelago_file_is_read_with_the_task(ours: Path, foreign: Path):
    (foreign / "archipelago.json").write_text(json.dumps({**ARCHIPELAGO, **RUBRIC}))
    found = read_task(foreign).archipelago
    assert found == Archipelago(
        task_id="t1", task_name="", task_slug="fee-letter", world_id="w7", world_short_name="",
        ecr_image="1.dkr.ecr.us-east-1.amazonaws.com/w7:v1", required_env_keys=("MAIL_KEY",), needs_snapshot=False,
    )  # fmt: skip
    assert read_task(foreign).rubric == Rubric(
        criteria=(("r1", "States a fee of 48"),), scoring="all", batched=True
    )
    assert read_task(ours).archipelago is None


def test_an_archipelago_file_that_does_not_say_needs_a_snapshot_and_no_key():
    table = {key: ARCHIPELAGO[key] for key in ("task_id", "task_slug", "world_id", "ecr_image")}
    assert archipelago(table).needs_snapshot
    assert archipelago(table).required_env_keys == ()
    assert archipelago({**table, "task_name": "Fee letter"}).task_name == "Fee letter"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"need_snapshot": True}, "archipelago.json must have only ecr_image, .*, got 'need_snapshot' in"),
        ({"task_id": None}, "task_id of archipelago.json must be a text, got None in"),
        ({"ecr_image": " "}, "ecr_image of archipelago.json must be a text, got ' ' in"),
        ({"task_name": 3}, "task_name of archipelago.json must be a text, got 3 in"),
        (
            {"required_env_keys": "KEY"},
            "required_env_keys of archipelago.json must be names of variables, got 'KEY'",
        ),
        ({"required_env_keys": ["A=1"]}, r"must be names of variables, got \['A=1'\] in"),
        ({"needs_snapshot": "no"}, "needs_snapshot of archipelago.json must be true or false, got 'no' in"),
    ],
)
def test_a_broken_archipelago_file_is_named(change: dict, line: str, foreign: Path):
    (foreign / "archipelago.json").write_text(json.dumps({**ARCHIPELAGO, **change}))
    with pytest.raises(ValueError, match=line) as caught:
        read_task(foreign)
    assert "\n" not in str(caught.value)
