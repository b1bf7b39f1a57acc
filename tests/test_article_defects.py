"""The harness defects that the article reports, each shown to do harm and to be gone here.

A scripted policy plays each task twice: under the defect it fails, under this harness it does not. What is scripted
never changes between the two, so the difference is the harness's.
"""

# ruff: noqa: F811  # fixtures are imported, and named again as arguments

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pypdf
import pytest
from reportlab.platypus import SimpleDocTemplate, Table, TableStyle
from scripted_engine import Script, plays
from test_diff import EDITS, book, changes_of, differing, saved
from test_full_tools import FULL, Call, do, pristine, world  # noqa: F401
from test_trial import READ, engine, instruction_of, run, tasks  # noqa: F401

from system.harness.chat import ToolCall, call_text
from system.harness.conversation import NUDGE
from system.tools import programs
from system.tools.registration import tool
from system.tools.server import tools_of
from system.verify.diff import changes

PACKAGES = {"numpy", "openpyxl", "docx", "pptx", "pdfplumber", "pypdf", "lxml", "matplotlib"}


# "packages were missing in the sandbox"


def test_missing_packages_code_imports_what_it_is_told_and_is_told_what_is_missing(world: Path) -> None:
    there, missing = programs.packages()
    assert set(there) >= PACKAGES
    bare = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import {there[0]}",
    ]  # the defect: an interpreter and nothing else
    assert "ModuleNotFoundError" in subprocess.run(bare, capture_output=True, text=True).stderr
    assert set(there) | set(missing) == set(programs.PACKAGES)
    told = FULL["run_code"].description
    assert ", ".join(there) in told and all(name in told for name in missing)
    source = f"import {', '.join(there)}; print('all there')"
    assert FULL["run_code"].call(world, {"code": source, "seconds": 60}) == ("all there", False)
    assert sorted(path.name for path in world.iterdir() if path.name.startswith(".")) == []


def test_missing_packages_pandas_reads_a_sheet_where_it_is_installed(world: Path) -> None:
    pytest.importorskip("pandas", exc_type=ImportError)
    source = "import pandas; print(int(pandas.read_excel('fees.xlsx')['Value'].iloc[0]))"
    assert FULL["run_code"].call(world, {"code": source, "seconds": 60}) == ("4821", False)


# "the slides tool answered None although it had done its work"


def test_none_results_no_tool_is_able_to_answer_nothing() -> None:
    for name, each in (tools_of("brief") | FULL).items():
        assert each.run.__annotations__["return"] == "str", name
    silent = tool(lambda root: None, name="silent")  # type: ignore[arg-type, return-value]
    text, failed = silent.call(Path("."), {})
    assert failed and text == "error: silent must say what it did, got None"


def test_none_results_a_change_of_slides_says_what_it_did(do: Call) -> None:
    before = do("read_slides", path="deck.pptx")
    said = do("add_slide", path="deck.pptx", title="Fees", text="Norvik 120")
    assert "deck.pptx" in said and "None" not in said
    assert do("read_slides", path="deck.pptx") != before


# "a page of two dimensions became one line of text"


def test_flattened_layout_a_table_keeps_its_cells_and_two_columns_their_order(world: Path, do: Call) -> None:
    rows = [["Client", "Scope of the work", "Fee"], ["Norvik", "two\nlines", "120"], ["Balden", "", "7"]]
    grid = TableStyle([("GRID", (0, 0), (-1, -1), 1, "black")])
    SimpleDocTemplate(str(world / "grid.pdf")).build([Table(rows, style=grid)])
    flattened = pypdf.PdfReader(world / "grid.pdf").pages[0].extract_text()
    assert "Balden\n7" in flattened.replace(" ", "")  # the defect: the empty cell is gone, 7 may be the scope
    assert do("read_pdf_tables", path="grid.pdf") == (
        "table 1 of 1, 3 rows:\nClient | Scope of the work | Fee\nNorvik | two lines | 120\nBalden |  | 7"
    )
    side_by_side = do("read_pdf", path="report.pdf").split("\n")
    assert any("Corden fee" in line and "Cortem fee" in line for line in side_by_side)
    in_order = do("read_pdf", path="report.pdf", order="columns").split("\n")
    column = [
        "The partners met in March and agreed on the",
        "figures below, which the office had checked",
        "before.",
    ]
    assert in_order == [
        "Quarterly report of Tavdor Partners about the fees of the year",
        *column,
        "Corden fee  17",
        "Kalhem fee  858",
        *column * 2,
        "Cortem fee  5663",
        "Jaskar fee  3767",
        *column,
        "[page 1 of 1]",
    ]
    assert os.fspath(world) not in "".join(in_order)


# "a call that could not be parsed ended the trajectory"


def clumsy(instruction: str) -> Script:
    """Writes a broken call first, then plays the task if it is let."""
    answer = yield '<tool_call>\n{"name": "read_sheet", "arguments": {'
    assert answer.startswith("error: ")
    yield from played(instruction)


def played(instruction: str) -> Script:
    """The expert, from its first turn on, in the middle of a script."""
    steps = plays(instruction)
    text = next(steps)
    try:
        while True:
            text = steps.send((yield text))
    except StopIteration:
        return


@pytest.mark.parametrize(("repairs", "reward"), [(0, 0.0), (2, 1.0)], ids=["defect", "here"])
def test_no_regeneration(run: Any, tasks: dict[str, Path], repairs: int, reward: float) -> None:
    result = run(clumsy(instruction_of(tasks["find"])), limits={"repairs": repairs})
    assert result["reward"] == reward and len(result["turns"]) > 1 or not reward
    assert result["repairs"] == min(repairs, 1)


# "one long result used up the context"


def greedy(instruction: str) -> Script:
    """Prints far too much, then plays the task if there is room."""
    yield call_text(ToolCall("run_code", {"code": "print('fee 17 ' * 20_000)"}))
    yield from played(instruction)


@pytest.mark.parametrize(("characters", "reward"), [(1_000_000, 0.0), (4_000, 1.0)], ids=["defect", "here"])
def test_no_truncation(run: Any, tasks: dict[str, Path], characters: int, reward: float) -> None:
    limits = {"context": 24_000, "result_characters": characters}
    result = run(greedy(instruction_of(tasks["find"])), toolset="full", limits=limits)
    assert result["reward"] == reward
    assert (result["outcome"]["reason"] == "context") is not bool(reward)


# "the agent read until the context was full and never answered"


def curious(instruction: str) -> Script:
    """Reads on and on until it is told that the context ends, then does its work."""
    while NUDGE not in (yield READ):
        pass
    yield from played(instruction)


@pytest.mark.parametrize(("ratio", "reward"), [(0.0, 0.0), (0.2, 1.0)], ids=["defect", "here"])
def test_no_nudge(run: Any, tasks: dict[str, Path], ratio: float, reward: float) -> None:
    limits = {"context": 10_000, "nudge_ratio": ratio, "turns": 1_000}
    result = run(curious(instruction_of(tasks["find"])), limits=limits)
    assert result["reward"] == reward and result["nudged"] is bool(ratio)
    assert (result["outcome"]["reason"] == "context") is not bool(reward)


# "the comparison of files missed changes"


def shown(data: bytes) -> str:
    """The defect: what the cells show, as text."""
    loaded = openpyxl.load_workbook(io.BytesIO(data), data_only=True)
    cells = [[list(row) for row in sheet.iter_rows(values_only=True)] for sheet in loaded.worksheets]
    return str(cells)


@pytest.mark.parametrize(
    ("place", "edit"),
    [(place, edit) for place, edit, _ in EDITS],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_comparison_that_misses_a_change(place: str, edit: Callable[[Any], object], tmp_path: Path) -> None:
    made = book()
    edit(made)
    assert place in changes_of("fees.xlsx", saved(book()), saved(made), tmp_path)


def test_a_comparison_that_misses_a_change_would_be_one_of_what_is_shown(tmp_path: Path) -> None:
    """Under the defect more than half of those edits are "no difference"; a file that only grew is no better off."""
    blind = 0
    for _, edit, _ in EDITS:
        made = book()
        edit(made)
        blind += shown(saved(made)) == shown(saved(book()))
    assert blind > len(EDITS) / 2
    place = differing({"a.txt": b"fee 40\n"}, {"a.txt": b"fee 48\n"}, tmp_path)
    for side in ("before", "after"):
        os.utime(tmp_path / side / "a.txt", (1e9, 1e9))
    sizes = [(tmp_path / side / "a.txt").stat() for side in ("before", "after")]
    assert sizes[0].st_size == sizes[1].st_size and sizes[0].st_mtime == sizes[1].st_mtime  # the defect
    assert [(change.before, change.after) for change in changes(place)] == [("fee 40", "fee 48")]
