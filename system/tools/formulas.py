"""Formulas that we can compute: SUM AVERAGE MIN MAX, + - * / and signs, cells, ranges, numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from openpyxl.formula import Tokenizer
from openpyxl.formula.tokenizer import Token, TokenizerError
from openpyxl.utils.cell import range_boundaries

LAST_COLUMN, LAST_ROW = 16_384, 1_048_576

_VOLATILE = {"INDIRECT(", "OFFSET(", "NOW(", "TODAY(", "RAND(", "RANDBETWEEN(", "CELL(", "INFO("}
_CELLS = r"\$?[A-Z]{1,3}\$?\d+(?::\$?[A-Z]{1,3}\$?\d+)?|\$?[A-Z]{1,3}:\$?[A-Z]{1,3}|\$?\d+:\$?\d+"
_REFERENCE = re.compile(rf"(?:(?:'((?:[^']|'')+)'|([^'!\[\]]+))!)?({_CELLS})")
ERROR = re.compile(r"#(DIV/0!|N/A|NAME\?|NULL!|NUM!|REF!|VALUE!)")
"""How a cell shows that its formula has no value."""

Value = float | str | bool | None
"""What a cell holds, as a formula sees it."""


class Place(NamedTuple):
    """One cell: `Place("Fees", 7, 2)` is Fees!B7."""

    sheet: str
    row: int
    column: int


class Area(NamedTuple):
    """A rectangle of cells on a sheet, ends included: `Area("Fees", 2, 2, 2, 6)` is Fees!B2:B6."""

    sheet: str
    left: int
    top: int
    right: int
    bottom: int

    @property
    def is_cell(self) -> bool:
        """Say whether the area is a single cell."""
        return (self.left, self.top) == (self.right, self.bottom)

    @property
    def size(self) -> int:
        """Count the cells of the area."""
        return (self.right - self.left + 1) * (self.bottom - self.top + 1)

    def places(self) -> Iterator[Place]:
        """Yield the cells of the area, row by row."""
        for row in range(self.top, self.bottom + 1):
            for column in range(self.left, self.right + 1):
                yield Place(self.sheet, row, column)

    def contains(self, place: Place) -> bool:
        """Say whether a cell lies in the area."""
        return (
            place.sheet == self.sheet
            and self.left <= place.column <= self.right
            and self.top <= place.row <= self.bottom
        )


class NotComputable(Exception):
    """A formula that we do not compute, or whose value is an error."""


def bounds(cells: str) -> tuple[int, int, int, int]:
    """Read A1:B4, B2, A:B or 2:4 as left, top, right, bottom.

    Raises:
        ValueError: Another text, or a cell beyond the last column or row.
    """
    if not re.fullmatch(_CELLS, cells):
        raise ValueError(f"range must be like A1:B4, got {cells}")
    found = range_boundaries(cells)
    limits = (1, 1, LAST_COLUMN, LAST_ROW)
    left, top, right, bottom = (limit if end is None else end for end, limit in zip(found, limits))
    if not (1 <= left <= right <= LAST_COLUMN and 1 <= top <= bottom <= LAST_ROW):
        raise ValueError(f"range must run from upper left to lower right within the sheet, got {cells}")
    return left, top, right, bottom


def check_formula(formula: str) -> None:
    """Refuse a formula that cannot be read at all.

    Raises:
        ValueError: A bracket or quote without its partner.
    """
    try:
        tokens_of(formula)
    except NotComputable:
        raise ValueError(f"formula must have matching brackets and quotes, got {formula}") from None


def areas(formula: str, sheet: str) -> list[Area] | None:
    """List the areas that a formula reads; None if they cannot be told from its text.

    Args:
        formula: Text with the leading `=`.
        sheet: The sheet that holds it.
    """
    try:
        tokens = tokens_of(formula)
    except NotComputable:
        return None
    references = [token for token in tokens if token.type == Token.OPERAND and token.subtype == Token.RANGE]
    found = [area_of(token.value, sheet) for token in references]
    if any(token.type == Token.FUNC and token.value.upper() in _VOLATILE for token in tokens):
        return None
    return None if None in found else [area for area in found if area is not None]


def evaluate(formula: str, sheet: str, values: Callable[[Area], Iterable[Value]]) -> float:
    """Compute a formula.

    Args:
        formula: Text with the leading `=`.
        sheet: The sheet that holds it.
        values: Gives what the cells of an area hold, blank cells left out; may raise NotComputable.

    Raises:
        NotComputable: Anything that the first line of this file does not name, a value that is no number
            where one is needed, a division by zero.
    """
    parser = _Parser(tokens_of(formula), sheet, values)
    result = parser.total()
    if parser.position != len(parser.tokens):
        raise NotComputable(formula)
    return result


class _Parser:
    """Recursive descent: total > product > signed > operand."""

    def __init__(self, tokens: list[Token], sheet: str, values: Callable[[Area], Iterable[Value]]) -> None:
        self.tokens = tokens
        self.position = 0
        self.sheet = sheet
        self.values = values

    def next_is(self, kind: str, *texts: str, ahead: int = 0) -> bool:
        """Say whether the next token (or one further ahead) is of the kind and has one of the texts."""
        at = self.position + ahead
        token = self.tokens[at] if at < len(self.tokens) else None
        return token is not None and token.type == kind and (not texts or token.value.upper() in texts)

    def take(self, kind: str, *texts: str) -> str:
        """Consume the next token, which must be of the kind and have one of the texts."""
        if not self.next_is(kind, *texts):
            raise NotComputable(f"{kind} expected")
        self.position += 1
        return self.tokens[self.position - 1].value

    def total(self) -> float:
        result = self.product()
        while self.next_is(Token.OP_IN, "+", "-"):
            operator = self.take(Token.OP_IN)
            other = self.product()
            result = result + other if operator == "+" else result - other
        return result

    def product(self) -> float:
        result = self.signed()
        while self.next_is(Token.OP_IN, "*", "/"):
            operator = self.take(Token.OP_IN)
            other = self.signed()
            if operator == "/" and other == 0:
                raise NotComputable("division by zero")
            result = result * other if operator == "*" else result / other
        return result

    def signed(self) -> float:
        if self.next_is(Token.OP_PRE, "+", "-"):
            return -self.signed() if self.take(Token.OP_PRE) == "-" else self.signed()
        return self.operand()

    def operand(self) -> float:
        if self.next_is(Token.PAREN, "("):
            self.take(Token.PAREN)
            result = self.total()
            self.take(Token.PAREN, ")")
            return result
        if self.next_is(Token.FUNC):
            name = self.take(Token.FUNC, *_FUNCTIONS).upper()
            numbers = self.argument()
            while self.next_is(Token.SEP, ","):
                self.take(Token.SEP)
                numbers += self.argument()
            self.take(Token.FUNC, ")")
            return _FUNCTIONS[name](numbers)
        text = self.take(Token.OPERAND)
        area = area_of(text, self.sheet)
        if area is None:
            return _number(text)
        if not area.is_cell:
            raise NotComputable("a range outside a function")
        return _number(next(iter(self.values(area)), 0.0))

    def argument(self) -> list[float]:
        """A range alone gives its numbers, text left out; anything else is one number."""
        ends = self.next_is(Token.SEP, ",", ahead=1) or self.next_is(Token.FUNC, ")", ahead=1)
        alone = ends and self.next_is(Token.OPERAND)
        area = area_of(self.tokens[self.position].value, self.sheet) if alone else None
        if area is None:
            return [self.total()]
        self.take(Token.OPERAND)
        values = list(self.values(area))
        if any(isinstance(value, str) and ERROR.fullmatch(value) for value in values):
            raise NotComputable("an error value")
        return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _average(numbers: list[float]) -> float:
    if not numbers:
        raise NotComputable("average of nothing")
    return sum(numbers) / len(numbers)


_FUNCTIONS: dict[str, Callable[[list[float]], float]] = {
    "SUM(": lambda numbers: sum(numbers, 0.0),
    "AVERAGE(": _average,
    "MIN(": lambda numbers: min(numbers, default=0.0),
    "MAX(": lambda numbers: max(numbers, default=0.0),
}


def tokens_of(formula: str) -> list[Token]:
    """Split a formula into its tokens, blanks left out. Raises NotComputable for a bracket without its partner."""
    try:
        tokens = [token for token in Tokenizer(formula).items if token.type != Token.WSPACE]
    except (TokenizerError, IndexError) as error:  # IndexError: a bracket that was never opened
        raise NotComputable(str(error)) from error
    opened = sum((token.subtype == Token.OPEN) - (token.subtype == Token.CLOSE) for token in tokens)
    if opened != 0:
        raise NotComputable("a bracket is not closed")
    return tokens


def area_of(text: str, sheet: str) -> Area | None:
    """Read a reference like `B2`, `A1:B4` or `Fees!B7`; None for any other text."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        return None
    quoted, plain, cells = match.groups()
    try:
        return Area(quoted.replace("''", "'") if quoted else plain or sheet, *bounds(cells))
    except ValueError:
        return None


def _number(value: Value) -> float:
    if isinstance(value, bool) or value is None:
        raise NotComputable("not a number")
    try:
        return float(value)
    except ValueError:
        raise NotComputable("not a number") from None
