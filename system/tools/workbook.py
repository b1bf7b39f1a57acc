"""An xlsx file, read and changed in place: only the cells concerned change, every other part keeps its bytes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from zipfile import ZIP_DEFLATED, ZipFile

from lxml import etree
from openpyxl.formula.translate import Translator
from openpyxl.styles.numbers import BUILTIN_FORMATS, is_date_format
from openpyxl.utils.cell import coordinate_from_string, column_index_from_string, get_column_letter
from openpyxl.utils.datetime import MAC_EPOCH, WINDOWS_EPOCH, from_excel

from system.tools.formulas import NotComputable, Place, Value, areas, evaluate
from system.tools.parts import parse_part, related_parts

_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_CALC_CHAIN = "xl/calcChain.xml"


class Cell(NamedTuple):
    """A cell as read: `Cell(9120.0, "=SUM(B2:B6)")`; a formula with value None is stale."""

    value: Value | datetime
    formula: str | None

    def __str__(self) -> str:
        if self.formula is None:
            return show(self.value)
        return f"stale ({self.formula})" if self.value is None else f"{show(self.value)} ({self.formula})"


def show(value: Value | datetime) -> str:
    """Show a value in one line: integers without .0, at most 15 digits, dates as 2026-03-02 or with 09:00."""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int | float):
        return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.15g}"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d" if value.time() == datetime.min.time() else "%Y-%m-%d %H:%M")
    return " ".join(str(value).split()) if value is not None else "empty"


class Workbook:
    """The sheets of one xlsx file; parts are parsed when first needed."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._changed: set[str] = set()
        self._trees: dict[str, etree._Element] = {}
        self._archive = ZipFile(file)
        self._book = self._part("xl/workbook.xml")
        targets = related_parts(self._archive, "xl/workbook.xml")
        self._parts = {
            entry.get("name", ""): targets[entry.get(f"{_RELATION}id", "")]
            for entry in self._book.iter(f"{_MAIN}sheet")
            if "/worksheets/" in f"/{targets[entry.get(f'{_RELATION}id', '')]}"
        }

    def __enter__(self) -> Workbook:
        return self

    def __exit__(self, *exception: object) -> None:
        self._archive.close()

    @property
    def sheets(self) -> list[str]:
        """Names of the worksheets, in order."""
        return list(self._parts)

    def rows(self, sheet: str) -> Iterator[list[tuple[Place, Cell]]]:
        """Yield the rows of a sheet; only cells that hold something, only rows that have some."""
        shared: dict[str, tuple[str, str]] = {}
        row_number = 0
        for row in self._sheet(sheet).iter(f"{_MAIN}row"):
            row_number = int(row.get("r", row_number + 1))
            column = 0
            cells = []
            for element in row.iterchildren(f"{_MAIN}c"):
                reference = element.get("r")
                column = _place(sheet, reference).column if reference else column + 1
                cell = self._cell(element, f"{get_column_letter(column)}{row_number}", shared)
                if cell.value is not None or cell.formula is not None:
                    cells.append((Place(sheet, row_number, column), cell))
            if cells:
                yield cells

    def cell(self, sheet: str, reference: str) -> Cell:
        """Read one cell."""
        place = _place(sheet, reference)
        return next((cell for row in self.rows(sheet) for at, cell in row if at == place), Cell(None, None))

    def merged(self, sheet: str, reference: str) -> str | None:
        """Name the merged range whose inside, but not its first cell, the reference is; None if it is free."""
        from openpyxl.utils.cell import range_boundaries

        place = _place(sheet, reference)
        for element in self._sheet(sheet).iter(f"{_MAIN}mergeCell"):
            name = element.get("ref", "")
            left, top, right, bottom = (int(bound or 0) for bound in range_boundaries(name))
            inside = left <= place.column <= right and top <= place.row <= bottom
            if inside and (place.row, place.column) != (top, left):
                return name
        return None

    def set(self, sheet: str, reference: str, text: str) -> None:
        """Write a cell, then compute what depends on it; what we cannot compute loses its value.

        Args:
            sheet: Name of the sheet.
            reference: The cell, like B2.
            text: A formula if it starts with `=`, a number if it reads as one, nothing if empty, else text.
        """
        element = self._element(sheet, reference)
        self._separate_shared(sheet, element)
        had_formula = element.find(f"{_MAIN}f") is not None
        for child in list(element):
            element.remove(child)
        element.attrib.pop("t", None)
        if text.startswith("=") and len(text) > 1:
            etree.SubElement(element, f"{_MAIN}f").text = text[1:]
        elif _NUMBER.fullmatch(text):
            etree.SubElement(element, f"{_MAIN}v").text = show(float(text)) if "." in text else str(int(float(text)))
        elif text:
            element.set("t", "inlineStr")
            holder = etree.SubElement(etree.SubElement(element, f"{_MAIN}is"), f"{_MAIN}t")
            holder.text = text
            if text != text.strip():
                holder.set(_SPACE, "preserve")
        self._changed.add(self._parts[sheet])
        if had_formula and element.find(f"{_MAIN}f") is None:
            self._drop_calc_chain()
        self._recalculate(_place(sheet, reference))

    def save(self) -> None:
        """Write the file anew: changed parts from their trees, every other part as it was."""
        temporary = self.file.with_name(f".{self.file.name}.part")
        try:
            with ZipFile(temporary, "w", ZIP_DEFLATED) as target:
                for info in self._archive.infolist():
                    if info.filename == _CALC_CHAIN and _CALC_CHAIN in self._changed:
                        continue
                    data = self._archive.read(info)
                    if info.filename in self._changed:
                        tree = self._trees[info.filename]
                        data = etree.tostring(tree, xml_declaration=True, encoding="UTF-8", standalone=True)
                    target.writestr(info, data)
            shutil.copymode(self.file, temporary)
            os.replace(temporary, self.file)
        finally:
            temporary.unlink(missing_ok=True)

    def _part(self, name: str) -> etree._Element:
        if name not in self._trees:
            self._trees[name] = parse_part(self._archive, name)
        return self._trees[name]

    def _sheet(self, sheet: str) -> etree._Element:
        return self._part(self._parts[sheet])

    @cached_property
    def _strings(self) -> list[str]:
        if "xl/sharedStrings.xml" not in self._archive.NameToInfo:
            return []
        return [_string(entry) for entry in self._part("xl/sharedStrings.xml").iterchildren(f"{_MAIN}si")]

    @cached_property
    def _date_styles(self) -> set[str]:
        """Numbers of the cell styles that show a date."""
        if "xl/styles.xml" not in self._archive.NameToInfo:
            return set()
        styles = self._part("xl/styles.xml")
        formats = dict(BUILTIN_FORMATS)
        for element in styles.iter(f"{_MAIN}numFmt"):
            formats[int(element.get("numFmtId", "0"))] = element.get("formatCode", "")
        cell_styles = styles.find(f"{_MAIN}cellXfs")
        if cell_styles is None:
            return set()
        numbers = [int(style.get("numFmtId", "0")) for style in cell_styles]
        return {str(index) for index, number in enumerate(numbers) if is_date_format(formats.get(number))}

    @cached_property
    def _epoch(self) -> datetime:
        properties = self._book.find(f"{_MAIN}workbookPr")
        from_1904 = properties is not None and properties.get("date1904") in ("1", "true")
        return MAC_EPOCH if from_1904 else WINDOWS_EPOCH

    def _cell(self, element: etree._Element, reference: str, shared: dict[str, tuple[str, str]]) -> Cell:
        formula = element.find(f"{_MAIN}f")
        text = None if formula is None else _formula_text(formula, reference, shared)
        return Cell(self._value(element), text)

    def _value(self, element: etree._Element) -> Value | datetime:
        kind = element.get("t", "n")
        if kind == "inlineStr":
            holder = element.find(f"{_MAIN}is")
            return _string(holder) if holder is not None else None
        content = element.findtext(f"{_MAIN}v")
        if content is None or (content == "" and kind != "str"):
            return None
        if kind == "s":
            return self._strings[int(content)]
        if kind == "b":
            return content in ("1", "true")
        if kind == "n":
            number = float(content)
            if element.get("s") in self._date_styles and element.get("s") is not None:
                date = from_excel(number, self._epoch)
                return date if isinstance(date, datetime) else str(date)
            return number
        return content

    def _element(self, sheet: str, reference: str) -> etree._Element:
        """Find a cell's element, making row and cell in their place where they are missing."""
        place = _place(sheet, reference)
        data = self._sheet(sheet).find(f"{_MAIN}sheetData")
        if data is None:
            raise ValueError(f"sheet {sheet} has no cells")
        row = _child(data, "row", str(place.row), lambda element: int(element.get("r", "0")) - place.row)
        cell = _child(row, "c", reference, lambda element: _place(sheet, element.get("r", "")).column - place.column)
        return cell

    def _separate_shared(self, sheet: str, element: etree._Element) -> None:
        """Write shared formulas of a sheet out in full if the cell to change is the one that holds the text."""
        formula = element.find(f"{_MAIN}f")
        if formula is None or formula.get("t") not in ("shared", "array"):
            return
        if formula.get("t") == "array":
            raise ValueError(f"{element.get('r')} is part of an array formula")
        shared: dict[str, tuple[str, str]] = {}
        for other in self._sheet(sheet).iter(f"{_MAIN}c"):
            own = other.find(f"{_MAIN}f")
            if own is None or own.get("t") != "shared":
                continue
            index = own.get("si")
            text = _formula_text(own, other.get("r", ""), shared)
            if index == formula.get("si"):
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
        self._changed.add(_CALC_CHAIN)

    def _recalculate(self, edited: Place) -> None:
        cells = {place: cell for sheet in self.sheets for row in self.rows(sheet) for place, cell in row}
        recalculated = _recalculated(cells, edited)
        for place, value in recalculated.items():
            element = self._element(place.sheet, f"{get_column_letter(place.column)}{place.row}")
            content = element.find(f"{_MAIN}v")
            if content is not None:
                element.remove(content)
            element.attrib.pop("t", None)
            if value is not None:
                etree.SubElement(element, f"{_MAIN}v").text = repr(value).removesuffix(".0")
            self._changed.add(self._parts[place.sheet])
        if None in recalculated.values():
            self._calculate_on_load()

    def _calculate_on_load(self) -> None:
        """Tell a spreadsheet program to compute the stale cells when it opens the file."""
        properties = self._book.find(f"{_MAIN}calcPr")
        if properties is not None and properties.get("fullCalcOnLoad") != "1":
            properties.set("fullCalcOnLoad", "1")
            self._changed.add("xl/workbook.xml")


def _recalculated(cells: dict[Place, Cell], edited: Place) -> dict[Place, float | None]:
    """Give new values of all formulas that depend on the edited cell; None is stale."""
    sources = {place: areas(cell.formula, place.sheet) for place, cell in cells.items() if cell.formula}
    stale = {edited}
    grown = True
    while grown:
        more = {
            place
            for place, read in sources.items()
            if place not in stale and (read is None or any(area.contains(at) for area in read for at in stale))
        }
        stale |= more
        grown = bool(more)
    values: dict[Place, float | None] = {}
    running: set[Place] = set()

    def value_of(place: Place) -> Value:
        cell = cells.get(place, Cell(None, None))
        if cell.formula is None or place not in stale:
            if isinstance(cell.value, datetime) or (cell.formula is not None and cell.value is None):
                raise NotComputable("date or stale cell")
            return cell.value
        if place in running:
            raise NotComputable("circular")
        if place not in values:
            running.add(place)
            try:
                values[place] = evaluate(cell.formula, place.sheet, value_of)
            except NotComputable:
                values[place] = None
            running.discard(place)
        result = values[place]
        if result is None:
            raise NotComputable("stale cell")
        return result

    for place in sorted(stale & sources.keys()):
        try:
            value_of(place)
        except NotComputable:
            values.setdefault(place, None)
    return values


def _formula_text(formula: etree._Element, reference: str, shared: dict[str, tuple[str, str]]) -> str:
    text = f"={formula.text or ''}"
    if formula.get("t") != "shared":
        return text
    index = formula.get("si", "")
    if formula.text:
        shared[index] = (text, reference)
        return text
    if index not in shared:
        return text
    origin_text, origin = shared[index]
    return str(Translator(origin_text, origin).translate_formula(reference))


def _string(holder: etree._Element) -> str:
    """The text of a string, runs joined, phonetic hints left out."""
    return "".join(
        part.text or "" for part in holder.iter(f"{_MAIN}t") if part.getparent().tag != f"{_MAIN}rPh"  # type: ignore[union-attr]
    )


def _place(sheet: str, reference: str) -> Place:
    letters, row = coordinate_from_string(reference)
    return Place(sheet, row, column_index_from_string(letters))


def _child(parent: etree._Element, name: str, reference: str, distance) -> etree._Element:  # type: ignore[no-untyped-def]
    """Find or make the child at distance 0 among children sorted by distance."""
    index = 0
    for index, child in enumerate(parent):
        if child.tag != f"{_MAIN}{name}":
            continue
        if distance(child) == 0:
            return child
        if distance(child) > 0:
            break
    else:
        index = len(parent)
    made = etree.Element(f"{_MAIN}{name}", {"r": reference})
    parent.insert(index, made)
    return made
