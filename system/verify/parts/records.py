"""Mailboxes, calendars and JSON: records with fields, matched by their own identifiers where they have some."""

from __future__ import annotations

import email
import email.policy
import hashlib
import json
import re
from collections import Counter
from email.message import Message
from typing import Any

from . import NotReadable, Parts
from .text import decoded

_MBOX_LINE = re.compile(rb"(?m)^From .*\r?\n")
_DEEPEST = 20


def read_mail(data: bytes) -> Parts:
    """Messages of an mbox, or of a file that is one message, by Message-ID: headers, bodies, attachments."""
    chunks = _MBOX_LINE.split(data)
    messages = [chunk for chunk in chunks[1:]] if len(chunks) > 1 else [data]
    parts: dict[str, str | tuple[str, ...]] = {"text before the first message": chunks[0].decode("latin-1")}
    if len(chunks) == 1:
        parts = {}
    seen: Counter[str] = Counter()
    order = []
    for number, chunk in enumerate(messages, start=1):
        message = email.message_from_bytes(chunk, policy=email.policy.compat32)
        name = " ".join(str(message.get("Message-ID", "")).split()) or f"number {number}"
        name = _once(name, seen)
        order.append(name)
        parts |= {f"mail {name} {place}": value for place, value in _message(message).items()}
    return {"mail": tuple(order), **parts}


def _message(message: Message) -> dict[str, str | tuple[str, ...]]:
    found: dict[str, str | tuple[str, ...]] = {}
    headers: Counter[str] = Counter()
    for header, value in message.items():
        found[_once(header, headers)] = " ".join(str(value).split())
    for number, part in enumerate((p for p in message.walk() if not p.is_multipart()), start=1):
        payload = part.get_payload(decode=True)
        content = payload if isinstance(payload, bytes) else str(part.get_payload()).encode(errors="replace")
        name = f"part {number} {part.get_content_type()} {part.get_filename() or ''}".strip()
        if part.get_content_maintype() == "text":
            found[f"{name} line"] = tuple(decoded(content)[0].splitlines())
        else:
            found[name] = f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}"
    return found


def read_calendar(data: bytes) -> Parts:
    """Components of a calendar by UID and recurrence, their properties as they stand."""
    text, _ = decoded(data)
    lines = re.sub(r"\r?\n[ \t]", "", text).splitlines()
    parts: dict[str, str | tuple[str, ...]] = {}
    stack: list[tuple[str, list[tuple[str, str]]]] = [("file", [])]
    names: Counter[str] = Counter()
    order = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.upper() == "BEGIN":
            stack.append((value.strip().upper(), []))
            if len(stack) > _DEEPEST:
                raise NotReadable("a calendar nested too deeply")
        elif key.upper() == "END" and len(stack) > 1:
            kind, properties = stack.pop()
            own = {name.split(";")[0].upper(): text for name, text in reversed(properties)}
            label = " ".join(filter(None, (kind, own.get("UID", ""), own.get("RECURRENCE-ID", ""))))
            label = _once(label, names)
            order.append(label)
            parts |= _properties(label, properties)
        elif line:
            stack[-1][1].append((key, value))
    for kind, properties in stack:
        parts |= _properties(f"unfinished {kind}" if kind != "file" else kind, properties)
    return {"component": tuple(order), **parts}


def _properties(label: str, properties: list[tuple[str, str]]) -> dict[str, str]:
    seen: Counter[str] = Counter()
    return {f"{label} {_once(key, seen)}": value for key, value in properties}


def read_json(data: bytes) -> Parts:
    """Values by their path; the members of a list as a sequence."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise NotReadable("no JSON") from None
    parts: dict[str, str | tuple[str, ...]] = {}
    _flatten(value, "$", parts, 0)
    return parts


def _flatten(value: Any, place: str, parts: dict[str, str | tuple[str, ...]], depth: int) -> None:
    if isinstance(value, list):
        parts[place] = tuple(json.dumps(member, ensure_ascii=False) for member in value)
    elif isinstance(value, dict) and depth < _DEEPEST:
        parts[f"{place} names"] = tuple(value)
        for name, member in value.items():
            _flatten(member, f"{place}.{name}", parts, depth + 1)
    else:
        parts[place] = json.dumps(value, ensure_ascii=False)


def _once(name: str, seen: Counter[str]) -> str:
    """A name that no other record has: the second of one name is "name #2"."""
    seen[name] += 1
    return name if seen[name] == 1 else f"{name} #{seen[name]}"
