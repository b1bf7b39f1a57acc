"""Real Harbor trials, offline: its lifecycle, our sandbox, our agent, a scripted engine; run by `run.sh`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor.trial.trial", reason="tests/harbor/run.sh runs these on Python 3.12")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from atif_results import ENDINGS, played
from harbor.models.trajectories import Trajectory
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial
from harbor.utils.trajectory_validator import TrajectoryValidator
from scripted_engine import Script, ScriptedEngine, plays, says

from system.harbor.atif import atif
from system.harness.chat import Chat, ToolCall, call_text
from system.world.assignment import draw_assignment
from system.world.company import make_company
from system.world.office import write_world
from system.world.task import write_task

CLERK = Path(__file__).resolve().parents[2] / "policies" / "clerk"
CHAT = Chat(CLERK)

ENVIRONMENT = "system.harbor.environment:BartlebyEnvironment"
AGENT = "system.harbor.agent:BartlebyAgent"

SCRATCH = Path(tempfile.gettempdir()) / f"bartleby-harbor-{os.getuid()}"
NUMBERS = itertools.count()

Run = Callable[..., tuple[TrialResult, Path]]

FOREIGN_TOML = """
schema_version = "1.4"
[task]
name = "someone/letter"
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 60
[environment]
docker_image = "python:3.12"
workdir = "/app"
network_mode = "no-network"
"""

GRADED_BY_CONTENT = """#!/bin/bash
if [ "$(cat /app/letter.txt 2>/dev/null)" = "Dear Ann" ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of our generator's."""
    folder = tmp_path_factory.mktemp("ours")
    company = make_company(3, split="train")
    world = write_world(company, folder / "world")
    return write_task(
        draw_assignment(company, level=1, index=0), company, tasks=folder / "tasks", world=world
    )


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A task of somebody else's: a script, a number in a file, another workdir."""
    return foreign_task(tmp_path / "letter", GRADED_BY_CONTENT)


def foreign_task(folder: Path, script: str) -> Path:
    for name, text in (
        ("instruction.md", "Write 'Dear Ann' into letter.txt."),
        ("task.toml", FOREIGN_TOML),
        ("environment/notes.txt", "Ann is a client."),
        ("tests/test.sh", script),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tmp_path_factory.mktemp("engine") / "s", CHAT) as engine:
        yield engine


@pytest.fixture
def prepared(engine: ScriptedEngine, tmp_path: Path) -> Callable[..., TrialConfig]:
    """What Harbor is told of a trial in which our agent says a script a run, or another agent works."""

    def config(
        task: Path,
        *scripts: Script,
        agent: dict[str, Any] | None = None,
        other: dict[str, Any] | None = None,
        **changed: Any,
    ) -> TrialConfig:
        name = f"trial-{next(NUMBERS)}"
        for number, script in enumerate(scripts, start=1):
            engine.scripts[f"{name}__agent/{number}"] = script
        kwargs = {
            "policy": str(CLERK),
            "engine_address": str(engine.path),
            "toolset": "brief",
            "context": 6000,
        }
        return TrialConfig(
            task=TaskConfig(path=task),
            trial_name=name,
            trials_dir=tmp_path / "trials",
            agent=AgentConfig(**(other or {"import_path": AGENT, "kwargs": kwargs | (agent or {})})),
            environment=EnvironmentConfig(import_path=ENVIRONMENT),
            **changed,
        )

    return config


def run_all(*configs: TrialConfig) -> list[TrialResult]:
    """The results of trials that run side by side; nothing of them is left."""

    async def one(config: TrialConfig) -> TrialResult:
        return await (await Trial.create(config)).run()

    async def all_of_them() -> list[TrialResult]:
        return await asyncio.gather(*map(one, configs))

    results = asyncio.run(all_of_them())
    assert not list(SCRATCH.glob("trial-*")), "a sandbox is left"
    return results


@pytest.fixture
def run(prepared: Callable[..., TrialConfig]) -> Run:
    """Runs one trial of Harbor's; its result, and its folder."""

    def trial(task: Path, *scripts: Script, **given: Any) -> tuple[TrialResult, Path]:
        config = prepared(task, *scripts, **given)
        (result,) = run_all(config)
        return result, config.trials_dir / config.trial_name

    return trial


def write(path: str, content: str) -> str:
    return call_text(ToolCall("write_file", {"path": path, "content": content}))


def rewards(result: TrialResult) -> dict[str, float | int] | None:
    return result.verifier_result.rewards if result.verifier_result else None


def trajectory(folder: Path) -> dict[str, Any]:
    """The document that a trial left, once Harbor's validator has passed it."""
    at = next(folder.rglob("trajectory.json"))
    validator = TrajectoryValidator()
    assert validator.validate(at), validator.get_errors()
    return json.loads(at.read_text())


def test_a_task_of_ours_is_solved_and_leaves_a_valid_trajectory(run: Run, ours: Path, engine: ScriptedEngine):
    result, folder = run(ours, plays((ours / "instruction.md").read_text().strip()))
    assert result.exception_info is None, result.exception_info
    assert rewards(result) == {"reward": 1.0, "passed": 1.0}
    document = trajectory(folder)
    assert document["schema_version"] == "ATIF-v1.8"
    acts = [step for step in document["steps"] if step["source"] == "agent"]
    assert [step["metrics"]["completion_token_ids"] for step in acts] == engine.sampled[
        document["session_id"]
    ]
    for step in acts:
        metrics = step["metrics"]
        lists = [
            metrics["completion_token_ids"],
            metrics["logprobs"],
            *map(metrics["extra"].get, ("loss_mask", "policy_version")),
        ]
        assert {len(one) for one in lists} == {metrics["completion_tokens"]}
        assert set(metrics["extra"]["loss_mask"]) == {True} and set(metrics["extra"]["policy_version"]) == {7}
    assert [step["tool_calls"][0]["function_name"] for step in acts[:-1]] and acts[-1].get(
        "tool_calls"
    ) is None
    assert all("observation" in step for step in acts[:-1])
    context = result.agent_result
    assert context is not None and context.rollout_details is not None
    detail: dict[str, Any] = {**context.rollout_details[0]}
    assert detail["completion_token_ids"] == engine.sampled[document["session_id"]]
    assert len({len(detail[name]) for name in ("prompt_token_ids", "completion_token_ids", "logprobs")}) == 1
    assert [len(one) for one in detail["extra"]["loss_mask"]] == [len(one) for one in detail["logprobs"]]
    assert context.n_output_tokens == sum(map(len, engine.sampled[document["session_id"]]))


def test_a_wrong_answer_to_a_task_of_ours_earns_nothing(run: Run, ours: Path):
    result, folder = run(ours, says("I do not know."))
    assert result.exception_info is None and rewards(result) == {"reward": 0.0, "passed": 0.0}
    assert trajectory(folder)["extra"]["outcome"]["kind"] == "answered"


def test_the_code_agent_solves_a_foreign_task_by_shell(run: Run, foreign: Path):
    write_it = call_text(ToolCall("bash", {"command": "pwd; ls; echo 'Dear Ann' > letter.txt"}))
    result, folder = run(foreign, says(write_it, "Done."), agent={"harness": "code"})
    assert result.exception_info is None, result.exception_info
    assert rewards(result) == {"reward": 1.0}
    (said,) = [step["observation"] for step in trajectory(folder)["steps"] if "observation" in step]
    assert said["results"][0]["content"].split() == ["/app", "notes.txt"]


def test_trials_run_side_by_side_each_in_a_world_of_its_own(
    prepared: Callable[..., TrialConfig], foreign: Path
):
    texts = ["Dear Ann", "Dear Bob", "Dear Ann"]
    results = run_all(*(prepared(foreign, says(write("letter.txt", text), "Done.")) for text in texts))
    assert [rewards(result) for result in results] == [{"reward": 1.0}, {"reward": 0.0}, {"reward": 1.0}]


def test_the_office_agent_fails_a_foreign_task_by_another_letter(run: Run, foreign: Path):
    result, _ = run(foreign, says(write("letter.txt", "Dear Bob"), "Done."))
    assert result.exception_info is None and rewards(result) == {"reward": 0.0}


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("exit 0", "RewardFileNotFoundError"),
        ("echo well > /logs/verifier/reward.txt", "VerifierOutputParseError"),
    ],
)
def test_a_verifier_that_is_broken_gives_harbors_exception_and_no_reward(
    run: Run, tmp_path: Path, script: str, error: str
):
    task = foreign_task(tmp_path / "letter", f"#!/bin/sh\n{script}\n")
    result, _ = run(task, says(write("letter.txt", "Dear Ann"), "Done."))
    assert result.exception_info is not None and result.exception_info.exception_type == error
    assert result.verifier_result is None and not result.exception_info.policy.has_valid_reward


def test_an_engine_that_is_gone_is_no_failure_of_the_policys(run: Run, foreign: Path):
    """Harbor grades after an exception that it does not know, and counts the zero; this one it knows."""
    result, _ = run(foreign, agent={"engine_address": "/nowhere/s"})
    info = result.exception_info
    assert info is not None and info.exception_message.startswith("agent: FileNotFoundError")
    assert result.verifier_result is None
    assert (info.policy.should_retry, info.policy.should_grade, info.policy.has_valid_reward) == (
        True,
        False,
        False,
    )


def test_an_agent_that_harbor_ends_is_graded(run: Run, foreign: Path):
    result, _ = run(foreign, says(600.0, "Done."), timeout_multiplier=0.05, verifier_timeout_multiplier=1.0)
    assert result.exception_info is not None and result.exception_info.exception_type == "AgentTimeoutError"
    assert rewards(result) == {"reward": 0.0}


FORGERIES = {
    "a writer in the background": "(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' &) ; sleep 0.1",
    "a reward planted": "echo '{\"reward\": 1}' > /logs/verifier/reward.json; mkdir -p /logs/verifier/reward.txt",
    "a test planted": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "a module planted": (
        "for v in 11 12 13; do d=/tmp/.local/lib/python3.$v/site-packages; mkdir -p $d;"
        ' echo \'open("/logs/verifier/reward.txt", "w").write("1")\' > $d/usercustomize.py; done'
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_forgery_of_an_agents_earns_anything(run: Run, tmp_path: Path, forgery: str):
    script = GRADED_BY_CONTENT + "sleep 0.2; python3 -c pass\n"
    task = foreign_task(tmp_path / "letter", script)
    result, _ = run(
        task, other={"import_path": "other_agents:ShellAgent", "kwargs": {"command": FORGERIES[forgery]}}
    )
    assert result.agent_result is not None and result.agent_result.metadata is not None
    assert rewards(result) == {"reward": 0.0}, result.exception_info


def test_a_verifier_planted_in_the_world_is_not_taken_for_ours(run: Run, ours: Path):
    forged = (
        'import json; json.dump({"reward": 1}, open("/logs/verifier/reward.json", "w")); raise SystemExit'
    )
    files = "system/__init__.py system/verify/__init__.py system/verify/__main__.py openpyxl.py"
    plant = f"mkdir -p system/verify; echo {shlex.quote(forged)} | tee {files}"
    result, _ = run(ours, other={"import_path": "other_agents:ShellAgent", "kwargs": {"command": plant}})
    assert result.exception_info is None and rewards(result) == {"reward": 0.0, "passed": 0.0}


STEPWISE_TOML = (
    FOREIGN_TOML
    + """
[[steps]]
name = "draft"
min_reward = 1.0
[[steps]]
name = "send"
"""
)


@pytest.fixture
def stepwise(tmp_path: Path) -> Path:
    folder = foreign_task(tmp_path / "steps", "#!/bin/sh\ntest -f /tests/own.sh && . /tests/own.sh\n")
    (folder / "instruction.md").unlink()
    (folder / "task.toml").write_text(STEPWISE_TOML)
    for name, file in (("draft", "draft.txt"), ("send", "sent.txt")):
        (folder / "steps" / name / "tests").mkdir(parents=True)
        (folder / "steps" / name / "instruction.md").write_text(f"Write yes into {file}.")
        (folder / "steps" / name / "tests" / "own.sh").write_text(
            f'ls /app > /logs/verifier/seen.txt\n[ "$(cat /app/{file})" = yes ] && echo 1 > /logs/verifier/reward.txt'
            " || echo 0 > /logs/verifier/reward.txt\n"
        )
    return folder


def test_steps_go_on_in_one_world_and_each_is_graded_afresh(run: Run, stepwise: Path):
    first, second = says(write("draft.txt", "yes"), "Done."), says(write("sent.txt", "no"), "Done.")
    result, folder = run(stepwise, first, second)
    assert result.exception_info is None, result.exception_info
    assert result.step_results is not None
    assert [one.verifier_result.rewards for one in result.step_results if one.verifier_result] == [
        {"reward": 1.0},
        {"reward": 0.0},
    ]
    assert rewards(result) == {"reward": 0.5}
    seen = (folder / "steps" / "send" / "verifier" / "seen.txt").read_text().split()
    assert seen == ["draft.txt", "notes.txt", "sent.txt"]


def test_a_step_below_its_least_reward_is_the_last(run: Run, stepwise: Path):
    result, _ = run(stepwise, says(write("draft.txt", "no"), "Done."), says("never asked"))
    assert result.step_results is not None and len(result.step_results) == 1
    assert rewards(result) == {"reward": 0.0}


@pytest.mark.parametrize("ending", ENDINGS)
def test_harbors_validator_passes_a_trial_of_every_ending(ending: str):
    texts, limits = ENDINGS[ending]
    document = atif(played(*texts, **limits)[0], version="1", model="clerk")
    validator = TrajectoryValidator()
    assert validator.validate(dict(document)), validator.get_errors()
    assert Trajectory.model_validate(document).to_json_dict()["steps"] == document["steps"]


def test_our_agent_refuses_another_environment(tmp_path: Path):
    from system.harbor.agent import BartlebyAgent

    agent = BartlebyAgent(logs_dir=tmp_path, policy=CLERK, engine_address="s")
    with pytest.raises(ValueError, match="^environment must be a BartlebyEnvironment, got object$"):
        asyncio.run(agent.setup(object()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Unknown option 'harnes'"):
        BartlebyAgent(logs_dir=tmp_path, policy=CLERK, engine_address="s", harnes="code")
