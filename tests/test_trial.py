"""A trial as the fleet runs it, with a scripted engine: both harnesses, a deadline a layer, servers that die."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import Script, ScriptedEngine, plays, says
from test_sandbox import both_kinds

from core.outcome import Outcome, has_valid_reward
from system.fleet import lifetime_s
from system.fleet.local import WARM, LocalFleet
from system.fleet.office import KITS
from system.harness.chat import Chat, ToolCall, call_text
from system.harness.conversation import NUDGE
from system.sandbox import SandboxError
from system.trial import TrialError, phase
from system.world import expert
from system.world.assignment import Assignment, draw_assignment
from system.world.company import make_company
from system.world.expert_shell import by_shell
from system.world.office import write_world
from system.world.task import write_task

CLERK = Path(__file__).resolve().parent.parent / "policies" / "clerk"
CHAT = Chat(CLERK)

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A task of each family in one company."""
    folder = tmp_path_factory.mktemp("tasks")
    company = make_company(3, split="train")
    world = write_world(company, folder / "world")
    found: dict[str, Path] = {}
    drawn: list[Assignment] = [draw_assignment(company, level=2, index=index) for index in range(12)]
    for assignment in (draw_assignment(company, level=1, index=0), *drawn):
        if assignment.family not in found:
            found[assignment.family] = write_task(assignment, company, tasks=folder / "tasks", world=world)
    assert sorted(found) == ["edit", "find", "sum", "write"]
    return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    """One engine for all."""
    with ScriptedEngine(tmp_path_factory.mktemp("engine") / "s", CHAT) as engine:
        yield engine


@pytest.fixture(scope="module")
def run(
    tasks: dict[str, Path], engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """Runs one trial, and sees that nothing of it is left."""
    scratch = tmp_path_factory.mktemp("scratch")
    warm = (*WARM, f"system.trial:load_chat={CLERK}")
    with LocalFleet(scratch, target="harness_trials:run", warm=warm) as fleet:
        counter = iter(range(10_000))

        def trial(
            script: Script | None = None, *, family: str = "find", limits: Any = (), **spec: Any
        ) -> Any:
            trial_id = f"trial {next(counter)}"
            if script is not None:
                engine.scripts[trial_id] = script
            plain = {
                "trial_id": trial_id,
                "task": str(tasks[family]),
                "policy": str(CLERK),
                "engine_address": str(engine.path),
                "sandbox": "process",
                "scratch": str(scratch),
                "seed": 1,
                "deadline_s": 20.0,
                "tool_timeout_s": 10.0,
                "limits": {
                    "context": 6000,
                    "turn_tokens": 3000,
                    "turns": 20,
                    "repairs": 2,
                    "result_characters": 4000,
                    "nudge_ratio": 0.0,
                    "temperature": 1.0,
                }
                | dict(limits),
            }
            fleet.start(plain | spec)
            results = fleet.poll(60)
            assert len(results) == 1
            assert not list(scratch.glob("trial-*"))
            return results[0]

        yield trial


def instruction_of(task: Path) -> str:
    return (task / "instruction.md").read_text().strip()


READ = call_text(ToolCall("read_file", {"path": "minutes.txt"}))


@both_kinds
@pytest.mark.parametrize("family", ["find", "edit"])
def test_the_expert_in_the_policys_place_solves_a_task_with_the_office_tools(run, tasks, kind, family):
    result = run(plays(instruction_of(tasks[family])), family=family, sandbox=kind)
    assert result["outcome"]["kind"] == "solved" and result["reward"] == 1.0, result
    assert result["tool_restarts"] == 0 and result["repairs"] == 0


@both_kinds
@pytest.mark.parametrize("family", ["sum", "edit", "write"])
def test_the_code_agent_solves_the_same_tasks_by_shell_and_files(run, tasks, kind, family):
    script = plays(instruction_of(tasks[family]), by_shell)
    result = run(script, family=family, sandbox=kind, harness="code", limits={"context": 20_000})
    assert result["outcome"]["kind"] == "solved" and result["reward"] == 1.0, result
    assert {turn["tool"] for turn in result["turns"]} <= {"bash", "grep", "write", ""}


def test_the_code_agent_puts_a_file_right_by_read_and_edit(run, tasks):
    """It writes the table with a wrong number first, finds it again, reads it and edits it."""
    gathered: list[expert.ToolCall] = []

    def script() -> Script:
        def noted(call: expert.ToolCall) -> ToolCall:
            gathered.append(call)
            return by_shell(call)

        steps = plays(instruction_of(tasks["write"]), noted)
        text = next(steps)
        while gathered[-1].name != "write_file":
            text = steps.send((yield text))
        content = gathered[-1].arguments["content"]
        name, value = content.splitlines()[0].split(",")
        wrong = content.replace(f"{name},{value}", f"{name},{value}0")
        yield call_text(ToolCall("write", {"filePath": "out.csv", "content": wrong}))
        listed = yield call_text(ToolCall("glob", {"pattern": "*.csv"}))
        assert listed.splitlines()[0] == "out.csv"
        found = yield call_text(ToolCall("grep", {"pattern": name, "include": "out.csv"}))
        assert found == f"out.csv:\n  1: {name},{value}0"
        shown = yield call_text(ToolCall("read", {"filePath": "out.csv"}))
        assert shown.splitlines()[0] == f"1: {name},{value}0"
        edit = {"filePath": "out.csv", "oldString": f"{name},{value}0", "newString": f"{name},{value}"}
        assert (yield call_text(ToolCall("edit", edit))) == "replaced once in out.csv, first in line 1"
        yield "done"

    result = run(script(), family="write", harness="code", limits={"context": 20_000})
    assert result["reward"] == 1.0, result


def test_rows_hold_what_the_engine_sampled_and_nothing_of_the_harness_is_trained(run, engine):
    broken = "<tool_call>{"
    result = run(says(READ, broken, "1"), limits={"nudge_ratio": 1.0})
    (row,) = result["rows"]
    trained = [token for token, mask in zip(row["token_ids"], row["loss_mask"]) if mask]
    assert trained == [token for ids in engine.sampled[result["trial_id"]] for token in ids]
    given = {version for version, mask in zip(row["policy_version"], row["loss_mask"]) if not mask}
    assert given == {-1} and result["nudged"] and result["repairs"] == 1


# The reminder


@pytest.mark.parametrize(
    ("spec", "nudged"),
    [
        ({}, True),
        ({"purpose": "eval"}, False),
        ({"purpose": "eval", "nudge_purposes": ["train", "eval"]}, True),
    ],
)
def test_the_reminder_is_for_training_unless_the_spec_says_otherwise(run, spec, nudged):
    result = run(says(READ, "1"), limits={"nudge_ratio": 1.0}, **spec)
    assert result["nudged"] is nudged and (NUDGE in result["turns"][0]["result"]) is nudged


# Deadlines, each with an outcome of its own


def test_a_tool_that_is_late_is_an_answer_to_the_policy(run):
    late = call_text(ToolCall("bash", {"command": "trap '' TERM; sleep 30", "timeout": 60_000}))
    result = run(says(late, "1"), harness="code", tool_timeout_s=2.0)
    assert result["turns"][0]["result"] == "[stopped after 1.62 s]" and result["outcome"]["kind"] == "failed"


def test_the_agents_clock_ends_a_pending_tool_call(run):
    late = call_text(ToolCall("bash", {"command": "sleep 30"}))
    begun = time.monotonic()
    result = run(says(late, "1"), harness="code", deadline_s=1.0, tool_timeout_s=30.0)
    assert result["outcome"] == {"kind": "truncated", "reason": "wall_clock", "phase": "", "cause": ""}
    assert result["reward"] == 0.0 and result["turns"][-1]["tool"] == "bash" and time.monotonic() - begun < 8


def test_the_agents_clock_ends_a_pending_engine_request(run):
    begun = time.monotonic()
    result = run(says(READ, 30.0, "1"), deadline_s=1.0)
    assert result["outcome"]["reason"] == "wall_clock" and len(result["turns"]) == 1
    assert time.monotonic() - begun < 8


def test_a_late_start_is_a_system_error_of_the_start(run):
    result = run(says("1"), start_s=0.001)
    assert result["outcome"] == {"kind": "system_error", "phase": "start", "cause": "deadline: 0.001 s"}
    assert "reward" not in result


def test_a_late_verifier_is_a_system_error_of_its_own(run):
    result = run(says("1"), verify_s=1e-5)
    assert result["outcome"] == {"kind": "system_error", "phase": "verify", "cause": "deadline: 1e-05 s"}
    assert "reward" not in result


def test_a_late_end_is_a_system_error_of_the_teardown_and_the_fleet_clears_up(run):
    result = run(says("1"), stop_s=1e-5)
    assert result["outcome"] == {"kind": "system_error", "phase": "teardown", "cause": "deadline: 1e-05 s"}
    outcome = Outcome(**result["outcome"])
    assert not has_valid_reward(outcome, scored_truncations=())


def test_no_broad_except_inside_a_phase_hides_that_it_is_late():
    """A verifier that takes every error for the agent's would otherwise make a reward of the alarm."""
    tried = []
    with pytest.raises(TrialError, match="verify: deadline: 0.05 s"), phase("verify", {}, limit_s=0.05):
        for _ in range(2):
            try:
                time.sleep(5)
            except BaseException:  # noqa: BLE001 - what is tested
                tried.append(True)
    assert tried == [True, True]
    with pytest.raises(TrialError, match="verify: deadline"), phase("verify", {}, limit_s=0.05):
        try:
            time.sleep(5)
        finally:
            raise ValueError("in the end")


def test_a_phase_in_time_leaves_no_alarm_behind():
    seconds: dict[str, float] = {}
    with phase("start", seconds, limit_s=0.2):
        pass
    time.sleep(0.3)
    assert seconds["start"] < 0.2
    with pytest.raises(TrialError, match="teardown: it stays"), phase("freeze", seconds, blame="teardown"):
        raise SandboxError("freeze", "it stays")


def test_a_fleet_gives_a_trial_the_time_of_all_its_phases():
    spec = {"deadline_s": 10.0, "start_s": 1.0, "verify_s": 5.0, "stop_s": 2.0}
    assert lifetime_s(spec) == 20.0 and lifetime_s({"deadline_s": 10.0}) == 10.0


def test_an_engine_that_is_gone_is_a_system_error_of_the_agent(run, tmp_path):
    result = run(engine_address=str(tmp_path / "nobody"))
    assert result["outcome"]["kind"] == "system_error" and result["outcome"]["phase"] == "agent"


# The tools' server


def fragile(run: Run, tasks: dict[str, Path], *calls: tuple[str, dict[str, Any]], **spec: Any) -> Any:
    world = str(tasks["find"] / "environment" / "world")
    plain = {"action": "use_fragile_tools", "world": world, "tool_s": 5.0, "calls": calls}
    return run(**(plain | spec))


@both_kinds
def test_a_read_that_the_server_died_in_is_made_again_on_a_fresh_one(run, tasks, kind):
    result = fragile(run, tasks, ("poke", {}), ("peek", {"deaths": 1}), ("poke", {}), sandbox=kind)
    assert result["answers"] == [["poke 1", False], ["peek 2", False], ["poke 2", False]]
    assert result["restarts"] == 1 and result["texts"] == {"peek": "xx", "poke": "xx"}


def test_a_read_is_made_again_only_once(run, tasks):
    result = fragile(run, tasks, ("peek", {"deaths": 5}), ("poke", {}))
    assert result["answers"][0][1] is True and "broke off during this call" in result["answers"][0][0]
    assert result["answers"][1] == ["poke 1", False]
    assert result["restarts"] == 2 and result["texts"]["peek"] == "xx"


def test_a_write_that_the_server_died_in_is_told_and_not_made_again(run, tasks):
    result = fragile(run, tasks, ("poke", {"deaths": 1}), ("peek", {}))
    assert result["answers"][0][1] is True and "may have taken effect" in result["answers"][0][0]
    assert result["answers"][1] == ["peek 1", False] and result["texts"]["poke"] == "x"


def test_a_server_that_does_not_come_back_is_a_fault_of_the_system(run, tasks):
    result = fragile(run, tasks, ("peek", {"deaths": 1}), ("peek", {}), rigid=True)
    assert [answer[0] for answer in result["answers"]] == ["ConnectionError", "ConnectionError"]
    assert "tool server exit 9" in result["answers"][0][1]


def test_a_call_that_hangs_is_an_answer_and_the_next_call_has_a_fresh_server(run, tasks):
    result = fragile(run, tasks, ("sleep", {"seconds": 30}), ("poke", {}), tool_s=0.5)
    assert result["answers"][0] == ["error: no answer within 0.5 s; the call may have taken effect", True]
    assert result["answers"][1] == ["poke 1", False] and result["restarts"] == 1 and result["seconds"] < 8


def test_a_call_that_its_caller_gave_up_leaves_the_session_whole(run, tasks):
    result = fragile(run, tasks, ("sleep", {"seconds": 1}), ("poke", {}), patience_s=[0.3, 30])
    assert result["answers"] == [["poke 1", False]] and result["restarts"] == 0


def test_a_result_too_long_for_the_wire_is_told(run, tasks):
    result = fragile(run, tasks, ("flood", {"millions": 40}), ("poke", {}))
    assert result["answers"][0][1] is True and result["answers"][1] == ["poke 1", False]


@both_kinds
def test_a_tools_temporary_files_go_with_its_trial(run, tasks, kind):
    ((place, error),) = fragile(run, tasks, ("temporary", {}), sandbox=kind)["answers"]
    assert not error and (place == "/tmp" if kind == "bubblewrap" else "/trial-" in place)


def test_a_missing_tool_ends_the_trial_before_the_agent_begins(run, tasks):
    result = fragile(run, tasks, ("poke", {}), expected=["poke", "read_sheet", "list_mail"])
    assert result["answers"] == [["NotReady", "tools missing: list_mail, read_sheet"]]
    result = run(says("1"), toolset="nothing")
    assert result["outcome"]["phase"] == "start" and "toolset" in result["outcome"]["cause"]


# Long results


def page_by_office() -> Script:
    """Lists it, sees the cut, reads what was cut out, and finds text in it."""
    code = "open('long.txt', 'w').write('\\n'.join(f'line {n}' for n in range(3000)))"
    yield call_text(ToolCall("run_code", {"code": code}))
    shown = yield call_text(ToolCall("read_file", {"path": "long.txt"}))
    assert ".spill/1.txt: read_file(path, start, lines) shows a part" in shown and len(shown) <= 4000
    assert shown.startswith("line 0\n") and shown.endswith("line 2999")
    part = yield call_text(ToolCall("read_file", {"path": ".spill/1.txt", "start": 1500, "lines": 2}))
    assert part.startswith("line 1499\nline 1500\n")
    again = yield call_text(ToolCall("read_file", {"path": ".spill/1.txt"}))
    assert ".spill/2.txt" not in again and ".spill/1.txt" in again
    yield call_text(ToolCall("delete_file", {"path": "long.txt"}))
    yield "1"


def page_by_code() -> Script:
    wrong = yield call_text(ToolCall("read_file", {"path": "minutes.txt"}))
    assert wrong.startswith("error: no such tool read_file; tools: bash, glob, read")
    code = "print('\\n'.join(f'line {n}' for n in range(3000)))"
    shown = yield call_text(ToolCall("bash", {"command": f'python3 -c "{code}"'}))
    assert ".spill/1.txt: read shows it from a line offset on" in shown and len(shown) <= 4000
    assert shown.startswith("line 0\n") and shown.endswith("line 2999")
    part = yield call_text(ToolCall("read", {"filePath": ".spill/1.txt", "offset": 1500, "limit": 2}))
    assert part.startswith("1500: line 1499\n1501: line 1500")
    yield "1"


@both_kinds
@pytest.mark.parametrize(
    ("script", "spec"), [(page_by_office, {"toolset": "full"}), (page_by_code, {"harness": "code"})]
)
def test_a_long_result_is_kept_whole_can_be_paged_and_is_no_change_of_the_world(run, kind, script, spec):
    result = run(script(), limits={"context": 30_000}, sandbox=kind, **spec)
    assert result["outcome"] == {"kind": "failed", "reason": "", "phase": "", "cause": ""}, result["turns"][
        -1
    ]
    assert result["answer"] == "1" and result["criteria"]
    assert all(criterion["met"] for criterion in result["criteria"] if criterion["gate"])


@pytest.mark.parametrize("kit", KITS)
def test_the_parent_of_the_trials_can_use_every_tool_of_a_kit(run, kit):
    assert run(action="warm", kit=kit)["warm"]


def test_results_are_json(run):
    json.dumps(run(says("1")))
