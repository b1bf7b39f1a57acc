"""A trial as an ATIF document: every token that was sampled is in it once, with its logprob, mask and version."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from atif_results import ENDINGS, READ, played

from system.harbor.atif import atif
from system.harbor.export import export
from system.record.metrics import JsonLines

by_ending = pytest.mark.parametrize("ending", ENDINGS)


def of(ending: str) -> tuple[dict[str, Any], Any]:
    texts, limits = ENDINGS[ending]
    return played(*texts, **limits)


def acts(document: Any) -> list[dict[str, Any]]:
    """The steps of the agent."""
    return [step for step in document["steps"] if step["source"] == "agent"]


@by_ending
def test_every_sampled_token_stands_once_with_logprob_mask_and_version(ending: str):
    result, engine = of(ending)
    metrics = [step["metrics"] for step in acts(atif(result))]
    assert [one["completion_token_ids"] for one in metrics] == engine.sampled
    for turn, one in enumerate(metrics, start=1):
        count = one["completion_tokens"]
        assert one["logprobs"] == [-0.25 - i / 64 for i in range(count)]
        assert (
            one["extra"]["loss_mask"] == [True] * count and one["extra"]["policy_version"] == [turn] * count
        )
        row = result["rows"][one["extra"]["row"]]["token_ids"]
        joined = [*one["prompt_token_ids"], *one["completion_token_ids"]]
        assert joined == list(row[: len(joined)]) and one["prompt_tokens"] == len(one["prompt_token_ids"])


@by_ending
def test_steps_are_numbered_from_one_and_calls_answered_within_theirs(ending: str):
    document = atif(of(ending)[0])
    assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
    assert [step["source"] for step in document["steps"][:2]] == ["system", "user"]
    called = [call["tool_call_id"] for step in acts(document) for call in step.get("tool_calls", [])]
    assert len(set(called)) == len(called)
    for step in acts(document):
        own = {call["tool_call_id"] for call in step.get("tool_calls", [])}
        for answer in step.get("observation", {"results": []})["results"]:
            assert answer.get("source_call_id") in (own or {None})
    assert document["final_metrics"]["total_steps"] == len(document["steps"])


@by_ending
def test_the_result_is_left_alone_and_the_document_is_json(ending: str):
    result, _ = of(ending)
    before = copy.deepcopy(result)
    document = atif(result, version="1", model="clerk")
    assert result == before
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["session_id"] == "t/1" and document["agent"] == {
        "name": "bartleby",
        "version": "1",
        "model_name": "clerk",
    }
    kept = {name: document["extra"][name] for name in ("outcome", "reward", "passed", "criteria", "task")}
    assert kept == {name: result[name] for name in kept}


def test_a_call_is_parted_from_what_was_said_and_from_the_reasoning():
    first, second = acts(atif(of("reasoned")[0]))
    assert first["reasoning_content"] == "It is in the notes." and first["message"] == "I look."
    assert first["tool_calls"] == [
        {"tool_call_id": "call-2", "function_name": "read_file", "arguments": {"path": "notes.txt"}}
    ]
    (answer,) = first["observation"]["results"]
    assert (
        answer["content"] == "Norvik fee: 4821" and not answer["extra"]["error"] and answer["extra"]["shown"]
    )
    assert second["reasoning_content"] == "So." and second["message"] == "4821" and "tool_calls" not in second


def test_an_unreadable_call_is_what_was_said_and_its_answer_has_no_call():
    first, second = acts(atif(of("unreadable, then answered")[0]))
    assert first["message"] == "<tool_call>{" and "tool_calls" not in first
    (answer,) = first["observation"]["results"]
    assert "source_call_id" not in answer and answer["extra"]["error"]
    assert second["message"] == "4821"


def test_a_turn_that_a_limit_cut_has_tokens_and_no_text():
    document = atif(of("cut by the turn cap")[0])
    last = acts(document)[-1]
    assert (
        last["message"] == ""
        and last["extra"] == {"cut": True}
        and last["metrics"]["completion_tokens"] == 60
    )
    assert document["extra"]["outcome"]["reason"] == "turn_cap"


def test_an_answer_that_was_not_shown_any_more_says_so():
    result, _ = of("out of context")
    assert result["outcome"]["reason"] == "context"
    shown = [step["observation"]["results"][0]["extra"]["shown"] for step in acts(atif(result))]
    assert shown[-1] is False and set(shown[:-1]) <= {True}


def test_a_trial_in_parts_is_told_part_after_part():
    """Each part has its own opening; a turn that was cut does not take a later part's text."""
    result, _ = of("cut by the turn cap")
    other, _ = of("answered")
    rows, turns, messages = len(result["rows"]), len(result["turns"]), len(result["messages"])
    joined = {
        **result,
        "rows": [*result["rows"], *other["rows"]],
        "turns": [*result["turns"], *({**turn, "row": turn["row"] + rows} for turn in other["turns"])],
        "messages": [*result["messages"], *other["messages"]],
        "steps": [
            {"name": "draft", "turns": [0, turns], "messages": [0, messages]},
            {
                "name": "send",
                "turns": [turns, turns + len(other["turns"])],
                "messages": [messages, messages + len(other["messages"])],
            },
        ],
    }
    document = atif(joined)
    assert [step["source"] for step in document["steps"]] == ["system", "user", *["agent"] * 2] * 2
    assert [step["step_id"] for step in document["steps"]] == list(range(1, 9))
    assert [step["message"] for step in acts(document)][1:] == ["", "", "4821"]
    assert [step["extra"]["step"] for step in document["steps"] if step["source"] == "user"] == [
        "draft",
        "send",
    ]
    assert (
        acts(document)[-1]["metrics"]["completion_token_ids"]
        == acts(atif(other))[-1]["metrics"]["completion_token_ids"]
    )


def test_a_system_error_has_no_trajectory():
    with pytest.raises(ValueError, match="^a trajectory must have messages, got none after system_error$"):
        atif({"outcome": {"kind": "system_error", "phase": "start", "cause": "bwrap not found"}})


def test_a_recorded_run_is_exported_trial_by_trial(tmp_path: Path):
    run, out = tmp_path / "run", tmp_path / "out"
    broken = {"trial_id": "t/2", "outcome": {"kind": "system_error", "phase": "start", "cause": "none"}}
    with JsonLines(run / "trajectories.jsonl") as lines:
        for ending in ENDINGS:
            lines.write({"arm": "mean", "seed": 0, **of(ending)[0]})
        lines.write(broken)
    done = subprocess.run(
        [sys.executable, "-m", "system.harbor.export", str(run), str(out)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parent.parent,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(ENDINGS)} trajectories in {out}; 1 trials ended before they had one\n"
    files = sorted(out.iterdir())
    assert [file.name for file in files] == [f"{n:06d}-t-1.json" for n in range(1, len(ENDINGS) + 1)]
    assert json.loads(files[0].read_text())["extra"]["arm"] == "mean"


def test_an_export_says_in_one_line_what_a_run_lacks(tmp_path: Path):
    with pytest.raises(ValueError, match="^run must hold trajectories.jsonl, got none in "):
        export(tmp_path, tmp_path / "out")
    result, _ = played(READ, "4821")
    del result["rows"]
    with JsonLines(tmp_path / "trajectories.jsonl") as lines:
        lines.write(result)
    with pytest.raises(ValueError, match="^a recorded trial must have 'rows', got line 1 of .* without$"):
        export(tmp_path, tmp_path / "out")
