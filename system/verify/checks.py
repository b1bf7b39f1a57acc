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
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import openpyxl

from .diff import changes
from .verdict import Criterion, Verdict
from .world import GradedWorld

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_LARGEST_FILE = 2_000_000
_LARGEST_UNPACKED = 8_000_000


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
    criteria = tuple(c for check in checks for c in _CHECKS[check["kind"]](check, world, answer))
    earned = [criterion.met for criterion in criteria if not criterion.gate]
    if not earned:
        raise ValueError(f"checks must hold a criterion beside the gates, got {[c['kind'] for c in checks]}")
    gated = any(criterion.gate and not criterion.met for criterion in criteria)
    reward = 0.0 if gated else sum(earned) / len(earned)
    return Verdict(reward=reward, passed=all(criterion.met for criterion in criteria), criteria=criteria)


def numbers_in(text: str) -> list[float]:
    """Every number in a text; commas may group thousands."""
    return [float(number.replace(",", "")) for number in _NUMBER.findall(text)]


def _answer_number(check: dict[str, Any], world: GradedWorld, answer: str) -> list[Criterion]:
    found = numbers_in(answer)
    met = found == [float(check["expected"])]
    return [
        Criterion(
            name="answer", met=met, detail=f"expected {check['expected']}, got {answer[:80]!r}", gate=False
        )
    ]


def _cell_value(check: dict[str, Any], world: GradedWorld, answer: str) -> list[Criterion]:
    name = f"{check['path']} {check['cell']}"
    try:
        value = next(iter(_agent_cells(world, check["path"], values=True).values())).get(check["cell"])
    except Unreadable as reason:
        return [Criterion(name=name, met=False, detail=str(reason), gate=False)]
    met = isinstance(value, int | float) and not isinstance(value, bool) and value == check["expected"]
    detail = f"expected {check['expected']}, got {str(value)[:80]!r}"
    return [Criterion(name=name, met=met, detail=detail, gate=False)]


def _other_cells_unchanged(check: dict[str, Any], world: GradedWorld, answer: str) -> list[Criterion]:
    name = f"other cells of {check['path']}"
    before = _cells((world.lower / check["path"]).read_bytes(), values=False)
    try:
        after = _agent_cells(world, check["path"], values=False)
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


def _file_lines(check: dict[str, Any], world: GradedWorld, answer: str) -> list[Criterion]:
    expected = check["expected"]
    try:
        lines = [
            line.rstrip() for line in _agent_bytes(world, check["path"]).decode(errors="replace").splitlines()
        ]
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


def _diff(check: dict[str, Any], world: GradedWorld, answer: str) -> list[Criterion]:
    """Changes of one file: {"path", "expected": [{"place", "after"}], "others": false}.

    Each expected change is a criterion; unless others are allowed, a gate holds the rest of the file as it was,
    but for what untouched formulas show: that follows from the cells they read.
    """
    path, expected = check["path"], check["expected"]
    listed = [change for change in changes(world) if change.path == path]
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


def _unchanged(check: dict[str, Any], world: GradedWorld, answer: str) -> list[Criterion]:
    altered = [name for name in world.changed() if name not in check["except"]]
    detail = f"altered: {', '.join(altered[:5])}"[:200] if altered else "as before"
    return [Criterion(name="rest of the world", met=not altered, detail=detail, gate=True)]


_CHECKS: dict[str, Callable[[dict[str, Any], GradedWorld, str], list[Criterion]]] = {
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


def _agent_cells(world: GradedWorld, name: str, *, values: bool) -> dict[str, dict[str, Any]]:
    data = _agent_bytes(world, name)
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > _LARGEST_UNPACKED:
            raise Unreadable(f"{name} unpacks to {unpacked} bytes, {_LARGEST_UNPACKED} are read at most")
        cells = _cells(data, values=values)
        if not cells:
            raise Unreadable(f"{name} has no sheet")
        return cells
    except Unreadable:
        raise
    except Exception as error:  # damage takes any form; it becomes the detail of a criterion that is not met
        raise Unreadable(f"{name} is not a readable workbook: {type(error).__name__}") from error


def _cells(data: bytes, *, values: bool) -> dict[str, dict[str, Any]]:
    """Sheet → cell → value, with formulas as text, or with their cached values; empty cells are left out.

    Goes over the stored cells only: a sheet whose last cell is XFD1048576 has 17 thousand million others.
    """
    book = openpyxl.load_workbook(io.BytesIO(data), data_only=values)
    return {
        sheet.title: {cell.coordinate: cell.value for cell in sheet._cells.values() if cell.value is not None}
        for sheet in book.worksheets
    }
