"""An xlsx file, read and changed in place: the cells concerned change, every other part keeps its bytes."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime, time, timedelta
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import NamedTuple
from zipfile import ZIP_DEFLATED, ZipFile

from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]  # a compiled module without stubs
from openpyxl.formula.translate import Translator
from openpyxl.styles.numbers import BUILTIN_FORMATS, is_date_format
from openpyxl.utils.cell import column_index_from_string, get_column_letter
from openpyxl.utils.datetime import MAC_EPOCH, WINDOWS_EPOCH, from_excel, to_excel

from system.tools.formulas import ERROR, Place, Value, bounds, check_formula
from system.tools.parts import RELATIONSHIPS, Element, check_package, parse_part, related_parts
from system.tools.recalculation import Content, Evaluate, narrow, recalculated
from system.tools.results import one_line

_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_CALC_CHAIN = "xl/calcChain.xml"
_KINDS = "{http://schemas.openxmlformats.org/package/2006/content-types}"
_SHEET_KIND = "application/vnd.openxmlformats-officedocument.spreadsheetml.worksheet+xml"
_SHEET_RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/worksheet"

Shown = Value | datetime | time | timedelta
"""What a cell holds, as a person sees it."""


class Cell(NamedTuple):
    """A cell as read: `Cell(9120.0, "=SUM(B2:B6)")`; a formula whose value is None is stale."""

    value: Shown = None
    formula: str | None = None

    def __str__(self) -> str:
        if self.formula is None:
            return shown(self.value)
        return f"stale ({self.formula})" if self.value is None else f"{shown(self.value)} ({self.formula})"


def shown(value: Shown) -> str:
    """Show a value in one line: integers without .0, at most 15 digits, dates as 2026-03-02 or with 09:00."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float | int):
        return _digits(value) if float(value).is_integer() else f"{value:.15g}"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d" if value.time() == time() else "%Y-%m-%d %H:%M")
    return one_line(str(value))


def content_without_dates(cell: Cell) -> Content:
    """What a formula sees of a cell; it cannot use a date."""
    if isinstance(cell.value, datetime | time | timedelta):
        return Content(None, cell.formula, usable=False)
    return Content(cell.value, cell.formula)


def content_with_dates(cell: Cell) -> Content:
    """What a formula sees of a cell; a date is the number of its day."""
    if isinstance(cell.value, datetime | time | timedelta):
        return Content(float(to_excel(cell.value)), cell.formula)
    return Content(cell.value, cell.formula)


class Workbook:
    """The worksheets of one xlsx file; a part is parsed when it is first needed."""

    def __init__(
        self,
        file: Path,
        *,
        evaluate: Evaluate = narrow,
        content: Callable[[Cell], Content] = content_without_dates,
    ) -> None:
        """Open the file.

        Args:
            file: The xlsx file.
            evaluate: Computes the formulas that an edit concerns.
            content: Tells what a formula sees of a cell.
        """
        self.file = file
        self._evaluate, self._content = evaluate, content
        self._changed: set[str] = set()
        self._added: list[str] = []
        self._dropped: set[str] = set()
        self._trees: dict[str, Element] = {}
        self._rows: dict[str, dict[int, Element]] = {}
        self._archive = ZipFile(file)
        self._book = self._part("xl/workbook.xml")
        targets = related_parts(self._archive, "xl/workbook.xml")
        named = {
            entry.get("name", ""): targets.get(entry.get(f"{_RELATION}id", ""), "")
            for entry in self._book.iter(f"{_MAIN}sheet")
        }
        self._parts = {name: part for name, part in named.items() if "worksheets/" in part}
        if not self._parts:
            raise ValueError(f"{file.name} has no worksheet")

    def __enter__(self) -> Workbook:
        return self

    def __exit__(self, *exception: object) -> None:
        self._archive.close()

    @property
    def sheets(self) -> list[str]:
        """Names of the worksheets, in order."""
        return list(self._parts)

    def rows(self, sheet: str) -> Iterator[list[tuple[Place, Cell]]]:
        """Yield the rows of a sheet: only cells that hold something, only rows that have some."""
        for row in self._walk(sheet):
            yield [(place, cell) for place, cell, _ in row]

    def _walk(self, sheet: str) -> Iterator[list[tuple[Place, Cell, Element]]]:
        """Yield the same rows, each cell with its element."""
        shared: dict[str, tuple[str, str]] = {}
        number = 0
        for row in self._tree(sheet).iter(f"{_MAIN}row"):
            number = int(row.get("r", number + 1))
            column = 0
            cells = []
            for element in row.iterchildren(f"{_MAIN}c"):
                column = _column(element) or column + 1
                formula = _formula(element, f"{get_column_letter(column)}{number}", shared)
                cell = Cell(self._value(element), formula)
                if cell != Cell():
                    cells.append((Place(sheet, number, column), cell, element))
            if cells:
                yield cells

    def cell(self, place: Place) -> Cell:
        """Read one cell."""
        found = (cell for row in self.rows(place.sheet) for at, cell in row if at == place)
        return next(found, Cell())

    def cells(self, places: Collection[Place]) -> dict[Place, Cell]:
        """Read many cells at once; empty ones are left out."""
        wanted = set(places)
        sheets = {place.sheet for place in wanted}
        return {at: cell for sheet in sheets for row in self.rows(sheet) for at, cell in row if at in wanted}

    @property
    def counts_from_1904(self) -> bool:
        """Say whether the days of this workbook are counted from 1904, not 1900."""
        return self._epoch == MAC_EPOCH

    def merged(self, place: Place) -> str | None:
        """Name the merged range that hides the cell; None if it is free, or the first of its range."""
        for reference, (left, top, right, bottom) in self._merges(place.sheet):
            inside = left <= place.column <= right and top <= place.row <= bottom
            if inside and (place.row, place.column) != (top, left):
                return reference
        return None

    def _merges(self, sheet: str) -> list[tuple[str, tuple[int, int, int, int]]]:
        """The merged ranges of a sheet; they stand after its rows, beside them."""
        references = [
            e.get("ref", "") for e in self._tree(sheet).findall(f"{_MAIN}mergeCells/{_MAIN}mergeCell")
        ]
        return [(reference, bounds(reference)) for reference in references]

    def set(self, place: Place, text: str) -> None:
        """Write a cell, then compute what depends on it; what we cannot compute loses its value.

        Args:
            place: The cell.
            text: A formula if it starts with `=`, a number if it reads as one, nothing if empty, else text.

        Raises:
            ValueError: A formula with a broken bracket or quote; a cell of an array formula.
        """
        self.fill({place: text})

    def fill(self, texts: Mapping[Place, str]) -> None:
        """Write many cells as `set` does, then compute once what depends on them."""
        for text in texts.values():
            if _is_formula(text):
                check_formula(text)
        for place, text in texts.items():
            self._write(place, text)
        self._recalculate(set(texts))

    def add_sheet(self, name: str) -> None:
        """Add an empty worksheet after the others.

        Raises:
            ValueError: A name that a spreadsheet program refuses, or that another sheet has.
        """
        check_sheet_name(name)
        entries = list(self._book.iter(f"{_MAIN}sheet"))
        if name.casefold() in {entry.get("name", "").casefold() for entry in entries}:
            raise ValueError(f"sheet must have a new name, got {name}; sheets here: {', '.join(self.sheets)}")
        part = _unused("xl/worksheets/sheet{}.xml", set(self._archive.NameToInfo) | set(self._trees))
        relations, kinds = self._part("xl/_rels/workbook.xml.rels"), self._part("[Content_Types].xml")
        relation = _unused("rId{}", {each.get("Id", "") for each in relations})
        target = part.removeprefix("xl/")
        etree.SubElement(
            relations,
            f"{RELATIONSHIPS}Relationship",
            {"Id": relation, "Type": _SHEET_RELATION, "Target": target},
        )
        etree.SubElement(kinds, f"{_KINDS}Override", {"PartName": f"/{part}", "ContentType": _SHEET_KIND})
        number = 1 + max(int(entry.get("sheetId", "0")) for entry in entries)
        attributes = {"name": name, "sheetId": str(number), f"{_RELATION}id": relation}
        etree.SubElement(entries[0].getparent(), f"{_MAIN}sheet", attributes)
        root = etree.Element(f"{_MAIN}worksheet", nsmap={None: _MAIN[1:-1]})
        etree.SubElement(root, f"{_MAIN}sheetData")
        self._trees[part], self._parts[name] = root, part
        self._added.append(part)
        self._changed |= {part, "xl/workbook.xml", "xl/_rels/workbook.xml.rels", "[Content_Types].xml"}

    def _write(self, place: Place, text: str) -> None:
        is_formula = _is_formula(text)
        element = self._element(place)
        had_formula = element.find(f"{_MAIN}f") is not None
        self._separate_shared(place.sheet, element)
        for child in list(element):
            element.remove(child)
        element.attrib.pop("t", None)
        if is_formula:
            etree.SubElement(element, f"{_MAIN}f").text = text[1:]
        elif _NUMBER.fullmatch(text.strip()) and math.isfinite(float(text)):
            etree.SubElement(element, f"{_MAIN}v").text = _digits(float(text))
        elif text:
            element.set("t", "inlineStr")
            holder = etree.SubElement(etree.SubElement(element, f"{_MAIN}is"), f"{_MAIN}t")
            holder.text = text
            holder.set(_SPACE, "preserve")
        self._changed.add(self._parts[place.sheet])
        if had_formula and not is_formula:
            self._drop_calc_chain()

    def save(self) -> None:
        """Write the file anew: changed parts from their trees, every other part as it was."""
        check_package(self.file)
        temporary = self.file.with_name(f".{self.file.name}.part")
        temporary.unlink(missing_ok=True)  # what lies there may be a link to somewhere else
        try:
            with ZipFile(temporary, "x", ZIP_DEFLATED) as target:
                for info in self._archive.infolist():
                    changed = info.filename in self._changed
                    data = self._bytes(info.filename) if changed else self._archive.read(info)
                    if info.filename not in self._dropped:
                        target.writestr(info, data)
                for part in self._added:
                    target.writestr(part, self._bytes(part))
            shutil.copymode(self.file, temporary)
            os.replace(temporary, self.file)
        finally:
            temporary.unlink(missing_ok=True)

    def _bytes(self, part: str) -> bytes:
        return etree.tostring(self._trees[part], xml_declaration=True, encoding="UTF-8", standalone=True)

    def _part(self, name: str) -> Element:
        if name not in self._trees:
            self._trees[name] = parse_part(self._archive, name)
        return self._trees[name]

    def _tree(self, sheet: str) -> Element:
        return self._part(self._parts[sheet])

    @cached_property
    def _strings(self) -> list[str]:
        if "xl/sharedStrings.xml" not in self._archive.NameToInfo:
            return []
        return [_string(entry) for entry in self._part("xl/sharedStrings.xml").iterchildren(f"{_MAIN}si")]

    @cached_property
    def _date_styles(self) -> set[str]:
        """Numbers of the cell styles that show a date or a time."""
        if "xl/styles.xml" not in self._archive.NameToInfo:
            return set()
        styles = self._part("xl/styles.xml")
        formats = dict(BUILTIN_FORMATS)
        for element in styles.iter(f"{_MAIN}numFmt"):
            formats[int(element.get("numFmtId", "0"))] = element.get("formatCode", "")
        cell_styles = styles.find(f"{_MAIN}cellXfs")
        codes = [] if cell_styles is None else [formats.get(int(s.get("numFmtId", "0"))) for s in cell_styles]
        return {str(index) for index, code in enumerate(codes) if code and is_date_format(code)}

    @cached_property
    def _epoch(self) -> datetime:
        properties = self._book.find(f"{_MAIN}workbookPr")
        from_1904 = properties is not None and properties.get("date1904") in ("1", "true")
        return MAC_EPOCH if from_1904 else WINDOWS_EPOCH

    def _value(self, element: Element) -> Shown:
        kind = element.get("t", "n")
        if kind == "inlineStr":
            holder = element.find(f"{_MAIN}is")
            return None if holder is None else _string(holder)
        content = element.findtext(f"{_MAIN}v")
        if content is None or (content == "" and kind != "str"):
            return None
        if kind == "s":
            return self._strings[int(content)]
        if kind == "b":
            return content in ("1", "true")
        if kind != "n":
            return content
        number = float(content)
        if element.get("s", "0") not in self._date_styles:
            return number
        try:
            return from_excel(number, self._epoch)
        except (ValueError, OverflowError):  # a number that is no date although its style says so
            return number

    def _element(self, place: Place) -> Element:
        """Find the element of a cell; row and cell are made where they are missing."""
        data = self._tree(place.sheet).find(f"{_MAIN}sheetData")
        if data is None:
            raise ValueError(f"sheet {place.sheet} has no cells")
        row = self._row_elements(place.sheet).get(place.row)
        if row is None:
            row, _ = _child(data, "row", str(place.row), place.row, _row)
            self._row_elements(place.sheet)[place.row] = row
        reference = f"{get_column_letter(place.column)}{place.row}"
        cell, made = _child(row, "c", reference, place.column, _column)
        if made:
            row.attrib.pop("spans", None)
            self._extend_dimension(place)
        return cell

    def _row_elements(self, sheet: str) -> dict[int, Element]:
        """The rows of a sheet by number; rows and cells that left their place unsaid say it from then on."""
        if sheet not in self._rows:
            self._rows[sheet] = {}
            number = 0
            for row in self._tree(sheet).iterfind(f"{_MAIN}sheetData/{_MAIN}row"):
                number = _row(row) or number + 1
                row.set("r", str(number))
                self._rows[sheet][number] = row
                column = 0
                for cell in row.iterchildren(f"{_MAIN}c"):
                    column = _column(cell) or column + 1
                    cell.set("r", f"{get_column_letter(column)}{number}")
        return self._rows[sheet]

    def _extend_dimension(self, place: Place) -> None:
        dimension = self._tree(place.sheet).find(f"{_MAIN}dimension")
        if dimension is not None:
            left, top, right, bottom = bounds(dimension.get("ref", "A1"))
            first = f"{get_column_letter(min(left, place.column))}{min(top, place.row)}"
            last = f"{get_column_letter(max(right, place.column))}{max(bottom, place.row)}"
            dimension.set("ref", first if first == last else f"{first}:{last}")

    def _separate_shared(self, sheet: str, element: Element) -> None:
        """Write the formulas that share their text with this cell out in full, so that it can go."""
        formula = element.find(f"{_MAIN}f")
        if formula is not None and formula.get("t") in ("array", "dataTable"):
            raise ValueError(f"{element.get('r')} holds an array formula, which can not be edited here")
        if formula is None or formula.get("t") != "shared":
            return
        shared: dict[str, tuple[str, str]] = {}
        index = formula.get("si")
        for other in self._tree(sheet).iter(f"{_MAIN}c"):
            text = _formula(other, other.get("r", ""), shared)
            own = other.find(f"{_MAIN}f")
            if own is not None and own.get("t") == "shared" and own.get("si") == index and text:
                own.attrib.clear()
                own.text = text[1:]

    def _drop_calc_chain(self) -> None:
        """Forget the stored order of calculation, which may not name a cell that has no formula any more."""
        if _CALC_CHAIN not in self._archive.NameToInfo:
            return
        for name in ("[Content_Types].xml", "xl/_rels/workbook.xml.rels"):
            for element in list(self._part(name)):
                if (element.get("PartName") or element.get("Target") or "").endswith("calcChain.xml"):
                    self._part(name).remove(element)
            self._changed.add(name)
        self._dropped.add(_CALC_CHAIN)

    def _recalculate(self, edited: Collection[Place]) -> None:
        rows = [row for sheet in self.sheets for row in self._walk(sheet)]
        cells = {at: self._content(cell) for row in rows for at, cell, _ in row}
        elements = {at: element for row in rows for at, _, element in row}
        new = recalculated(cells, edited, self.sheets, self._evaluate)
        for place, value in new.items():
            element = elements[place]
            for content in element.findall(f"{_MAIN}v"):
                element.remove(content)
            element.attrib.pop("t", None)
            if value is not None:
                _store(element, value)
            self._changed.add(self._parts[place.sheet])
        if None in new.values():
            self._calculate_on_load()

    def _calculate_on_load(self) -> None:
        """Tell a spreadsheet program to compute the stale cells when it opens the file."""
        properties = self._book.find(f"{_MAIN}calcPr")
        if properties is not None and properties.get("fullCalcOnLoad") != "1":
            properties.set("fullCalcOnLoad", "1")
            self._changed.add("xl/workbook.xml")


def check_sheet_name(name: str) -> None:
    """Refuse a name of a sheet that a spreadsheet program would refuse."""
    if not 1 <= len(name) <= 31 or re.search(r"[\[\]:*?/\\]", name) or name[0] == "'" or name[-1] == "'":
        raise ValueError(f"sheet must have 1 to 31 characters and none of []:*?/\\, got {name}")


def _is_formula(text: str) -> bool:
    return text.startswith("=") and len(text) > 1


def _unused(pattern: str, names: set[str]) -> str:
    return next(name for name in map(pattern.format, count(1)) if name not in names)


def _store(element: Element, value: Value) -> None:
    """Put the computed value of a formula into its cell."""
    if isinstance(value, bool):
        kind, text = "b", str(int(value))
    elif isinstance(value, str):
        kind, text = "e" if ERROR.fullmatch(value) else "str", value
    else:
        assert value is not None
        kind, text = "", _digits(value)
    if kind:
        element.set("t", kind)
    etree.SubElement(element, f"{_MAIN}v").text = text


def _digits(number: float) -> str:
    """Write a number so that it reads back the same, integers without .0."""
    return str(int(number)) if float(number).is_integer() and abs(number) < 1e15 else repr(number)


def _formula(element: Element, reference: str, shared: dict[str, tuple[str, str]]) -> str | None:
    """Tell the formula of a cell; one that shares its text with an earlier cell is translated from there."""
    formula = element.find(f"{_MAIN}f")
    if formula is None:
        return None
    text = f"={formula.text or ''}"
    if formula.get("t") != "shared":
        return text
    index = formula.get("si", "")
    if formula.text:
        shared[index] = (text, reference)
    origin_text, origin = shared.get(index, (text, reference))
    return str(Translator(origin_text, origin).translate_formula(reference))


def _string(holder: Element) -> str:
    """The text of a string: its runs joined, phonetic hints left out."""
    hints = {text for hint in holder.iter(f"{_MAIN}rPh") for text in hint.iter(f"{_MAIN}t")}
    return "".join(text.text or "" for text in holder.iter(f"{_MAIN}t") if text not in hints)


def _row(element: Element) -> int:
    return int(element.get("r", "0"))


def _column(element: Element) -> int:
    """The column of a cell's element; 0 if it does not say."""
    letters = element.get("r", "").rstrip("0123456789")
    return column_index_from_string(letters) if letters else 0


def _child(
    parent: Element, name: str, reference: str, number: int, number_of: Callable[[Element], int]
) -> tuple[Element, bool]:
    """Find the child with the number, or make it in its place; says whether it was made."""
    place = len(parent)
    for child in reversed(parent):  # what is written in order is found at the end
        if number_of(child) == number:
            return child, False
        if number_of(child) < number:
            break
        place -= 1
    made = etree.Element(f"{_MAIN}{name}", {"r": reference})
    parent.insert(place, made)
    return made, True
