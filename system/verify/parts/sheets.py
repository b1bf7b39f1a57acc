"""Workbooks: values and formulas of every cell, how they look, and what hangs on the sheets."""

from __future__ import annotations

import datetime
import io
import json
import re
from typing import Any

import openpyxl

from . import NotReadable, Parts
from .package import Package

_COVERED = re.compile(
    r"xl/(workbook\.xml|worksheets/sheet[^/]*\.xml|sharedStrings\.xml|styles\.xml|calcChain\.xml"
    r"|comments[^/]*(/.*)?|metadata\.xml|theme/.*|drawings/[^/]*\.vml|tables/.*|persons/.*)$",
    re.IGNORECASE,
)
_PLAIN = "General"


def read(data: bytes) -> Parts:
    """Facts per cell and per sheet; charts, pictures, pivots and macros by a hash of their part.

    What a formula shows is what it gave when it was last computed, by whatever program saved the file.
    """
    package = Package(data)
    formulas: Any = openpyxl.load_workbook(io.BytesIO(data))
    values: Any = openpyxl.load_workbook(io.BytesIO(data), data_only=True)
    if not formulas.sheetnames:
        raise NotReadable("a workbook without sheets")
    names = tuple(
        f"{s.title}{'' if s.sheet_state == 'visible' else ' ' + s.sheet_state}" for s in formulas._sheets
    )
    parts: dict[str, str | tuple[str, ...]] = {"sheet": names}
    for name, defined in sorted(formulas.defined_names.items()):
        parts[f"name {name}"] = str(defined.attr_text)
    looks: dict[Any, str] = {}
    for sheet in formulas.worksheets:
        shown = values[sheet.title]
        for (row, column), cell in sheet._cells.items():
            cached = shown._cells.get((row, column))
            parts |= _cell(f"{sheet.title}!{cell.coordinate}", cell, cached, looks)
        parts |= {f"{sheet.title} {name}": text for name, text in _sheet(sheet).items() if text}
    return parts | dict(package.rest(lambda name: bool(_COVERED.match(name))))


def _cell(place: str, cell: Any, cached: Any, looks: dict[Any, str]) -> dict[str, str]:
    found = {}
    if cell.data_type == "f":
        found[f"{place} formula"] = _formula(cell.value)
        found[f"{place} shown"] = _value(cached)
    elif cell.value is not None:
        found[f"{place} value"] = _value(cell)
    if cell.comment is not None:
        found[f"{place} comment"] = f"{cell.comment.author}: {cell.comment.text}"
    if cell.hyperlink is not None:
        found[f"{place} link"] = f"{cell.hyperlink.target or ''}#{cell.hyperlink.location or ''}"
    if cell.has_style:
        if cell.number_format != _PLAIN:
            found[f"{place} format"] = cell.number_format
        key = tuple(cell._style)
        if key not in looks:
            looks[key] = _look(cell)
        if looks[key]:
            found[f"{place} style"] = looks[key]
    return found


def _formula(value: Any) -> str:
    text = getattr(value, "text", None)
    if text is None:
        return str(value) if isinstance(value, str) else json.dumps(dict(value), default=str, sort_keys=True)
    return f"{text} over {value.ref}"


def _value(cell: Any | None) -> str:
    """A cell's value so that the number 48, the text "48" and an error stay apart."""
    if cell is None or cell.value is None:
        return ""
    value = cell.value
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, str) and cell.data_type != "e":
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _look(cell: Any) -> str:
    """Font, fill, borders, alignment and lock, where they are not the usual ones."""
    font, fill, border, alignment = cell.font, cell.fill, cell.border, cell.alignment
    found = [name for name in ("bold", "italic", "strike", "underline") if getattr(font, name, None)]
    if _color(font.color):
        found.append(f"color {_color(font.color)}")
    if font.name or font.sz:
        found.append(f"font {font.name} {font.sz}")
    if fill.fill_type:
        found.append(f"fill {fill.fill_type} {_color(getattr(fill, 'fgColor', None))}")
    sides = [
        f"{side} {getattr(border, side).style}"
        for side in ("left", "right", "top", "bottom")
        if getattr(border, side) is not None and getattr(border, side).style
    ]
    found += [f"border {' '.join(sides)}"] if sides else []
    for name in ("horizontal", "vertical", "wrap_text", "text_rotation", "indent"):
        if getattr(alignment, name):
            found.append(f"{name} {getattr(alignment, name)}")
    if not cell.protection.locked:
        found.append("not locked")
    return "" if found == [f"font {font.name} {font.sz}"] else "; ".join(found)


def _color(color: Any) -> str:
    if color is None or color.type == "theme":
        return "" if color is None or color.theme == 1 else f"theme {color.theme} {color.tint}"
    return str(color.value)


def _sheet(sheet: Any) -> dict[str, str | tuple[str, ...]]:
    widths = sheet.column_dimensions.items()
    heights = sheet.row_dimensions.items()
    return {
        "merged": tuple(sorted(str(area) for area in sheet.merged_cells.ranges)),
        "column": tuple(
            f"{name} width {column.width}{' hidden' if column.hidden else ''}"
            for name, column in sorted(widths)
            if column.customWidth or column.hidden
        ),
        "row": tuple(
            f"{number} height {row.height}{' hidden' if row.hidden else ''}"
            for number, row in sorted(heights)
            if row.height or row.hidden
        ),
        "frozen above and left of": str(sheet.freeze_panes or ""),
        "filter": str(sheet.auto_filter.ref or ""),
        "print area": str(sheet.print_area or ""),
        "protection": "on" if sheet.protection.sheet else "",
        "validation": tuple(
            sorted(
                f"{v.sqref} {v.type} {v.operator} {v.formula1} {v.formula2}"
                for v in sheet.data_validations.dataValidation
            )
        ),
        "conditional format": tuple(
            sorted(
                f"{area.sqref} {rule.type} {rule.operator} {rule.formula}"
                for area, rules in sheet.conditional_formatting._cf_rules.items()
                for rule in rules
            )
        ),
        "table": tuple(sorted(f"{name} {table.ref}" for name, table in sheet.tables.items())),
    }
