"""What a tool takes: its arguments, their flat JSON schema, and the reading of what a model wrote for them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import Field, TypeAdapter

from system.tools.results import one_line

Rows: TypeAlias = list[list[str]]
"""Rows of cells; a model may write them as lists, as their JSON, or as lines of CSV."""

NO_ROWS: Rows = []
NO_STRINGS: list[str] = []

_STRING = TypeAdapter(Annotated[str, Field(coerce_numbers_to_str=True)])  # 77 is written as often as "77"
_INTEGER = TypeAdapter(int)
_BOOLEAN = TypeAdapter(bool)
_STRINGS = TypeAdapter(list[Annotated[str, Field(coerce_numbers_to_str=True)]])


class Kind(NamedTuple):
    """A type of argument: how errors name it, its schema, how it is read; the reader raises ValueError."""

    name: str
    schema: dict[str, Any]
    read: Callable[[Any], Any]


class Argument(NamedTuple):
    """One argument of a tool: `Argument("page", KINDS[int], "", False, 1)`."""

    name: str
    kind: Kind
    meaning: str
    needed: bool
    default: Any = None

    @property
    def schema(self) -> dict[str, Any]:
        """Its part of the schema of the tool."""
        default = {} if self.needed else {"default": self.default}
        meaning = {"description": self.meaning} if self.meaning else {}
        return default | meaning | {"title": self.name.replace("_", " ").title()} | self.kind.schema


def schema_of(tool: str, arguments: tuple[Argument, ...]) -> dict[str, Any]:
    """The JSON schema of what a tool takes: one flat object."""
    needed = [argument.name for argument in arguments if argument.needed]
    return {
        "type": "object",
        "properties": {argument.name: argument.schema for argument in arguments},
        **({"required": needed} if needed else {}),
        "title": f"{tool}Arguments",
    }


def read_arguments(tool: str, arguments: tuple[Argument, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Read what a model wrote; numbers for strings, and strings that spell the wanted type, are taken.

    Raises:
        ValueError: An argument that the tool does not have, one that is missing, or one of another type.
    """
    known = [argument.name for argument in arguments]
    unknown = [name for name in given if name not in known]
    if unknown:
        names = ", ".join(known) or "none"
        raise ValueError(f"{tool} has no argument {one_line(unknown[0])[:80]}; arguments: {names}")
    values = {}
    for argument in arguments:
        if argument.name in given:
            values[argument.name] = _read(argument, given[argument.name])
        elif argument.needed:
            raise ValueError(f"{tool} needs argument {argument.name}")
        else:
            values[argument.name] = argument.default
    return values


def _read(argument: Argument, value: Any) -> Any:
    try:
        return argument.kind.read(value)
    except ValueError:  # pydantic's ValidationError is one; its text is for programmers
        got = json.dumps(value, ensure_ascii=False, default=str)[:80]
        raise ValueError(f"{argument.name} must be {argument.kind.name}, got {got}") from None


def _read_strings(value: Any) -> list[str]:
    if isinstance(value, str):
        value = _from_json(value) if value.lstrip().startswith("[") else [value]
    return _STRINGS.validate_python(value)


def _read_rows(value: Any) -> Rows:
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            value = _from_json(value)
        else:
            delimiter = "\t" if "\t" in value else ","
            value = list(csv.reader(value.splitlines(), delimiter=delimiter))
    if not isinstance(value, list):
        raise ValueError("no list")
    rows = [row if isinstance(row, list) else [row] for row in value]
    return [[_cell(cell) for cell in row] for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, dict | list):
        raise ValueError("no cell")
    return str(value)


def _from_json(text: str) -> Any:
    return json.loads(text)  # its error is a ValueError


_PLAIN = {"type": "string"}
_LIST = {"type": "array", "items": _PLAIN}

KINDS: dict[Any, Kind] = {
    str: Kind("a string", _PLAIN, _STRING.validate_python),
    int: Kind("an integer", {"type": "integer"}, _INTEGER.validate_python),
    bool: Kind("true or false", {"type": "boolean"}, _BOOLEAN.validate_python),
    list[str]: Kind("a list of strings", _LIST, _read_strings),
    Rows: Kind("a list of rows, each a list of cells", {"type": "array", "items": _LIST}, _read_rows),
}
"""The usual types of an argument, by annotation."""


def kind_of(annotation: Any) -> Kind:
    """The kind of an annotation; one that is not in `KINDS` is described and read by pydantic."""
    try:
        return KINDS[annotation]
    except (KeyError, TypeError):  # TypeError: not hashable
        adapter = TypeAdapter(annotation)
        return Kind("as the schema says", adapter.json_schema(), adapter.validate_python)
