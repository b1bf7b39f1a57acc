"""Demonstrations: what they show of the tools is, byte for byte, what the tools say in the written world."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from playing import call_tool, play

from system.harness.chat import ToolCall as ParsedCall
from system.harness.chat import call_text, parse_completion
from system.world.assignment import draw_assignment
from system.world.company import Company, make_company
from system.world.demonstration import Replies, carelessness, demonstration, draw_demonstration, step_text
from system.world.expert import SLIPS, BadCall, Expert, ToolCall, careful, read_instruction
from system.world.office import write_world

EVEN = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}


def look_ups(company: Company) -> list[ToolCall]:
    """Every look-up that an expert could make in the company, and some that find nothing."""
    calls = [ToolCall("read_mail", {"id": f"m{number}"}) for number in range(1, len(company.mails) + 1)]
    for source in company.sources:
        for fact in (*source.facts, company.source("mail").facts[0], company.sources[0].facts[0]):
            calls += {
                "xlsx": [ToolCall("read_sheet", {"path": source.name, "find": fact.label})],
                "pdf": [ToolCall("read_pdf", {"path": source.name, "find": fact.label})],
                "pptx": [ToolCall("read_slides", {"path": source.name, "find": fact.label})],
                "docx": [ToolCall("read_document", {"path": source.name, "find": fact.label})],
                "txt": [ToolCall("search_files", {"query": fact.label})],
                "mail": [ToolCall("search_mail", {"query": fact.label})],
                "chat": [ToolCall("read_channel", {"channel": source.name[1:], "find": fact.label})],
            }[source.kind]
    return calls


@pytest.mark.parametrize(("seed", "split"), [(0, "train"), (1, "train"), (2, "heldout"), (3, "heldout")])
def test_replies_are_what_the_tools_say_byte_for_byte(seed: int, split, tmp_path: Path):
    company = make_company(seed, split=split)
    root = write_world(company, tmp_path / "world")
    replies = Replies(company)
    for call in look_ups(company):
        assert replies.reply(call) == call_tool(root, call), call
    for fact in company.facts[::6]:
        call = ToolCall("search_files", {"query": fact.label})
        assert replies.reply(call) == call_tool(root, call), call


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_demonstrations_are_what_the_expert_sees_in_the_world(level: int, tmp_path: Path):
    company = make_company(level, split="train")
    rates = dict.fromkeys(SLIPS, 0.15)
    for index in range(4):
        root = write_world(company, tmp_path / str(index))
        task = draw_assignment(company, level=level, index=index)
        slips = (carelessness(random.Random(index), rates), carelessness(random.Random(index), rates))
        messages = demonstration(company, task, slips[0])
        answer, made = play(task.instruction, root, slip=slips[1])
        shown = [parse_completion(m["content"]).call for m in messages[1:-1:2]]
        replies = [m["content"] for m, call in zip(messages[2::2], shown) if call is not None]
        assert [call for call in shown if call is not None] == [call for call, _ in made]
        assert replies == [reply for _, reply in made]
        assert messages[-1] == {"role": "assistant", "content": answer}


def test_careful_demonstrations_end_in_the_right_answer_after_the_stated_number_of_calls():
    for seed in range(200):
        _, task, messages = draw_demonstration(seed, split="train", level_shares=EVEN, slip_rates={})
        roles = [message["role"] for message in messages]
        assert roles == ["user", *["assistant", "tool"] * task.calls, "assistant"]
        expected = next((c["expected"] for c in task.checks if c["kind"] == "answer_number"), "done")
        assert messages[-1]["content"] == str(expected)


def test_draw_demonstration_depends_on_the_seed_alone():
    rates = dict.fromkeys(SLIPS, 0.2)
    first = [draw_demonstration(s, split="train", level_shares=EVEN, slip_rates=rates)[2] for s in range(20)]
    second = [
        draw_demonstration(s, split="train", level_shares=EVEN, slip_rates=rates)[2]
        for s in range(19, -1, -1)
    ]
    assert first == second[::-1]


def test_step_text_is_what_the_harness_reads():
    call = ToolCall("write_file", {"path": "out.csv", "content": "Norvik fee,4821\n"})
    assert step_text(call) == call_text(ParsedCall(*call))
    assert parse_completion(step_text(call)).call == call
    assert parse_completion(step_text(BadCall(call))).error is not None


@pytest.mark.parametrize("kind", SLIPS)
def test_each_slip_changes_what_the_expert_does(kind: str):
    kinds: Counter[str] = Counter()
    for seed in range(60):
        company = make_company(seed, split="train")
        task = draw_assignment(company, level=3, index=seed)
        messages = demonstration(company, task, lambda asked: asked == kind)
        kinds["changed"] += messages != demonstration(company, task, careful)
    assert kinds["changed"] >= (20 if kind == "guess_code" else 55)


def test_a_careless_expert_asks_for_no_more_slips_than_it_names():
    asked: set[str] = set()
    for seed in range(80):
        company = make_company(seed, split="train")
        for level in (1, 2, 3, 4):
            task = draw_assignment(company, level=level, index=0)
            demonstration(company, task, lambda kind: bool(asked.add(kind)))
    assert asked == set(SLIPS)


def test_expert_reads_every_item_of_an_instruction():
    family, items = read_instruction(
        "Set Norvik fee in fees.xlsx to the value in report.pdf. "
        "Set Balden claim in fees.xlsx to the value in #team. Answer with done."
    )
    assert family == "edit"
    assert items == [("Norvik fee", "report.pdf", "fees.xlsx"), ("Balden claim", "#team", "fees.xlsx")]


@pytest.mark.parametrize("text", ["Sing a song.", "Find nothing at all. Answer with the number.", ""])
def test_expert_refuses_an_instruction_of_no_family(text: str):
    with pytest.raises(ValueError, match="instruction must begin with Find, Add, Set or Write"):
        Expert(text)


def test_demonstration_contents_are_short():
    longest = 0
    for seed in range(300):
        _, _, messages = draw_demonstration(seed, split="train", level_shares=EVEN, slip_rates={})
        longest = max(
            longest, *(len(message["content"]) for message in messages if message["role"] == "tool")
        )
        json.dumps(messages)
    assert longest < 140
