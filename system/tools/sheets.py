"""Spreadsheets: rows with values and formulas, and the change of one cell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mcp.server import MCPServer
from openpyxl.utils.cell import get_column_letter, range_boundaries

from system.tools.formulas import Place
from system.tools.paths import existing_file
from system.tools.registration import add_tool
from system.tools.results import joined, matches
from system.tools.workbook import Cell, Workbook

_CELL = re.compile(r"[A-Z]{1,3}[1-9]\d{0,6}")
_BOUNDS = (1, 1, 16_384, 1_048_576)


def read_sheet(root: Path, path: str, find: str = "", range: str = "", sheet: str = "") -> str:
    """Read rows of an xlsx file."""
    file = existing_file(root, path, ".xlsx")
    bounds = _bounds(range)
    with Workbook(file) as workbook:
        if sheet or range:
            names = [_sheet(workbook, path, sheet)]
        else:
            names = workbook.sheets if find else workbook.sheets[:1]
        lines = [line for name in names for line in _lines(workbook, name, bounds, find)]
        others = workbook.sheets[1:] if not (sheet or range or find) else []
    if others:
        lines.append(f"other sheets: {', '.join(others)}")
    return joined(lines, rest="narrow with find or range")


def edit_cell(root: Path, path: str, cell: str, value: str, sheet: str = "") -> str:
    """Set a cell of an xlsx file; a value that starts with = is a formula."""
    file = existing_file(root, path, ".xlsx")
    reference = cell.strip().replace("$", "").upper()
    if not _CELL.fullmatch(reference):
        raise ValueError(f"cell must be like B2, got {cell}")
    _bounds(reference)
    with Workbook(file) as workbook:
        name = _sheet(workbook, path, sheet)
        merged = workbook.merged(name, reference)
        if merged:
            raise ValueError(f"{reference} lies inside the merged cells {merged}; edit {merged.split(':')[0]}")
        before = workbook.cell(name, reference)
        workbook.set(name, reference, value)
        after = workbook.cell(name, reference)
        workbook.save()
    return f"{reference}: {before} -> {after}"


def workbook_lines(file: Path) -> list[str]:
    """Give every row of every sheet, one a line."""
    with Workbook(file) as workbook:
        return [line for name in workbook.sheets for line in _lines(workbook, name, _BOUNDS, "")]


def _lines(workbook: Workbook, sheet: str, bounds: tuple[int, int, int, int], find: str) -> Iterator[str]:
    """Yield the matching rows; rows of any sheet but the first begin with its name."""
    left, top, right, bottom = bounds
    prefix = "" if sheet == workbook.sheets[0] else f"{sheet}!"
    for row in workbook.rows(sheet):
        shown = [(at, cell) for at, cell in row if left <= at.column <= right and top <= at.row <= bottom]
        if shown and any(matches(find, str(cell)) for _, cell in shown):
            yield prefix + " | ".join(_labelled(at, cell) for at, cell in shown)


def _labelled(at: Place, cell: Cell) -> str:
    return f"{get_column_letter(at.column)}{at.row}: {cell}"


def _bounds(range: str) -> tuple[int, int, int, int]:
    """Read a range like A1:B4, B2, A:B or 2:4 as left, top, right, bottom."""
    if not range.strip():
        return _BOUNDS
    try:
        found = range_boundaries(range.strip().upper())
    except (ValueError, TypeError):
        raise ValueError(f"range must be like A1:B4, got {range}") from None
    left, top, right, bottom = (bound or limit for bound, limit in zip(found, _BOUNDS, strict=True))
    if left > right or top > bottom or right > _BOUNDS[2] or bottom > _BOUNDS[3]:
        raise ValueError(f"range must be like A1:B4, got {range}")
    return left, top, right, bottom


def _sheet(workbook: Workbook, path: str, sheet: str) -> str:
    if not sheet:
        return workbook.sheets[0]
    if sheet not in workbook.sheets:
        raise ValueError(f"no such sheet {sheet} in {path}; sheets here: {', '.join(workbook.sheets)}")
    return sheet


def register(server: MCPServer, root: Path) -> None:
    """Offer the sheet tools."""
    for function in (read_sheet, edit_cell):
        add_tool(server, root, function)
