"""Text and token ids of a policy folder: the chat template rendered to ids, completions decoded and parsed."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from core.tito import agreed_delta

Message = dict[str, Any]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
END_OF_REASONING = "</think>"

DEEPEST = 64
"""How deep the arguments of a call may be nested: what carries and keeps them breaks off somewhere beyond."""

# Contents stand in the rendered template as private-use characters, and are encoded apart from it (see `render`).
FIRST_SLOT = 0xE000

# The short conversations that speak for every other one (see `Chat.observation`). They reason, because a template that
# drops reasoning later on can be caught only where there is some.
REASONED: Message = {"role": "assistant", "content": "-", "reasoning_content": "-"}
USER: Message = {"role": "user", "content": "-"}
STUBS: list[list[Message]] = [
    [USER, REASONED],
    [{"role": "system", "content": "-"}, USER, REASONED, {"role": "tool", "content": "-"}, REASONED],
]


class ToolCall(NamedTuple):
    """A parsed tool call: ToolCall("read_sheet", {"path": "fees.xlsx"})."""

    name: str
    arguments: dict[str, Any]


class Parsed(NamedTuple):
    """What a completion asks for: a call, a final answer, or an error to be answered. Exactly one is not None."""

    call: ToolCall | None
    answer: str | None
    error: str | None


class Chat:
    """The tokenizer and chat template of a Hugging Face policy folder, without transformers.

    >>> chat = Chat(Path("policies/clerk"))
    >>> ids = chat.render([{"role": "user", "content": "Find ..."}], tools, add_generation_prompt=True)
    """

    def __init__(self, folder: Path) -> None:
        for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
            if not (folder / name).is_file():
                raise ValueError(f"policy folder must hold {name}, got {folder} without it")
        text = (folder / "tokenizer.json").read_text()
        self.tokenizer = Tokenizer.from_str(text)
        self.vocabulary = _vocabulary(folder, self.tokenizer)
        plain = json.loads(text)
        plain["added_tokens"], plain["post_processor"] = [], None
        self.plain_tokenizer = Tokenizer.from_str(json.dumps(plain))
        environment: Environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **o: json.dumps(value, **{"ensure_ascii": False, **o})
        environment.globals["raise_exception"] = _refuse
        self.template = environment.from_string((folder / "chat_template.jinja").read_text())
        eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        self.stop_ids: list[int] = list(eos) if isinstance(eos, list) else [eos]
        self.separator = self._after_stop()
        self.proved: dict[tuple[str, int], tuple[int, ...] | None] = {}

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> list[int]:
        """Token ids of a conversation; control tokens spelt inside a message's content stay plain text.

        The template sees a placeholder for each content, and the contents are encoded by a tokenizer that has no
        added tokens. A template that rewrites content (strips it, say) therefore does not get to.
        """
        laid_out = self._laid_out([], messages, tools, add_generation_prompt=add_generation_prompt)
        return self._filled(laid_out, messages)

    def observation(self, messages: list[Message], last_token: int) -> tuple[int, ...] | None:
        """Ids that `messages` and the next prompt add to a row ending with `last_token`; None where that is not proved.

        The proof is about the template alone, so it is made once for messages of one shape: the two short
        conversations of `STUBS` are rendered without and with them, contents as placeholders. Each call then encodes
        the contents, and nothing that was there before.
        """
        shape = json.dumps([{**message, "content": None} for message in messages])
        if (shape, last_token) not in self.proved:
            renderings = [
                (
                    self._laid_out(stub, [], None, add_generation_prompt=False),
                    self._laid_out(stub, messages, None, add_generation_prompt=True),
                )
                for stub in STUBS
            ]
            self.proved[shape, last_token] = agreed_delta(
                renderings, stop_ids=self.stop_ids, last_token=last_token, separator=self.separator
            )
        delta = self.proved[shape, last_token]
        return None if delta is None else tuple(self._filled(delta, messages))

    def _laid_out(
        self,
        stub: list[Message],
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Ids of the rendered stub and messages, where -1 - i stands for the content of message i."""
        slots = [{**message, "content": chr(FIRST_SLOT + i)} for i, message in enumerate(messages)]
        text = self.template.render(
            messages=[*stub, *slots], tools=tools, add_generation_prompt=add_generation_prompt
        )
        ids: list[int] = []
        start = 0
        for place, char in enumerate(text):
            if 0 <= ord(char) - FIRST_SLOT < len(messages):
                ids += self.tokenizer.encode(text[start:place], add_special_tokens=False).ids
                ids.append(FIRST_SLOT - ord(char) - 1)
                start = place + 1
        return ids + self.tokenizer.encode(text[start:], add_special_tokens=False).ids

    def _filled(self, laid_out: Sequence[int], messages: list[Message]) -> list[int]:
        ids: list[int] = []
        for i in laid_out:
            ids += [i] if i >= 0 else self._content(messages[-1 - i])
        return ids

    def _content(self, message: Message) -> list[int]:
        own = self.tokenizer if message["role"] == "assistant" else self.plain_tokenizer
        return own.encode(message["content"], add_special_tokens=False).ids

    def _after_stop(self) -> list[int]:
        """What the template writes between the stop token of an assistant's turn and the next turn."""
        laid_out = self._laid_out([], [USER, REASONED], None, add_generation_prompt=False)
        tail = laid_out[laid_out.index(-2) + 1 :]
        stops = [place for place, i in enumerate(tail) if i in self.stop_ids]
        return tail[stops[0] + 1 :] if stops else []

    def completion(self, text: str) -> list[int]:
        """Ids of a completion that nobody sampled: of a demonstration, closed by the stop token."""
        return [*self.tokenizer.encode(text, add_special_tokens=False).ids, self.stop_ids[0]]

    def decode(self, ids: list[int]) -> str:
        """Text of sampled ids, control tokens spelt out, a closing stop token left away."""
        kept = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return self.tokenizer.decode(kept, skip_special_tokens=False)


def _vocabulary(folder: Path, tokenizer: Tokenizer) -> int:
    """Ids that a policy can sample are below this: a model may have more than its tokenizer, which are no text."""
    config = folder / "config.json"
    said = json.loads(config.read_text()) if config.is_file() else {}
    sizes = [part.get("vocab_size", 0) for part in (said, said.get("text_config", {}))]
    return max(*sizes, *(1 + i for i in tokenizer.get_vocab(with_added_tokens=True).values()))


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat templates want it."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _refuse(message: str) -> None:
    raise ValueError(f"chat template refused the conversation: {message}")


def parse_completion(text: str) -> Parsed:
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; text without a tag is the final answer.

    Reasoning up to `</think>` is neither. The call is one JSON object, read to its own end: a tag inside one of its
    strings is a part of the string. What is not exactly that is an error, and its line tells how to put it right.
    Models that were taught `<function=name><parameter=key>value</parameter></function>` in place of the object are
    read by the same rules; each value is a text then, which the tools take for what it spells.
    """
    said = _after_reasoning(text)
    before, opened, body = said.partition(OPEN)
    if not opened and CLOSE not in said:
        return Parsed(None, said.strip(), None)
    try:
        if CLOSE in before:
            raise _Unreadable("a tool call must be opened by <tool_call> before it is closed")
        call, rest = _one_object(body.lstrip())
        if OPEN in rest or CLOSE in rest:
            raise _Unreadable("one tool call a turn, opened and closed once")
        return Parsed(_tool_call(call), None, None)
    except _Unreadable as error:
        return Parsed(None, None, str(error))


class _Unreadable(ValueError):
    """Why a completion is no tool call, in one line for the policy."""


def _after_reasoning(text: str) -> str:
    """What follows the reasoning; a text that begins with a call has none."""
    if text.lstrip().startswith(OPEN) or END_OF_REASONING not in text:
        return text
    return text.split(END_OF_REASONING, 1)[1]


def _one_object(body: str) -> tuple[Any, str]:
    """The JSON value that a body begins with, and what follows its closing tag."""
    try:
        call, end = _one_function(body) if body.startswith("<function=") else _STRICT.raw_decode(body)
        json.dumps(call, ensure_ascii=False).encode()  # a lone surrogate could not be sent to a tool
    except _Unreadable:
        raise
    except (ValueError, RecursionError):
        fault = (
            "the tool call is not JSON" if CLOSE in body else "the tool call is not closed by </tool_call>"
        )
        raise _Unreadable(fault) from None
    after, closed, rest = body[end:].partition(CLOSE)
    if not closed:
        raise _Unreadable("the tool call is not closed by </tool_call>")
    if OPEN in after:
        raise _Unreadable("one tool call a turn, opened and closed once")
    if after.strip():
        raise _Unreadable("the tool call is not JSON")
    return call, rest


def _one_function(body: str) -> tuple[dict[str, Any], int]:
    """The call that a body begins with in tags, and where it ends; a value ends where another tag may follow."""
    named = _FUNCTION.match(body)
    if named is None:
        raise _Unreadable("a function must have a name, as in <function=name>")
    found, at = [], named.end()
    while given := _PARAMETER.match(body, at):
        found.append((given.group(1), given.group(2)))
        at = given.end()
    if not body.startswith("</function>", at):
        if CLOSE not in body:
            raise _Unreadable("the tool call is not closed by </tool_call>")
        raise _Unreadable("a function must hold <parameter=name>value</parameter> only, and be closed")
    return {"name": named.group(1), "arguments": _named_once(found)}, at + len("</function>")


_FUNCTION = re.compile(r"<function=([^<>\s]+)>\s*")
_PARAMETER = re.compile(
    r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL
)


def _tool_call(call: Any) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise _Unreadable('a tool call needs "name"')
    if not isinstance(call.get("arguments", {}), dict):
        raise _Unreadable('"arguments" must be an object')
    for key in call:
        if key not in ("name", "arguments"):
            raise _Unreadable(f'a tool call has only "name" and "arguments", got {json.dumps(key)[:80]}')
    if _depth(call.get("arguments")) > DEEPEST:
        raise _Unreadable(f'"arguments" must be nested {DEEPEST} deep at most')
    return ToolCall(call["name"], call.get("arguments", {}))


def _depth(value: Any) -> int:
    """How deep lists and objects lie in one another: 0 for a number or a text."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Unreadable(f"the tool call names {json.dumps(key)[:80]} twice")
        found[key] = value
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"a number must be finite, got {name}")


_STRICT = json.JSONDecoder(object_pairs_hook=_named_once, parse_constant=_no_number)


def call_text(call: ToolCall) -> str:
    """The text by which an assistant turn makes a call; `parse_completion` reads it back."""
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
