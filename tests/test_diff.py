"""Whatever changed in a world is told: where, what stood there and what stands there now."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docx
import openpyxl
import pptx
import pytest
from docx.oxml.parser import OxmlElement
from docx.shared import RGBColor
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from openpyxl.chart import BarChart, Reference
from openpyxl.comments import Comment
from openpyxl.formatting.rule import CellIsRule
from openpyxl.styles import Font, PatternFill
from openpyxl.workbook.defined_name import DefinedName
from openpyxl.worksheet.datavalidation import DataValidation
from pptx.util import Inches
from reportlab.pdfgen.canvas import Canvas

from system.sandbox.frozen import FrozenWorld
from system.verify.bounded import OutOfBounds, bounded
from system.verify.diff import Change, DiffLimits, changes, compare, rendered
from system.verify.parts import kind_of, read_parts
from system.world.company import make_company
from system.world.office import write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(make_company(3, split="train"), tmp_path_factory.mktemp("office") / "world")


def differing(before: dict[str, bytes], after: dict[str, bytes], folder: Path) -> FrozenWorld:
    for name, files in (("before", before), ("after", after)):
        for path, data in files.items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_bytes(data)
        (folder / name).mkdir(exist_ok=True)
    return FrozenWorld(lower=folder / "before", root=folder / "after")


def changes_of(name: str, before: bytes, after: bytes, folder: Path) -> dict[str, tuple[str, str]]:
    """Place → before and after, of one file."""
    listed = changes(differing({name: before}, {name: after}, folder))
    assert listed and {change.path for change in listed} == {name}
    return {change.place: (change.before, change.after) for change in listed}


def saved(thing: Any) -> bytes:
    file = io.BytesIO()
    thing.save(file)
    return file.getvalue()


# Workbooks: each of these was missed by comparing values alone.


def book() -> Any:
    made: Any = openpyxl.Workbook()
    made.active.title = "Fees"
    for row in (["Item", "Fee"], ["Alpha", 40], ["Beta", 8], ["Total", "=SUM(B2:B3)"]):
        made.active.append(row)
    made.create_sheet("About")["A1"] = "2026"
    return made


def _chart(made: Any) -> None:
    chart = BarChart()
    chart.add_data(Reference(made["Fees"], min_col=2, min_row=1, max_row=3))
    made["Fees"].add_chart(chart, "D2")


def _validate(made: Any) -> None:
    rule = DataValidation(type="list", formula1='"a,b"')
    made["Fees"].add_data_validation(rule)
    rule.add("A2")


EDITS: list[tuple[str, Callable[[Any], object], tuple[str, str] | None]] = [
    ("Fees!B2 value", lambda made: made["Fees"].__setitem__("B2", 48), ("40", "48")),
    ("Fees!B2 value", lambda made: made["Fees"].__setitem__("B2", "40"), ("40", '"40"')),
    ("Fees!B4 formula", lambda made: made["Fees"].__setitem__("B4", "=B2+B3"), ("=SUM(B2:B3)", "=B2+B3")),
    ("Fees!C9 value", lambda made: made["Fees"].__setitem__("C9", True), ("", "TRUE")),
    ("Fees!B2 format", lambda made: setattr(made["Fees"]["B2"], "number_format", "0.00%"), ("", "0.00%")),
    ("Fees!B2 style", lambda made: setattr(made["Fees"]["B2"], "font", Font(bold=True)), None),
    (
        "Fees!B2 style",
        lambda made: setattr(made["Fees"]["B2"], "fill", PatternFill("solid", fgColor="FFFF00")),
        None,
    ),
    (
        "Fees!B2 comment",
        lambda made: setattr(made["Fees"]["B2"], "comment", Comment("why?", "Ann")),
        ("", "Ann: why?"),
    ),
    ("Fees!B2 link", lambda made: setattr(made["Fees"]["B2"], "hyperlink", "https://a.example/"), None),
    ("Fees merged 1", lambda made: made["Fees"].merge_cells("A6:B7"), ("", "A6:B7")),
    ("sheet 3", lambda made: made.create_sheet("Extra"), ("", "Extra")),
    ("sheet 2", lambda made: setattr(made["About"], "sheet_state", "hidden"), ("About", "About hidden")),
    ("sheet 2", lambda made: setattr(made["About"], "title", "Notes"), ("About", "Notes")),
    ("Fees column 1", lambda made: setattr(made["Fees"].column_dimensions["B"], "hidden", True), None),
    ("Fees row 1", lambda made: setattr(made["Fees"].row_dimensions[3], "hidden", True), None),
    ("Fees filter", lambda made: setattr(made["Fees"].auto_filter, "ref", "A1:B4"), ("", "A1:B4")),
    ("Fees frozen above and left of", lambda made: setattr(made["Fees"], "freeze_panes", "A2"), ("", "A2")),
    ("Fees protection", lambda made: made["Fees"].protection.enable(), ("", "on")),
    ("Fees validation 1", _validate, None),
    (
        "Fees conditional format 1",
        lambda made: made["Fees"].conditional_formatting.add(
            "B2:B3", CellIsRule(operator="greaterThan", formula=["9"], fill=PatternFill(bgColor="FF0000"))
        ),
        None,
    ),
    ("name Rate", lambda made: made.defined_names.__setitem__("Rate", _name()), ("", "Fees!$B$2")),
    ("part xl/charts/chart1.xml", _chart, None),
]


def _name() -> Any:
    return DefinedName("Rate", attr_text="Fees!$B$2")


@pytest.mark.parametrize(
    ("place", "edit", "sides"), EDITS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_change_of_a_workbook_is_told_by_its_place(
    place: str, edit: Callable[[Any], object], sides: tuple[str, str] | None, tmp_path: Path
):
    made = book()
    edit(made)
    found = changes_of("fees.xlsx", saved(book()), saved(made), tmp_path)
    assert place in found, sorted(found)
    assert sides is None or found[place] == sides


def test_comparing_values_alone_would_miss_most_of_these():
    """The defect of a harness that compares what cells show: it says "no difference" to most of the edits above."""

    def shown(data: bytes) -> list[list[tuple[Any, ...]]]:
        loaded = openpyxl.load_workbook(io.BytesIO(data), data_only=True)
        return [list(sheet.iter_rows(values_only=True)) for sheet in loaded.worksheets]

    missed = set()
    for place, edit, _ in EDITS:
        made = book()
        edit(made)
        if shown(saved(made)) == shown(saved(book())):
            missed.add(place)
    assert {
        "Fees!B4 formula",
        "Fees!B2 format",
        "Fees!B2 comment",
        "sheet 2",
        "part xl/charts/chart1.xml",
    } <= missed
    assert len(missed) > 12


def test_a_change_that_keeps_size_and_time_is_told(tmp_path: Path):
    """The defect of a comparison by size and time of change."""
    place = differing({"a.txt": b"fee 40\n"}, {"a.txt": b"fee 48\n"}, tmp_path)
    for side in ("before", "after"):
        os.utime(tmp_path / side / "a.txt", (1e9, 1e9))
    assert [(change.before, change.after) for change in changes(place)] == [("fee 40", "fee 48")]


def test_a_cached_value_that_no_longer_fits_its_formula_is_told(tmp_path: Path):
    """A formula alone, or a value alone, would be as before."""
    plain = saved(book())
    stale = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(plain)) as old, zipfile.ZipFile(stale, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "xl/worksheets/sheet1.xml":
                data = (
                    data.replace(b"<v></v>", b"<v>48</v>")
                    .replace(b"<v />", b"<v>48</v>")
                    .replace(b"<v/>", b"<v>48</v>")
                )
            new.writestr(name, data)
    found = changes_of("fees.xlsx", plain, stale.getvalue(), tmp_path)
    assert found == {"Fees!B4 shown": ("", "48")}


def test_saving_a_workbook_again_tells_only_the_values_that_are_lost(world: Path, tmp_path: Path):
    name = next(path.name for path in world.glob("*.xlsx"))
    again = saved(openpyxl.load_workbook(world / name))
    found = changes_of(name, (world / name).read_bytes(), again, tmp_path)
    # The library keeps no cached values of formulas; nothing else may look changed.
    assert all(place.endswith(" shown") and after == "" for place, (_, after) in found.items()), found


# Documents, decks and pages.


def document() -> Any:
    made = docx.Document()
    made.add_heading("Fees", level=1)
    made.add_paragraph("The fee is 40.")
    made.add_paragraph("It is due in March.")
    table = made.add_table(rows=2, cols=2)
    table.cell(1, 1).text = "40"
    made.sections[0].header.paragraphs[0].text = "Confidential"
    return made


def _tracked(made: Any) -> None:
    inserted = OxmlElement("w:ins")
    run = OxmlElement("w:r")
    text = OxmlElement("w:t")
    text.text = " and 8"
    run.append(text)
    inserted.append(run)
    made.paragraphs[1]._p.append(inserted)


def _text_box(made: Any) -> None:
    box = OxmlElement("w:txbxContent")
    inner = OxmlElement("w:p")
    run = OxmlElement("w:r")
    text = OxmlElement("w:t")
    text.text = "boxed"
    run.append(text)
    inner.append(run)
    box.append(inner)
    made.paragraphs[2].runs[0]._r.append(box)


def _red(made: Any) -> None:
    made.paragraphs[1].runs[0].font.color.rgb = RGBColor(255, 0, 0)


@pytest.mark.parametrize(
    ("place", "edit", "after"),
    [
        ("document paragraph 2", lambda made: setattr(made.paragraphs[1], "text", "The fee is 48."), "The fee is 48."),
        ("document paragraph 2", _tracked, "The fee is 40.[inserted:  and 8]"),
        ("document paragraph 4", _text_box, "boxed"),
        ("document paragraph 7", lambda made: setattr(made.tables[0].cell(1, 1), "text", "48"), None),
        ("document paragraph 1", lambda made: setattr(made.paragraphs[0], "style", "Heading 2"), "[Heading2] Fees"),
        ("header1 paragraph 1", lambda made: setattr(made.sections[0].header.paragraphs[0], "text", "Public"), None),
        ("document formatted run 1", _red, "color FF0000: The fee is 40."),
        ("comments paragraph 1", lambda made: made.add_comment(made.paragraphs[1].runs, "why?", "Ann"), None),
        ("document section 1", lambda made: setattr(made.sections[0], "left_margin", 99), None),
    ],
)  # fmt: skip
def test_a_change_of_a_document_is_told_by_its_place(
    place: str, edit: Callable[[Any], object], after: str | None, tmp_path: Path
):
    made = document()
    edit(made)
    found = changes_of("fees.docx", saved(document()), saved(made), tmp_path)
    assert place in found, sorted(found)
    assert after is None or found[place][1] == after


def test_a_paragraph_more_shifts_nothing(tmp_path: Path):
    made = document()
    made.paragraphs[0].insert_paragraph_before("Draft")
    found = changes_of("fees.docx", saved(document()), saved(made), tmp_path)
    assert found == {"document paragraph 1": ("", "Draft")}


def deck() -> Any:
    made: Any = pptx.Presentation()
    for title in ("Fees", "More"):
        slide = made.slides.add_slide(made.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text_frame.text = "Alpha: 40\nBeta: 8"
        slide.notes_slide.notes_text_frame.text = "say it slowly"
    made.slides[1].shapes.add_table(2, 2, Inches(1), Inches(4), Inches(4), Inches(1)).table.cell(
        1, 1
    ).text = "40"
    return made


def _reorder(made: Any) -> None:
    listed = made.slides._sldIdLst
    listed.append(listed[0])


@pytest.mark.parametrize(
    ("place", "edit", "sides"),
    [
        (
            "slide 256 shape 3 Content Placeholder 2 line 1",
            lambda made: setattr(
                made.slides[0].placeholders[1].text_frame.paragraphs[0], "text", "Alpha: 48"
            ),
            ("Alpha: 40", "Alpha: 48"),
        ),
        (
            "slide 256 notes line 1",
            lambda made: setattr(made.slides[0].notes_slide.notes_text_frame, "text", "fast"),
            ("say it slowly", "fast"),
        ),
        (
            "slide 257 shape 4 Table 3 cell 4",
            lambda made: setattr(made.slides[1].shapes[2].table.cell(1, 1), "text", "48"),
            ("row 2 cell 2: 40", "row 2 cell 2: 48"),
        ),
        (
            "slide 256 shape 2 Title 1 place",
            lambda made: setattr(made.slides[0].shapes.title, "left", 9),
            None,
        ),
        ("slide 1", _reorder, None),
        ("slide 3", lambda made: made.slides.add_slide(made.slide_layouts[5]), None),
        ("slide 256 hidden", lambda made: made.slides[0]._element.set("show", "0"), ("", "yes")),
    ],
)
def test_a_change_of_a_deck_is_told_by_its_place(
    place: str, edit: Callable[[Any], object], sides: tuple[str, str] | None, tmp_path: Path
):
    made = deck()
    edit(made)
    found = changes_of("fees.pptx", saved(deck()), saved(made), tmp_path)
    matching = [name for name in found if name.startswith(place)]
    assert matching, sorted(found)
    assert sides is None or found[place] == sides


def pdf(*pages: list[str], size: tuple[int, int] = (595, 842)) -> bytes:
    file = io.BytesIO()
    canvas = Canvas(file, pagesize=size, invariant=1)
    for lines in pages:
        for number, line in enumerate(lines):
            canvas.drawString(72, 700 - 20 * number, line)
        canvas.showPage()
    canvas.save()
    return file.getvalue()


def test_a_change_of_a_pdf_is_told_by_page_and_line(tmp_path: Path):
    before = pdf(["Fees", "Alpha 40"], ["Terms"])
    found = changes_of("fees.pdf", before, pdf(["Fees", "Alpha 48"], ["Terms"]), tmp_path / "1")
    assert found == {"page 1 line 2": ("Alpha 40", "Alpha 48")}
    found = changes_of("fees.pdf", before, pdf(["Fees", "Alpha 40"]), tmp_path / "2")
    assert found["pages"] == ("2", "1") and found["page 2 line 1 of before"] == ("Terms", "")
    found = changes_of(
        "fees.pdf", before, pdf(["Fees", "Alpha 40"], ["Terms"], size=(842, 595)), tmp_path / "3"
    )
    assert found["page 1 size"] == ("595 × 842", "842 × 595")


# Mail, chat, calendar, text.


def test_a_sent_mail_is_told_and_the_others_are_not(world: Path, tmp_path: Path):
    before = (world / "mail.mbox").read_bytes()
    sent = b"From ann@a.example Mon Mar 02 10:00:00 2026\nFrom: ann@a.example\nTo: bob@a.example\n"
    sent += b"Subject: Fees\nMessage-ID: <new@a.example>\n\nThe fee is 48.\n\n"
    found = changes_of("mail.mbox", before, before + sent, tmp_path)
    assert found["mail <new@a.example> Subject"] == ("", "Fees")
    assert ("", "The fee is 48.") in found.values()
    assert all("new@a.example" in place or place.startswith("mail ") for place in found)
    assert not any("<1." in place for place in found)


def test_a_mail_that_was_altered_is_told(world: Path, tmp_path: Path):
    before = (world / "mail.mbox").read_bytes()
    found = changes_of("mail.mbox", before, before.replace(b"Subject: ", b"Subject: Re: ", 1), tmp_path)
    assert [place for place in found if place.endswith(" Subject")]
    assert len(found) == 1


def test_an_event_that_moved_is_told(world: Path, tmp_path: Path):
    before = (world / "calendar.ics").read_bytes()
    moved = before.replace(b"DTSTART:20260302T090000", b"DTSTART:20260302T110000", 1)
    assert moved != before
    found = changes_of("calendar.ics", before, moved, tmp_path)
    ((place, sides),) = found.items()
    assert place.startswith("VEVENT 0@") and place.endswith("DTSTART") and sides[1] == "20260302T110000"


def test_a_message_in_a_chat_is_told(world: Path, tmp_path: Path):
    file = next((world / "chat").glob("*.json"))
    messages = json.loads(file.read_text())
    more = json.dumps([*messages, {"time": "t", "user": "ann", "text": "48"}], indent=1).encode()
    found = changes_of("chat/a.json", file.read_bytes(), more, tmp_path)
    assert list(found) == [f"$ {len(messages) + 1}", "end of file"] or list(found) == [
        f"$ {len(messages) + 1}"
    ]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (b"a\nb\nc\n", b"a\nB\nc\n", {"line 2": ("b", "B")}),
        (b"a\nb\nc\n", b"a\nc\n", {"line 2 of before": ("b", "")}),
        (b"a\nc\n", b"a\nb\nc\n", {"line 2": ("", "b")}),
        (b"a\nb\n", b"a\r\nb\r\n", {"line ends": ("LF", "CR LF")}),
        (b"a\nb\n", b"a\nb", {"end of the last line": ("as the others", "none")}),
        (b"a\n", b"\xef\xbb\xbfa\n", {"encoding": ("UTF-8", "UTF-8 with a mark")}),
        ("ä\n".encode(), "ä\n".encode("latin-1"), {"encoding": ("UTF-8", "none known, shown as Latin-1")}),
        (b"a \n", b"a\n", {"line 1": ("a ", "a")}),
    ],
)
def test_a_change_of_a_text_is_told(
    before: bytes, after: bytes, found: dict[str, tuple[str, str]], tmp_path: Path
):
    assert changes_of("notes.txt", before, after, tmp_path) == found


# Nothing goes unnoticed.

SAMPLES: dict[str, bytes] = {
    "a.xlsx": saved(book()),
    "a.docx": saved(document()),
    "a.pptx": saved(deck()),
    "a.pdf": pdf(["Fees"]),
    "a.mbox": b"From a Mon\nFrom: a@b\nMessage-ID: <1>\n\nhello\n",
    "a.ics": b"BEGIN:VCALENDAR\r\nBEGIN:VEVENT\r\nUID:1\r\nEND:VEVENT\r\nEND:VCALENDAR\r\n",
    "a.json": b'[{"a": 1}, {"b": 2}]',
    "a.csv": b"x,y\n1,2\n",
    "a.bin": bytes(range(256)),
    "a.zip": saved(book()),
}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@example(name="a.json", at=0, put=b" ", replace=False)
@example(name="a.mbox", at=10, put=b"\n", replace=False)
@example(name="a.ics", at=0, put=b"\r\n", replace=False)
@example(name="a.txt", at=0, put=b"", replace=True)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    at=st.integers(0, 40_000),
    put=st.binary(min_size=1, max_size=6),
    replace=st.booleans(),
)
def test_any_change_of_bytes_is_at_least_one_change(
    name: str, at: int, put: bytes, replace: bool, tmp_path: Path
):
    before = SAMPLES.get(name, b"text\n")
    at %= len(before) + 1
    after = before[:at] + put + before[at + (len(put) if replace else 0) :]
    folder = tmp_path / f"{time.monotonic_ns()}"
    listed = changes(differing({name: before}, {name: after}, folder))
    shutil.rmtree(folder)
    assert bool(listed) == (before != after)
    assert all(change.path == name for change in listed)
    assert all(change.kind != "changed" or change.before != change.after for change in listed)


PARTS = st.dictionaries(
    st.sampled_from("abc"),
    st.text("xyz", max_size=2) | st.lists(st.sampled_from("xyz"), max_size=5).map(tuple),
)


@given(PARTS, PARTS)
@example({"a": ()}, {})
@example({"a": "x"}, {"a": ("x",)})
@example({"a": ("x", "y")}, {"a": ("y", "x")})
def test_parts_differ_exactly_if_a_change_says_so(before: dict[str, Any], after: dict[str, Any]):
    listed = compare("f", before, after, characters=100)

    def sides(parts: dict[str, Any]) -> dict[str, Any]:
        as_sequence = {name for p in (before, after) for name, value in p.items() if isinstance(value, tuple)}
        return {
            name: (value if isinstance(value, tuple) else (value,)) if name in as_sequence else value
            for name, value in parts.items()
            if value != ()
        }

    assert bool(listed) == (sides(before) != sides(after))
    assert compare("f", before, before, characters=100) == []


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.lists(st.sampled_from("abcd"), max_size=12))
def test_changes_of_a_sequence_lead_from_before_to_after(before: list[str], after: list[str]):
    rebuilt = list(before)
    removed = []
    for change in compare("f", {"line": tuple(before)}, {"line": tuple(after)}, characters=9):
        if change.kind == "removed":
            removed.append(int(change.place.split()[1]) - 1)
    counts = [c.kind for c in compare("f", {"line": tuple(before)}, {"line": tuple(after)}, characters=9)]
    assert len(before) - counts.count("removed") + counts.count("added") == len(after)
    assert all(rebuilt[place] in before for place in removed)


def test_a_long_sequence_is_compared_as_a_bag_in_little_time(tmp_path: Path):
    before = [f"row {n}" for n in range(30_000)]
    after = [*before[1::2], *before[0::2]]
    begun = time.monotonic()
    found = changes_of("a.csv", "\n".join(before).encode(), "\n".join(after).encode(), tmp_path)
    assert time.monotonic() - begun < 5.0
    assert any("order" in sides[0] for sides in found.values())


def test_a_change_deep_in_a_long_line_is_shown():
    (change,) = compare(
        "f", {"a": "x" * 5_000 + "1" + "y" * 5_000}, {"a": "x" * 5_000 + "2" + "y" * 5_000}, characters=90
    )
    assert "1y" in change.before and "2y" in change.after and len(change.before) < 150


def test_files_that_come_go_and_turn_special_are_told(tmp_path: Path):
    place = differing(
        {"gone.txt": b"1", "sub/was.txt": b"2", "link.txt": b"3"}, {"new.csv": b"a,1\n"}, tmp_path
    )
    os.symlink("/etc/passwd", tmp_path / "after" / "link.txt")
    os.mkfifo(tmp_path / "after" / "pipe")
    listed = changes(place)
    told = {(change.path, change.kind, change.place) for change in listed}
    assert {
        ("gone.txt", "removed", ""),
        ("sub/was.txt", "removed", ""),
        ("link.txt", "removed", ""),
        ("pipe", "added", ""),
        ("new.csv", "added", ""),
        ("new.csv", "added", "line 1"),
    } <= told
    assert next(change for change in listed if change.path == "pipe").after.startswith("no plain file")
    assert "root:" not in rendered(listed, characters=10_000)


def test_a_text_says_every_change_under_its_file(tmp_path: Path):
    listed = changes(
        differing({"a.txt": b"1\n", "b.txt": b"1\n"}, {"a.txt": b"2\n", "b.txt": b"1\n3\n"}, tmp_path)
    )
    text = rendered(listed, characters=1_000)
    assert text == "== 'a.txt'\nchanged line 1: 1 -> 2\n== 'b.txt'\nadded line 2: 3"
    short = rendered(listed, characters=20)
    assert "[2 changes in all; some are left out here]" in short


# What an agent can do to its reader.


def _bomb(levels: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/workbook.xml", b"0" * levels)
    return file.getvalue()


def _sheet_bomb() -> bytes:
    """A sheet of a few hundred kilobytes whose cells fill gigabytes once they are objects."""
    file = io.BytesIO()
    plain = saved(openpyxl.Workbook())
    rows = b"".join(b'<row r="%d"><c r="A%d"><v>1</v></c></row>' % (n, n) for n in range(1, 900_000))
    with zipfile.ZipFile(io.BytesIO(plain)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "xl/worksheets/sheet1.xml":
                data = data.replace(b"<sheetData />", b"<sheetData>" + rows + b"</sheetData>")
                data = data.replace(b"<sheetData/>", b"<sheetData>" + rows + b"</sheetData>")
            new.writestr(name, data)
    return file.getvalue()


_ENTITIES = (
    b'<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa">'
    + b"".join(b'<!ENTITY %c "%s">' % (98 + n, b"&%c;" % (97 + n) * 10) for n in range(9))
    + b"]><a>&j;</a>"
)


def _entities() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(document()))) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, _ENTITIES if name == "word/document.xml" else old.read(name))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        ("a.xlsx", lambda: _bomb(90_000_000)),
        ("a.xlsx", lambda: b"PK\x03\x04 no archive"),
        ("a.xlsx", _sheet_bomb),
        ("a.docx", _entities),
        ("a.docx", lambda: saved(book())),
        ("a.pptx", lambda: saved(document())),
        ("a.pdf", lambda: b"%PDF-1.7\n%%EOF"),
        ("a.json", lambda: b"[" * 1_000_000),
        ("a.ics", lambda: b"BEGIN:A\n" * 1_000_000),
        ("a.mbox", lambda: b"From a b\n\n" * 300_000),
        ("a.bin", lambda: b"\0" * 5_000_000),
    ],
)
def test_a_file_made_to_break_its_reader_is_still_a_change(
    name: str, attack: Callable[[], bytes], tmp_path: Path
):
    before = SAMPLES[name]
    limits = DiffLimits(memory_bytes=400 << 20, file_s=5.0)
    begun = time.monotonic()
    listed = changes(
        differing({name: before, "b.txt": b"1"}, {name: attack(), "b.txt": b"2"}, tmp_path), limits
    )
    assert time.monotonic() - begun < 12.0
    assert [change for change in listed if change.path == name]
    assert [change.after for change in listed if change.path == "b.txt"] == ["2"]


def test_many_files_are_all_told(tmp_path: Path):
    after = {f"f{n}.txt": b"1" for n in range(30)}
    listed = changes(differing({}, after, tmp_path), DiffLimits(files=3))
    assert {change.path for change in listed} == set(after)
    assert sum("only its bytes were compared" in change.after for change in listed) == 27


def test_more_changes_than_are_told_are_counted(tmp_path: Path):
    after = "\n".join(str(n) for n in range(100)).encode()
    listed = changes(differing({"a.txt": b"x"}, {"a.txt": after}, tmp_path), DiffLimits(changes=10))
    assert len(listed) == 11 and "changes more" in listed[0].after


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda: time.sleep(60), "not read within"),
        (lambda: bytearray(600 << 20), "MemoryError"),
        (lambda: os._exit(3), "the reader died"),
        (lambda: os.abort(), "the reader died"),
        (lambda: "x" * 3_000_000, "not read within"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: Path("/tmp/never-written").write_text("x"), "OSError"),
    ],
)
def test_work_on_untrusted_data_stays_within_its_bounds(work: Callable[[], Any], text: str):
    begun = time.monotonic()
    with pytest.raises(OutOfBounds, match=text):
        bounded(work, seconds=1.0, memory_bytes=300 << 20, result_bytes=1 << 20)
    assert time.monotonic() - begun < 3.0


def test_bounded_work_gives_its_result():
    assert bounded(lambda: {"a": [1, "ä"]}, seconds=5.0, memory_bytes=300 << 20, result_bytes=100) == {
        "a": [1, "ä"]
    }


def test_a_file_is_read_by_its_suffix_and_else_as_what_it_is():
    assert kind_of("A/B.XLSX", b"") == "sheets" and kind_of("readme", b"text\n") == "text"
    assert kind_of("image.png", b"\x89PNG\r\n\x1a\n\0") == "bytes"
    assert dict(read_parts("text", b"a"))["line"] == ("a",)


def test_a_change_is_a_value():
    change = Change(path="a", kind="changed", place="", before="1", after="2")
    assert change == Change(path="a", kind="changed", place="", before="1", after="2")
