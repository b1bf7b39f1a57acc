"""The tools over real files made by the real libraries, called in memory through the official MCP client."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from email.header import Header
from email.message import EmailMessage
from pathlib import Path
from typing import Any, cast
from zipfile import ZipFile

import docx
import openpyxl
import pdfplumber
import pptx
import pytest
import xlsxwriter
from icalendar import Calendar, Event
from mcp import Client, StdioServerParameters, stdio_client
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import BaseDocTemplate, Frame, FrameBreak, PageTemplate, Paragraph, Table

from system.tools import chat, code, documents, files, mail, pdfs, sheets, slides
from system.tools.formulas import Area, NotComputable, evaluate
from system.tools.results import RESULT_LIMIT, cut
from system.tools.server import TOOL_LINES, build_server
from system.world.company import Company, make_company
from system.world.demonstration import Replies
from system.world.office import write_world

Call = Callable[..., tuple[bool, str]]


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
    messages = [{"user": "ana", "text": "Good morning"}, {"user": "ben", "text": "Zanlop fee: 98"}]
    (root / "chat" / "deals.json").write_text(json.dumps(messages))
    (root / "notes.txt").write_text("Kept by Ana\nPervik fee: 437\nNothing else\n")
    return root


@pytest.fixture
def world(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the company for one test."""
    return shutil.copytree(pristine, tmp_path / "world")


@pytest.fixture
def call(world: Path) -> Call:
    """Call a tool of the world's server through the official client; gives is_error and the text."""

    async def through_client(name: str, arguments: dict[str, object]) -> tuple[bool, str]:
        async with Client(build_server(world)) as client:
            result = await client.call_tool(name, arguments)
        (content,) = result.content
        assert content.type == "text"
        return bool(result.is_error), content.text

    return lambda name, /, **arguments: asyncio.run(through_client(name, arguments))


def write_fees(file: Path) -> None:
    book = xlsxwriter.Workbook(file)
    sheet = book.add_worksheet("Fees")
    date = book.add_format({"num_format": "yyyy-mm-dd"})
    sheet.write_row("A1", ["Item", "Value", "Due"])
    for row, (label, value) in enumerate([("Norvik fee", 4821), ("Balden fee", 77), ("Rostan fee", 12.5)], 2):
        sheet.write_string(row - 1, 0, label)
        sheet.write_number(row - 1, 1, value)
        sheet.write_datetime(row - 1, 2, datetime(2026, 3, row), date)
    sheet.write_string("A5", "Total")
    sheet.write_formula("B5", "=SUM(B2:B4)", value=cast(Any, 4910.5))
    sheet.write_string("A6", "Twice")
    sheet.write_formula("B6", "=B5*2", None, 9821)
    sheet.write_string("A7", "Found")
    sheet.write_formula("B7", '=VLOOKUP("Norvik fee",A2:B4,2,FALSE)', None, 4821)
    about = book.add_worksheet("About")
    about.write_string("A1", "Half of all")
    about.write_formula("B1", "=Fees!B5/2", value=cast(Any, 2455.25))
    book.close()


def write_report(file: Path) -> None:
    style = getSampleStyleSheet()["BodyText"]
    half = (595 - 120) / 2
    frames = [Frame(50, 740, 495, 50), Frame(50, 50, half, 660), Frame(70 + half, 50, half, 660)]
    prose = "The partners met in March and agreed on the figures below, which the office had checked before."
    story = [Paragraph("Quarterly report of Tavdor Partners about the fees of the year", style), FrameBreak()]
    for rows in (
        [["Corden fee", "17"], ["Kalhem fee", "858"]],
        [["Cortem fee", "5663"], ["Jaskar fee", "3767"]],
    ):
        story += [
            Paragraph(prose, style),
            Table(rows, colWidths=[130, 60]),
            Paragraph(prose, style),
            FrameBreak(),
        ]
    document = BaseDocTemplate(str(file), pagesize=(595, 842))
    document.addPageTemplates([PageTemplate(frames=frames)])
    document.build(story[:-1])


def write_deck(file: Path) -> None:
    deck: Any = pptx.Presentation()
    for title, text in (("Welcome", "Tavdor Partners"), ("Figures", "Polkar fee: 40\nJaslin fee: 41")):
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text_frame.text = text
    table = deck.slides[1].shapes.add_table(2, 2, 0, 0, 100, 100).table
    for row, (left, right) in enumerate([("Item", "Value"), ("Torjin fee", "602")]):
        table.cell(row, 0).text, table.cell(row, 1).text = left, right
    deck.save(str(file))


def write_memo(file: Path) -> None:
    document = docx.Document()
    document.add_heading("Memo", level=1)
    document.add_paragraph("Halpas fee: 6839")
    table = document.add_table(rows=0, cols=2)
    for row in (("Item", "Value"), ("Fenden fee", "4603")):
        cells = table.add_row().cells
        cells[0].text, cells[1].text = row
    document.add_paragraph("Line one\nline two\tafter a tab")
    document.save(str(file))


def write_mailbox(file: Path) -> None:
    parts = []
    for subject, body in (
        ("Jaslin claim", "For the file.\nJaslin claim: 41\nGus"),
        ("Lunch", "From now on at noon, dear all\nsäge mir Bescheid"),
    ):
        message = EmailMessage()
        message["From"] = "gus@kalfur.example"
        message["Subject"] = subject
        message.set_content(body)
        text = message.as_string().replace("\nFrom now", "\n>From now")
        parts.append(f"From gus@kalfur.example Mon Mar  2 09:00:00 2026\n{text}\n")
    encoded = Header("Gebühr", "utf-8").encode()
    parts.append(
        f"From a@b.example Mon Mar  2 09:00:00 2026\nFrom: a@b.example\nSubject: {encoded}\n\nkurz\n\n"
    )
    file.write_text("".join(parts), encoding="utf-8")


def write_calendar(file: Path) -> None:
    calendar = Calendar()
    for summary, start in (
        ("Pervik hearing", datetime(2026, 3, 3, 10)),
        ("Norvik review", datetime(2026, 3, 2, 9)),
        ("Closed", datetime(2026, 3, 4).date()),
    ):
        event = Event()
        event.add("summary", summary)
        event.add("dtstart", start)
        calendar.add_component(event)
    file.write_bytes(calendar.to_ical())


# every tool, through the client


def test_every_tool_answers_through_the_client_in_the_agreed_form(call: Call) -> None:
    answers: dict[Any, str] = {
        (
            "list_files",
        ): "calendar.ics\nchat/\ndeck.pptx\nfees.xlsx\nmail.mbox\nmemo.docx\nnotes.txt\nreport.pdf",
        ("list_files", ("path", "chat")): "chat/deals.json",
        ("read_file", ("path", "notes.txt")): "Kept by Ana\nPervik fee: 437\nNothing else",
        (
            "read_sheet",
            ("path", "fees.xlsx"),
            ("find", "balden FEE"),
        ): "A3: Balden fee | B3: 77 | C3: 2026-03-03",
        ("read_sheet", ("path", "fees.xlsx"), ("range", "A4:B6")): (
            "A4: Rostan fee | B4: 12.5\nA5: Total | B5: 4910.5 (=SUM(B2:B4))\nA6: Twice | B6: 9821 (=B5*2)"
        ),
        (
            "read_sheet",
            ("path", "fees.xlsx"),
            ("find", "half"),
        ): "About!A1: Half of all | B1: 2455.25 (=Fees!B5/2)",
        ("edit_cell", ("path", "fees.xlsx"), ("cell", "B2"), ("value", "77")): "B2: 4821 -> 77",
        ("edit_cell", ("path", "fees.xlsx"), ("cell", "b2"), ("value", 78)): "B2: 77 -> 78",
        ("read_pdf", ("path", "report.pdf"), ("find", "kalhem fee")): "Kalhem fee 858",
        ("read_slides", ("path", "deck.pptx"), ("find", "polkar")): "slide 2: Polkar fee: 40",
        ("read_document", ("path", "memo.docx"), ("find", "halpas fee")): "Halpas fee: 6839",
        ("list_mail",): (
            "m1 | gus@kalfur.example | Jaslin claim\n"
            "m2 | gus@kalfur.example | Lunch\n"
            "m3 | a@b.example | Gebühr"
        ),
        ("search_mail", ("query", "jaslin claim")): "m1 | gus@kalfur.example | Jaslin claim",
        ("read_mail", ("id", "m1")): (
            "From: gus@kalfur.example\nSubject: Jaslin claim\n\nFor the file.\nJaslin claim: 41\nGus"
        ),
        ("read_channel", ("channel", "deals"), ("find", "zanlop")): "ben: Zanlop fee: 98",
        ("read_channel", ("channel", "#deals")): "ana: Good morning\nben: Zanlop fee: 98",
        (
            "list_events",
        ): "2026-03-02 09:00 Norvik review\n2026-03-03 10:00 Pervik hearing\n2026-03-04 Closed",
        ("list_events", ("find", "pervik")): "2026-03-03 10:00 Pervik hearing",
        (
            "write_file",
            ("path", "new/out.csv"),
            ("content", "Norvik fee,4821\n"),
        ): "wrote 16 bytes to new/out.csv",
        ("run_code", ("code", "print(4821+77)")): "4898",
        ("search_files", ("query", "no such thing")): "no match",
    }
    for (name, *arguments), expected in answers.items():
        is_error, text = call(name, **dict(arguments))
        assert (is_error, text) == (False, expected), (name, arguments)


def test_search_finds_one_keyed_line_in_every_kind_of_file(call: Call) -> None:
    for query, line in {
        "balden fee": "fees.xlsx: A3: Balden fee | B3: 77 | C3: 2026-03-03",
        "corden fee": "report.pdf: Corden fee 17",
        "jaslin fee": "deck.pptx: slide 2: Jaslin fee: 41",
        "torjin fee": "deck.pptx: slide 2: Torjin fee | 602",
        "fenden fee": "memo.docx: Fenden fee | 4603",
        "pervik fee": "notes.txt: Pervik fee: 437",
        "zanlop fee": "chat/deals.json: ben: Zanlop fee: 98",
        "pervik hearing": "calendar.ics: 2026-03-03 10:00 Pervik hearing",
        "jaslin claim": "mail.mbox: m1 | gus@kalfur.example | Jaslin claim\nmail.mbox: Jaslin claim: 41",
    }.items():
        assert call("search_files", query=query) == (False, line)


def test_search_shows_twenty_lines_and_names_files_it_cannot_read(world: Path, call: Call) -> None:
    (world / "many.txt").write_text("same words\n" * 25)
    (world / "broken.xlsx").write_bytes(b"no zip")
    lines = call("search_files", query="same words")[1].split("\n")
    assert lines[:20] == ["many.txt: same words"] * 20
    assert lines[20:] == [
        "[cut: 20 of 25 lines shown; use a longer query]",
        "[not readable: broken.xlsx]",
    ]


def test_the_prompt_lines_are_the_servers_own_tools(world: Path) -> None:
    async def listed() -> list[str]:
        async with Client(build_server(world)) as client:
            tools = (await client.list_tools()).tools
        for tool in tools:
            assert tool.description and "\n" not in tool.description
            assert all(
                item["type"] in ("string", "integer") for item in tool.input_schema["properties"].values()
            )
        return [f"{tool.name}({', '.join(tool.input_schema['properties'])})" for tool in tools]

    assert asyncio.run(listed()) == TOOL_LINES
    assert "read_sheet(path, find, range, sheet)" in TOOL_LINES
    assert len(TOOL_LINES) == 15


# errors


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("read_sheet", {}, "error: read_sheet needs argument path"),
        (
            "read_sheet",
            {"path": "x.xlsx"},
            "error: no such file x.xlsx; files here: calendar.ics, chat/, deck.pptx,",
        ),
        ("read_sheet", {"path": None}, "error: path must be a string, got null"),
        ("read_sheet", {"path": ["a"]}, 'error: path must be a string, got ["a"]'),
        (
            "read_sheet",
            {"path": "fees.xlsx", "row": 2},
            "error: read_sheet has no argument row; arguments: path, find",
        ),
        ("read_sheet", {"path": "fees.xlsx", "range": "what"}, "error: range must be like A1:B4, got WHAT"),
        (
            "read_sheet",
            {"path": "fees.xlsx", "sheet": "No"},
            "error: no such sheet No in fees.xlsx; sheets here: Fees, About",
        ),
        (
            "read_sheet",
            {"path": "report.pdf"},
            "error: path must end with .xlsx, got report.pdf; use read_pdf",
        ),
        (
            "edit_cell",
            {"path": "no.xlsx", "cell": "B2", "value": "1"},
            "error: no such file no.xlsx; files here:",
        ),
        (
            "edit_cell",
            {"path": "fees.xlsx", "cell": "22", "value": "1"},
            "error: cell must be like B2, got 22",
        ),
        ("edit_cell", {"path": "fees.xlsx", "cell": "ZZZ1", "value": "1"}, "error: range must"),
        (
            "edit_cell",
            {"path": "fees.xlsx", "cell": "B2", "value": "=SUM((B2"},
            "error: formula must have matching",
        ),
        (
            "edit_cell",
            {"path": "fees.xlsx", "cell": "B2", "value": "bad\x01"},
            "error: All strings must be XML",
        ),
        ("read_pdf", {"path": "report.pdf", "page": 9}, "error: page must be from 1 to 1, got 9"),
        ("read_pdf", {"path": "report.pdf", "page": "last"}, 'error: page must be an integer, got "last"'),
        ("read_file", {"path": "deck.pptx"}, "error: deck.pptx is not UTF-8 text; use read_slides"),
        ("read_file", {"path": "chat"}, "error: chat is a folder; files here: chat/deals.json"),
        ("list_files", {"path": "notes.txt"}, "error: notes.txt is a file; use read_file"),
        ("list_files", {"path": "nowhere"}, "error: no such file nowhere; files here:"),
        ("search_files", {"query": " "}, "error: query must not be empty"),
        ("read_mail", {"id": "m9"}, "error: no such mail m9; ids: m1 to m3"),
        ("read_channel", {"channel": "x"}, "error: no such channel x; channels here: deals"),
        (
            "write_file",
            {"path": "fees.xlsx", "content": "a"},
            "error: path must be a text file, got fees.xlsx",
        ),
        ("write_file", {"path": "chat", "content": "a"}, "error: chat is a folder"),
        ("write_file", {"path": "notes.txt/a", "content": "a"}, "error: "),
        ("write_file", {"path": "a" * 300, "content": "a"}, "error: OSError: [Errno 36] File name too long"),
        ("run_code", {"code": "1/0"}, "error: ZeroDivisionError: division by zero"),
        ("run_code", {"code": "print('a'"}, "error: SyntaxError: '(' was never closed"),
        ("run_code", {"code": "import sys; sys.exit(3)"}, "error: code ended with status 3"),
        ("open_door", {}, "error: no such tool open_door; tools: list_files, read_file"),
        ("open\ndoor", {}, "error: no such tool open door; tools:"),
    ],
)
def test_a_bad_call_is_one_line_for_the_model(
    call: Call, world: Path, name: str, arguments: dict[str, object], line: str
) -> None:
    is_error, text = call(name, **arguments)
    assert is_error
    assert text.startswith(line)
    assert "\n" not in text and "Traceback" not in text and str(world) not in text


@pytest.mark.parametrize(
    "path", ["../secret.txt", "/etc/passwd", "chat/../../secret.txt", "link.txt", "away/secret.txt"]
)
def test_a_path_that_leaves_the_world_is_refused_by_every_tool(call: Call, world: Path, path: str) -> None:
    (world.parent / "secret.txt").write_text("secret")
    (world / "link.txt").symlink_to(world.parent / "secret.txt")
    (world / "away").symlink_to(world.parent)
    for name, more in {
        "list_files": {},
        "read_file": {},
        "read_sheet": {},
        "edit_cell": {"cell": "A1", "value": "1"},
        "read_pdf": {},
        "read_slides": {},
        "read_document": {},
        "write_file": {"content": "x"},
    }.items():
        is_error, text = call(name, path=path, **more)
        assert is_error and text.startswith("error: path must "), (name, text)
    assert call("read_channel", channel="../../secret")[0]
    assert (world.parent / "secret.txt").read_text() == "secret"
    assert call("search_files", query="secret")[1] == "no match"


@pytest.mark.parametrize(
    "name", ["fees.xlsx", "report.pdf", "deck.pptx", "memo.docx", "calendar.ics", "mail.mbox"]
)
@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 broken", bytes(range(256)) * 4])
def test_a_damaged_file_is_one_line_for_the_model(call: Call, world: Path, name: str, damage: bytes) -> None:
    (world / name).write_bytes(damage)
    tool, arguments = {
        "fees.xlsx": ("read_sheet", {"path": name}),
        "report.pdf": ("read_pdf", {"path": name}),
        "deck.pptx": ("read_slides", {"path": name}),
        "memo.docx": ("read_document", {"path": name}),
        "calendar.ics": ("list_events", {}),
        "mail.mbox": ("list_mail", {}),
    }[name]
    is_error, text = call(tool, **arguments)
    assert "\n" not in text
    assert text.startswith("error: ") if is_error else text == "no match"


def test_a_long_result_is_cut_and_says_how_to_get_the_rest(call: Call, world: Path) -> None:
    (world / "long.txt").write_text("".join(f"line {number}\n" for number in range(2000)))
    text = call("read_file", path="long.txt")[1]
    shown, _, marker = text.rpartition("\n")
    assert len(shown) <= RESULT_LIMIT and shown.endswith(shown.split("\n")[-1])
    assert marker.startswith(f"[cut: {len(shown)} of ") and "run_code" in marker
    assert (
        cut("x" * (RESULT_LIMIT + 1), rest="r")
        == "x" * RESULT_LIMIT + "\n[cut: 6000 of 6001 characters shown; r]"
    )


# sheets


def test_an_edit_recalculates_what_depends_on_it_in_all_sheets_and_marks_the_rest_stale(world: Path) -> None:
    assert sheets.edit_cell(world, "fees.xlsx", "B3", "100") == "B3: 77 -> 100"
    assert sheets.read_sheet(world, "fees.xlsx", range="A5:B7") == (
        "A5: Total | B5: 4933.5 (=SUM(B2:B4))\nA6: Twice | B6: 9867 (=B5*2)\n"
        'A7: Found | B7: stale (=VLOOKUP("Norvik fee",A2:B4,2,FALSE))'
    )
    assert sheets.read_sheet(world, "fees.xlsx", sheet="About") == (
        "About!A1: Half of all | B1: 2466.75 (=Fees!B5/2)"
    )
    values = openpyxl.load_workbook(world / "fees.xlsx", data_only=True)
    assert [values["Fees"][cell].value for cell in ("B3", "B5", "B6", "B7")] == [100, 4933.5, 9867, None]
    assert values["About"]["B1"].value == 2466.75
    formulas = openpyxl.load_workbook(world / "fees.xlsx")
    assert formulas["Fees"]["B5"].value == "=SUM(B2:B4)"


def test_an_edit_leaves_every_other_part_and_cell_as_it_was(world: Path) -> None:
    before = {
        info.filename: ZipFile(world / "fees.xlsx").read(info)
        for info in ZipFile(world / "fees.xlsx").infolist()
    }
    sheets.edit_cell(world, "fees.xlsx", "C9", "late & <odd>", sheet="Fees")
    with ZipFile(world / "fees.xlsx") as archive:
        changed = {name for name in before if archive.read(name) != before[name]}
        assert archive.namelist() == list(before)
    assert changed == {"xl/worksheets/sheet1.xml"}
    sheet = openpyxl.load_workbook(world / "fees.xlsx", data_only=True)["Fees"]
    assert sheet["C9"].value == "late & <odd>" and sheet.dimensions == "A1:C9"
    assert sheet["C2"].value == datetime(2026, 3, 2) and sheet["B7"].value == 4821
    assert sorted(path.name for path in world.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize(
    ("value", "shown", "stored"),
    [
        ("4821", "4821", 4821),
        ("12.50", "12.5", 12.5),
        ("-3", "-3", -3),
        ("1e3", "1000", 1000),
        ("1e999", "1e999", "1e999"),
        ("4,821", "4,821", "4,821"),
        ("two words", "two words", "two words"),
        ("", "empty", None),
        ("=", "=", "="),
        ("=B2+1", "4822 (=B2+1)", 4822),
        ("=FOO(B2)", "stale (=FOO(B2))", None),
        ("=B6", "9821 (=B6)", 9821),
        ("=D4", "stale (=D4)", None),
        ("=D4+B2", "stale (=D4+B2)", None),
    ],
)
def test_a_value_becomes_a_number_a_text_or_a_formula(
    world: Path, value: str, shown: str, stored: object
) -> None:
    assert sheets.edit_cell(world, "fees.xlsx", "D4", value) == f"D4: empty -> {shown}"
    assert openpyxl.load_workbook(world / "fees.xlsx", data_only=True)["Fees"]["D4"].value == stored


def test_editing_works_on_files_of_openpyxl_with_shared_formulas_and_merged_cells(world: Path) -> None:
    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    sheet.append(["a", 1, "=B1*2"])
    sheet.append(["b", 2, "=B2*2"])
    sheet.merge_cells("E1:F2")
    book.save(world / "own.xlsx")
    assert sheets.read_sheet(world, "own.xlsx") == (
        "A1: a | B1: 1 | C1: stale (=B1*2)\nA2: b | B2: 2 | C2: stale (=B2*2)"
    )
    sheets.edit_cell(world, "own.xlsx", "B1", "5")
    assert sheets.read_sheet(world, "own.xlsx", find="a") == "A1: a | B1: 5 | C1: 10 (=B1*2)"
    with pytest.raises(ValueError, match="F2 lies inside merged cells; edit E1"):
        sheets.edit_cell(world, "own.xlsx", "F2", "5")


def test_a_shared_formula_survives_the_edit_of_the_cell_that_holds_its_text(world: Path) -> None:
    with ZipFile(world / "fees.xlsx") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    rows = b"".join(
        b'<row r="%d"><c r="A%d"><v>%d</v></c><c r="B%d"><f t="shared"%s si="0">%s</f><v>%d</v></c></row>'
        % (row, row, row, row, b' ref="B1:B3"' if row == 1 else b"", b"A1*10" if row == 1 else b"", row * 10)
        for row in (1, 2, 3)
    )
    start, _, rest = parts["xl/worksheets/sheet1.xml"].partition(b"<sheetData>")
    parts["xl/worksheets/sheet1.xml"] = (
        start + b"<sheetData>" + rows + b"</sheetData>" + rest.partition(b"</sheetData>")[2]
    )
    with ZipFile(world / "shared.xlsx", "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    assert (
        sheets.read_sheet(world, "shared.xlsx", range="B1:B3")
        == "B1: 10 (=A1*10)\nB2: 20 (=A2*10)\nB3: 30 (=A3*10)"
    )
    sheets.edit_cell(world, "shared.xlsx", "B1", "7")
    sheets.edit_cell(world, "shared.xlsx", "A3", "4")
    assert sheets.read_sheet(world, "shared.xlsx", range="B1:B3") == "B1: 7\nB2: 20 (=A2*10)\nB3: 40 (=A3*10)"


def test_a_long_chain_of_formulas_and_a_circle_are_recalculated(world: Path) -> None:
    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    sheet["A1"] = 1
    for row in range(2, 1200):
        sheet[f"A{row}"] = f"=A{row - 1}+1"
    sheet["B1"], sheet["B2"], sheet["B3"] = "=A1+B2", "=B1", "=SUM(A:A)"
    book.save(world / "chain.xlsx")
    sheets.edit_cell(world, "chain.xlsx", "A1", "10")
    values = openpyxl.load_workbook(world / "chain.xlsx", data_only=True).active
    assert values is not None
    assert [values[cell].value for cell in ("A2", "A1199", "B1", "B2", "B3")] == [
        11,
        1208,
        None,
        None,
        sum(range(10, 1209)),
    ]


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("=1+2*3", 7),
        ("=(1+2)*3", 9),
        ("=-2-3", -5),
        ("=10/4/5", 0.5),
        ("=SUM(B1:B3)", 60),
        ("=sum(B1:B3, 4,B1)", 74),
        ("=AVERAGE(B1:B3)-MIN(B1:B3)/MAX($B$1:$B$3)", 20 - 10 / 30),
        ("= B1 + 'My sheet'!B2 ", 30),
        ("=SUM(B:B)", 60),
        ("=SUM(B1:B3)*-1", -60),
        ("=B1*(B2+B3)", 500),
        ("=1/0", None),
        ("=B1:B3", None),
        ("=B1^2", None),
        ("=B1%", None),
        ("=IF(B1,1,2)", None),
        ('="a"&"b"', None),
        ("=B1 B2", None),
        ("=SUM(B1:B3", None),
        ("=name", None),
        ("=C1+1", None),
    ],
)
def test_a_formula_has_its_value_or_is_not_computable(formula: str, value: float | None) -> None:
    cells = {1: 10.0, 2: 20.0, 3: 30.0}

    def values(area: Area) -> list[float | str]:
        if area.left != 2:
            return ["text"]
        return [cell for row, cell in cells.items() if area.top <= row <= area.bottom]

    if value is None:
        with pytest.raises(NotComputable):
            evaluate(formula, "Sheet", values)
    else:
        assert evaluate(formula, "Sheet", values) == pytest.approx(value)


# pdf, slides, documents, mail


def test_a_page_of_two_columns_keeps_its_layout_and_gives_a_column_piece_for_find(world: Path) -> None:
    page = pdfs.read_pdf(world, "report.pdf")
    (row,) = [line for line in page.split("\n") if "Corden fee" in line]
    left, right = row.index("Corden fee"), row.index("Cortem fee")
    assert left < row.index("17") < right < row.index("5663")
    assert pdfs.read_pdf(world, "report.pdf", find="Corden fee") == "Corden fee 17"
    assert pdfs.read_pdf(world, "report.pdf", find="Cortem fee") == "Cortem fee 5663"
    pieces = pdfs.piece_lines(world / "report.pdf")
    assert pieces[0] == "Quarterly report of Tavdor Partners about the fees of the year"
    assert pieces.count(pieces[1]) == 4 and pieces[1].startswith("The partners met in March")


def test_a_row_of_a_table_with_several_text_columns_stays_whole(tmp_path: Path) -> None:
    rows = [["Client", "Team", "Fee"]] + [
        [name, "legal team", "120"] for name in ("Norvik", "Balden", "Rostan")
    ]
    document = BaseDocTemplate(str(tmp_path / "t.pdf"))
    document.addPageTemplates([PageTemplate(frames=[Frame(50, 50, 500, 700)])])
    document.build([Table(rows, colWidths=[150, 150, 80])])
    assert pdfs.read_pdf(tmp_path, "t.pdf", find="norvik") == "Norvik legal team 120"


def test_slides_and_documents_read_as_their_own_libraries_read_them(world: Path) -> None:
    deck = [
        f"slide {number}: {paragraph.text}"
        for number, slide in enumerate(cast(Any, pptx.Presentation(str(world / "deck.pptx"))).slides, 1)
        for shape in slide.shapes
        if shape.has_text_frame
        for paragraph in shape.text_frame.paragraphs
    ]
    assert slides.slide_lines(world / "deck.pptx") == [
        *deck,
        "slide 2: Item | Value",
        "slide 2: Torjin fee | 602",
    ]
    assert documents.document_lines(world / "memo.docx") == [
        "Memo",
        "Halpas fee: 6839",
        "Item | Value",
        "Fenden fee | 4603",
        "Line one line two after a tab",
    ]


def test_mail_decodes_headers_bodies_and_escaped_lines(world: Path) -> None:
    assert mail.read_mail(world, "m2").endswith("\n\nFrom now on at noon, dear all\nsäge mir Bescheid")
    assert mail.read_mail(world, "m3") == "From: a@b.example\nSubject: Gebühr\n\nkurz"


# code


def test_code_sees_the_world_and_nothing_of_the_servers_environment(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSTARTUP", "x")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert code.run_code(world, "print(open('notes.txt').readline(), end='')") == "Kept by Ana"
    assert (
        code.run_code(world, "import os; print(sorted(k for k in os.environ if 'PYTHON' in k or 'KEY' in k))")
        == "[]"
    )
    assert code.run_code(world, "print(repr(__import__('sys').stdin.read()))") == "''"
    assert code.run_code(world, "a = 1") == "no output"


def test_code_output_is_capped_and_never_blocks_the_process(world: Path) -> None:
    text = code.run_code(world, "print('x' * 5_000_000); import sys; print('y' * 5_000_000, file=sys.stderr)")
    assert text == "x" * 4096 + "\n[cut: 4096 of 5000001 bytes shown; print less]"


def test_code_out_of_time_dies_with_all_it_started(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "TIME_LIMIT_S", 0.5)
    started = time.monotonic()
    with pytest.raises(ValueError, match="code must end within 0.5 s"):
        code.run_code(world, "import subprocess; subprocess.run(['sleep', '60'])")
    assert time.monotonic() - started < 5
    source = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    left_behind = int(code.run_code(world, source))
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _alive(left_behind):
        time.sleep(0.01)
    assert not _alive(left_behind)


def _alive(pid: int) -> bool:
    """Say whether a process runs; a dead one that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# the server


def test_the_server_starts_no_thread_and_leaves_logging_alone(call: Call, world: Path) -> None:
    handlers, level, threads = list(logging.root.handlers), logging.root.level, threading.active_count()
    build_server(world)
    assert (list(logging.root.handlers), logging.root.level) == (handlers, level)
    call("read_pdf", path="report.pdf")
    call("run_code", code="print(1)")
    assert threading.active_count() == threads


def test_a_server_is_built_in_a_few_milliseconds(world: Path) -> None:
    build_server(world)
    started = time.process_time()
    for _ in range(10):
        build_server(world)
    assert (time.process_time() - started) / 10 < 0.010


def test_servers_of_two_worlds_do_not_mix(world: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "only.txt").write_text("x")

    async def both() -> list[str]:
        texts = []
        async with Client(build_server(world)) as first, Client(build_server(other)) as second:
            for client in (first, second):
                (content,) = (await client.call_tool("list_files", {})).content
                assert content.type == "text"
                texts.append(content.text)
        return texts

    first, second = asyncio.run(both())
    assert "notes.txt" in first and second == "only.txt"


def test_a_world_without_write_permission_is_one_line(call: Call, world: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes anywhere")
    world.chmod(0o500)
    is_error, text = call("write_file", path="new.txt", content="x")
    world.chmod(0o700)
    assert is_error and "Permission denied" in text


def test_the_server_serves_a_folder_over_stdio_without_noise(world: Path) -> None:
    server = StdioServerParameters(command=sys.executable, args=["-m", "system.tools", str(world)])

    async def through_stdio() -> str:
        async with Client(stdio_client(server, errlog=errors)) as client:
            (content,) = (await client.call_tool("read_file", {"path": "nothing.txt"})).content
        assert content.type == "text"
        return content.text

    with (world.parent / "errors.txt").open("w") as errors:
        assert asyncio.run(through_stdio()).startswith("error: no such file nothing.txt; files here: ")
    assert (world.parent / "errors.txt").read_text() == ""


# a generated world


@pytest.fixture(scope="module", params=[3, 4])
def company_and_root(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Company, Path]:
    company = make_company(request.param, split="train")
    return company, write_world(company, tmp_path_factory.mktemp("generated") / "world")


def test_the_tools_answer_in_a_generated_world_as_its_record_says(
    company_and_root: tuple[Company, Path],
) -> None:
    company, root = company_and_root
    replies = Replies(company)
    lookups = {
        "xlsx": sheets.read_sheet,
        "pdf": pdfs.read_pdf,
        "pptx": slides.read_slides,
        "docx": documents.read_document,
    }
    for fact in company.facts:
        source = company.source(fact.source)
        assert files.search_files(root, fact.label) == replies.search_files(fact.label)
        if source.kind in lookups:
            tool = lookups[source.kind]
            expected = getattr(replies, tool.__name__)(path=source.name, find=fact.label)
            assert str(fact.value) in expected
            assert tool(root, path=source.name, find=fact.label) == expected
        elif source.kind == "mail":
            assert mail.search_mail(root, fact.label) == replies.search_mail(fact.label)
        elif source.kind == "chat":
            channel = source.name.removeprefix("#")
            assert chat.read_channel(root, channel, fact.label) == replies.read_channel(channel, fact.label)
    for number in range(1, len(company.mails) + 1):
        assert mail.read_mail(root, f"m{number}") == replies.read_mail(f"m{number}")


def test_a_page_has_the_lines_that_pdfplumber_reads(
    company_and_root: tuple[Company, Path], world: Path
) -> None:
    company, root = company_and_root
    generated = root / next(source.name for source in company.sources if source.kind == "pdf")
    for file in (generated, world / "report.pdf"):
        with pdfplumber.open(file) as pdf:
            expected = pdf.pages[0].extract_text().split("\n")
        lines = pdfs.read_pdf(file.parent, file.name).split("\n")
        assert [" ".join(line.split()) for line in lines if line] == expected


def test_a_name_with_a_hyphen_at_the_end_of_a_line_is_read_whole(tmp_path: Path) -> None:
    canvas = Canvas(str(tmp_path / "h.pdf"))
    canvas.drawString(72, 700, "a well-")
    canvas.drawString(72, 685, "known firm")
    canvas.save()
    assert pdfs.read_pdf(tmp_path, "h.pdf") == "a well-\nknown firm"
