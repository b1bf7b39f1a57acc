"""Conditions on the columns of a sheet, as `Fee >= 100`: read from text, tested on values. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from openpyxl.utils.cell import column_index_from_string

from system.tools.results import matches, one_line

_OPERATORS = r"is\s+not\s+empty|is\s+empty|starts\s+with|contains|>=|<=|!=|<>|==|=|>|<"
_CONDITION = re.compile(rf"\s*({_OPERATORS})\s*(.*?)\s*", re.IGNORECASE | re.DOTALL)
_NUMBER = re.compile(r"[+-]?[\d,]*\.?\d+(e[+-]?\d+)?%?", re.IGNORECASE)


class Condition(NamedTuple):
    """A test of one column: `Condition(2, ">=", "100")`."""

    column: int
    operator: str
    wanted: str

    def holds(self, value: Any) -> bool:
        """Say whether a value of the column meets the condition; nothing is None."""
        empty = value is None or value == ""
        if self.operator.endswith("empty"):
            return empty == (self.operator == "is empty")
        if self.operator == "contains":
            return not empty and matches(self.wanted, _text(value))
        if self.operator == "starts with":
            return one_line(_text(value)).casefold().startswith(one_line(self.wanted).casefold())
        if empty:
            return self.operator == "!=" and self.wanted != ""
        left, right = _comparable(value, self.wanted)
        return _TESTS[self.operator](left, right)


_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
}


def read_condition(text: str, headers: dict[int, str], *, columns: int) -> Condition:
    """Read `Fee >= 100`; the column is a header, whatever its case, or a letter.

    Args:
        text: What the model wrote.
        headers: Text of the header by the number of its column.
        columns: Number of columns there are.

    Raises:
        ValueError: No such column, or no operator after it.
    """
    stripped = text.strip()
    named = sorted(((one_line(name), column) for column, name in headers.items()), key=lambda e: -len(e[0]))
    letters = re.match(r"[A-Za-z]{1,3}(?![A-Za-z0-9_])", stripped)
    lettered = [(letters.group(), column_index_from_string(letters.group()))] if letters else []
    for name, column in [*named, *(each for each in lettered if each[1] <= columns)]:
        for spelt in (name, f'"{name}"', f"'{name}'"):
            rest = stripped[len(spelt) :]
            found = _CONDITION.fullmatch(rest) if name else None
            if stripped.casefold().startswith(spelt.casefold()) and found:
                operator = {"<>": "!=", "==": "="}.get(found[1], one_line(found[1]).lower())
                return Condition(
                    column, operator, found[2].strip("\"'") if found[2][:1] in "\"'" else found[2]
                )
    known = ", ".join(name for name, _ in named[::-1][:20]) or "none"
    raise ValueError(
        f"condition must be like Fee >= 100 with a header or letter, got {text}; headers: {known}"
    )


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)


def _comparable(value: Any, wanted: str) -> tuple[Any, Any]:
    """Both as numbers, both as dates, or both as folded text."""
    if isinstance(value, datetime):
        try:
            return value, datetime.fromisoformat(wanted)
        except ValueError:
            return _text(value), wanted
    number = _number(wanted)
    own = (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else _number(_text(value))
    )
    if number is not None and own is not None:
        return own, number
    return one_line(_text(value)).casefold(), one_line(wanted).casefold()


def _number(text: str) -> float | None:
    stripped = text.strip()
    if not _NUMBER.fullmatch(stripped):
        return None
    value = float(stripped.rstrip("%").replace(",", ""))
    return value / 100 if stripped.endswith("%") else value
