"""Spreadsheets of the set `full`: made, extended, filtered; formulas written with their values."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import xlsxwriter
from openpyxl.utils.cell import get_column_letter

from system.tools import sheets
from system.tools.arguments import NO_ROWS, NO_STRINGS, Rows
from system.tools.calculation import calculate
from system.tools.conditions import Condition, read_condition
from system.tools.formulas import LAST_COLUMN, LAST_ROW, Place
from system.tools.paths import existing_file
from system.tools.recalculation import narrow
from system.tools.registration import tool
from system.tools.results import NO_MATCH
from system.tools.saving import name_of, new_file, save_bytes
from system.tools.workbook import (
    Cell,
    Workbook,
    check_sheet_name,
    content_with_dates,
    content_without_dates,
    shown,
)

RowsMeaning = Annotated[
    Rows, 'rows of cells from the top, like [["Item","Fee"],["Norvik","12.5"],["Total","=SUM(B2:B2)"]]'
]
SheetMeaning = Annotated[str, "name of the sheet; the first one if left out"]


def read_sheet(
    root: Path,
    path: str,
    find: Annotated[str, "keep rows that contain this text, in all sheets unless one is named"] = "",
    range: Annotated[str, "like A1:B4"] = "",
    sheet: SheetMeaning = "",
) -> str:
    """Read rows of an xlsx file: each cell with its address, its value, and its formula in brackets."""
    return "\n".join(sheets.sheet_lines(root, path, find, range, sheet)) or NO_MATCH


def list_sheets(root: Path, path: str) -> str:
    """List the sheets of an xlsx file with the range that each one fills and its first row."""
    with Workbook(existing_file(root, path, ".xlsx")) as workbook:
        return "\n".join(_summary(workbook, name) for name in workbook.sheets)


def filter_rows(
    root: Path,
    path: str,
    where: Annotated[
        list[str],
        'conditions that a row must all meet, like ["Fee >= 100", "Client contains Nor"]; '
        "operators = != > >= < <= contains, starts with, is empty, is not empty",
    ],
    sheet: SheetMeaning = "",
    columns: Annotated[list[str], "headers or letters of the columns to show; all if left out"] = NO_STRINGS,
    header: Annotated[int, "number of the row with the headers; the first that holds something if 0"] = 0,
) -> str:
    """Find the rows of a sheet that meet conditions on their columns, named by header or letter."""
    with Workbook(existing_file(root, path, ".xlsx")) as workbook:
        name = sheets.named_sheet(workbook, path, sheet)
        rows = [row for row in workbook.rows(name) if row[0][0].row >= header]
    if not rows:
        return f"{name} is empty" + (f" from row {header} on" if header else "")
    head, *rest = rows
    names = {at.column: shown(cell.value) for at, cell in head if cell.value is not None}
    last = max(row[-1][0].column for row in rows)
    conditions = [read_condition(text, names, columns=last) for text in where]
    wanted = {read_condition(f"{text} is empty", names, columns=last).column for text in columns}
    found = [row for row in rest if _meets(row, conditions)]
    lines = [
        sheets.row_line([(a, c) for a, c in row if not wanted or a.column in wanted])
        for row in [head, *found]
    ]
    return "\n".join([*lines, f"{len(found)} of {len(rest)} rows"])


def create_sheet(
    root: Path,
    path: str,
    rows: RowsMeaning = NO_ROWS,
    sheet: Annotated[str, "name of its sheet"] = "Sheet1",
) -> str:
    """Make a new xlsx file with one sheet; a cell that starts with = is a formula, stored with its value."""
    check_sheet_name(sheet)
    _check_size(rows, 1, 1)
    file = new_file(root, path, ".xlsx")
    save_bytes(file, _empty_workbook(sheet))
    try:
        report = _fill(file, sheet, rows, 1, 1)
    except BaseException:
        file.unlink()
        raise
    return f"created {name_of(root, file)}, sheet {sheet}: {report}"


def add_sheet(
    root: Path, path: str, sheet: Annotated[str, "name of the new sheet"], rows: RowsMeaning = NO_ROWS
) -> str:
    """Add a sheet to an xlsx file, after the others."""
    file = existing_file(root, path, ".xlsx")
    _check_size(rows, 1, 1)
    with _open(file) as workbook:
        workbook.add_sheet(sheet)
        report = _filled(workbook, sheet, rows, 1, 1)
        workbook.save()
        names = ", ".join(workbook.sheets)
    return f"added sheet {sheet} to {path}: {report}; sheets: {names}"


def edit_cell(
    root: Path,
    path: str,
    cell: Annotated[str, "like B2"],
    value: Annotated[str, "a number, a text, a formula that starts with =, or nothing to clear the cell"],
    sheet: SheetMeaning = "",
) -> str:
    """Set one cell of an xlsx file and recalculate what depends on it."""
    with _open(existing_file(root, path, ".xlsx")) as workbook:
        return sheets.edited(workbook, path, cell, value, sheet)


def edit_range(
    root: Path,
    path: str,
    cell: Annotated[str, "the upper left cell, like B2"],
    rows: RowsMeaning,
    sheet: SheetMeaning = "",
) -> str:
    """Write a block of cells of an xlsx file and recalculate what depends on them."""
    file = existing_file(root, path, ".xlsx")
    column, row = sheets.cell_place(cell)
    _check_size(rows, row, column)
    with _open(file) as workbook:
        name = sheets.named_sheet(workbook, path, sheet)
        report = _filled(workbook, name, rows, row, column)
        workbook.save()
    return f"{name}: {report}"


def append_rows(root: Path, path: str, rows: RowsMeaning, sheet: SheetMeaning = "") -> str:
    """Add rows below the last row of a sheet that holds something."""
    file = existing_file(root, path, ".xlsx")
    with _open(file) as workbook:
        name = sheets.named_sheet(workbook, path, sheet)
        last = [row for row in workbook.rows(name)][-1:]
        top = last[0][0][0].row + 1 if last else 1
        _check_size(rows, top, 1)
        report = _filled(workbook, name, rows, top, 1)
        workbook.save()
    return f"{name}: {report}"


def _open(file: Path) -> Workbook:
    """Open a workbook with the wide evaluator; where days are counted from 1904, with the narrow one."""
    workbook = Workbook(file, evaluate=calculate, content=content_with_dates)
    if not workbook.counts_from_1904:
        return workbook
    workbook.__exit__()
    return Workbook(file, evaluate=narrow, content=content_without_dates)


def _empty_workbook(sheet: str) -> bytes:
    data = io.BytesIO()
    book = xlsxwriter.Workbook(data, {"in_memory": True})
    book.add_worksheet(sheet)
    book.close()
    return data.getvalue()


def _fill(file: Path, sheet: str, rows: Rows, top: int, left: int) -> str:
    with _open(file) as workbook:
        report = _filled(workbook, sheet, rows, top, left)
        workbook.save()
    return report


def _filled(workbook: Workbook, sheet: str, rows: Rows, top: int, left: int) -> str:
    """Write a block and say what it became: its range, and the values of its formulas."""
    texts = {
        Place(sheet, top + i, left + j): text for i, row in enumerate(rows) for j, text in enumerate(row)
    }
    if not texts:
        return "no cells"
    for place in texts:
        if merged := workbook.merged(place):
            raise ValueError(f"{_address(place)} lies inside merged cells; write to {merged.split(':')[0]}")
    workbook.fill(texts)
    formulas = [place for place, text in texts.items() if text.startswith("=") and len(text) > 1]
    cells = workbook.cells(formulas)
    values = [f"{_address(place)} {cells.get(place, Cell())}" for place in formulas[:20]]
    more = [f"and {len(formulas) - 20} formulas more"] if len(formulas) > 20 else []
    first, last = min(texts), max(texts)
    right = max(place.column for place in texts)
    area = f"{_address(first)}:{get_column_letter(right)}{last.row}"
    return "; ".join([f"wrote {len(rows)} rows at {area}", *values, *more])


def _check_size(rows: Rows, top: int, left: int) -> None:
    height, width = len(rows), max(map(len, rows), default=0)
    if top + height - 1 > LAST_ROW or left + width - 1 > LAST_COLUMN:
        raise ValueError(f"rows must fit into the sheet, got {height} rows of {width} cells")
    if height * width > _MOST_CELLS:
        raise ValueError(f"rows must have at most {_MOST_CELLS} cells, got {height * width}; use run_code")


_MOST_CELLS = 50_000


def _meets(row: list[tuple[Place, Cell]], conditions: list[Condition]) -> bool:
    values = {at.column: cell.value for at, cell in row}
    return all(condition.holds(values.get(condition.column)) for condition in conditions)


def _summary(workbook: Workbook, name: str) -> str:
    rows = list(workbook.rows(name))
    if not rows:
        return f"{name}: empty"
    columns = [at.column for row in rows for at, _ in row]
    left, right = get_column_letter(min(columns)), get_column_letter(max(columns))
    area = f"{left}{rows[0][0][0].row}:{right}{rows[-1][0][0].row}"
    return f"{name}: {area}, {len(rows)} rows; {sheets.row_line(rows[0])}"


def _address(place: Place) -> str:
    return f"{get_column_letter(place.column)}{place.row}"


TOOLS = (
    tool(read_sheet, reads=True),
    tool(list_sheets, reads=True),
    tool(filter_rows, reads=True),
    tool(create_sheet),
    tool(add_sheet),
    tool(edit_cell),
    tool(edit_range),
    tool(append_rows),
)
