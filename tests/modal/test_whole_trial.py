"""A whole trial through Modal's sandbox: start, agent, frozen world, verdict, nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import has, needs_modal
from scripted_engine import Script, ScriptedEngine, plays

from system.fleet.local import WARM, LocalFleet
from system.harness.chat import Chat, ToolCall, call_text
from system.world.assignment import draw_assignment
from system.world.company import make_company
from system.world.expert_shell import by_shell
from system.world.office import write_world
from system.world.task import write_task

pytestmark = needs_modal
if has("modal"):
    from fake_modal import FakeModal

CLERK = Path(__file__).resolve().parents[2] / "policies" / "clerk"
CHAT = Chat(CLERK)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task whose answer is a change of the world."""
    folder = tmp_path_factory.mktemp("tasks")
    company = make_company(3, split="train")
    world = write_world(company, folder / "world")
    drawn = (draw_assignment(company, level=2, index=index) for index in range(20))
    assignment = next(one for one in drawn if one.family == "edit")
    return write_task(assignment, company, tasks=folder / "tasks", world=world)


@pytest.fixture(scope="module")
def run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs one trial, and sees that nothing of it is left here or at the service."""
    folder = tmp_path_factory.mktemp("run")
    scratch, warm = folder / "scratch", (*WARM, f"system.trial:load_chat={CLERK}")
    with (
        FakeModal(folder) as modal,
        ScriptedEngine(folder / "s", CHAT) as engine,
        LocalFleet(scratch, warm=warm) as fleet,
    ):

        def trial(trial_id: str, script: Script, **spec: Any) -> dict[str, Any]:
            engine.scripts[trial_id] = script
            limits = {
                "context": 20_000,
                "turn_tokens": 3000,
                "turns": 20,
                "repairs": 2,
                "result_characters": 4000,
                "nudge_ratio": 0.0,
                "temperature": 1.0,
            }
            plain = {
                "trial_id": trial_id,
                "task": str(task),
                "policy": str(CLERK),
                "engine_address": f"{folder}/s",
                "sandbox": "modal",
                "modal": {"image": "python:3.11", "config": str(modal.config)},
                "sandbox_limits": {"start_s": 90.0, "stop_s": 60.0},
                "scratch": str(scratch),
                "seed": 1,
                "start_s": 100.0,
                "deadline_s": 120.0,
                "tool_timeout_s": 60.0,
                "verify_s": 60.0,
                "stop_s": 70.0,
                "limits": limits,
            }
            fleet.start(plain | spec)
            (result,) = fleet.poll(300)
            assert os.listdir(scratch) == ["fleet.log"] and modal.running() == []
            return result

        yield trial


@pytest.mark.parametrize("harness", ["office", "code"])
def test_the_expert_in_the_policys_place_solves_a_task_in_a_container(
    run: Any, task: Path, harness: str
) -> None:
    instruction = (task / "instruction.md").read_text().strip()
    script = plays(instruction) if harness == "office" else plays(instruction, by_shell)
    result = run(f"modal {harness}", script, harness=harness)
    assert result["outcome"]["kind"] == "solved" and result["reward"] == 1.0, result
    assert result["tool_restarts"] == 0 and result["repairs"] == 0


def test_a_trial_that_edits_nothing_is_graded_as_that(run: Any) -> None:
    def idle() -> Script:
        yield call_text(ToolCall("list_files", {}))
        yield "done"

    result = run("modal idle", idle())
    assert result["outcome"]["kind"] == "failed" and result["reward"] == 0.0


def test_a_service_that_is_not_there_is_a_system_error_of_the_start(run: Any, tmp_path: Path) -> None:
    nobody = tmp_path / "modal.toml"
    nobody.write_text(
        '[default]\nserver_url = "http://127.0.0.1:1"\ntoken_id = "ak-x"\ntoken_secret = "as-x"\n'
    )
    settings = {"image": "python:3.11", "config": str(nobody), "attempts": 1}
    limits = {"start_s": 5.0, "stop_s": 60.0}
    result = run("modal nobody", iter(()), modal=settings, sandbox_limits=limits)
    assert result["outcome"]["kind"] == "system_error" and result["outcome"]["phase"] == "start"
    assert "reward" not in result and "\n" not in result["outcome"]["cause"]
    result = run("modal nothing", iter(()), modal=None)
    assert result["outcome"]["cause"] == "ValueError: modal must be settings with an image, got none"
