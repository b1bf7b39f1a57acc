"""Triage of real trials: whatever is planted is found, with the line that shows it; the judge's word stands beside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import Script, says
from test_trial import READ, engine, run, tasks  # noqa: F401

from core.clue import CAUSES
from core.triage import clues_of
from system.harness.chat import ToolCall, call_text
from system.harness.connection import LOST
from system.record.opinion import question_of, spread_over_causes
from system.record.triage import SIGNS, examples, is_failure, page, sorted_out, trace_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

import triage  # noqa: E402

KNOBS: dict[str, Any] = {"signs": SIGNS, "repeats": 3, "slow_share": 0.5, "flood_share": 0.5}

IMPORT = call_text(ToolCall("run_code", {"code": "import no_such_package"}))
LONG = call_text(ToolCall("run_code", {"code": "print('x' * 5000)"}))
WRONG = call_text(ToolCall("read_file", {"page": "minutes.txt"}))
NOISY = call_text(ToolCall("run_code", {"code": "print('No module named pandas is no error here')"}))


def right_answer(task: Path) -> str:
    (check,) = [
        c for c in json.loads((task / "tests" / "checks.json").read_text()) if c["kind"] == "answer_number"
    ]
    return str(check["expected"])


Planted = dict[str, tuple[dict[str, Any], str, str]]


@pytest.fixture(scope="module")
def planted(run: Any, tasks: dict[str, Path]) -> Planted:  # noqa: F811
    """Trials that fail for a reason that is known: the result, its cause, the rule that must find it."""
    expected = right_answer(tasks["find"])
    slow = {"deadline_s": 1.5, "limits": {"turns": 20}}

    def played(script: Script | None, cause: str, rule: str, **spec: Any) -> tuple[dict[str, Any], str, str]:
        return run(script, **spec), cause, rule

    return {
        "missing": played(says(IMPORT, "1"), "dependency", "missing_package"),
        "cut": played(says(LONG, "1"), "harness", "cut_result", limits={"result_characters": 500}),
        "misused": played(says(WRONG, "1"), "policy", "misused_tool"),
        "unreadable": played(
            says("<tool_call>{", "<tool_call>{", "<tool_call>{"), "policy", "unreadable_call"
        ),
        "no call": played(says("1"), "policy", "no_call"),
        "wrong": played(says(READ, "1"), "policy", "nothing_else"),
        "again": played(says(READ, READ, READ, "1"), "policy", "same_call_again"),
        "strict": played(says(READ, f"{expected} of 12 items, {expected}"), "verifier", "near_miss"),
        "late verifier": played(says("1"), "verifier", "no_grade", verify_s=1e-5),
        "no tool": played(says("1"), "harness", "broke_in_start", toolset="nothing"),
        "no engine": played(None, "harness", "broke_in_agent", engine_address="/nowhere"),
        "slow engine": played(says(READ, 30.0, "1"), "harness", "slow_engine", **slow),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("missing", "cut", "misused", "unreadable", "no call", "wrong", "again"),
        *("strict", "late verifier", "no tool", "no engine", "slow engine"),
    ],
)
def test_what_is_planted_is_found_and_quoted(planted: Planted, name: str):
    result, cause, rule = planted[name]
    assert is_failure(result), result["outcome"]
    first, *_ = found = clues_of(trace_of(result), **KNOBS)
    assert (first.cause, first.rule) == (cause, rule), found
    assert first.quote.strip()
    if first.turn >= 0:
        turn = result["turns"][first.turn]
        assert turn["tool"] == first.tool
    if rule in ("missing_package", "misused_tool"):
        assert first.quote in result["turns"][first.turn]["result"].replace("\t", " ")


def test_a_tool_that_hangs_or_dies_is_the_tools_fault():
    """By the texts that the connection gives, which test_trial holds."""
    turn = {"tool": "peek", "arguments": {}, "error": True, "seconds": 1.0}
    line = {"outcome": {"kind": "failed"}, "reward": 0.0, "messages": [{"role": "assistant", "content": "-"}]}
    for text in (
        "error: no answer within 0.5 s; the call may have taken effect",
        LOST,
        "error: KeyError: 'sheet'",
    ):
        first, *_ = clues_of(trace_of({**line, "turns": [{**turn, "result": text}]}), **KNOBS)
        assert (first.cause, first.quote, first.tool) == ("tool", text, "peek")
    outcome = {"kind": "system_error", "phase": "agent", "cause": "ConnectionError: tool server exit 9"}
    assert clues_of(trace_of({"outcome": outcome}), **KNOBS)[0].cause == "tool"


def test_a_package_that_a_text_only_mentions_before_the_policy_goes_on_is_not_the_cause(run):  # noqa: F811
    result = run(says(NOISY, call_text(ToolCall("run_code", {"code": "print(1)"})), "1"))
    first, *more = clues_of(trace_of(result), **KNOBS)
    assert first.cause == "policy" and more[-1].rule == "missing_package" and more[-1].weight == 0


def test_turns_of_several_steps_keep_their_texts():
    """The first step's second turn was cut, and so has no message."""
    turn = {"tool": "", "arguments": {}, "result": "", "error": False}
    line = {
        "outcome": {"kind": "truncated", "reason": "turn_cap"},
        "turns": [{**turn, "tool": "read", "result": "1"}, turn, turn],
        "messages": [
            {"role": "assistant", "content": "a"},
            {"role": "tool", "content": "1"},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "c"},
        ],
        "steps": [{"turns": [0, 2], "messages": [0, 2]}, {"turns": [2, 3], "messages": [2, 4]}],
    }
    assert [step.said for step in trace_of(line).steps] == ["a", "", "c"]


@pytest.fixture(scope="module")
def folder(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with these trials, one that was solved and one that was cancelled."""
    place = tmp_path_factory.mktemp("triage")
    solved = {"trial_id": "s", "outcome": {"kind": "solved"}, "reward": 1.0}
    gone = {"trial_id": "c", "outcome": {"kind": "cancelled"}}
    lines = [solved, gone, *({"task": name, **result} for name, (result, _, _) in planted.items())]
    (place / "trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def test_the_script_writes_a_table_a_file_and_a_page_with_three_examples_of_each_cause(folder, planted):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "experiments" / "triage.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "12 of 14 trials did not earn 1" in done.stdout, done.stderr[-2000:]
    assert re.search(r"\| +core.triage$", done.stderr, re.M) and not re.search(
        r"\| +torch$", done.stderr, re.M
    )
    told = json.loads((folder / "triage.json").read_text())
    wanted = {cause: sum(c == cause for _, c, _ in planted.values()) for cause in CAUSES}
    assert {cause: row["count"] for cause, row in told["causes"].items()} == wanted
    text = (folder / "triage.md").read_text()
    assert text.count("\n**trial ") == sum(min(3, count) for count in wanted.values())
    assert "`error: ModuleNotFoundError: No module named 'no_such_package'`" in text


def test_examples_show_every_rule_before_one_twice(folder):
    told = triage.main(triage.Config(run=folder))
    shown = examples(told["failures"], "policy", most=5)
    assert len({failure["clues"][0]["rule"] for failure in shown}) == 5
    assert "## Tool" not in page(told, folder="x")


def test_causes_take_turns_in_what_a_judge_is_asked():
    failures = [{"trial_id": f"{cause}{n}", "cause": cause} for cause in ("policy", "tool") for n in range(3)]
    assert spread_over_causes(failures, most=4) == ["tool0", "policy0", "tool1", "policy1"]


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="run must be a folder with trajectories.jsonl"):
        triage.main(triage.Config(run=tmp_path))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("", "run must hold a trial that ended, got none in"),
        ('{"trial_id": "a"}\n', "line 1 must be a recorded trial, got one with KeyError: 'outcome'"),
    ],
)
def test_files_that_are_no_record_of_trials_are_refused(tmp_path, lines, told):
    (tmp_path / "trajectories.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=re.escape(told)):
        triage.main(triage.Config(run=tmp_path))


@pytest.mark.parametrize("options", [{"judge_most": -1}, {"repeats": 1}, {"slow_share": 0.0}])
def test_bad_options_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must"):
        triage.Config(run=tmp_path, **options)


def test_nothing_failed_is_no_error():
    solved = {"trial_id": "s", "outcome": {"kind": "solved"}, "reward": 1.0}
    told = sorted_out([solved], lambda _: [])
    assert told["failed"] == 0 and page(told, folder="x").startswith("# 0 of 1 trials did not earn 1")


# A second opinion


@pytest.fixture
def judge() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that blames the tool in every second reply, and else is no judge at all."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            broken = "no_such_package" in body["messages"][1]["content"]
            said = json.dumps({"cause": "dependency", "turn": 0, "reason": "It says so."})
            reply = json.dumps(
                {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}
            ).encode()
            self.send_response(200 if broken else 400)
            self.send_header("Content-Length", str(len(reply) if broken else 0))
            self.end_headers()
            self.wfile.write(reply if broken else b"")

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()


def test_a_judge_gives_a_second_opinion_without_seeing_the_first(folder, judge, tmp_path):
    endpoint, asked = judge
    config = triage.Config(
        run=folder, out=tmp_path, judge_endpoint=endpoint, judge_model="m", judge_side_by_side=2
    )
    told = triage.main(config)
    assert told["opinions"] == {"asked": 12, "answered": 1, "same": 1}
    assert all("missing_package" not in body["messages"][1]["content"] for body in asked)
    by_task = {failure["task"]: failure["opinion"] for failure in told["failures"]}
    assert by_task["missing"]["cause"] == "dependency" and by_task["wrong"]["reason"].startswith(
        "no answer: judge_"
    )
    assert "judge: dependency, It says so." in (tmp_path / "triage.md").read_text()


def test_a_question_is_fenced_and_fits(planted):
    result, *_ = planted["cut"]
    question = question_of({**result, "instruction": "END x " * 9000}, limit=6000)
    assert len(question.instructions) + len(question.evidence) <= 6000
    nonce = question.evidence.split("BEGIN ", 1)[1][:16]
    assert question.evidence.count(f"END {nonce}") == 5 and nonce in question.instructions
