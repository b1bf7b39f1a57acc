"""The checks of our tasks, the gates that guard them, and the reward that follows.

A gate that is not met makes the reward zero; otherwise the reward is the share of the other criteria that
are met. What the agent did wrong, an unreadable file included, is a criterion not met. A defect of the task
itself raises, so that the shell can call it a system error and not a zero.
"""

from __future__ import annotations

import io
import json
import re
import stat
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import openpyxl

from .bounded import OutOfBounds, bounded
from .diff import changes
from .verdict import Criterion, Verdict
from .world import GradedWorld

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3}(?!\d))+|\d+)(?:\.\d+)?")
_LARGEST_FILE = 2_000_000
_LARGEST_UNPACKED = 8_000_000
_LARGEST_CELLS = 64 << 20
_READ_S = 10.0
_READ_BYTES = 256 << 20

_Cells = dict[str, dict[str, Any]]
"""Sheet → cell → what it holds, empty cells left out."""


class Unreadable(Exception):
    """A file of the agent's that is missing, too large, not a plain file, or damaged."""


def read_checks(path: Path) -> list[dict[str, Any]]:
    """The list of checks in a checks.json.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(f"tests must hold checks.json, got none at {path}")
    checks = json.loads(path.read_text())
    if not isinstance(checks, list) or not checks:
        raise ValueError(f"checks.json must be a list of checks, got {checks!r}")
    for check in checks:
        if not isinstance(check, dict) or check.get("kind") not in _CHECKS:
            raise ValueError(f"kind of a check must be one of {sorted(_CHECKS)}, got {check!r}")
    return checks


def grade(checks: list[dict[str, Any]], world: GradedWorld, answer: str) -> Verdict:
    """Applies checks to a frozen world and a final answer.

    Raises:
        ValueError: the checks leave no criterion beside the gates.
    """
    seen = _Seen(world)
    criteria = tuple(c for check in checks for c in _CHECKS[check["kind"]](check, seen, answer))
    earned = [criterion.met for criterion in criteria if not criterion.gate]
    if not earned:
        raise ValueError(f"checks must hold a criterion beside the gates, got {[c['kind'] for c in checks]}")
    gated = any(criterion.gate and not criterion.met for criterion in criteria)
    reward = 0.0 if gated else sum(earned) / len(earned)
    return Verdict(reward=reward, passed=all(criterion.met for criterion in criteria), criteria=criteria)


def numbers_in(text: str, *, most: int | None = None) -> list[float]:
    """Every number in a text, or its first so many; commas may group thousands."""
    found = islice(_NUMBER.finditer(text), most)
    return [float(number[0].replace(",", "")) for number in found]


def _answer_number(check: dict[str, Any], world: _Seen, answer: str) -> list[Criterion]:
    found = numbers_in(answer, most=2)
    met = found == [float(check["expected"])]
    return [
        Criterion(
            name="answer", met=met, detail=f"expected {check['expected']}, got {answer[:80]!r}", gate=False
        )
    ]


def _cell_value(check: dict[str, Any], world: _Seen, answer: str) -> list[Criterion]:
    name = f"{check['path']} {check['cell']}"
    try:
        value = next(iter(world.cells(check["path"], values=True).values())).get(check["cell"])
    except Unreadable as reason:
        return [Criterion(name=name, met=False, detail=str(reason), gate=False)]
    met = isinstance(value, int | float) and not isinstance(value, bool) and value == check["expected"]
    detail = f"expected {check['expected']}, got {str(value)[:80]!r}"
    return [Criterion(name=name, met=met, detail=detail, gate=False)]


def _other_cells_unchanged(check: dict[str, Any], world: _Seen, answer: str) -> list[Criterion]:
    name = f"other cells of {check['path']}"
    before = _cells((world.lower / check["path"]).read_bytes(), values=False)
    try:
        after = world.cells(check["path"], values=False)
    except Unreadable as reason:
        return [Criterion(name=name, met=False, detail=str(reason), gate=True)]
    for cells in (before, after):
        first = next(iter(cells.values()))
        for cell in check["except"]:
            first.pop(cell, None)
    if list(before) != list(after):
        return [Criterion(name=name, met=False, detail=f"sheets are now {list(after)}"[:120], gate=True)]
    altered = [
        f"{sheet}!{cell}"
        for sheet in before
        for cell in sorted(before[sheet].keys() | after[sheet].keys())
        if before[sheet].get(cell) != after[sheet].get(cell)
    ]
    detail = f"altered: {', '.join(altered[:5])}" if altered else "as before"
    return [Criterion(name=name, met=not altered, detail=detail, gate=True)]


def _file_lines(check: dict[str, Any], world: _Seen, answer: str) -> list[Criterion]:
    expected = check["expected"]
    try:
        lines = [line.rstrip() for line in world.content(check["path"]).decode(errors="replace").splitlines()]
        reason = ""
    except Unreadable as unreadable:
        lines, reason = [], str(unreadable)
    while lines and not lines[-1]:
        lines.pop()
    found = [
        Criterion(
            name=f"line {line}", met=count == 1, detail=reason or f"expected once, got {count}", gate=False
        )
        for line, count in ((line, lines.count(line)) for line in expected)
    ]
    alone = any(criterion.met for criterion in found) and len(lines) == len(expected)
    detail = reason or f"{len(lines)} lines, {len(expected)} expected"
    return [*found, Criterion(name="no other lines", met=alone, detail=detail, gate=False)]


def _diff(check: dict[str, Any], world: _Seen, answer: str) -> list[Criterion]:
    """Changes of one file: {"path", "expected": [{"place", "after"}], "others": false}.

    Each expected change is a criterion; unless others are allowed, a gate holds the rest of the file as it was,
    but for what untouched formulas show: that follows from the cells they read.
    """
    path, expected = check["path"], check["expected"]
    listed = changes(world, only=(path,))
    found = {change.place: change.after for change in listed}
    criteria = [
        Criterion(
            name=f"{path} {wanted['place']}",
            met=found.get(wanted["place"]) == wanted["after"],
            detail=f"expected {wanted['after']!r}, got {found.get(wanted['place'], 'no change')[:80]!r}",
            gate=False,
        )
        for wanted in expected
    ]
    if check.get("others", False):
        return criteria
    places = {wanted["place"] for wanted in expected}
    altered = [
        change.place or "the file"
        for change in listed
        if change.place not in places and not change.place.endswith(" shown")
    ]
    detail = f"altered: {', '.join(altered[:5])}"[:200] if altered else "as before"
    return [*criteria, Criterion(name=f"rest of {path}", met=not altered, detail=detail, gate=True)]


def _unchanged(check: dict[str, Any], world: _Seen, answer: str) -> list[Criterion]:
    altered = [name for name in world.changed() if name not in check["except"]]
    detail = f"altered: {', '.join(altered[:5])}"[:200] if altered else "as before"
    return [Criterion(name="rest of the world", met=not altered, detail=detail, gate=True)]


class _Seen:
    """A graded world whose workbooks are read once each, whatever number of checks asks for them."""

    def __init__(self, world: GradedWorld) -> None:
        self._world = world
        self._read: dict[str, list[_Cells] | Unreadable] = {}

    @property
    def lower(self) -> Path:
        return self._world.lower

    def path(self, rel: str, /) -> Path | None:
        return self._world.path(rel)

    def files(self) -> list[str]:
        return self._world.files()

    def changed(self) -> list[str]:
        return self._world.changed()

    def content(self, name: str) -> bytes:
        """The bytes of a file. Raises Unreadable."""
        return _agent_bytes(self._world, name)

    def cells(self, name: str, *, values: bool) -> _Cells:
        """The cells of a workbook, with formulas as text or with their cached values. Raises Unreadable."""
        if name not in self._read:
            try:
                self._read[name] = _agent_cells(self._world, name)
            except Unreadable as reason:
                self._read[name] = reason
        read = self._read[name]
        if isinstance(read, Unreadable):
            raise read
        return {sheet: dict(held) for sheet, held in read[values].items()}


_CHECKS: dict[str, Callable[[dict[str, Any], _Seen, str], list[Criterion]]] = {
    "answer_number": _answer_number,
    "cell_value": _cell_value,
    "other_cells_unchanged": _other_cells_unchanged,
    "file_lines": _file_lines,
    "diff": _diff,
    "unchanged": _unchanged,
}


def _agent_bytes(world: GradedWorld, name: str) -> bytes:
    """The content of a file that may be the agent's: follows no link, waits for no pipe, fills no memory."""
    place = world.path(name)
    if place is None:
        raise Unreadable(f"no file {name}")
    status = place.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"{name} is not a plain file")
    if status.st_size > _LARGEST_FILE:
        raise Unreadable(f"{name} has {status.st_size} bytes, {_LARGEST_FILE} are read at most")
    try:
        return place.read_bytes()
    except PermissionError:
        raise Unreadable(f"{name} may not be read") from None


def _agent_cells(world: GradedWorld, name: str) -> list[_Cells]:
    """The cells of a workbook that may be the agent's: with formulas, and with cached values.

    It is read in a child with bounds: a merged range of a few bytes can stand for 17 thousand million cells.
    """
    data = _agent_bytes(world, name)
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except Exception as error:  # damage takes any form; it becomes the detail of a criterion that is not met
        raise Unreadable(f"{name} is not a readable workbook: {type(error).__name__}") from error
    if unpacked > _LARGEST_UNPACKED:
        raise Unreadable(f"{name} unpacks to {unpacked} bytes, {_LARGEST_UNPACKED} are read at most")
    work = partial(_both, data)
    try:
        found = bounded(work, seconds=_READ_S, memory_bytes=_READ_BYTES, result_bytes=_LARGEST_CELLS)
    except OutOfBounds as reason:
        raise Unreadable(f"{name} is not a readable workbook: {reason}") from reason
    if not found[0]:
        raise Unreadable(f"{name} has no sheet")
    return found


def _both(data: bytes) -> list[_Cells]:
    """The cells with formulas as text, and with their cached values."""
    return [_cells(data, values=values) for values in (False, True)]


def _cells(data: bytes, *, values: bool) -> _Cells:
    """Sheet → cell → value, with formulas as text, or with their cached values; empty cells are left out.

    Goes over the stored cells only: a sheet whose last cell is XFD1048576 has 17 thousand million others.
    """
    book = openpyxl.load_workbook(io.BytesIO(data), data_only=values)
    return {
        sheet.title: {
            cell.coordinate: _held(cell.value) for cell in sheet._cells.values() if cell.value is not None
        }
        for sheet in book.worksheets
    }


def _held(value: Any) -> Any:
    """What a cell holds as JSON has it; a date or an array formula as a pair of its kind and its text."""
    if isinstance(value, bool | int | float | str):
        return value
    told = value.isoformat() if hasattr(value, "isoformat") else repr(sorted(vars(value).items()))
    return [type(value).__name__, told]
