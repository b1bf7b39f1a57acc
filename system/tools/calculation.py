"""Formulas as an office writes them: operators, comparisons, conditions, lookups, texts, dates. Pure.

The wide evaluator, of the set `full`; `formulas.py` has the narrow one of `brief`. What `functions.py` does not have
raises NotComputable: the cell is stale then, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from openpyxl.formula.tokenizer import Token

from system.tools.formulas import Area, NotComputable, Place, Value, area_of, tokens_of
from system.tools.functions import FUNCTIONS, LAZY
from system.tools.quantities import Fault, Operand, Range, compared, number, scalar, text_of

Contents = Callable[[Area], Mapping[Place, Value]]
Thunk = Callable[[], Operand]

_LEVELS = [{"=", "<>", "<", ">", "<=", ">="}, {"&"}, {"+", "-"}, {"*", "/"}, {"^"}]
"""Operators, the loosest first; each level reads from left to right."""


def calculate(formula: str, sheet: str, contents: Contents) -> Value:
    """Compute a formula; an error value like `#DIV/0!` is a value too.

    Args:
        formula: Text with the leading `=`.
        sheet: The sheet that holds it.
        contents: Gives what the cells of an area hold, blank cells left out; may raise NotComputable.

    Raises:
        NotComputable: A function, a name or a construct that is not known here.
    """
    parser = _Parser(tokens_of(formula), sheet, contents)
    thunk = parser.level(0)
    if parser.position != len(parser.tokens):
        raise NotComputable(formula)
    try:
        value = scalar(thunk())
    except Fault as fault:
        return fault.code
    except (OverflowError, TypeError, ValueError, ZeroDivisionError) as error:
        # A wrong number of operands is a TypeError; a result beyond any number is one of the others.
        raise NotComputable(str(error)) from error
    return 0.0 if value is None else value


class _Parser:
    """Recursive descent over the levels of operators; gives functions, so that IF leaves a branch alone."""

    def __init__(self, tokens: list[Token], sheet: str, contents: Contents) -> None:
        self.tokens, self.sheet, self.contents = tokens, sheet, contents
        self.position = 0

    def next_is(self, kind: str, subtype: str = "", texts: set[str] | None = None) -> bool:
        token = self.tokens[self.position] if self.position < len(self.tokens) else None
        if token is None or token.type != kind:
            return False
        return (not subtype or token.subtype == subtype) and (texts is None or token.value in texts)

    def take(self) -> Token:
        if self.position >= len(self.tokens):
            raise NotComputable("the formula breaks off")
        self.position += 1
        return self.tokens[self.position - 1]

    def level(self, depth: int) -> Thunk:
        if depth == len(_LEVELS):
            return self.signed()
        left = self.level(depth + 1)
        while self.next_is(Token.OP_IN, texts=_LEVELS[depth]):
            operator = self.take().value
            left = partial(_applied, operator, left, self.level(depth + 1))
        return left

    def signed(self) -> Thunk:
        if self.next_is(Token.OP_PRE):
            minus, inner = self.take().value == "-", self.signed()
            return lambda: -number(inner()) if minus else inner()
        operand = self.operand()
        while self.next_is(Token.OP_POST):
            self.take()
            operand = partial(_hundredth, operand)
        return operand

    def operand(self) -> Thunk:
        token = self.take()
        if token.type == Token.PAREN and token.subtype == Token.OPEN:
            inner = self.level(0)
            self.close(Token.PAREN)
            return inner
        if token.type == Token.FUNC and token.subtype == Token.OPEN:
            return self.function(token.value[:-1].upper().removeprefix("_XLFN."))
        if token.type != Token.OPERAND:
            raise NotComputable(f"{token.value} is not known")
        return self.constant(token)

    def constant(self, token: Token) -> Thunk:
        text = token.value
        if token.subtype == Token.NUMBER:
            return lambda: float(text)
        if token.subtype == Token.TEXT:
            return lambda: text[1:-1].replace('""', '"')
        if token.subtype == Token.LOGICAL:
            return lambda: text.upper() == "TRUE"
        if token.subtype == Token.ERROR:
            return lambda: text
        area = area_of(text, self.sheet)
        if area is None:
            raise NotComputable(f"{text} is not known")
        return lambda: Range(area, self.contents(area))

    def function(self, name: str) -> Thunk:
        operands: list[Thunk] = []
        while not self.next_is(Token.FUNC, Token.CLOSE):
            if self.next_is(Token.SEP):
                operands.append(_blank)
            else:
                operands.append(self.level(0))
            if self.next_is(Token.SEP):
                self.take()
                if self.next_is(Token.FUNC, Token.CLOSE):
                    operands.append(_blank)
            elif not self.next_is(Token.FUNC, Token.CLOSE):
                raise NotComputable(f"{name} is not closed")
        self.close(Token.FUNC)
        if name in LAZY:
            return lambda: LAZY[name](*operands)
        if name not in FUNCTIONS:
            raise NotComputable(f"function {name} is not known")
        return lambda: FUNCTIONS[name](*(operand() for operand in operands))

    def close(self, kind: str) -> None:
        if not self.next_is(kind, Token.CLOSE):
            raise NotComputable("a bracket is not closed")
        self.take()


def _blank() -> Operand:
    return None


def _hundredth(operand: Thunk) -> Operand:
    return number(operand()) / 100


def _applied(operator: str, left: Thunk, right: Thunk) -> Operand:
    if operator == "&":
        return text_of(left()) + text_of(right())
    if operator in _LEVELS[0]:
        order = compared(scalar(left()), scalar(right()))
        return {"=": order == 0, "<>": order != 0, "<": order < 0, ">": order > 0}.get(
            operator, order <= 0 if operator == "<=" else order >= 0
        )
    first, second = number(left()), number(right())
    if operator == "+":
        return first + second
    if operator == "-":
        return first - second
    if operator == "*":
        return first * second
    return FUNCTIONS["POWER"](first, second) if operator == "^" else _quotient(first, second)


def _quotient(first: float, second: float) -> float:
    if second == 0:
        raise Fault("#DIV/0!")
    return first / second
