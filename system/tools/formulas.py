"""The formulas that we can compute: SUM, AVERAGE, MIN, MAX over ranges, + - * / and signs, cells and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from openpyxl.formula import Tokenizer
from openpyxl.formula.tokenizer import Token
from openpyxl.utils.cell import range_boundaries

LARGEST_RANGE = 100_000
"""Cells of a range beyond which a formula counts as one that we cannot compute."""

_VOLATILE = {"INDIRECT(", "OFFSET(", "NOW(", "TODAY(", "RAND(", "RANDBETWEEN(", "CELL(", "INFO("}
_REFERENCE = re.compile(r"(?:(?:'((?:[^']|'')+)'|([^'!\[\]]+))!)?(\$?[A-Z]{1,3}\$?\d+(?::\$?[A-Z]{1,3}\$?\d+)?)")


class Area(NamedTuple):
    """A rectangle of cells on a sheet, ends included: `Area("Fees", 2, 2, 2, 6)` is Fees!B2:B6."""

    sheet: str
    left: int
    top: int
    right: int
    bottom: int

    def contains(self, place: Place) -> bool:
        """Say whether a cell lies in the area."""
        return (
            place.sheet == self.sheet
            and self.left <= place.column <= self.right
            and self.top <= place.row <= self.bottom
        )

    def places(self) -> Iterator[Place]:
        """Yield the cells row by row."""
        for row in range(self.top, self.bottom + 1):
            for column in range(self.left, self.right + 1):
                yield Place(self.sheet, row, column)

    @property
    def cell_count(self) -> int:
        """How many cells the area has."""
        return (self.right - self.left + 1) * (self.bottom - self.top + 1)


class Place(NamedTuple):
    """One cell: `Place("Fees", 7, 2)` is Fees!B7."""

    sheet: str
    row: int
    column: int


class NotComputable(Exception):
    """A formula that we do not compute, or whose value is an error."""


Value = float | str | bool | None
"""What a cell holds, as a formula sees it."""


def areas(formula: str, sheet: str) -> list[Area] | None:
    """List the areas that a formula reads; None if they cannot be told from its text.

    Args:
        formula: Text with the leading `=`.
        sheet: The sheet that holds it.
    """
    found = []
    for token in Tokenizer(formula).items:
        if token.type == Token.FUNC and token.value.upper() in _VOLATILE:
            return None
        if token.type == Token.OPERAND and token.subtype == Token.RANGE:
            area = _area(token.value, sheet)
            if area is None:
                return None
            found.append(area)
    return found


def evaluate(formula: str, sheet: str, value_of: Callable[[Place], Value]) -> float:
    """Compute a formula.

    Args:
        formula: Text with the leading `=`.
        sheet: The sheet that holds it.
        value_of: Gives the value of a cell; may raise NotComputable.

    Raises:
        NotComputable: Anything but numbers, cells, ranges in the known functions, and + - * / with brackets.
    """
    tokens = [token for token in Tokenizer(formula).items if token.type != Token.WSPACE]
    parser = _Parser(tokens, sheet, value_of)
    result = parser.sum()
    if parser.position != len(tokens):
        raise NotComputable(formula)
    return result


class _Parser:
    """Recursive descent over the tokens; `sum` > `product` > `sign` > `operand`."""

    def __init__(self, tokens: list[Token], sheet: str, value_of: Callable[[Place], Value]) -> None:
        self.tokens = tokens
        self.position = 0
        self.sheet = sheet
        self.value_of = value_of

    def take(self, kind: str, *values: str) -> str | None:
        """Consume the next token if it is of the kind and has one of the values."""
        if self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token.type == kind and (not values or token.value in values):
                self.position += 1
                return token.value
        return None

    def sum(self) -> float:
        result = self.product()
        while operator := self.take(Token.OP_IN, "+", "-"):
            result = result + self.product() if operator == "+" else result - self.product()
        return result

    def product(self) -> float:
        result = self.sign()
        while operator := self.take(Token.OP_IN, "*", "/"):
            other = self.sign()
            if operator == "/" and other == 0:
                raise NotComputable("division by zero")
            result = result * other if operator == "*" else result / other
        return result

    def sign(self) -> float:
        if operator := self.take(Token.OP_PRE, "+", "-"):
            return -self.sign() if operator == "-" else self.sign()
        return self.operand()

    def operand(self) -> float:
        if self.take(Token.PAREN, "("):
            result = self.sum()
            if not self.take(Token.PAREN, ")"):
                raise NotComputable("bracket not closed")
            return result
        if name := self.take(Token.FUNC, *_FUNCTIONS):
            return self.function(name)
        text = self.take(Token.OPERAND)
        if text is None:
            raise NotComputable("not an operand")
        area = _area(text, self.sheet)
        if area is None:
            return _number(text)
        if area.cell_count != 1:
            raise NotComputable("a range outside a function")
        value = self.value_of(next(area.places()))
        if value is None:
            return 0.0
        return _number(value)

    def function(self, name: str) -> float:
        numbers: list[float] = []
        while not self.take(Token.FUNC, ")"):
            numbers += self.argument()
            if not self.take(Token.SEP, ",") and self.tokens[self.position : self.position + 1]:
                if self.tokens[self.position].value != ")":
                    raise NotComputable("not a list of arguments")
            if self.position >= len(self.tokens):
                raise NotComputable("bracket not closed")
        return _FUNCTIONS[name](numbers)

    def argument(self) -> list[float]:
        """A range gives its numbers, text and blanks left out; anything else is an expression."""
        token = self.tokens[self.position]
        area = _area(token.value, self.sheet) if token.type == Token.OPERAND else None
        after = self.tokens[self.position + 1 : self.position + 2]
        if area is None or not after or after[0].value not in (",", ")"):
            return [self.sum()]
        if area.cell_count > LARGEST_RANGE:
            raise NotComputable("range too large")
        self.position += 1
        values = [self.value_of(place) for place in area.places()]
        return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _average(numbers: list[float]) -> float:
    if not numbers:
        raise NotComputable("average of nothing")
    return sum(numbers) / len(numbers)


_FUNCTIONS: dict[str, Callable[[list[float]], float]] = {
    "SUM(": lambda numbers: sum(numbers),
    "AVERAGE(": _average,
    "MIN(": lambda numbers: min(numbers, default=0.0),
    "MAX(": lambda numbers: max(numbers, default=0.0),
}


def _area(text: str, sheet: str) -> Area | None:
    match = _REFERENCE.fullmatch(text)
    if match is None:
        return None
    quoted, plain, cells = match.groups()
    left, top, right, bottom = (int(bound or 0) for bound in range_boundaries(cells))
    name = quoted.replace("''", "'") if quoted else plain or sheet
    return Area(name, min(left, right), min(top, bottom), max(left, right), max(top, bottom))


def _number(value: Value) -> float:
    if isinstance(value, bool) or value is None:
        raise NotComputable("not a number")
    try:
        return float(value)
    except ValueError:
        raise NotComputable("not a number") from None
