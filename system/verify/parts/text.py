"""Plain text: its lines, and how they are encoded and ended."""

from __future__ import annotations

import re

from . import Parts

_END = re.compile(r"\r\n|\r|\n")


def read(data: bytes) -> Parts:
    """Lines as a sequence; encoding and line ends as facts, so that a change of those alone is seen."""
    text, encoding = decoded(data)
    ends = sorted(set(_END.findall(text)))
    lines = _END.split(text)
    last = lines.pop()
    return {
        "line": (*lines, last) if last else tuple(lines),
        "encoding": encoding,
        "line ends": ", ".join({"\r\n": "CR LF", "\r": "CR", "\n": "LF"}[end] for end in ends),
        "end of the last line": "none" if last else "as the others",
    }


def decoded(data: bytes) -> tuple[str, str]:
    """The text of some bytes, and the encoding that gave it."""
    if data[:3] == b"\xef\xbb\xbf":
        return data[3:].decode(errors="backslashreplace"), "UTF-8 with a mark"
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="backslashreplace"), "UTF-16"
    try:
        return data.decode(), "UTF-8"
    except UnicodeDecodeError:
        return data.decode("latin-1"), "none known, shown as Latin-1"
