"""What a file says, as named parts: two versions of it are compared part by part.

A part is a text (one fact: the value of a cell) or a tuple of texts (a sequence: the lines of a page).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

Parts = Mapping[str, str | tuple[str, ...]]
"""Name → fact or sequence, such as {"Fees!B4 value": "48", "sheet": ("Fees", "About")}."""


class NotReadable(Exception):
    """A file that is not what its name says, or that is more than will be read."""


def read_parts(kind: str, data: bytes) -> Parts:
    """The parts of a file's content. Raises NotReadable, or whatever a library raises over damage."""
    return reader(kind)(data)


def kind_of(name: str, data: bytes) -> str:
    """How a file is read: by its suffix, else as text if it is some, else "bytes"."""
    suffix = PurePosixPath(name).suffix.lower().lstrip(".")
    return _KINDS.get(suffix) or ("text" if _is_text(data) else "bytes")


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


_KINDS = {
    **dict.fromkeys(("xlsx", "xlsm", "xltx", "xltm"), "sheets"),
    **dict.fromkeys(("docx", "docm", "dotx", "dotm"), "document"),
    **dict.fromkeys(("pptx", "pptm", "potx", "ppsx"), "slides"),
    **dict.fromkeys(("mbox", "eml"), "mail"),
    **dict.fromkeys(
        ("txt", "csv", "tsv", "md", "html", "htm", "xml", "log", "py", "sh", "yaml", "yml"), "text"
    ),
    "pdf": "pdf",
    "ics": "calendar",
    "json": "json",
    "zip": "archive",
}


def reader(kind: str) -> Callable[[bytes], Parts]:
    """Who reads a kind. Libraries are imported only here: a trial whose task compares nothing pays for none."""
    if kind == "sheets":
        from .sheets import read
    elif kind == "document":
        from .document import read
    elif kind == "slides":
        from .slides import read
    elif kind == "pdf":
        from .pdf import read
    elif kind == "archive":
        from .package import read
    elif kind in ("mail", "calendar", "json"):
        from . import records

        read = {"mail": records.read_mail, "calendar": records.read_calendar, "json": records.read_json}[kind]
    elif kind == "text":
        from .text import read
    else:
        raise NotReadable(f"kind must be one of those of kind_of, got {kind!r}")
    return read
