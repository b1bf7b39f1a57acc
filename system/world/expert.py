"""The scripted expert: plays a task knowing only its instruction and what the tools answer.

It shares nothing with the verifiers, so that the one tests the other. With a `slip` function it is careless,
and makes the mistakes by which an imitator starts out worse than it could be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

SLIPS: tuple[str, ...] = ("skip_item", "guess_code", "wrong_entity", "drop_digit", "repeat", "bad_call")
"""The mistakes of a careless expert: leaves an item out of the work; answers a sum with the number read last
instead of adding; asks for another item's label; copies a value without its last digit; repeats a call;
writes broken JSON."""

Slip = Callable[[str], bool]


class ToolCall(NamedTuple):
    """A well-formed call: `ToolCall("read_sheet", {"path": "fees.xlsx", "find": "Norvik fee"})`."""

    name: str
    arguments: dict[str, Any]


class BadCall(NamedTuple):
    """A call that was meant but comes out as broken JSON: `BadCall(ToolCall("list_mail", {}))`."""

    call: ToolCall


class Item(NamedTuple):
    """One thing to look up: `Item("Norvik fee", "mail", "fees.xlsx")`; target is the sheet to be set."""

    label: str
    source: str
    target: str


Steps = Generator[ToolCall | BadCall, str, str]

_ITEM = re.compile(r"([A-Z][a-z]+ [a-z]+) \(([^()]+)\)")
_EDIT = re.compile(r"Set ([A-Z][a-z]+ [a-z]+) in (\S+) to the value in (\S+)\.(?= )")
_READER = {"pdf": "read_pdf", "pptx": "read_slides", "docx": "read_document"}
_CELL = re.compile(r" \| ([A-Z]+\d+):")
_VALUE = re.compile(r"(?: \| [A-Z]+\d+)?:? +(\d+)")


def careful(kind: str) -> bool:
    """The slip function of an expert that makes no mistakes."""
    return False


class Expert:
    """One attempt at one task.

    >>> steps = Expert("Find Norvik fee (fees.xlsx). Answer with the number.").steps()
    >>> next(steps)
    ToolCall(name='read_sheet', arguments={'path': 'fees.xlsx', 'find': 'Norvik fee'})
    >>> try: steps.send("A2: Norvik fee | B2: 4821")
    ... except StopIteration as stop: stop.value
    '4821'

    Args:
        instruction: the text of the task.
        slip: called with a kind of `SLIPS` at each occasion; True makes that mistake.

    Raises:
        ValueError: the instruction is of no known family.
    """

    def __init__(self, instruction: str, *, slip: Slip = careful) -> None:
        self.instruction = instruction
        self.slip = slip
        self.family, self.items = read_instruction(instruction)

    def steps(self) -> Steps:
        """Yields calls, is sent the result texts, returns the final answer (as StopIteration.value)."""
        chosen = self._chosen_items()
        if self.family == "edit":
            for item in chosen:
                yield from self._edit(item)
            return "done"
        found: list[tuple[str, str]] = []
        for item in chosen:
            value = yield from self._look_up(item)
            found.append((item.label, self._copied(value)))
        if self.family == "find":
            return found[0][1]
        if self.family == "sum":
            return (yield from self._add([value for _, value in found]))
        content = "".join(f"{label},{value}\n" for label, value in found)
        yield from self._call("write_file", path="out.csv", content=content)
        return "done"

    def _chosen_items(self) -> list[Item]:
        chosen = [item for item in self.items if len(self.items) == 1 or not self.slip("skip_item")]
        return chosen or self.items[:1]

    def _add(self, values: list[str]) -> Steps:
        if self.slip("guess_code"):
            return values[-1]
        text = yield from self._call("run_code", code=f"print({'+'.join(values)})")
        return text.strip()

    def _edit(self, item: Item) -> Steps:
        value = yield from self._look_up(item)
        row = yield from self._call("read_sheet", path=item.target, find=item.label)
        cell = _after(item.label, _CELL, row)
        if cell and value:
            yield from self._call("edit_cell", path=item.target, cell=cell, value=self._copied(value))
        return "done"

    def _look_up(self, item: Item) -> Steps:
        others = [other.label for other in self.items if other.label != item.label]
        if others and self.slip("wrong_entity"):
            value = yield from self._read(others[-1], item.source)
            if value:
                return value
        return (yield from self._read(item.label, item.source))

    def _read(self, label: str, source: str) -> Steps:
        """The value written for the label in the source; the empty text if there is none."""
        if source == "mail":
            text = yield from self._call("search_mail", query=label)
            ids = [line.split(" | ", 1)[0] for line in text.splitlines() if line.endswith(f" | {label}")]
            text = (yield from self._call("read_mail", id=ids[0])) if ids else ""
        elif source.startswith("#"):
            text = yield from self._call("read_channel", channel=source[1:], find=label)
        elif source.endswith(".txt"):
            text = yield from self._call("search_files", query=label)
            text = "\n".join(line for line in text.splitlines() if line.startswith(f"{source}: "))
        elif source.endswith(".xlsx"):
            text = yield from self._call("read_sheet", path=source, find=label)
        else:
            text = yield from self._call(_READER[source.rsplit(".", 1)[-1]], path=source, find=label)
        return _after(label, _VALUE, text)

    def _call(self, name: str, **arguments: str) -> Steps:
        call = ToolCall(name, arguments)
        if self.slip("bad_call"):
            yield BadCall(call)
        text = yield call
        if self.slip("repeat"):
            text = yield call
        return text

    def _copied(self, value: str) -> str:
        return value[:-1] if len(value) > 1 and self.slip("drop_digit") else value


def _after(label: str, pattern: re.Pattern[str], text: str) -> str:
    """What the pattern's group takes directly after an occurrence of the label; else the empty text."""
    place = text.find(label)
    while place >= 0:
        found = pattern.match(text, place + len(label))
        if found is not None:
            return found.group(1)
        place = text.find(label, place + 1)
    return ""


def read_instruction(instruction: str) -> tuple[str, list[Item]]:
    """The family and the items of an instruction.

    Raises:
        ValueError: the instruction is of no known family.
    """
    verb = instruction.split(" ", 1)[0]
    family = {"Find": "find", "Add": "sum", "Set": "edit", "Write": "write"}.get(verb)
    if family == "edit":
        items = [Item(label, source, target) for label, target, source in _EDIT.findall(instruction)]
    else:
        items = [Item(label, source, "") for label, source in _ITEM.findall(instruction)]
    if family is None or not items:
        raise ValueError(
            f"instruction must begin with Find, Add, Set or Write, with an item, got {instruction!r}"
        )
    return family, items
