"""Chat templates of four families, rendered as transformers renders them, and their text as one id a letter."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.tito import agreed_delta

HERE = Path(__file__).parent
Message = dict[str, Any]
FIRST_CONTROL = 0x110000


def compiled(text: str) -> Template:
    """The template of a policy."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda v, **o: json.dumps(v, **{"ensure_ascii": False, **o})
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: "01 Jan 2026"
    return environment.from_string(text)


def refuse(message: str) -> None:
    raise ValueError(message)


class Letters:
    """A tokenizer without a vocabulary: a control token is one id, any other character its code point."""

    def __init__(self, control: tuple[str, ...]) -> None:
        self.control = control
        self.pattern = re.compile("(" + "|".join(map(re.escape, control)) + ")")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.pattern.split(text):
            known = piece in self.control
            ids += [FIRST_CONTROL + self.control.index(piece)] if known else map(ord, piece)
        return ids

    def decode(self, ids: Any) -> str:
        return "".join(self.control[i - FIRST_CONTROL] if i >= FIRST_CONTROL else chr(i) for i in ids)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template, and what a policy that speaks by it samples at the end of a turn."""

    template: Template
    letters: Letters
    after_call: str
    """The stop token of a turn that calls a tool."""
    after_answer: str
    """The stop token of a turn that calls none."""
    separator: str
    forgets: bool
    """Whether the reasoning of earlier turns goes when a user speaks again."""

    def render(self, messages: list[Message], *, prompt: bool, tools: Any = None, **options: Any) -> str:
        return self.template.render(
            messages=messages,
            tools=tools,
            add_generation_prompt=prompt,
            bos_token="<|begin_of_text|>",
            **options,
        )

    def ids(self, messages: list[Message], *, prompt: bool) -> list[int]:
        return self.letters.encode(self.render(messages, prompt=prompt))

    def stop(self, call: bool) -> int:
        (token,) = self.letters.encode(self.after_call if call else self.after_answer)
        return token

    def delta(self, new: list[Message], last: int) -> tuple[int, ...] | None:
        """What the short conversations agree on."""
        stubs = CALL_STUBS if new[0]["role"] == "tool" else ANSWER_STUBS
        return agreed_delta(
            [(self.ids(stub, prompt=False), self.ids([*stub, *new], prompt=True)) for stub in stubs],
            stop_ids={self.stop(True), self.stop(False)},
            last_token=last,
            separator=self.letters.encode(self.separator),
        )

    def said(self, past: list[Message], turn: Message) -> list[int]:
        """What a policy samples that says exactly `turn`, stop token included."""
        before, whole = self.render(past, prompt=True), self.render([*past, turn], prompt=False)
        assert whole.startswith(before)
        text = whole[len(before) :].removesuffix(self.separator)
        stop = self.stop("tool_calls" in turn)
        return [*self.letters.encode(text.removesuffix(self.letters.decode([stop]))), stop]


CHATML = Letters(("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
GLM = Letters(
    ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
)
LLAMA = Letters(("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"))


def of_chatml(text: str) -> Family:
    return Family(
        template=compiled(text),
        letters=CHATML,
        after_call="<|im_end|>",
        after_answer="<|im_end|>",
        separator="\n",
        forgets=True,
    )


def of_glm(text: str) -> Family:
    return Family(
        template=compiled(text),
        letters=GLM,
        after_call="<|observation|>",
        after_answer="<|user|>",
        separator="",
        forgets=True,
    )


def of_llama(text: str) -> Family:
    return Family(
        template=compiled(text),
        letters=LLAMA,
        after_call="<|eot_id|>",
        after_answer="<|eot_id|>",
        separator="",
        forgets=False,
    )


def text_of(name: str) -> str:
    return (HERE / f"{name}.jinja").read_text(encoding="utf-8")


FAMILIES = {
    "qwen3": of_chatml(text_of("qwen3")),
    "qwen3_5": of_chatml(text_of("qwen3_5")),
    "glm4_6": of_glm(text_of("glm4_6")),
    "llama3_format": of_llama(text_of("llama3_format")),
}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "name": "read_cell", "tool_call_id": "call00001", "content": text}


def answer(text: str, *, reasoning: str) -> Message:
    return {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})


def call(text: str, *, reasoning: str, cell: str) -> Message:
    function = {"name": "read_cell", "arguments": {"cell": cell}}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    return {**answer(text, reasoning=reasoning), "tool_calls": calls}


_CALL, _ANSWER = call("c", reasoning="r", cell="A1"), answer("a", reasoning="r")
CALL_STUBS = [[user("u"), _CALL], [system("s"), user("u"), _CALL, tool("t"), _CALL]]
ANSWER_STUBS = [[user("u"), _ANSWER], [system("s"), user("u"), _CALL, tool("t"), _ANSWER]]
"""Conversations that reason, short and less short: with and without a system prompt and an earlier step."""
