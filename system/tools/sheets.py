"""Spreadsheets: rows with values and formulas, and the change of one cell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from openpyxl.utils.cell import get_column_letter

from system.tools.formulas import LAST_COLUMN, LAST_ROW, Place, bounds
from system.tools.paths import existing_file
from system.tools.registration import tool
from system.tools.results import joined, matches
from system.tools.workbook import Cell, Workbook, shown

_CELL = re.compile(r"[A-Z]{1,3}[1-9]\d{0,6}")
_ALL = (1, 1, LAST_COLUMN, LAST_ROW)


def read_sheet(root: Path, path: str, find: str = "", range: str = "", sheet: str = "") -> str:
    """Read rows of an xlsx file; find keeps rows that contain a text, range is like A1:B4.

    Without a sheet, `find` looks through all sheets and anything else reads the first one.
    """
    return joined(sheet_lines(root, path, find, range, sheet), rest="narrow with find or range")


def edit_cell(root: Path, path: str, cell: str, value: str, sheet: str = "") -> str:
    """Set a cell of an xlsx file, like B2, to a number, a text, or a formula that starts with =."""
    file = existing_file(root, path, ".xlsx")
    cell_place(cell)
    with Workbook(file) as workbook:
        return edited(workbook, path, cell, value, sheet)


def sheet_lines(root: Path, path: str, find: str, range: str, sheet: str) -> list[str]:
    """Give the rows that `read_sheet` shows, one a line."""
    file = existing_file(root, path, ".xlsx")
    window = bounds(range.strip().upper()) if range.strip() else _ALL
    with Workbook(file) as workbook:
        if find and not (sheet or range):
            names = workbook.sheets
        else:
            names = [named_sheet(workbook, path, sheet)]
        lines = [line for name in names for line in _lines(workbook, name, window, find)]
        others = workbook.sheets[1:] if not (sheet or range or find) else []
    return [*lines, *([f"other sheets: {', '.join(others)}"] if others else [])]


def edited(workbook: Workbook, path: str, cell: str, value: str, sheet: str) -> str:
    """Set a cell, save the file, say what it was and what it is."""
    column, row = cell_place(cell)
    place = Place(named_sheet(workbook, path, sheet), row, column)
    reference = f"{get_column_letter(column)}{row}"
    merged = workbook.merged(place)
    if merged:
        raise ValueError(f"{reference} lies inside merged cells; edit {merged.split(':')[0]}")
    before = workbook.cell(place)
    workbook.set(place, value)
    after = workbook.cell(place)
    workbook.save()
    return f"{reference}: {before} -> {after}"


def cell_place(cell: str) -> tuple[int, int]:
    """Read an address like B2 as column and row."""
    reference = cell.strip().replace("$", "").upper()
    if not _CELL.fullmatch(reference):
        raise ValueError(f"cell must be like B2, got {cell}")
    column, row, _, _ = bounds(reference)
    return column, row


def workbook_lines(file: Path) -> list[str]:
    """Give every row of every sheet, one a line."""
    with Workbook(file) as workbook:
        return [line for name in workbook.sheets for line in _lines(workbook, name, _ALL, "")]


def _lines(workbook: Workbook, sheet: str, window: tuple[int, int, int, int], find: str) -> Iterator[str]:
    """Yield the matching rows; rows of any sheet but the first begin with its name."""
    left, top, right, bottom = window
    prefix = "" if sheet == workbook.sheets[0] else f"{sheet}!"
    for row in workbook.rows(sheet):
        inside = [(at, cell) for at, cell in row if left <= at.column <= right and top <= at.row <= bottom]
        if inside and any(_contains(cell, find) for _, cell in inside):
            yield prefix + row_line(inside)


def row_line(row: list[tuple[Place, Cell]]) -> str:
    """Show cells in one line, each with its address."""
    return " | ".join(f"{get_column_letter(at.column)}{at.row}: {cell}" for at, cell in row)


def _contains(cell: Cell, find: str) -> bool:
    value = "" if cell.value is None else shown(cell.value)
    return matches(find, value) or matches(find, cell.formula or "")


def named_sheet(workbook: Workbook, path: str, sheet: str) -> str:
    """The name of a sheet that is there; the first one for no name."""
    if not sheet:
        return workbook.sheets[0]
    if sheet not in workbook.sheets:
        raise ValueError(f"no such sheet {sheet} in {path}; sheets here: {', '.join(workbook.sheets)}")
    return sheet


TOOLS = (tool(read_sheet, reads=True), tool(edit_cell))
