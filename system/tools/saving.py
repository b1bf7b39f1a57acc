"""Where new files go: checked paths, written whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from system.tools.paths import inside


def new_file(root: Path, path: str, *suffixes: str, replace: bool = False) -> Path:
    """Resolve a path for a file to be made, one of the suffixes required; its folders are made as needed.

    Raises:
        ValueError: The path escapes, has another suffix, or is taken (by a file, unless `replace`).
    """
    file = inside(root, path)
    if suffixes and file.suffix.lower() not in suffixes:
        raise ValueError(f"path must end with {' or '.join(suffixes)}, got {path}")
    if file.is_dir():
        raise ValueError(f"{path or '.'} is a folder")
    if file.exists() and not (replace and file.is_file()):  # a pipe would block for ever
        raise ValueError(f"path must be new, got {path}, which exists")
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def save_bytes(file: Path, data: bytes) -> None:
    """Write a file so that it is the old or the new one at every moment."""
    temporary = file.with_name(f".{file.name}.part")
    temporary.unlink(missing_ok=True)  # what lies there may be a link to somewhere else
    try:
        with open(temporary, "xb") as opened:
            opened.write(data)
        if file.exists():
            shutil.copymode(file, temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def name_of(root: Path, file: Path) -> str:
    """Name a file as the model does: relative to the world."""
    return file.relative_to(root.resolve()).as_posix()
