"""The tools of the set `full`, over files made by the real libraries; what protects the tool server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, cast
from zipfile import ZipFile

import docx
import openpyxl
import pptx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import Client, StdioServerParameters, stdio_client
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pydantic import TypeAdapter, ValidationError
from test_tools import write_calendar, write_deck, write_fees, write_mailbox, write_memo, write_report

from system.tools import code, confine
from system.tools.arguments import KINDS, NO_ROWS, Argument, Rows, read_arguments
from system.tools.calculation import calculate
from system.tools.conditions import read_condition
from system.tools.formulas import Area, NotComputable, Place, Value
from system.tools.ranking import Ranking, words
from system.tools.registration import tool
from system.tools.results import RESULT_LIMIT
from system.tools.server import build_server, expected_tools, serve_tools, tools_of
from system.tools.splice import occurrences, spliced

FULL = tools_of("full")

Call = Callable[..., str]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small company; each file is written by the library that an office would use."""
    root = tmp_path_factory.mktemp("pristine") / "world"
    (root / "chat").mkdir(parents=True)
    write_fees(root / "fees.xlsx")
    write_report(root / "report.pdf")
    write_deck(root / "deck.pptx")
    write_memo(root / "memo.docx")
    write_mailbox(root / "mail.mbox")
    write_calendar(root / "calendar.ics")
    messages = [{"time": "2026-03-02T09:00:00", "user": "ana", "text": "Good morning"}]
    (root / "chat" / "deals.json").write_text(json.dumps(messages))
    (root / "notes.txt").write_text("Kept by Ana\nPervik fee: 437\nNothing else\n")
    return root


@pytest.fixture
def world(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the company for one test."""
    return shutil.copytree(pristine, tmp_path / "world")


@pytest.fixture
def do(world: Path) -> Call:
    """Call a tool that must succeed; gives its text."""

    def call(name: str, /, **arguments: object) -> str:
        text, failed = FULL[name].call(world, arguments)
        assert not failed, text
        return text

    return call


@pytest.fixture
def fail(world: Path) -> Call:
    """Call a tool that must fail; gives its line."""

    def call(name: str, /, **arguments: object) -> str:
        text, failed = FULL[name].call(world, arguments)
        assert failed and text.startswith("error: ") and "\n" not in text, text
        return text

    return call


# the sets


def listed(toolset: str) -> list[Any]:
    async def ask() -> list[Any]:
        async with Client(build_server(Path("."), toolset)) as client:
            return (await client.list_tools()).tools

    return asyncio.run(ask())


def test_brief_is_byte_for_byte_what_the_clerk_was_made_for() -> None:
    text = json.dumps([(each.name, each.description, each.input_schema) for each in listed("brief")])
    assert hashlib.sha256(text.encode()).hexdigest().startswith("6f51084c21be6c1d498e47bfb0502c73")


def test_full_has_every_tool_of_brief_and_every_argument_of_it() -> None:
    brief = tools_of("brief")
    assert len(FULL) == 41 and set(brief) <= set(FULL)
    for name, each in brief.items():
        offered = {argument.name for argument in FULL[name].arguments}
        needed = {argument.name for argument in FULL[name].arguments if argument.needed}
        assert {argument.name for argument in each.arguments} <= offered, name
        assert needed <= {argument.name for argument in each.arguments}, name


@pytest.mark.parametrize("toolset", ["brief", "full"])
def test_a_server_lists_the_expected_tools_with_flat_schemas_and_says_which_only_read(toolset: str) -> None:
    tools = listed(toolset)
    assert tuple(each.name for each in tools) == expected_tools(toolset)
    for each in tools:
        assert each.description and "\n" not in each.description
        for schema in each.input_schema["properties"].values():
            assert schema["type"] in ("string", "integer", "boolean", "array"), each.name
            assert schema.get("items", {"type": "string"})["type"] in ("string", "array"), each.name
        reads = re.match(r"(list|read|find|search|filter)", each.name) is not None
        assert each.annotations.read_only_hint is reads, each.name


def test_another_set_is_refused() -> None:
    with pytest.raises(ValueError, match='toolset must be "brief" or "full", got \'half\''):
        expected_tools("half")


def test_a_long_result_is_shortened_by_what_the_server_was_given(world: Path) -> None:
    (world / "long.txt").write_text("line\n" * 50_000)

    async def read(**how: Any) -> str:
        async with Client(build_server(world, "full", **how)) as client:
            (content,) = (await client.call_tool("read_file", {"path": "long.txt"})).content
        assert content.type == "text"
        return content.text

    assert RESULT_LIMIT < len(asyncio.run(read())) + 10 < RESULT_LIMIT + 200
    assert asyncio.run(read(shorten=lambda text: f"{len(text)} characters")) == "249999 characters"


def test_a_tool_that_takes_too_long_is_broken_off(world: Path) -> None:
    def dawdle(root: Path) -> str:
        """Dawdle."""
        time.sleep(30)
        return "done"

    slow = tool(dawdle, limit_s=0.05)
    begun = time.monotonic()
    assert slow.call(world, {}) == ("error: dawdle must end within 0.05 s", True)
    assert time.monotonic() - begun < 5

    async def through_client() -> str:
        async with Client(serve_tools(world, {"dawdle": slow})) as client:
            (content,) = (await client.call_tool("dawdle", {})).content
        return cast(Any, content).text

    assert asyncio.run(through_client()) == "error: dawdle must end within 0.05 s"


# every tool says what it did

DONE: list[tuple[str, dict[str, Any], str]] = [
    ("list_files", {"path": "chat"}, "chat/deals.json 72"),
    (
        "read_file",
        {"path": "notes.txt", "start": 2, "lines": 1},
        "Pervik fee: 437\n[lines 2 to 2 of 3; go on with start=3]",
    ),
    ("write_file", {"path": "a/b.md", "content": "x\ny\n"}, "wrote 4 bytes to a/b.md"),
    ("write_file", {"path": "a/b.md", "content": "z\n", "append": "true"}, "added 2 bytes to a/b.md, now 6"),
    ("edit_file", {"path": "a/b.md", "old": "y\nz", "new": "w"}, "replaced 1 time in a/b.md"),
    ("copy_file", {"path": "a/b.md", "to": "c/d.md"}, "copied a/b.md to c/d.md, 4 bytes"),
    ("move_file", {"path": "c/d.md", "to": "d.md"}, "moved c/d.md to d.md"),
    ("delete_file", {"path": "d.md"}, "deleted d.md, 4 bytes"),
    ("delete_file", {"path": "c"}, "deleted folder c"),
    ("find", {"query": "zebra"}, "no match"),
    ("search_files", {"query": "pervik fee"}, "notes.txt: Pervik fee: 437"),
    ("read_sheet", {"path": "fees.xlsx", "range": "A5:B5"}, "A5: Total | B5: 4910.5 (=SUM(B2:B4))"),
    (
        "list_sheets",
        {"path": "fees.xlsx"},
        "Fees: A1:C7, 7 rows; A1: Item | B1: Value | C1: Due\n"
        "About: A1:B1, 1 rows; A1: Half of all | B1: 2455.25 (=Fees!B5/2)",
    ),
    (
        "filter_rows",
        {"path": "fees.xlsx", "where": ["value > 70", "Item contains fee"], "columns": ["Item", "B"]},
        "A1: Item | B1: Value\nA2: Norvik fee | B2: 4821\nA3: Balden fee | B3: 77\n2 of 6 rows",
    ),
    (
        "create_sheet",
        {"path": "s.xlsx", "rows": [["Item", "Fee"], ["Norvik", 12.5], ["Total", "=SUM(B2:B2)"]]},
        "created s.xlsx, sheet Sheet1: wrote 3 rows at A1:B3; B3 12.5 (=SUM(B2:B2))",
    ),
    (
        "add_sheet",
        {"path": "s.xlsx", "sheet": "Two", "rows": "a,=Sheet1!B3*2"},
        "added sheet Two to s.xlsx: wrote 1 rows at A1:B1; B1 25 (=Sheet1!B3*2); sheets: Sheet1, Two",
    ),
    ("edit_cell", {"path": "s.xlsx", "cell": "B2", "value": 3}, "B2: 12.5 -> 3"),
    ("read_sheet", {"path": "s.xlsx", "sheet": "Two"}, "Two!A1: a | B1: 6 (=Sheet1!B3*2)"),
    (
        "edit_range",
        {"path": "s.xlsx", "cell": "D1", "rows": '[[1,2],[3,"=D1+E1"]]'},
        "Sheet1: wrote 2 rows at D1:E2; E2 3 (=D1+E1)",
    ),
    ("append_rows", {"path": "s.xlsx", "rows": [["end"]]}, "Sheet1: wrote 1 rows at A4:A4"),
    ("read_pdf", {"path": "report.pdf", "find": "kalhem"}, "Kalhem fee 858\n[page 1 of 1]"),
    ("search_pdf", {"path": "report.pdf", "query": "kalhem"}, "page 1: Kalhem fee 858"),
    (
        "read_pdf_tables",
        {"path": "report.pdf"},
        "table 1 of 1, 2 rows:\nCorden fee | 17 | Cortem fee | 5663\nKalhem fee | 858 | Jaskar fee | 3767",
    ),
    ("read_slides", {"path": "deck.pptx", "slide": 1}, "slide 1: Welcome\nslide 1: Tavdor Partners"),
    ("create_slides", {"path": "p.pptx", "title": "Hi"}, "created p.pptx with 1 slide; add_slide adds more"),
    ("add_slide", {"path": "p.pptx", "title": "End"}, "added slide 2 of 2 to p.pptx: End"),
    (
        "add_slide",
        {
            "path": "p.pptx",
            "title": "Mid",
            "text": "- a\n  - b",
            "rows": [["x", 1]],
            "notes": "say",
            "position": 2,
        },
        "added slide 2 of 3 to p.pptx: Mid",
    ),
    ("edit_slides", {"path": "p.pptx", "old": "End", "new": "Close"}, "replaced 1 time in p.pptx"),
    ("delete_slide", {"path": "p.pptx", "slide": 1}, "removed slide 1 from p.pptx; 2 left"),
    (
        "read_slides",
        {"path": "p.pptx"},
        "slide 1: Mid\nslide 1: a\nslide 1: b\nslide 1: x | 1\nslide 1 notes: say\nslide 2: Close",
    ),
    (
        "create_document",
        {"path": "n.docx", "text": "# Memo\nhello\n- one\n1. two\n| a | b |\n|---|---|\n| 1 | |"},
        "created n.docx: 4 paragraphs, 1 tables",
    ),
    ("append_document", {"path": "n.docx", "text": "more"}, "added to n.docx: 1 paragraphs, 0 tables"),
    ("edit_document", {"path": "n.docx", "old": "hello", "new": "Goodbye"}, "replaced 1 time in n.docx"),
    ("read_document", {"path": "n.docx"}, "# Memo\nGoodbye\n- one\n- two\na | b\n1 | \nmore"),
    ("list_mail", {"start": 3}, "m3 | no date | a@b.example | Gebühr"),
    ("search_mail", {"sender": "gus", "query": "claim"}, "m1 | no date | gus@kalfur.example | Jaslin claim"),
    (
        "send_mail",
        {"to": "Ana <ana@x.example>", "subject": "Hi", "body": "From now\non", "attachments": ["notes.txt"]},
        "sent m4 to ana@x.example: Hi, attached: notes.txt",
    ),
    (
        "read_mail",
        {"id": "m4"},
        "From: office@world.example\nTo: ana@x.example\nDate: Thu, 01 Jan 2026 00:01:00 +0000\nSubject: Hi\n"
        "Attachments: notes.txt (41 bytes)\n\nFrom now\non",
    ),
    ("save_attachment", {"id": "m4", "name": "notes.txt", "path": "s/n.txt"}, "saved 41 bytes as s/n.txt"),
    (
        "reply_mail",
        {"id": "m1", "body": "ok", "all": True},
        "sent m5 to gus@kalfur.example: Re: Jaslin claim",
    ),
    ("list_channels", {}, "deals: 1 messages"),
    ("post_message", {"channel": "deals", "text": "hi"}, "posted to deals, now 2 messages: hi"),
    ("read_channel", {"channel": "#deals"}, "2026-03-02 09:00 ana: Good morning\n2026-03-02 09:01 me: hi"),
    (
        "create_event",
        {"summary": "New", "start": "2026-03-02 12:00", "location": "here", "attendees": ["a@b.example"]},
        "created event: 2026-03-02 12:00 - 2026-03-02 13:00 New, here, a@b.example",
    ),
    (
        "list_events",
        {"after": "2026-03-02 10:00", "before": "2026-03-04"},
        "2026-03-02 12:00 - 2026-03-02 13:00 New, here, a@b.example\n2026-03-03 10:00 Pervik hearing",
    ),
    ("run_code", {"code": "print(4821+77)", "seconds": 20}, "4898"),
    ("run_code", {"code": "a = 1"}, "no output"),
]


def test_every_tool_says_what_it_did_and_never_nothing(world: Path) -> None:
    assert {name for name, _, _ in DONE} == set(FULL)

    async def through_client() -> list[tuple[str, bool]]:
        answers = []
        async with Client(build_server(world, "full")) as client:
            for name, arguments, _ in DONE:
                result = await client.call_tool(name, arguments)
                (content,) = result.content
                answers.append((cast(Any, content).text, bool(result.is_error)))
        return answers

    for (name, arguments, expected), answer in zip(DONE, asyncio.run(through_client()), strict=True):
        assert answer == (expected, False), (name, arguments)


# arguments

NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(NESTED, st.sampled_from([str, int, bool, list[str], Rows]))
def test_any_value_is_read_as_its_kind_or_refused_in_one_line(value: object, kind: Any) -> None:
    argument = Argument("it", KINDS[kind], "", True)
    try:
        read = read_arguments("a_tool", (argument,), {"it": value})["it"]
    except ValueError as error:
        assert str(error).startswith(f"it must be {KINDS[kind].name}, got ") and len(str(error)) < 200
    else:
        TypeAdapter(kind).validate_python(read, strict=True)


@given(st.integers() | st.text(max_size=6) | st.floats(allow_nan=False) | st.booleans() | st.none())
def test_integers_are_read_as_pydantic_reads_them(value: object) -> None:
    argument = Argument("it", KINDS[int], "", False, 5)
    try:
        expected: object = TypeAdapter(int).validate_python(value)
    except ValidationError:
        expected = None
    try:
        assert read_arguments("a_tool", (argument,), {"it": value}) == {"it": expected}
    except ValueError:
        assert expected is None
    assert read_arguments("a_tool", (argument,), {}) == {"it": 5}


@pytest.mark.parametrize(
    ("written", "rows"),
    [
        ([["a", 1, None, True, 2.5]], [["a", "1", "", "TRUE", "2.5"]]),
        ('[["a", 1], ["b"]]', [["a", "1"], ["b"]]),
        ('a,1\n"b, c",2', [["a", "1"], ["b, c", "2"]]),
        ("a\t1\nb\t2", [["a", "1"], ["b", "2"]]),
        (["a", "b"], [["a"], ["b"]]),
        ("", []),
    ],
)
def test_rows_are_read_however_a_model_writes_them(written: object, rows: Rows) -> None:
    assert read_arguments("t", (Argument("rows", KINDS[Rows], "", True),), {"rows": written}) == {
        "rows": rows
    }
    assert NO_ROWS == []


def test_a_path_that_leaves_the_world_is_refused_by_every_tool(world: Path) -> None:
    (world.parent / "secret.txt").write_text("secret")
    (world / "link.txt").symlink_to(world.parent / "secret.txt")
    (world / "away").symlink_to(world.parent)
    before = sorted(world.parent.iterdir())
    filled = {str: "x", int: 1, bool: True, list[str]: ["x = 1"], Rows: [["x"]]}
    for name, each in FULL.items():
        arguments = {a.name: next(v for k, v in filled.items() if KINDS[k] is a.kind) for a in each.arguments}
        for place in {"path", "to", "attachments", "channel"} & arguments.keys():
            for path in (
                "../secret.txt",
                "/etc/passwd",
                "chat/../../secret.txt",
                "link.txt",
                "away/secret.txt",
            ):
                own = (
                    {"path": "notes.txt"}
                    if place == "to"
                    else {"to": ["a@b.example"]}
                    if place == "attachments"
                    else {}
                )
                own |= {
                    "cc": ["a@b.example"],
                    "id": "m1",
                    "order": "layout",
                    "start": 1 if name != "create_event" else "2026-01-01",
                }
                asked = arguments | {k: v for k, v in own.items() if k in arguments}
                text, failed = each.call(world, asked | {place: [path] if place == "attachments" else path})
                assert failed, (name, place, path, text)
                assert (
                    "path must" in text or "to must" in text or "channel" in text or "no attachment" in text
                ), text
    assert sorted(world.parent.iterdir()) == before
    assert (world.parent / "secret.txt").read_text() == "secret"
    assert FULL["search_files"].call(world, {"query": "secret"}) == ("no match", False)


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("read_file", {"path": "notes.txt", "start": 9}, "start must be from 1 to 3, got 9"),
        ("read_file", {"path": "deck.pptx"}, "deck.pptx is not a text file; use read_slides"),
        (
            "write_file",
            {"path": "a.xlsx", "content": ""},
            "path must be a text file, got a.xlsx; use create_sheet",
        ),
        ("edit_file", {"path": "notes.txt", "old": "e", "new": ""}, "old must occur once, got 6 times"),
        ("edit_file", {"path": "notes.txt", "old": "zebra", "new": ""}, "old must be a text of notes.txt"),
        (
            "copy_file",
            {"path": "notes.txt", "to": "fees.xlsx"},
            "path must be new, got fees.xlsx, which exists",
        ),
        ("move_file", {"path": "notes.txt", "to": "notes.xlsx"}, "to must end with .txt, got notes.xlsx"),
        ("delete_file", {"path": "."}, "path must not be the whole world"),
        ("delete_file", {"path": "chat"}, "chat is a folder that is not empty"),
        ("find", {"query": " "}, "query must not be empty"),
        ("find", {"query": "a", "count": 0}, "count must be from 1 to 20, got 0"),
        ("filter_rows", {"path": "fees.xlsx", "where": "Fee > 3"}, "condition must be like Fee >= 100"),
        ("filter_rows", {"path": "fees.xlsx", "where": 3}, "where must be a list of strings, got 3"),
        ("create_sheet", {"path": "fees.xlsx"}, "path must be new, got fees.xlsx, which exists"),
        ("create_sheet", {"path": "n.xlsx", "rows": [["=SUM((A1"]]}, "formula must have matching brackets"),
        ("create_sheet", {"path": "n.xlsx", "sheet": "a/b"}, "sheet must have 1 to 31 characters"),
        ("create_sheet", {"path": "n.txt"}, "path must end with .xlsx, got n.txt"),
        (
            "create_sheet",
            {"path": "n.xlsx", "rows": [["x"] * 300] * 300},
            "rows must have at most 50000 cells",
        ),
        ("add_sheet", {"path": "fees.xlsx", "sheet": "about"}, "sheet must have a new name, got about"),
        ("edit_range", {"path": "fees.xlsx", "cell": "XFD1", "rows": "a,b"}, "rows must fit into the sheet"),
        ("read_pdf", {"path": "report.pdf", "order": "up"}, "order must be layout or columns, got up"),
        ("read_pdf_tables", {"path": "report.pdf", "page": 2}, "page must be from 1 to 1, got 2"),
        ("search_pdf", {"path": "report.pdf", "query": ""}, "query must not be empty"),
        ("read_slides", {"path": "deck.pptx", "slide": 3}, "slide must be from 1 to 2, got 3"),
        (
            "add_slide",
            {"path": "deck.pptx", "title": "x", "position": 9},
            "position must be from 0 to 3, got 9",
        ),
        ("edit_slides", {"path": "deck.pptx", "old": "fee", "new": "x"}, "old must occur once, got 3 times"),
        ("delete_slide", {"path": "deck.pptx", "slide": 0}, "slide must be from 1 to 2, got 0"),
        ("edit_document", {"path": "memo.docx", "old": "", "new": "x"}, "old must not be empty"),
        (
            "edit_document",
            {"path": "memo.docx", "old": "x\ny", "new": "x"},
            "old must be a text within one paragraph",
        ),
        ("read_mail", {"id": "m9"}, "no such mail m9; ids: m1 to m3"),
        ("search_mail", {"after": "soon"}, "after must be a date like 2026-03-02, got soon"),
        ("save_attachment", {"id": "m1", "name": "x"}, "no attachment x in m1; attachments: none"),
        ("send_mail", {"to": "ana", "subject": "", "body": ""}, "to must be mail addresses, got ana"),
        ("send_mail", {"to": [], "subject": "", "body": ""}, "to must be mail addresses, got none"),
        ("post_message", {"channel": "x", "text": "y"}, "no such channel x; channels here: deals"),
        ("post_message", {"channel": "deals", "text": " "}, "text must not be empty"),
        ("create_event", {"summary": "x", "start": "soon"}, "start must be like 2026-03-02 09:00, got soon"),
        (
            "create_event",
            {"summary": "x", "start": "2026-03-02 09:00", "end": "2026-03-01 09:00"},
            "end must be after start, got 2026-03-01 09:00",
        ),
        ("run_code", {"code": "1", "seconds": 61}, "seconds must be from 1 to 60, got 61"),
        ("run_code", {"code": "while True: pass", "seconds": 1}, "code must end within 1 s"),
    ],
)
def test_a_bad_call_is_one_line_and_changes_nothing(
    world: Path, fail: Call, name: str, arguments: dict[str, object], line: str
) -> None:
    before = {path: path.read_bytes() for path in world.rglob("*") if path.is_file()}
    assert fail(name, **arguments).startswith(f"error: {line}")
    assert {path: path.read_bytes() for path in world.rglob("*") if path.is_file()} == before


# formulas

CELLS: dict[str, Value] = {
    **{
        "A1": "Item",
        "B1": "Fee",
        "A2": "Norvik",
        "B2": 10.0,
        "A3": "Balden",
        "B3": 20.0,
        "A4": "nora",
        "B4": 30.0,
    },
    **{"C1": 46083.0, "C2": True, "C3": "#N/A", "C4": "7", "D1": -3.5},
}


def contents(area: Area) -> dict[Place, Value]:
    spelt = (
        {f"{chr(64 + place.column)}{place.row}": place for place in area.places()} if area.size < 99 else {}
    )
    return {place: CELLS[name] for name, place in spelt.items() if name in CELLS}


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("=1+2*3^2", 19.0),
        ("=-2^2", 4.0),
        ("=2^3^2", 64.0),
        ("=50%*4", 2.0),
        ("=(1+2)*3-4/2", 7.0),
        ('="a"&1&TRUE&1.5', "a1TRUE1.5"),
        ('="A"="a"', True),
        ("=1<2", True),
        ('=IF(B2>5,"big","small")', "big"),
        ("=IF(FALSE,1)", False),
        ("=IF(TRUE,,1)", 0.0),
        ("=IF(TRUE,1,1/0)", 1.0),
        ("=1/0", "#DIV/0!"),
        ("=C3+1", "#N/A"),
        ("=IFERROR(C3,5)", 5.0),
        ("=IFNA(1/0,5)", "#DIV/0!"),
        ("=ISERROR(1/0)", True),
        ("=SUM(B1:B4,1,C2)", 61.0),
        ("=SUM(C1:C4)", "#N/A"),
        ("=COUNT(B1:B4)", 3.0),
        ("=COUNTA(A1:B4)", 8.0),
        ("=COUNTBLANK(D1:D4)", 3.0),
        ("=AVERAGE(B2:B4)", 20.0),
        ("=AVERAGE(D2:D4)", "#DIV/0!"),
        ("=MEDIAN(B2:B4,100)", 25.0),
        ("=MIN(B2:B4)+MAX(B2:B4)", 40.0),
        ("=LARGE(B2:B4,2)", 20.0),
        ("=RANK(30,B2:B4)", 1.0),
        ("=STDEV(B2:B4)", 10.0),
        ("=ROUND(2.675,2)", 2.68),
        ("=ROUND(-2.5,0)", -3.0),
        ("=ROUND(1234,-2)", 1200.0),
        ("=ROUNDUP(2.1,0)+ROUNDDOWN(2.9,0)", 5.0),
        ("=INT(D1)", -4.0),
        ("=MOD(-7,3)", 2.0),
        ("=CEILING(7,5)+FLOOR(7,5)", 15.0),
        ("=SQRT(-1)", "#NUM!"),
        ("=ABS(D1)", 3.5),
        ('=SUMIF(A2:A4,"nor*",B2:B4)', 40.0),
        ('=SUMIF(B2:B4,">=20")', 50.0),
        ('=SUMIF(B2:B4,"<>20")', 40.0),
        ('=COUNTIF(A1:A4,"norvik")', 1.0),
        ('=COUNTIF(D1:D4,"")', 3.0),
        ('=AVERAGEIF(B2:B4,"<30")', 15.0),
        ('=SUMIFS(B2:B4,A2:A4,"n*",B2:B4,">10")', 30.0),
        ('=COUNTIFS(A2:A4,"n*",B2:B4,">5")', 2.0),
        ('=MAXIFS(B2:B4,A2:A4,"n*")', 30.0),
        ("=SUMPRODUCT(B2:B4,B2:B4)", 1400.0),
        ('=VLOOKUP("balden",A2:B4,2,FALSE)', 20.0),
        ('=VLOOKUP("zebra",A2:B4,2,FALSE)', "#N/A"),
        ("=VLOOKUP(25,B2:B4,1)", 20.0),
        ('=XLOOKUP("nora",A2:A4,B2:B4)', 30.0),
        ('=INDEX(B2:B4,MATCH("nora",A2:A4,0))', 30.0),
        ("=INDEX(A1:B4,9,1)", "#REF!"),
        ("=SUM(INDEX(A1:B4,0,2))", 60.0),
        ("=MATCH(25,B2:B4)", 2.0),
        ('=LEFT("Norvik",3)&RIGHT("Norvik",2)&MID("Norvik",2,2)', "Norikor"),
        ('=LEN(TRIM("  a   b "))', 3.0),
        ('=UPPER("a")&LOWER("B")&PROPER("ab")', "AbAb"),
        ('=SUBSTITUTE("a-b-c","-","")', "abc"),
        ('=FIND("b","abc")+SEARCH("B","abc")', 4.0),
        ('=TEXTJOIN(", ",TRUE,A2:A4)', "Norvik, Balden, nora"),
        ("=VALUE(C4)+1", 8.0),
        ("=DATE(2026,3,2)", 46083.0),
        ("=YEAR(C1)*10000+MONTH(C1)*100+DAY(C1)", 20260302.0),
        ("=EDATE(DATE(2026,1,31),1)-DATE(2026,2,28)", 0.0),
        ("=DAY(EOMONTH(C1,0))", 31.0),
        ("=AND(TRUE,B2=10)", True),
        ("=OR(FALSE,NOT(TRUE))", False),
        ("=ISBLANK(D2)", True),
        ("=D2", 0.0),
        ("=10^400", "#NUM!"),
        ('=D2&"x"', "x"),
        ("=NPV(0.1,110,121)", 200.0),
        ("=ROUND(PMT(0.01,12,-1000),4)", 88.8488),
        ("=A2*1", "#VALUE!"),
        ("=_xlfn.CONCAT(A2,A3)", "NorvikBalden"),
    ],
)
def test_a_formula_of_an_office_has_its_value(formula: str, value: Value) -> None:
    found = calculate(formula, "S", contents)
    assert type(found) is type(value)
    assert found == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    "formula",
    [
        "=FOO(1)",
        "=name",
        "=A1:B2",
        "=SUM(B1:B2 B2)",
        "=ROUND()",
        "=ROUND(1,2,3)",
        "=OFFSET(A1,1,1)",
        "={1,2}",
        "=SUM(S2!A1",
        "=+",
        "=SUM(B:B*2)",
    ],
)
def test_what_is_not_known_is_not_computed(formula: str) -> None:
    with pytest.raises(NotComputable):
        calculate(formula, "S", contents)


def test_an_edit_recalculates_lookups_conditions_and_dates(world: Path, do: Call) -> None:
    do(
        "edit_range",
        path="fees.xlsx",
        cell="E1",
        rows=[['=IF(B3>90,"high","low")', "=C2+30", "=FOO(B3)"]],
        sheet="Fees",
    )
    do("edit_cell", path="fees.xlsx", cell="B3", value="100")
    do("edit_cell", path="fees.xlsx", cell="B2", value="5000")
    shown = do("read_sheet", path="fees.xlsx", range="B7:G7")
    assert shown == 'B7: 5000 (=VLOOKUP("Norvik fee",A2:B4,2,FALSE))'
    assert do("read_sheet", path="fees.xlsx", range="E1:G1") == (
        'E1: high (=IF(B3>90,"high","low")) | F1: 46113 (=C2+30) | G1: stale (=FOO(B3))'
    )
    values = openpyxl.load_workbook(world / "fees.xlsx", data_only=True)["Fees"]
    assert [values[cell].value for cell in ("B7", "E1", "F1", "G1")] == [5000, "high", 46113, None]


# sheets


def test_a_new_sheet_is_read_by_another_library_and_leaves_the_other_parts_alone(
    world: Path, do: Call
) -> None:
    before = {
        i.filename: ZipFile(world / "fees.xlsx").read(i) for i in ZipFile(world / "fees.xlsx").infolist()
    }
    do("add_sheet", path="fees.xlsx", sheet="Plan & more", rows=[["a", "=Fees!B5"], ["", 2]])
    with ZipFile(world / "fees.xlsx") as archive:
        changed = {name for name in archive.namelist() if before.get(name) != archive.read(name)}
    assert changed == {
        "[Content_Types].xml",
        "xl/workbook.xml",
        "xl/_rels/workbook.xml.rels",
        "xl/worksheets/sheet3.xml",
    }
    book = openpyxl.load_workbook(world / "fees.xlsx", data_only=True)
    assert book.sheetnames == ["Fees", "About", "Plan & more"]
    assert [cell.value for row in book["Plan & more"]["A1:B2"] for cell in row] == ["a", 4910.5, None, 2]
    assert book["Fees"]["C2"].value == datetime(2026, 3, 2)


def test_many_rows_are_written_in_a_moment(do: Call) -> None:
    begun = time.process_time()
    rows = [[f"item {n}", n, f"=B{n}*2"] for n in range(1, 2001)]
    assert do("create_sheet", path="big.xlsx", rows=rows).startswith(
        "created big.xlsx, sheet Sheet1: wrote 2000 rows"
    )
    assert time.process_time() - begun < 5
    assert do("filter_rows", path="big.xlsx", where=["C > 3990"], header=1).endswith("5 of 1999 rows")


def test_cells_that_leave_their_place_unsaid_are_edited_where_they_stand(world: Path, do: Call) -> None:
    with ZipFile(world / "fees.xlsx") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    sheet = parts["xl/worksheets/sheet1.xml"]
    parts["xl/worksheets/sheet1.xml"] = re.sub(rb'(<(?:row|c)) r="[^"]*"', rb"\1", sheet)
    with ZipFile(world / "unsaid.xlsx", "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    assert do("edit_cell", path="unsaid.xlsx", cell="B2", value="1") == "B2: 4821 -> 1"
    assert do("read_sheet", path="unsaid.xlsx", range="A2:B6").split("\n")[::3] == [
        "A2: Norvik fee | B2: 1",
        "A5: Total | B5: 90.5 (=SUM(B2:B4))",
    ]
    assert openpyxl.load_workbook(world / "unsaid.xlsx", data_only=True)["Fees"]["B5"].value == 90.5


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("Fee >= 100", 100.0, True),
        ("fee>100", 100.0, False),
        ("B = 7", "7", True),
        ("Fee != 7", None, True),
        ("Fee = 5%", 0.05, True),
        ("Fee < 1,000", 999.0, True),
        ('"Fee total" contains vik', "Norvik", True),
        ("Fee total starts with nor", "Norvik", True),
        ("Fee is empty", None, True),
        ("Fee is not empty", 0.0, True),
        ("Fee > 5", None, False),
        ("Fee >= 2026-03-02", datetime(2026, 3, 2), True),
        ("Fee < 2026-03-02", datetime(2026, 3, 2, 9), False),
        ("Fee = 'nor vik'", "Nor Vik", True),
    ],
)
def test_a_condition_holds_or_not(text: str, value: object, holds: bool) -> None:
    assert read_condition(text, {2: "Fee", 3: "Fee total"}, columns=3).holds(value) is holds


# documents and slides


def test_a_correction_keeps_the_formatting_and_reaches_tables_and_headers(world: Path, do: Call) -> None:
    document: Any = docx.Document()
    paragraph = document.add_paragraph("The ")
    paragraph.add_run("Norvik").bold = True
    paragraph.add_run(" fee is 10.")
    document.add_table(1, 1).rows[0].cells[0].text = "Norvik fee is 10"
    document.sections[0].header.paragraphs[0].text = "Norvik fee"
    document.save(str(world / "bold.docx"))
    assert do("edit_document", path="bold.docx", old="Norvik fee", new="Balden sum", every=True).startswith(
        "replaced 3"
    )
    changed: Any = docx.Document(str(world / "bold.docx"))
    runs = [(run.text, bool(run.bold)) for run in changed.paragraphs[0].runs]
    assert runs == [("The ", False), ("Balden sum", True), (" is 10.", False)]
    assert changed.tables[0].rows[0].cells[0].text == "Balden sum is 10"
    assert do("read_document", path="bold.docx").endswith("header: Balden sum")


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=5),
    st.text(alphabet="ab", min_size=1, max_size=3),
    st.text(alphabet="abc", max_size=3),
)
def test_a_splice_is_a_replacement_that_touches_only_the_pieces_concerned(
    pieces: list[str], old: str, new: str
) -> None:
    result = spliced(pieces, old, new)
    assert "".join(result) == "".join(pieces).replace(old, new)
    assert len(result) == len(pieces)
    if not occurrences(pieces, old):
        assert result == pieces


def test_slides_show_charts_and_notes(world: Path, do: Call) -> None:
    deck: Any = pptx.Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[5])
    slide.shapes.title.text = "Fees"
    data = CategoryChartData()
    data.categories = ["2024", "2025"]
    data.add_series("Norvik", (1.5, 2))
    slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, 100, 100, data)
    slide.notes_slide.notes_text_frame.text = "Ask Ana"
    deck.save(str(world / "chart.pptx"))
    assert do("read_slides", path="chart.pptx") == (
        "slide 1: Fees\nslide 1 chart: Norvik | 2024: 1.5 | 2025: 2\nslide 1 notes: Ask Ana"
    )


# search


def brute_force(passages: dict[str, str], query: str) -> dict[str, float]:
    """BM25 by its definition."""
    split = {key: words(text) for key, text in passages.items()}
    mean = sum(map(len, split.values())) / len(split)
    score = {}
    for key, own in split.items():
        total = 0.0
        for word in set(words(query)):
            holders = sum(word in other for other in split.values())
            often = Counter(own)[word]
            rarity = math.log(1 + (len(split) - holders + 0.5) / (holders + 0.5))
            total += rarity * often * 2.2 / (often + 1.2 * (0.25 + 0.75 * len(own) / mean)) if often else 0.0
        if any(word in own for word in words(query)):
            score[key] = total
    return score


TEXTS = st.dictionaries(
    st.sampled_from("uvwxyz"),
    st.lists(st.sampled_from(["fee", "fees", "bank", "1,000", "Nora's"]), min_size=1, max_size=6).map(
        " ".join
    ),
    min_size=1,
)


@given(
    TEXTS,
    st.sampled_from(["fee", "bank 1000", "nora fees fees", "zebra"]),
    st.sets(st.sampled_from("uvwxyz")),
)
def test_the_ranking_is_bm25_whatever_was_added_and_taken_out(
    passages: dict[str, str], query: str, removed: set[str]
) -> None:
    ranking = Ranking()
    for key, text in passages.items():
        ranking.add(key, text)
    ranking.remove(removed & passages.keys())
    left = {key: text for key, text in passages.items() if key not in removed}
    expected = brute_force(left, query) if left else {}
    found = ranking.search(query, 10)
    assert {hit.key: hit.score for hit in found} == pytest.approx(expected)
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
    assert len(ranking) == len(left)


def test_find_reads_every_kind_of_file_and_follows_their_changes(world: Path, do: Call) -> None:
    for query, name in {
        "balden fees": "fees.xlsx",
        "kalhem": "report.pdf",
        "torjin": "deck.pptx",
        "halpas": "memo.docx",
        "pervik fee": "notes.txt",
        "good morning": "chat/deals.json",
        "hearing": "calendar.ics",
        "jaslin claim": "mail.mbox",
        "deck": "deck.pptx",
    }.items():
        assert do("find", query=query, count=1).startswith(f"{name}, line "), query
    (world / "notes.txt").write_text("Zanlop fee: 5\n")
    assert do("find", query="zanlop", count=1) == "notes.txt, line 1:\n  Zanlop fee: 5"
    do("send_mail", to="a@b.example", subject="Quokka", body="x")
    assert do("find", query="quokka", count=1).startswith("mail.mbox, line ")
    (world / "notes.txt").unlink()
    assert do("find", query="zanlop") == "no match"
    (world / ".spill").mkdir()
    (world / ".spill" / "1.txt").write_text("zanlop")
    (world / "broken.xlsx").write_bytes(b"no zip")
    assert do("find", query="zanlop") == "no match\n[not readable: broken.xlsx]"
    assert ".spill" not in do("list_files") and do("read_file", path=".spill/1.txt") == "zanlop"


def test_columns_are_searched_one_after_the_other(do: Call) -> None:
    lines = do("search_files", query="figures below").split("\n")
    assert (
        len(lines) == 4 and do("find", query="agreed figures checked before", count=1).count("before.") >= 1
    )


# mail, in the world's own time


def test_a_reply_keeps_the_thread_and_leaves_the_mailbox_readable(world: Path, do: Call) -> None:
    (world / "mail.mbox").write_text(
        "From a@x.example Mon Mar  2 09:00:00 2026\nFrom: Ana <a@x.example>\nTo: me@y.example, Ben <b@y.example>\n"
        "Date: Mon, 02 Mar 2026 09:00:00 +0100\nMessage-ID: <1@x>\nReferences: <0@x>\nSubject: Fee\n"
        "Content-Type: text/html\n\n<p>Norvik <b>fee</b></p><table><tr><td>a</td><td>1</td></tr></table>\n"
    )
    assert do("read_mail", id="m1").endswith("\n\nNorvik fee\n| a | 1")
    assert (
        do("reply_mail", id="m1", body="Done.\nFrom me", all=True)
        == "sent m2 to a@x.example, b@y.example: Re: Fee"
    )
    raw = (world / "mail.mbox").read_text()
    assert "In-Reply-To: <1@x>\nReferences: <0@x> <1@x>\n" in raw and "\n>From me\n" in raw
    assert do("list_mail") == (
        "m1 | 2026-03-02 09:00 | Ana <a@x.example> | Fee\nm2 | 2026-03-02 09:01 | me@y.example | Re: Fee"
    )
    assert (
        do("search_mail", after="2026-03-02", recipient="b@y", sender="me@")
        == "m2 | 2026-03-02 09:01 | me@y.example | Re: Fee"
    )
    assert do("search_mail", before="2026-03-02") == "no match"


def test_a_header_with_a_line_break_adds_no_header(world: Path, do: Call) -> None:
    do("send_mail", to="a@b.example", subject="x\nBcc: spy@b.example", body="y")
    assert "\nBcc:" not in (world / "mail.mbox").read_text()


# code that turns against the server

ATTACKS = {
    "its parent": "os.kill(os.getppid(), 0)",
    "everything": "os.kill(-1, 0)",
    "the group of its parent": "os.killpg(os.getpgid(os.getppid()), 0)",
    "a thread of its parent": "call('tgkill', os.getppid(), os.getppid(), 0)",
    "a queued signal": "call('sigqueue', os.getppid(), 0, 0)",
    "a handle": "os.pidfd_open(os.getppid())",
    "a folder of /proc as a handle": "signal.pidfd_send_signal(os.open(f'/proc/{os.getppid()}', 0), 0)",
    "its limits": "resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
    "its priority": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "its class": "os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))",
    "its cores": "os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))",
    "signals of a pipe": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
}
"""Signal 0 asks whether one may send any: should the protection fail, only the test does."""

IMPORTS = """
import ctypes, fcntl, os, resource, signal
def call(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
@pytest.mark.parametrize("scope", [True, False], ids=["filter and scope", "filter alone"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_code_can_not_reach_the_tool_server(
    world: Path, monkeypatch: pytest.MonkeyPatch, attack: str, scope: bool
) -> None:
    if not scope:
        monkeypatch.setattr(confine, "_leave_scope", lambda: None)
    source = f"{IMPORTS}\n{ATTACKS[attack]}\nprint('reached')"
    with pytest.raises(ValueError, match="PermissionError: .* Operation not permitted"):
        code.run_code(world, source)


def test_code_steers_itself_and_what_it_starts(world: Path) -> None:
    source = (
        "import os, resource, subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
        "child.kill()\nprint(child.wait())\nos.nice(1)\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "os.sched_setaffinity(0, os.sched_getaffinity(0))\n"
        "os.setpriority(os.PRIO_PROCESS, 0, 5)\nprint(os.system('kill -9 $$') & 127)"
    )
    assert code.run_code(world, source) == "-9\n9"


def test_a_server_lives_on_after_code_has_tried_to_kill_it_in_every_way(world: Path) -> None:
    """Over stdio, so that the server is a process of its own and could die."""
    server = StdioServerParameters(command=sys.executable, args=["-m", "system.tools", str(world), "full"])
    sources = [
        "import os; os.kill(os.getppid(), 9)",
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
        f"import os; os.system('pkill -9 -f \"system.tools {world}\"')",
    ]

    async def through_stdio() -> list[str]:
        async with Client(stdio_client(server)) as client:
            for source in sources:
                await client.call_tool("run_code", {"code": source})
            (content,) = (await client.call_tool("list_files", {"path": "chat"})).content
        return cast(Any, content).text

    assert asyncio.run(through_stdio()) == "chat/deals.json 72"
