"""Files of the set `full`: text read by lines, written, corrected; files moved, copied, deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from system.tools.paths import READERS, existing_file, inside, reader_hint
from system.tools.registration import tool
from system.tools.saving import name_of, new_file, save_bytes

SPILL = ".spill"
"""Where long results of tools are kept; no part of the world."""

_MOST_ENTRIES = 500


def list_files(
    root: Path,
    path: Annotated[str, "a folder; . is the whole world"] = ".",
    depth: Annotated[int, "levels of folders to show"] = 1,
) -> str:
    """List the files below a folder with their sizes in bytes."""
    folder = inside(root, path or ".")
    if depth < 1:
        raise ValueError(f"depth must be positive, got {depth}")
    if not folder.is_dir():
        file = existing_file(root, path)
        return f"{name_of(root, file)} {file.stat().st_size}"
    lines = []
    for line in _listed(root.resolve(), folder, depth):
        if len(lines) == _MOST_ENTRIES:
            lines.append(f"[only the first {_MOST_ENTRIES} shown; list a folder below]")
            break
        lines.append(line)
    return "\n".join(lines) or "no files"


def read_file(
    root: Path,
    path: str,
    start: Annotated[int, "number of the first line, from 1"] = 1,
    lines: Annotated[int, "how many lines; all if 0"] = 0,
) -> str:
    """Read a text file (txt, csv, md, json, ics), whole or some lines of it."""
    if start < 1 or lines < 0:
        raise ValueError(f"start must be positive and lines not negative, got {start} and {lines}")
    file = existing_file(root, path)
    if READERS.get(file.suffix.lower(), "read_file") not in ("read_file", "list_mail"):
        raise ValueError(f"{path} is not a text file{reader_hint(file)}")
    text = text_of_file(file).splitlines()
    if start > max(1, len(text)):
        raise ValueError(f"start must be from 1 to {len(text)}, got {start}")
    shown = text[start - 1 : start - 1 + lines if lines else None]
    end = start - 1 + len(shown)
    if len(shown) == len(text):
        return "\n".join(shown) or f"{path} is empty"
    rest = f"; go on with start={end + 1}" if end < len(text) else ""
    return "\n".join([*shown, f"[lines {start} to {end} of {len(text)}{rest}]"])


def write_file(
    root: Path, path: str, content: str, append: Annotated[bool, "add to the end of the file"] = False
) -> str:
    """Write a text file; folders are made as needed."""
    file = new_file(root, path, replace=True)
    if READERS.get(file.suffix.lower(), "read_file") != "read_file":
        raise ValueError(f"path must be a text file, got {path}{_maker_hint(file)}")
    before = file.read_bytes() if append and file.exists() else b""
    data = content.encode("utf-8")
    save_bytes(file, before + data)
    done = "added" if append else "wrote"
    return f"{done} {len(data)} bytes to {name_of(root, file)}" + (f", now {len(before + data)}" * append)


def edit_file(
    root: Path,
    path: str,
    old: Annotated[str, "text to replace, its line breaks too"],
    new: str,
    every: Annotated[bool, "replace all; else old must occur once"] = False,
) -> str:
    """Replace a text in a text file."""
    file = existing_file(root, path)
    text = file.read_bytes().decode("utf-8")  # line ends as they are
    if not old:
        raise ValueError("old must not be empty")
    count = text.count(old)
    if count == 0:
        raise ValueError(f"old must be a text of {path}, got {old[:100]!r}")
    if count > 1 and not every:
        raise ValueError(f"old must occur once, got {count} times; give more of the text, or set every")
    save_bytes(file, text.replace(old, new).encode("utf-8"))
    return f"replaced {count} time{'s' * (count > 1)} in {path}"


def copy_file(root: Path, path: str, to: Annotated[str, "the new path"]) -> str:
    """Copy a file to a new path."""
    source = existing_file(root, path)
    target = new_file(root, to)
    _same_kind(source, target, to)
    save_bytes(target, source.read_bytes())
    return f"copied {name_of(root, source)} to {name_of(root, target)}, {target.stat().st_size} bytes"


def move_file(root: Path, path: str, to: Annotated[str, "the new path"]) -> str:
    """Move or rename a file."""
    source = existing_file(root, path)
    target = new_file(root, to)
    _same_kind(source, target, to)
    shutil.move(source, target)
    return f"moved {name_of(root, source)} to {name_of(root, target)}"


def delete_file(root: Path, path: str) -> str:
    """Delete a file, or a folder that is empty."""
    place = inside(root, path)
    if place == root.resolve():
        raise ValueError("path must not be the whole world")
    if place.is_dir():
        if any(place.iterdir()):
            raise ValueError(f"{path} is a folder that is not empty")
        place.rmdir()
        return f"deleted folder {name_of(root, place)}"
    file = existing_file(root, path)
    size = file.stat().st_size
    file.unlink()
    return f"deleted {name_of(root, file)}, {size} bytes"


def text_of_file(file: Path) -> str:
    """The text of a file: UTF-8, UTF-16 with its mark, else Windows-1252.

    Raises:
        ValueError: The file is not text.
    """
    data = file.read_bytes()
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace")
    if b"\0" in data:
        raise ValueError(f"{file.name} is not text{reader_hint(file)}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def _listed(root: Path, folder: Path, depth: int) -> Iterator[str]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name = Path(entry.path).relative_to(root).as_posix()
        if name == SPILL:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield f"{name}/"
            if depth > 1:
                yield from _listed(root, Path(entry.path), depth - 1)
        else:
            yield f"{name} {entry.stat(follow_symlinks=False).st_size}"


def _same_kind(source: Path, target: Path, to: str) -> None:
    if source.suffix.lower() != target.suffix.lower():
        raise ValueError(f"to must end with {source.suffix or 'no suffix'}, got {to}")


def _maker_hint(file: Path) -> str:
    maker = {".xlsx": "create_sheet", ".docx": "create_document", ".pptx": "create_slides"}
    tool_name = maker.get(file.suffix.lower(), "run_code")
    return f"; use {tool_name}"


TOOLS = (
    tool(list_files, reads=True),
    tool(read_file, reads=True),
    tool(write_file),
    tool(edit_file),
    tool(copy_file),
    tool(move_file),
    tool(delete_file),
)
