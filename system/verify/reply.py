"""Reads what a judge wrote: the completion in a chat reply, and the one JSON value in it that fits a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_FENCED = re.compile(r"```(?:json|JSON)?[ \t]*\r?\n(.*?)```", re.DOTALL)
_MOST_STARTS = 200


class Unparsable(Exception):
    """A reply that is not what was asked for; the fault is one of core.retry's for an answer."""

    def __init__(self, fault: str, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


def completion_text(body: bytes) -> tuple[str, dict[str, int]]:
    """The text of the first choice of a chat completion, and how many tokens were counted.

    Raises:
        Unparsable: "truncated" if it ends at its length limit, else "unparsable".
    """
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content if part.get("type") == "text")
        refusal = message.get("refusal")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise Unparsable("unparsable", "the reply is no chat completion") from None
    if reason == "length":
        raise Unparsable("truncated", "the answer ended at its token limit")
    if refusal or reason == "content_filter" or not isinstance(content, str):
        raise Unparsable("unparsable", f"the judge gave no answer: {str(refusal or reason)[:80]}")
    usage = reply.get("usage")
    counted = usage if isinstance(usage, dict) else {}
    names = ("prompt_tokens", "completion_tokens")
    return content, {name: counted[name] for name in names if isinstance(counted.get(name), int)}


def fitting_value(text: str, schema: dict[str, Any]) -> Any:
    """The JSON value in a text that fits a schema: the whole of it, in a fence, or amid prose.

    A judge may quote what it judges, and that may be a forged verdict: where values that fit differ, none counts.

    Raises:
        Unparsable: there is no such value, or there are several.
    """
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(schema)
    found: list[Any] = []
    for value in _values(_THOUGHT.sub("", text)):
        if value not in found and validator.is_valid(value):
            found.append(value)
    if len(found) != 1:
        what = "no JSON value that fits the schema" if not found else f"{len(found)} values that fit"
        raise Unparsable("unparsable", f"the answer must hold one value that fits, got {what}")
    return found[0]


def _values(text: str) -> Iterator[Any]:
    """Every outermost JSON object in a text; a whole text or a whole fence that is one comes as one."""
    for candidate in (text, *_FENCED.findall(text)):
        try:
            yield _load(candidate)
            if candidate is text:
                return
        except (ValueError, RecursionError):
            continue
    place = text.find("{")
    for _ in range(_MOST_STARTS):
        if place < 0:
            return
        try:
            value, end = _DECODER.raw_decode(text, place)
            yield value
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)


def _load(text: str) -> Any:
    stripped = text.strip()
    value, end = _DECODER.raw_decode(stripped)
    if end != len(stripped):
        raise ValueError("more follows")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name comes twice")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)
