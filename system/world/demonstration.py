"""Demonstrations for imitation, in memory: the expert plays against answers computed from the record.

Each answer is the text that the tool of that name gives in the written world, byte for byte (a test holds
it), so thousands of demonstrations a second cost no file.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from ..harness.chat import parse_completion
from .assignment import Assignment, draw_assignment
from .company import Company, Mail, Source, make_company, row_number, slide_number
from .expert import BadCall, Expert, Slip, ToolCall, careful
from .names import Split

Message = dict[str, str]

NO_MATCH = "no match"
_DEMONSTRATIONS_PER_COMPANY = 4


def demonstration(company: Company, task: Assignment, slip: Slip) -> list[Message]:
    """The conversation in which the expert works on one task: user, assistant, tool, ..., assistant.

    Args:
        company: the world's record.
        task: anything with an `instruction`.
        slip: `expert.careful`, or a function such as `carelessness` gives.
    """
    office = Replies(company)
    steps = Expert(task.instruction, slip=slip).steps()
    messages = [{"role": "user", "content": task.instruction}]
    try:
        step = next(steps)
        while True:
            text = step_text(step)
            messages.append({"role": "assistant", "content": text})
            reply = malformed_reply(text) if isinstance(step, BadCall) else office.reply(step)
            messages.append({"role": "tool", "content": reply})
            step = steps.send(reply)
    except StopIteration as stop:
        messages.append({"role": "assistant", "content": stop.value})
    return messages


def draw_demonstration(
    seed: int, *, split: Split, level_shares: Mapping[int, float], slip_rates: Mapping[str, float]
) -> tuple[Company, Assignment, list[Message]]:
    """A company, one task in it and a demonstration of it, from one seed; four seeds share a company.

    Args:
        seed: not negative; the company is `make_company(seed // 4, split=split)`.
        level_shares: level → share, such as `{1: 0.7, 2: 0.3}`; they need not add up to one.
        slip_rates: kind of mistake → probability at each occasion; kinds left out never happen.
    """
    rng = random.Random(f"demonstration:{split}:{seed}")
    company = _company(seed // _DEMONSTRATIONS_PER_COMPANY, split)
    level = rng.choices(list(level_shares), list(level_shares.values()))[0]
    task = draw_assignment(company, level=level, index=rng.randrange(1 << 30))
    return company, task, demonstration(company, task, carelessness(rng, slip_rates))


@lru_cache(maxsize=16)
def _company(seed: int, split: Split) -> Company:
    return make_company(seed, split=split)


def carelessness(rng: random.Random, rates: Mapping[str, float]) -> Slip:
    """A slip function that makes each kind of mistake with its own probability."""
    if not any(rates.values()):
        return careful
    return lambda kind: rng.random() < rates.get(kind, 0.0)


def step_text(step: ToolCall | BadCall) -> str:
    """The assistant's text for a step of the expert; a bad call lacks its last brace."""
    call = step.call if isinstance(step, BadCall) else step
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body[:-1] if isinstance(step, BadCall) else body}\n</tool_call>"


def malformed_reply(text: str) -> str:
    """What the harness answers to a completion that it cannot read."""
    return f"error: {parse_completion(text).error}"


class Replies:
    """What the tools answer to the expert's calls in one company's world, edits remembered.

    Knows only the calls that the expert makes: look-ups by a whole label, `print(a+b)`, one cell, one file.
    """

    def __init__(self, company: Company) -> None:
        self.company = company
        self.cells: dict[tuple[str, str], str] = {}
        self.tools: dict[str, Callable[..., str]] = {
            "read_sheet": self.read_sheet,
            "read_pdf": self.read_pdf,
            "read_slides": self.read_slides,
            "read_document": self.read_document,
            "search_files": self.search_files,
            "search_mail": self.search_mail,
            "read_mail": self.read_mail,
            "read_channel": self.read_channel,
            "edit_cell": self.edit_cell,
            "write_file": self.write_file,
            "run_code": self.run_code,
        }

    def reply(self, call: ToolCall) -> str:
        """The result text of one call."""
        return self.tools[call.name](**call.arguments)

    def read_sheet(self, path: str, find: str) -> str:
        return self._row(self.company.source(path), find) or NO_MATCH

    def read_pdf(self, path: str, find: str) -> str:
        return _joined(_written(self.company.source(path), find, _FORMS["pdf"]))

    def read_slides(self, path: str, find: str) -> str:
        return _joined(_written(self.company.source(path), find, _FORMS["pptx"]))

    def read_document(self, path: str, find: str) -> str:
        return _joined(_written(self.company.source(path), find, _FORMS["docx"]))

    def search_files(self, query: str) -> str:
        sources = sorted(self.company.sources, key=lambda source: _path(source).split("/"))
        return _joined([f"{_path(s)}: {line}" for s in sources for line in self._searched(s, query)])

    def search_mail(self, query: str) -> str:
        mails = enumerate(self.company.mails, start=1)
        return _joined([_listed(i, mail) for i, mail in mails if mail.subject == query])

    def read_mail(self, id: str) -> str:
        mail = self.company.mails[int(id[1:]) - 1]
        return f"From: {mail.sender}\nSubject: {mail.subject}\n\n{mail.body}"

    def read_channel(self, channel: str, find: str) -> str:
        return _joined(_said(self.company.chats[channel], find))

    def edit_cell(self, path: str, cell: str, value: str) -> str:
        old = self._value(self.company.source(path), int(cell[1:]) - 2)
        self.cells[path, cell] = value
        return f"{cell}: {old} -> {value}"

    def write_file(self, path: str, content: str) -> str:
        return f"wrote {len(content.encode())} bytes to {path}"

    def run_code(self, code: str) -> str:
        return str(sum(int(number) for number in re.findall(r"\d+", code)))

    def _value(self, source: Source, index: int) -> str:
        return self.cells.get((source.name, f"B{row_number(index)}"), str(source.facts[index].value))

    def _row(self, source: Source, label: str) -> str:
        for i, fact in enumerate(source.facts):
            if fact.label == label:
                return f"A{row_number(i)}: {label} | B{row_number(i)}: {self._value(source, i)}"
        return ""

    def _searched(self, source: Source, label: str) -> list[str]:
        if source.kind == "xlsx":
            return [line for line in (self._row(source, label),) if line]
        if source.kind == "chat":
            return _said(self.company.chats[source.name[1:]], label)
        if source.kind == "mail":
            mails = [(i, m) for i, m in enumerate(self.company.mails, start=1) if m.subject == label]
            return [line for i, m in mails for line in (_listed(i, m), m.body.split("\n")[1])]
        return _written(source, label, _FORMS[source.kind])


_FORMS = {
    "pdf": "{label} {value}",
    "pptx": "slide {slide}: {label}: {value}",
    "docx": "{label}: {value}",
    "txt": "{label}: {value}",
}


def _path(source: Source) -> str:
    return {"mail": "mail.mbox", "chat": f"chat/{source.name[1:]}.json"}.get(source.kind, source.name)


def _listed(number: int, mail: Mail) -> str:
    return f"m{number} | {mail.sender} | {mail.subject}"


def _said(chat: tuple[tuple[str, str], ...], label: str) -> list[str]:
    return [f"{user}: {text}" for user, text in chat if text.startswith(f"{label}:")]


def _written(source: Source, label: str, form: str) -> list[str]:
    return [
        form.format(label=label, value=fact.value, slide=slide_number(i))
        for i, fact in enumerate(source.facts)
        if fact.label == label
    ]


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) or NO_MATCH
