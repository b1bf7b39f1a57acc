"""Files of a world: list, read text, write text, search every kind of file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from system.tools.calendar import event_lines
from system.tools.chat import message_lines
from system.tools.documents import document_lines
from system.tools.mail import mail_lines
from system.tools.paths import LARGEST_FILE, READERS, entries, existing_file, inside, reader_hint
from system.tools.pdfs import piece_lines
from system.tools.registration import tool
from system.tools.results import cut, joined, matches, one_line
from system.tools.sheets import workbook_lines
from system.tools.slides import slide_lines

LINES_SHOWN = 20
"""How many lines a search shows."""


def list_files(root: Path, path: str = ".") -> str:
    """List the files and folders of a folder."""
    folder = inside(root, path or ".")
    if not folder.is_dir():
        existing_file(root, path)
        raise ValueError(f"{path} is a file{reader_hint(folder)}")
    return cut("\n".join(entries(root, folder)), rest="list a folder below") or "no files"


def read_file(root: Path, path: str) -> str:
    """Read a text file (txt, csv, md, json, ics)."""
    file = existing_file(root, path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text{reader_hint(file)}") from None
    return cut(text.rstrip(), rest=f"the rest by run_code: print(open({path!r}).read()[start:end])")


def write_file(root: Path, path: str, content: str) -> str:
    """Write a text file; folders are made as needed."""
    file = inside(root, path)
    if file.is_dir():
        raise ValueError(f"{path or '.'} is a folder")
    if file.exists() and not file.is_file():  # a pipe would block for ever
        raise ValueError(f"{path} is no ordinary file")
    if READERS.get(file.suffix.lower(), "read_file") != "read_file":
        raise ValueError(f"path must be a text file, got {path}")
    data = content.encode("utf-8")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return f"wrote {len(data)} bytes to {file.relative_to(root.resolve()).as_posix()}"


def search_files(root: Path, query: str) -> str:
    """Find the lines that contain a text, in every file of any type."""
    if not query.strip():
        raise ValueError("query must not be empty")
    found: list[str] = []
    unread: list[str] = []
    for file, name in files_below(root):
        try:
            if file.stat().st_size > LARGEST_FILE:
                raise ValueError(f"{name} is too large")
            found += [f"{name}: {one_line(line)}" for line in _lines(file, name) if matches(query, line)]
        except Exception:  # noqa: BLE001  # one damaged file must not hide the others; it is named in the result
            unread.append(name)
    shown = found[:LINES_SHOWN]
    if len(found) > LINES_SHOWN:
        shown.append(f"[cut: {LINES_SHOWN} of {len(found)} lines shown; use a longer query]")
    if unread:
        shown.append(f"[not readable: {', '.join(unread)}]")
    return joined(shown, rest="use a longer query")


def files_below(root: Path) -> Iterator[tuple[Path, str]]:
    """Give every ordinary file of the world with its name there; links that lead out are left out."""
    resolved_root = root.resolve()
    below = [Path(folder) / name for folder, _, names in os.walk(resolved_root) for name in names]
    for file in sorted(below):
        if file.is_file() and file.resolve().is_relative_to(resolved_root):
            yield file, file.relative_to(resolved_root).as_posix()


def _lines(file: Path, name: str) -> list[str]:
    if file.suffix.lower() == ".json" and not name.startswith("chat/"):
        return _text_lines(file)
    return _LINES.get(file.suffix.lower(), _text_lines)(file)


def _text_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        return []


_LINES: dict[str, Callable[[Path], list[str]]] = {
    ".xlsx": workbook_lines,
    ".pdf": piece_lines,
    ".pptx": slide_lines,
    ".docx": document_lines,
    ".mbox": mail_lines,
    ".json": message_lines,
    ".ics": event_lines,
}


TOOLS = (
    tool(list_files, reads=True),
    tool(read_file, reads=True),
    tool(search_files, reads=True, limit_s=60.0),
    tool(write_file),
)
