"""What an edit changes: the formulas that depend on the cell, each computed after those it reads. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from system.tools.formulas import Area, NotComputable, Place, Value, areas, evaluate


class Content(NamedTuple):
    """What a cell holds: `Content(9120.0, "=SUM(B2:B6)")`.

    A formula whose value is None is stale. A value that no formula can use (a date) has `usable` False.
    """

    value: Value
    formula: str | None = None
    usable: bool = True


Evaluate = Callable[[str, str, Callable[[Area], Mapping[Place, Value]]], Value]
"""Computes a formula on a sheet from what the cells of an area hold; raises NotComputable."""


def narrow(formula: str, sheet: str, contents: Callable[[Area], Mapping[Place, Value]]) -> Value:
    """Compute a formula with the few functions of `formulas.py`."""
    return evaluate(formula, sheet, lambda area: contents(area).values())


def recalculated(
    cells: Mapping[Place, Content],
    edited: Collection[Place],
    sheets: Collection[str],
    evaluate: Evaluate = narrow,
) -> dict[Place, Value]:
    """Compute every formula that depends on the edited cells, themselves included; None: not computable, stale.

    A formula whose sources cannot be told from its text counts as dependent.

    Args:
        cells: Every cell of the workbook that holds something, with the edits made.
        edited: The cells that changed.
        sheets: Names of the sheets there are.
        evaluate: Computes one formula.
    """
    sources = {place: areas(cell.formula, place.sheet) for place, cell in cells.items() if cell.formula}
    dependents = _dependents(sources, edited)
    new: dict[Place, Value] = {}

    def content(place: Place) -> Value:
        cell = cells[place]
        value = new.get(place) if place in dependents else cell.value
        if not cell.usable or (cell.formula is not None and value is None):
            raise NotComputable(f"{place} has no usable value")
        return value

    def contents(area: Area) -> Mapping[Place, Value]:
        if area.sheet not in sheets:
            raise NotComputable(f"no sheet {area.sheet}")
        if area.size <= len(cells):
            return {place: content(place) for place in area.places() if place in cells}
        return {place: content(place) for place in cells if area.contains(place)}

    for place in _ordered(dependents):
        formula = cells[place].formula
        assert formula is not None
        try:
            value = evaluate(formula, place.sheet, contents)
            new[place] = None if isinstance(value, float) and not math.isfinite(value) else value
        except NotComputable:
            new[place] = None
    return new | {place: None for place in dependents.keys() - new.keys()}


def _dependents(
    sources: Mapping[Place, list[Area] | None], edited: Collection[Place]
) -> dict[Place, set[Place]]:
    """Map every formula that depends on an edited cell to the formulas among them that read it."""
    found: dict[Place, set[Place]] = {
        place: set() for place, read in sources.items() if place in edited or read is None
    }
    single: dict[Place, list[Place]] = {}
    wide: list[tuple[Area, Place]] = []
    for reader, read in sources.items():
        for area in read or []:
            if area.is_cell:
                single.setdefault(Place(area.sheet, area.top, area.left), []).append(reader)
            else:
                wide.append((area, reader))
    waiting = [*edited, *(found.keys() - edited)]
    while waiting:
        place = waiting.pop()
        for reader in [*single.get(place, []), *(reader for area, reader in wide if area.contains(place))]:
            if reader not in found:
                found[reader] = set()
                waiting.append(reader)
            if place in found:
                found[place].add(reader)
    return found


def _ordered(readers: Mapping[Place, set[Place]]) -> Iterable[Place]:
    """Yield the formulas so that each comes after those it reads; those in a circle are left out."""
    open_sources = dict.fromkeys(readers, 0)
    for reading in readers.values():
        for reader in reading:
            open_sources[reader] += 1
    ready = [place for place, count in open_sources.items() if count == 0]
    while ready:
        place = ready.pop()
        yield place
        for reader in readers[place]:
            open_sources[reader] -= 1
            if open_sources[reader] == 0:
                ready.append(reader)
