"""What a formula computes with: numbers, texts, truth values, blanks, ranges, and the errors of a spreadsheet. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from system.tools.formulas import ERROR, Area, NotComputable, Place, Value


class Fault(Exception):
    """An error value, as `#N/A`, on its way through a formula: `Fault("#N/A")`."""

    @property
    def code(self) -> str:
        """How a cell shows it."""
        return str(self)


class Range(NamedTuple):
    """An area with what its cells hold; blank cells are left out."""

    area: Area
    cells: Mapping[Place, Value]

    @property
    def height(self) -> int:
        """Rows of the area."""
        return self.area.bottom - self.area.top + 1

    @property
    def width(self) -> int:
        """Columns of the area."""
        return self.area.right - self.area.left + 1

    def at(self, row: int, column: int) -> Value:
        """What stands in a row and column of the area, counted from 0."""
        return self.cells.get(Place(self.area.sheet, self.area.top + row, self.area.left + column))

    def values(self) -> list[Value]:
        """What the cells hold, row by row."""
        return [self.cells[place] for place in sorted(self.cells)]

    def part(self, top: int, left: int, height: int, width: int) -> Range:
        """A smaller range inside this one, from a row and column counted from 0."""
        row, column = self.area.top + top, self.area.left + left
        area = Area(self.area.sheet, column, row, column + width - 1, row + height - 1)
        return Range(area, {place: value for place, value in self.cells.items() if area.contains(place)})


Operand: TypeAlias = Value | Range


def scalar(operand: Operand) -> Value:
    """One value; a range of one cell is its value, an error value goes on its way.

    Raises:
        Fault: The value is an error.
        NotComputable: A range of several cells where one value is needed.
    """
    if isinstance(operand, Range):
        if (operand.height, operand.width) != (1, 1):
            raise NotComputable("a range outside a function")
        operand = operand.at(0, 0)
    if isinstance(operand, str) and ERROR.fullmatch(operand):
        raise Fault(operand)
    return operand


def number(operand: Operand) -> float:
    """A number: blank is 0, TRUE is 1, a text must spell one."""
    value = scalar(operand)
    if value is None:
        return 0.0
    try:
        return float(value)
    except ValueError:
        raise Fault("#VALUE!") from None


def integer(operand: Operand) -> int:
    """A number without its fraction."""
    return int(number(operand))


def truth(operand: Operand) -> bool:
    """A truth value: any number but 0 is true."""
    value = scalar(operand)
    if isinstance(value, str):
        if value.upper() not in ("TRUE", "FALSE"):
            raise Fault("#VALUE!")
        return value.upper() == "TRUE"
    return bool(value)


def text_of(operand: Operand) -> str:
    """The text that `&` joins: numbers without a needless fraction."""
    value = scalar(operand)
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, str):
        return value
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.15g}"


def compared(left: Value, right: Value) -> int:
    """-1, 0 or 1: numbers before texts before truth values; texts whatever their case; blank is 0 or ""."""
    if left is None:
        left = _blank_like(right)
    if right is None:
        right = _blank_like(left)
    first, second = _key(left), _key(right)
    return (first > second) - (first < second)


def _blank_like(other: Value) -> Value:
    if isinstance(other, bool):
        return False
    return "" if isinstance(other, str) else 0.0


def _key(value: Value) -> tuple[int, float, str]:
    if isinstance(value, bool):
        return (2, float(value), "")
    if isinstance(value, str):
        return (1, 0.0, value.casefold())
    return (0, float(value or 0.0), "")


def numbers(operands: Iterable[Operand]) -> list[float]:
    """The numbers among them: of a range only true numbers, of a single value what it spells."""
    found: list[float] = []
    for operand in operands:
        if isinstance(operand, Range):
            values = [scalar(value) for value in operand.values()]
            found += [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        elif operand is not None:
            found.append(number(operand))
    return found


def criterion(condition: Operand) -> Callable[[Value], bool]:
    """The test that a condition like `>=5`, `<>open` or `Nor*` stands for."""
    wanted = scalar(condition)
    match = re.fullmatch(r"(<=|>=|<>|=|<|>)(.*)", wanted, re.DOTALL) if isinstance(wanted, str) else None
    sign, rest = match.groups() if match else ("=", wanted)
    if isinstance(rest, str):
        rest = _spelt(rest)
    if sign in ("=", "<>"):
        return lambda value: _equals(value, rest) == (sign == "=")
    return lambda value: _same_type(value, rest) and _ORDERS[sign](compared(value, rest))


_ORDERS: dict[str, Callable[[int], bool]] = {
    "<": lambda order: order < 0,
    ">": lambda order: order > 0,
    "<=": lambda order: order <= 0,
    ">=": lambda order: order >= 0,
}


def _spelt(text: str) -> Value:
    try:
        return float(text)
    except ValueError:
        return text.upper() == "TRUE" if text.upper() in ("TRUE", "FALSE") else text


def _same_type(value: Value, wanted: Value) -> bool:
    kinds = [bool if isinstance(v, bool) else str if isinstance(v, str) else float for v in (value, wanted)]
    return value is not None and kinds[0] is kinds[1]


def _equals(value: Value, wanted: Value) -> bool:
    if wanted == "":
        return value is None or value == ""
    if isinstance(wanted, str):
        return isinstance(value, str) and wildcard(wanted).fullmatch(value) is not None
    if isinstance(value, str):
        value = _spelt(value)
    return _same_type(value, wanted) and compared(value, wanted) == 0


def wildcard(pattern: str) -> re.Pattern[str]:
    """The pattern of a text in which `*` and `?` stand for others, `~` for the next sign itself."""
    signs = {"*": ".*", "?": "."}
    parts = re.findall(r"~[*?~]|.", pattern, re.DOTALL)
    spelt = [signs.get(part) or re.escape(part[-1]) for part in parts]
    return re.compile("".join(spelt), re.IGNORECASE | re.DOTALL)
