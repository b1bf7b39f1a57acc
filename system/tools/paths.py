"""Where a path of the model leads: always inside the world, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

LARGEST_FILE = 20_000_000
"""Bytes of a file beyond which no tool reads it."""

NAMES_SHOWN = 20
"""How many names an error lists."""


def inside(root: Path, path: str) -> Path:
    """Resolve a path relative to the world.

    Args:
        root: The world folder.
        path: What the model wrote; `.` is the world itself.

    Raises:
        ValueError: The path is absolute, or leaves the world by `..` or by a symbolic link.
    """
    if Path(path).is_absolute():
        raise ValueError(f"path must be relative to the world, got {path}")
    resolved_root = root.resolve()
    resolved = (resolved_root / path).resolve()
    if not resolved.is_relative_to(resolved_root):
        raise ValueError(f"path must stay inside the world, got {path}")
    return resolved


def existing_file(root: Path, path: str, *suffixes: str) -> Path:
    """Resolve a path to a file that is there and has one of the suffixes (any, if none is named).

    Raises:
        ValueError: The path escapes, no such file (the message lists those here), or another kind of file.
    """
    resolved = inside(root, path)
    if resolved.is_dir():
        raise ValueError(f"{path} is a folder; files here: {names_in(root, resolved)}")
    if not resolved.is_file():
        folder = resolved.parent if resolved.parent.is_dir() else root.resolve()
        raise ValueError(f"no such file {path}; files here: {names_in(root, folder)}")
    if resolved.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} is larger than {LARGEST_FILE // 1_000_000} MB; use run_code")
    if suffixes and resolved.suffix.lower() not in suffixes:
        raise ValueError(f"path must end with {' or '.join(suffixes)}, got {path}{reader_hint(resolved)}")
    return resolved


def names_in(root: Path, folder: Path) -> str:
    """List a folder in one line, as paths relative to the world."""
    names = list(entries(root, folder))
    shown = ", ".join(names[:NAMES_SHOWN]) or "none"
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"


def entries(root: Path, folder: Path) -> Iterator[str]:
    """Yield the sorted entries of a folder as paths relative to the world; folders end with a slash."""
    resolved_root = root.resolve()
    for entry in sorted(folder.iterdir()):
        name = entry.relative_to(resolved_root).as_posix()
        yield f"{name}/" if entry.is_dir() else name


def reader_hint(file: Path) -> str:
    """Name the tool that reads this kind of file, as the end of a message."""
    tool = READERS.get(file.suffix.lower())
    return f"; use {tool}" if tool else ""


READERS = {
    ".xlsx": "read_sheet",
    ".pdf": "read_pdf",
    ".pptx": "read_slides",
    ".docx": "read_document",
    ".txt": "read_file",
    ".csv": "read_file",
    ".md": "read_file",
    ".json": "read_file",
    ".ics": "read_file",
    ".mbox": "list_mail",
}
"""Which tool reads a file, by suffix."""
