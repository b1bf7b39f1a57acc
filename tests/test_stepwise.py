"""Trials of tasks of several steps: one world, a conversation and a grade a step, Harbor's rules between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import Script, ScriptedEngine, says
from test_sandbox import both_kinds, needs_bubblewrap

from system.fleet.local import LocalFleet
from system.harbor.atif import atif
from system.harness.chat import Chat, ToolCall, call_text

CLERK = Path(__file__).resolve().parent.parent / "policies" / "clerk"
CHAT = Chat(CLERK)

pytestmark = needs_bubblewrap  # the test scripts run in it

Run = Callable[..., dict[str, Any]]

TOML = """
schema_version = "1.4"
{top}
[task]
name = "office/letter"
[verifier]
timeout_sec = 60
env = {{WANTED = "yes"}}
[environment]
docker_image = "python:3.11"
network_mode = "no-network"
[[steps]]
name = "draft"
{draft}
[[steps]]
name = "send"
{send}
"""

GRADE = """#!/bin/sh
. /tests/file.sh
if [ "$(cat /world/$FILE 2>/dev/null)" = "$WANTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tmp_path_factory.mktemp("engine") / "s", CHAT) as engine:
        yield engine


@pytest.fixture(scope="module")
def run(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs one trial with a script a step, and sees that nothing of it is left."""
    scratch = tmp_path_factory.mktemp("scratch")
    with LocalFleet(
        scratch, warm=("system.fleet.office:load=full", f"system.trial:load_chat={CLERK}")
    ) as fleet:
        numbers = iter(range(1000))

        def trial(task: Path, limits: Any = (), /, *, spec: Any = (), **scripts: Script) -> dict[str, Any]:
            trial_id = f"t{next(numbers)}"
            for step, script in scripts.items():
                engine.scripts[f"{trial_id}/{step}"] = script
            plain = {
                "trial_id": trial_id,
                "task": str(task),
                "policy": str(CLERK),
                "engine_address": str(engine.path),
                "sandbox": "process",
                "scratch": str(scratch),
                "seed": 1,
                "deadline_s": 120.0,
                "tool_timeout_s": 60.0,
                "limits": {
                    "context": 16_000,
                    "turn_tokens": 600,
                    "turns": 9,
                    "repairs": 2,
                    "result_characters": 4000,
                    "nudge_ratio": 0.0,
                    "temperature": 1.0,
                }
                | dict(limits),
            }
            fleet.start(plain | dict(spec))
            (result,) = fleet.poll(150)
            assert not list(scratch.glob("trial-*"))
            return result

        yield trial


def task_of(folder: Path, *, top: str = "", draft: str = "", send: str = "", grade: str = GRADE) -> Path:
    """Two steps that are graded by one script; each has a file of its own that names what it looks at."""
    texts = {
        "task.toml": TOML.format(top=top, draft=draft, send=send),
        "environment/world/notes.txt": "Ann is a client.",
        "tests/test.sh": grade,
        "tests/file.sh": "exit 1",
        "steps/draft/instruction.md": "Draft it.",
        "steps/draft/tests/file.sh": "FILE=draft.txt",
        "steps/send/instruction.md": "Send it.",
        "steps/send/tests/file.sh": "FILE=sent.txt",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def write(path: str, content: str) -> str:
    return call_text(ToolCall("write_file", {"path": path, "content": content}))


def wrote(path: str, content: str) -> Script:
    return says(write(path, content), f"Wrote {path}.")


@both_kinds
def test_steps_go_on_in_one_world_and_speak_each_for_itself(run: Run, tmp_path: Path, kind: str):
    ticking = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while True: open('ticks', 'a').write('x'); time.sleep(0.01)\n"
    )

    def draft() -> Script:
        yield call_text(ToolCall("run_code", {"code": ticking}))
        yield write("draft.txt", "yes")
        yield "Drafted."

    def send() -> Script:
        size = "import os, time; a = os.path.getsize('ticks'); time.sleep(0.2); print(os.path.getsize('ticks') - a)"
        assert (yield call_text(ToolCall("run_code", {"code": size}))) == "0"
        assert (yield call_text(ToolCall("read_file", {"path": "draft.txt"}))).endswith("yes")
        yield write("sent.txt", "no")
        yield "Sent."

    result = run(task_of(tmp_path / "task"), spec={"sandbox": kind}, draft=draft(), send=send())
    assert result["outcome"]["kind"] == "failed", result["outcome"]
    assert (result["reward"], result["passed"], result["answer"]) == (0.5, False, "Sent.")
    first, second = result["steps"]
    assert [(s["name"], s["reward"], s["passed"], s["answer"]) for s in result["steps"]] == [
        ("draft", 1.0, True, "Drafted."),
        ("send", 0.0, False, "Sent."),
    ]
    assert first["rewards"] == {"reward": 1.0} and first["outcome"]["kind"] == "solved"
    assert [criterion["name"] for criterion in result["criteria"]] == ["draft: reward", "send: reward"]
    for name in ("rows", "turns", "messages"):
        assert [first[name][0], first[name][1], second[name][1]] == [0, second[name][0], len(result[name])]
    own = [message["content"] for message in result["messages"] if message["role"] == "user"]
    assert own == ["Draft it.", "Send it."]
    assert {turn["row"] for turn in result["turns"][slice(*second["turns"])]} == {second["rows"][0]}
    prompt = result["rows"][second["rows"][0]]["token_ids"][: result["turns"][second["turns"][0]]["start"]]
    assert "Draft it." not in CHAT.tokenizer.decode(prompt) and "Send it." in CHAT.tokenizer.decode(prompt)


def test_all_steps_solved_is_solved_and_its_document_tells_them_in_turn(
    run: Run, tmp_path: Path, engine: ScriptedEngine
):
    result = run(task_of(tmp_path / "task"), draft=wrote("draft.txt", "yes"), send=wrote("sent.txt", "yes"))
    assert (result["outcome"]["kind"], result["reward"], result["passed"]) == ("solved", 1.0, True)
    document = atif(result)
    sampled = [ids for step in ("draft", "send") for ids in engine.sampled[f"{result['trial_id']}/{step}"]]
    acts = [step for step in document["steps"] if step["source"] == "agent"]
    assert [step["metrics"]["completion_token_ids"] for step in acts] == sampled
    assert [step["source"] for step in document["steps"]] == ["user", "agent", "agent"] * 2
    assert [step["rewards"] for step in document["extra"]["steps"]] == [{"reward": 1.0}] * 2


@pytest.mark.parametrize(
    ("least", "reached"),
    [("min_reward = 0.5", 1), ("min_reward = {reward = 0}", 2), ("min_reward = {style = 0}", 1)],
)
def test_below_its_least_reward_a_step_is_the_last(
    run: Run, tmp_path: Path, engine: ScriptedEngine, least: str, reached: int
):
    task = task_of(tmp_path / "task", draft=least)
    result = run(task, draft=wrote("draft.txt", "no"), send=wrote("sent.txt", "yes"))
    assert len(result["steps"]) == reached and result["reward"] == [0.0, 0.5][reached - 1]
    assert result["outcome"]["kind"] == "failed" and not result["passed"]
    assert (f"{result['trial_id']}/send" in engine.sampled) == (reached == 2)


@pytest.mark.parametrize(("draft", "send", "reward"), [("no", "yes", 1.0), ("yes", "no", 0.0)])
def test_where_the_final_step_counts_the_others_do_not(
    run: Run, tmp_path: Path, draft: str, send: str, reward: float
):
    task = task_of(tmp_path / "task", top='multi_step_reward_strategy = "final"')
    result = run(task, draft=wrote("draft.txt", draft), send=wrote("sent.txt", send))
    assert result["reward"] == reward and result["passed"] == (reward == 1.0)
    stopped = task_of(
        tmp_path / "stopped", top='multi_step_reward_strategy = "final"', draft="min_reward = 2"
    )
    result = run(stopped, draft=wrote("draft.txt", "yes"))
    assert result["reward"] == 1.0 and not result["passed"], (
        "the last step that was reached is not the last one"
    )


def test_numbers_of_a_script_are_meant_by_name_and_missing_ones_are_nothing(run: Run, tmp_path: Path):
    grade = '#!/bin/sh\n. /tests/file.sh\necho "$SAYS" > /logs/verifier/reward.json\n'
    task = task_of(tmp_path / "task", draft="min_reward = {style = 0.2}", grade=grade)
    (task / "steps/draft/tests/file.sh").write_text("""SAYS='{"reward": 1, "style": 0.25}'""")
    (task / "steps/send/tests/file.sh").write_text("""SAYS='{"reward": 0.5}'""")
    result = run(task, draft=says("Done."), send=says("Done."))
    assert [step["rewards"] for step in result["steps"]] == [{"reward": 1.0, "style": 0.25}, {"reward": 0.5}]
    assert result["reward"] == 0.75


def test_a_step_is_graded_by_our_checks_and_by_variables_of_its_own(run: Run, tmp_path: Path):
    task = task_of(tmp_path / "task", draft='[steps.verifier]\nenv = {WANTED = "other"}')
    checks = [{"kind": "answer_number", "expected": 4821}]
    (task / "steps" / "send" / "tests" / "checks.json").write_text(json.dumps(checks))
    result = run(
        task, spec={"sandbox": "bubblewrap"}, draft=wrote("draft.txt", "other"), send=says("It is 4821.")
    )
    assert [step["reward"] for step in result["steps"]] == [1.0, 1.0], result


@pytest.mark.parametrize("broken", ["draft", "send"])
def test_a_step_whose_grading_breaks_is_a_system_error(run: Run, tmp_path: Path, broken: str):
    task = task_of(tmp_path / "task")
    (task / "steps" / broken / "tests" / "file.sh").write_text("exit 0")
    result = run(task, draft=wrote("draft.txt", "yes"), send=wrote("sent.txt", "yes"))
    assert result["outcome"]["kind"] == "system_error" and result["outcome"]["phase"] == "verify"
    assert result["outcome"]["cause"].startswith("reward_missing: ") and "reward" not in result


def test_a_limit_that_a_step_meets_is_the_outcome_and_the_next_one_is_still_run(run: Run, tmp_path: Path):
    result = run(task_of(tmp_path / "task"), draft=says("word " * 1000), send=wrote("sent.txt", "yes"))
    assert result["outcome"] == {"kind": "truncated", "reason": "turn_cap", "phase": "", "cause": ""}
    assert [step["reward"] for step in result["steps"]] == [0.0, 1.0] and result["reward"] == 0.5


def test_the_agents_time_is_of_all_steps_together_and_a_steps_own_is_within_it(run: Run, tmp_path: Path):
    slow = task_of(tmp_path / "slow", draft="[steps.agent]\ntimeout_sec = 1")
    result = run(slow, draft=says(600.0), send=wrote("sent.txt", "yes"))
    assert [step["outcome"]["kind"] for step in result["steps"]] == ["truncated", "solved"]
    assert result["outcome"]["reason"] == "wall_clock"
    result = run(
        task_of(tmp_path / "task"), spec={"deadline_s": 1.0}, draft=says(600.0), send=says("never said")
    )
    assert [step["outcome"]["reason"] for step in result["steps"]] == ["wall_clock"] * 2
    assert result["steps"][1]["turns"][0] == result["steps"][1]["turns"][1], "no time is left for a turn"


def test_what_no_trial_gives_is_refused_in_one_line(run: Run, tmp_path: Path):
    def cause(task: Path, **spec: Any) -> str:
        outcome = run(task, spec=spec)["outcome"]
        assert (outcome["kind"], outcome["phase"]) == ("system_error", "start")
        return outcome["cause"]

    must = "ValueError: a task of several steps must do without"
    task = task_of(tmp_path / "a")
    (task / "steps" / "send" / "workdir").mkdir()
    assert cause(task) == f"{must} steps/send/workdir in a trial, got {task}"
    task = task_of(tmp_path / "b", send='[steps.healthcheck]\ncommand = "true"')
    assert cause(task) == f"{must} a healthcheck of send in a trial, got {task}"
    task = task_of(tmp_path / "c")
    (task / "bartleby.json").write_text('{"rubric": [{"id": "r", "criterion": "It is polite."}]}')
    assert cause(task) == f"{must} a rubric in a trial, got {task}"
    wanted = "ValueError: sandbox must be bubblewrap or process for a task of several steps, got 'modal'"
    assert cause(task_of(tmp_path / "d"), sandbox="modal") == wanted
