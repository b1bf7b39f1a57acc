"""The functions of a spreadsheet, by name: each takes its operands and gives a value. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_FLOOR, ROUND_HALF_UP, ROUND_UP, Decimal

from openpyxl.utils.datetime import from_excel, to_excel

from system.tools.formulas import NotComputable, Value
from system.tools.quantities import (
    Fault,
    Operand,
    Range,
    compared,
    criterion,
    integer,
    number,
    numbers,
    scalar,
    text_of,
    truth,
    wildcard,
)

Function = Callable[..., Operand]


def _some(values: Sequence[float], fault: str = "#DIV/0!") -> Sequence[float]:
    if not values:
        raise Fault(fault)
    return values


def _rounded(value: Operand, digits: Operand = 0.0, *, how: str = ROUND_HALF_UP) -> float:
    step = Decimal(1).scaleb(-integer(digits))
    return float((Decimal(repr(number(value))) / step).to_integral_value(how) * step)


def _multiple(value: Operand, step: Operand, how: str) -> float:
    size = Decimal(repr(number(step)))
    if not size:
        return 0.0
    return float((Decimal(repr(number(value))) / size).to_integral_value(how) * size)


def _divided(left: Operand, right: Operand) -> float:
    divisor = number(right)
    if divisor == 0:
        raise Fault("#DIV/0!")
    return number(left) / divisor


def _power(base: Operand, exponent: Operand) -> float:
    try:
        result = number(base) ** number(exponent)
    except (ZeroDivisionError, OverflowError):
        raise Fault("#NUM!") from None
    if isinstance(result, complex):
        raise Fault("#NUM!")
    return result


def _root(value: Operand) -> float:
    if number(value) < 0:
        raise Fault("#NUM!")
    return math.sqrt(number(value))


def _logarithm(value: Operand, base: Operand = math.e) -> float:
    if number(value) <= 0 or number(base) <= 0 or number(base) == 1:
        raise Fault("#NUM!")
    return math.log(number(value)) / math.log(number(base)) if base != 10 else math.log10(number(value))


def _modulo(value: Operand, divisor: Operand) -> float:
    return number(value) - number(divisor) * math.floor(_divided(value, divisor))


def _count_all(*operands: Operand) -> float:
    return float(sum(len(o.values()) if isinstance(o, Range) else 1 for o in operands))


def _count_numbers(*operands: Operand) -> float:
    values = [v for o in operands for v in (o.values() if isinstance(o, Range) else [o])]
    return float(sum(isinstance(v, int | float) and not isinstance(v, bool) for v in values))


def _ranked(values: Operand, place: Operand, *, largest: bool) -> float:
    found = sorted(numbers([values]), reverse=largest)
    if not 1 <= integer(place) <= len(found):
        raise Fault("#NUM!")
    return found[integer(place) - 1]


def _all_ranges(operands: Sequence[Operand]) -> list[Range]:
    ranges = [operand for operand in operands if isinstance(operand, Range)]
    if len(ranges) != len(operands):
        raise NotComputable("a range is needed")
    if len({(each.height, each.width) for each in ranges}) > 1:
        raise Fault("#VALUE!")
    return ranges


def _chosen(target: Operand, *pairs: Operand) -> list[Value]:
    """What the cells of `target` hold where every range meets its condition."""
    if len(pairs) % 2:
        raise NotComputable("a range without a condition")
    first, *tested = _all_ranges([target, *pairs[::2]])
    tests = [criterion(condition) for condition in pairs[1::2]]
    chosen = []
    for place in sorted({p for each in (first, *tested) for p in _offsets(each)}):
        if all(test(each.at(*place)) for each, test in zip(tested, tests)):
            chosen.append(first.at(*place))
    return chosen


def _offsets(found: Range) -> list[tuple[int, int]]:
    return [(place.row - found.area.top, place.column - found.area.left) for place in found.cells]


def _chosen_numbers(target: Operand, *pairs: Operand) -> list[float]:
    values = [scalar(value) for value in _chosen(target, *pairs)]
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def _one_condition(cells: Operand, condition: Operand, target: Operand = None) -> tuple[Operand, ...]:
    if isinstance(cells, Range) and isinstance(target, Range):
        target = target._replace(
            area=target.area._replace(
                right=target.area.left + cells.width - 1, bottom=target.area.top + cells.height - 1
            )
        )
    return (cells if target is None else target), cells, condition


def _count_chosen(*pairs: Operand) -> float:
    if len(pairs) == 2 and isinstance(pairs[0], Range):  # blank cells can meet a condition too
        test = criterion(pairs[1])
        blank = pairs[0].height * pairs[0].width - len(pairs[0].cells)
        return float(sum(map(test, pairs[0].values())) + (blank if test(None) else 0))
    return float(len(_chosen(pairs[0], *pairs)))


def _sum_products(*operands: Operand) -> float:
    first, *others = _all_ranges(operands)
    total = 0.0
    for place in _offsets(first):
        values = [scalar(each.at(*place)) for each in (first, *others)]
        factors = [v if isinstance(v, int | float) and not isinstance(v, bool) else 0.0 for v in values]
        total += math.prod(factors)
    return total


def _position(wanted: Operand, cells: list[Value], mode: int) -> int:
    """Where a value stands in a list: exact (0), or the last not above (1) or not below (-1) it."""
    value = scalar(wanted)
    if mode == 0:
        pattern = wildcard(value) if isinstance(value, str) else None
        for index, cell in enumerate(cells):
            if pattern is not None:
                if isinstance(cell, str) and pattern.fullmatch(cell):
                    return index
            elif cell is not None and not isinstance(cell, str) and compared(cell, value) == 0:
                return index
        raise Fault("#N/A")
    fitting = [
        i
        for i, cell in enumerate(cells)
        if cell is not None
        and isinstance(cell, str) == isinstance(value, str)
        and compared(cell, value) * mode <= 0
    ]
    if not fitting:
        raise Fault("#N/A")
    return fitting[-1]


def _line(operand: Operand) -> list[Value]:
    if not isinstance(operand, Range):
        raise NotComputable("a range is needed")
    if 1 not in (operand.height, operand.width):
        raise Fault("#N/A")
    last = max((max(place) for place in _offsets(operand)), default=-1)
    return [operand.at(i, 0) if operand.width == 1 else operand.at(0, i) for i in range(last + 1)]


def _match(wanted: Operand, cells: Operand, mode: Operand = 1.0) -> float:
    return float(_position(wanted, _line(cells), integer(mode)) + 1)


def _index(cells: Operand, row: Operand, column: Operand = None) -> Operand:
    if not isinstance(cells, Range):
        raise NotComputable("a range is needed")
    if column is None and cells.height == 1:
        row, column = 1.0, row
    i, j = integer(row) - 1, integer(column if column is not None else 1.0) - 1
    if not (i < cells.height and j < cells.width):
        raise Fault("#REF!")
    if i < 0 or j < 0:
        rows, columns = (0, cells.height) if i < 0 else (i, 1), (0, cells.width) if j < 0 else (j, 1)
        return cells.part(rows[0], columns[0], rows[1], columns[1])
    return cells.at(i, j)


def _lookup(wanted: Operand, table: Operand, place: Operand, near: Operand = True, *, down: bool) -> Operand:
    if not isinstance(table, Range):
        raise NotComputable("a range is needed")
    keys = table.part(0, 0, table.height, 1) if down else table.part(0, 0, 1, table.width)
    if not 1 <= integer(place) <= (table.width if down else table.height):
        raise Fault("#REF!")
    found = _position(wanted, _line(keys), 1 if truth(near) else 0)
    return table.at(found, integer(place) - 1) if down else table.at(integer(place) - 1, found)


def _xlookup(wanted: Operand, keys: Operand, values: Operand, missing: Operand = None) -> Operand:
    if not isinstance(values, Range):
        raise NotComputable("a range is needed")
    try:
        found = _position(wanted, _line(keys), 0)
    except Fault:
        if missing is None:
            raise
        return scalar(missing)
    return values.at(found, 0) if values.width == 1 else values.at(0, found)


def _joined_text(separator: Operand, skip_blank: Operand, *parts: Operand) -> str:
    values = [v for part in parts for v in (part.values() if isinstance(part, Range) else [part])]
    texts = [text_of(value) for value in values]
    return text_of(separator).join(text for text in texts if text or not truth(skip_blank))


def _count_of(operand: Operand) -> int:
    count = integer(operand)
    if count < 0:
        raise Fault("#VALUE!")
    return count


def _right(text: Operand, count: Operand = 1.0) -> str:
    return text_of(text)[-_count_of(count) :] if _count_of(count) else ""


def _middle(text: Operand, start: Operand, count: Operand) -> str:
    first = _count_of(start) - 1
    if first < 0:
        raise Fault("#VALUE!")
    return text_of(text)[first : first + _count_of(count)]


def _found_at(part: Operand, text: Operand, start: Operand = 1.0, *, fold: bool) -> float:
    words, sought = text_of(text), text_of(part)
    if fold:
        words, sought = words.casefold(), sought.casefold()
    place = words.find(sought, _count_of(start) - 1)
    if place < 0:
        raise Fault("#VALUE!")
    return float(place + 1)


def _substituted(text: Operand, old: Operand, new: Operand) -> str:
    return text_of(text).replace(text_of(old), text_of(new)) if text_of(old) else text_of(text)


def _date(operand: Operand) -> datetime:
    if number(operand) < 1:
        raise Fault("#NUM!")
    found = from_excel(number(operand))
    if not isinstance(found, datetime):
        raise Fault("#NUM!")
    return found


def _day(year: int, month: int, day: int) -> float:
    """The serial number of a date; months and days beyond the end go on in the next."""
    first = datetime(year + (month - 1) // 12, (month - 1) % 12 + 1, 1)
    return float(to_excel(first + timedelta(days=day - 1)))


def _months_later(start: Operand, months: Operand) -> float:
    date, later = _date(start), integer(months)
    last = _date(_day(date.year, date.month + later + 1, 0)).day
    return _day(date.year, date.month + later, min(date.day, last))


def _month_end(start: Operand, months: Operand) -> float:
    date = _date(start)
    return _day(date.year, date.month + integer(months) + 1, 0)


def _payment(rate: Operand, periods: Operand, present: Operand, future: Operand = 0.0) -> float:
    r, n = number(rate), number(periods)
    if n == 0:
        raise Fault("#NUM!")
    if r == 0:
        return -(number(present) + number(future)) / n
    growth = (1 + r) ** n
    return -r * (number(present) * growth + number(future)) / (growth - 1)


def _present(rate: Operand, *flows: Operand) -> float:
    return sum(flow / (1 + number(rate)) ** i for i, flow in enumerate(numbers(flows), 1))


def _deviation(values: list[float]) -> float:
    if len(values) < 2:
        raise Fault("#DIV/0!")
    return statistics.stdev(values)


def _rank(value: Operand, cells: Operand, ascending: Operand = 0.0) -> float:
    found, own = numbers([cells]), number(value)
    if own not in found:
        raise Fault("#N/A")
    return 1.0 + sum(other < own if number(ascending) else other > own for other in found)


def _if(test: Callable[[], Operand], then: Callable[[], Operand], other: Callable[[], Operand] | None = None):
    if truth(test()):
        return then()
    return other() if other else False


def _if_fault(value: Callable[[], Operand], other: Callable[[], Operand], *, only: str = "") -> Operand:
    try:
        return scalar(value())
    except Fault as fault:
        if only and fault.code != only:
            raise
        return other()


def _is_fault(value: Callable[[], Operand]) -> bool:
    try:
        scalar(value())
    except Fault:
        return True
    return False


def _ifs(*parts: Callable[[], Operand]) -> Operand:
    for test, value in zip(parts[::2], parts[1::2]):
        if truth(test()):
            return value()
    raise Fault("#N/A")


def _truths(operands: Sequence[Operand]) -> list[bool]:
    values = [v for o in operands for v in (o.values() if isinstance(o, Range) else [o])]
    return [truth(value) for value in values if not isinstance(value, str) or scalar(value) is None]


LAZY: dict[str, Function] = {
    "IF": _if,
    "IFS": _ifs,
    "IFERROR": _if_fault,
    "IFNA": lambda value, other: _if_fault(value, other, only="#N/A"),
    "ISERROR": _is_fault,
}
"""Functions that look at their operands one by one: each is given as a function without arguments."""

FUNCTIONS: dict[str, Function] = {
    "SUM": lambda *o: math.fsum(numbers(o)),
    "PRODUCT": lambda *o: math.prod(numbers(o)),
    "AVERAGE": lambda *o: math.fsum(_some(numbers(o))) / len(numbers(o)),
    "MEDIAN": lambda *o: float(statistics.median(_some(numbers(o), "#NUM!"))),
    "MIN": lambda *o: min(numbers(o), default=0.0),
    "MAX": lambda *o: max(numbers(o), default=0.0),
    "STDEV": lambda *o: _deviation(numbers(o)),
    "COUNT": _count_numbers,
    "COUNTA": _count_all,
    "COUNTBLANK": lambda o: _count_chosen(o, ""),
    "LARGE": lambda cells, place: _ranked(cells, place, largest=True),
    "SMALL": lambda cells, place: _ranked(cells, place, largest=False),
    "RANK": _rank,
    "ABS": lambda v: abs(number(v)),
    "SIGN": lambda v: float((number(v) > 0) - (number(v) < 0)),
    "INT": lambda v: float(math.floor(number(v))),
    "ROUND": _rounded,
    "ROUNDUP": lambda v, d=0.0: _rounded(v, d, how=ROUND_UP),
    "ROUNDDOWN": lambda v, d=0.0: _rounded(v, d, how=ROUND_DOWN),
    "TRUNC": lambda v, d=0.0: _rounded(v, d, how=ROUND_DOWN),
    "CEILING": lambda v, step=1.0: _multiple(v, step, ROUND_CEILING),
    "FLOOR": lambda v, step=1.0: _multiple(v, step, ROUND_FLOOR),
    "MOD": _modulo,
    "SQRT": _root,
    "POWER": _power,
    "EXP": lambda v: math.exp(number(v)),
    "LN": _logarithm,
    "LOG": lambda v, base=10.0: _logarithm(v, base),
    "LOG10": lambda v: _logarithm(v, 10.0),
    "PI": lambda: math.pi,
    "AND": lambda *o: all(_truths(o)),
    "OR": lambda *o: any(_truths(o)),
    "NOT": lambda o: not truth(o),
    "TRUE": lambda: True,
    "FALSE": lambda: False,
    "SUMIF": lambda *o: math.fsum(_chosen_numbers(*_one_condition(*o))),
    "AVERAGEIF": lambda *o: statistics.fmean(_some(_chosen_numbers(*_one_condition(*o)))),
    "COUNTIF": _count_chosen,
    "SUMIFS": lambda *o: math.fsum(_chosen_numbers(*o)),
    "AVERAGEIFS": lambda *o: statistics.fmean(_some(_chosen_numbers(*o))),
    "COUNTIFS": _count_chosen,
    "MAXIFS": lambda *o: max(_chosen_numbers(*o), default=0.0),
    "MINIFS": lambda *o: min(_chosen_numbers(*o), default=0.0),
    "SUMPRODUCT": _sum_products,
    "VLOOKUP": lambda *o: _lookup(*o, down=True),
    "HLOOKUP": lambda *o: _lookup(*o, down=False),
    "XLOOKUP": _xlookup,
    "INDEX": _index,
    "MATCH": _match,
    "ROWS": lambda o: float(_all_ranges([o])[0].height),
    "COLUMNS": lambda o: float(_all_ranges([o])[0].width),
    "NA": lambda: "#N/A",
    "ISNUMBER": lambda o: isinstance(scalar(o), int | float) and not isinstance(scalar(o), bool),
    "ISTEXT": lambda o: isinstance(scalar(o), str),
    "ISBLANK": lambda o: scalar(o) is None,
    "CONCATENATE": lambda *o: _joined_text("", False, *o),
    "CONCAT": lambda *o: _joined_text("", False, *o),
    "TEXTJOIN": _joined_text,
    "LEFT": lambda t, count=1.0: text_of(t)[: _count_of(count)],
    "RIGHT": _right,
    "MID": _middle,
    "LEN": lambda t: float(len(text_of(t))),
    "UPPER": lambda t: text_of(t).upper(),
    "LOWER": lambda t: text_of(t).lower(),
    "PROPER": lambda t: text_of(t).title(),
    "TRIM": lambda t: " ".join(word for word in text_of(t).split(" ") if word),
    "FIND": lambda *o: _found_at(*o, fold=False),
    "SEARCH": lambda *o: _found_at(*o, fold=True),
    "SUBSTITUTE": _substituted,
    "EXACT": lambda a, b: text_of(a) == text_of(b),
    "VALUE": number,
    "DATE": lambda y, m, d: _day(integer(y), integer(m), integer(d)),
    "YEAR": lambda o: float(_date(o).year),
    "MONTH": lambda o: float(_date(o).month),
    "DAY": lambda o: float(_date(o).day),
    "DAYS": lambda end, start: number(end) - number(start),
    "EDATE": _months_later,
    "EOMONTH": _month_end,
    "PMT": _payment,
    "NPV": _present,
}
"""Every other function, by name; an operand is a value or a range."""
