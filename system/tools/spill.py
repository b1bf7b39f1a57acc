"""Long results: what is cut from the text that the model sees lies whole in a file that it can page."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from core.budget import cut_text
from system.tools.registration import Tool

FOLDER = ".spill"
"""Below the world; no change of the world in the eyes of a verifier."""

LARGEST_SPILL = 8_000_000
"""Characters of a result that are kept; the rest is dropped, and the model is told."""


def spilled(text: str, root: Path, *, limit: int, how: str, source: str = "") -> str:
    """A text of at most `limit` characters: the whole, or its head and its tail and where the whole lies.

    Args:
        text: a result.
        root: the world.
        limit: characters that the model is shown, the line about the rest included.
        how: how to read the file, for that line.
        source: the kept file that the text was read from, which is not kept again; "" if none.
    """
    if len(text) <= limit:
        return text
    kept = source or _keep(text[:LARGEST_SPILL], root)
    where = f"whole in {kept}: {how}" if kept else "nothing is kept of the rest: ask for less"
    if kept and len(text) > LARGEST_SPILL:
        where = f"its first {LARGEST_SPILL} characters in {kept}: {how}"
    marker = f"\n[... cut, {len(text)} characters; {where} ...]\n"
    return cut_text(text, limit=max(0, limit - len(marker)), marker=marker)


def _keep(text: str, root: Path) -> str:
    """Writes a text to the next free file; its path for the model, or "" where there is no room or no folder."""
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                os.mkdir(FOLDER, dir_fd=folder)
            except FileExistsError:
                pass
            spill = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            return _write(text, spill)
        finally:
            os.close(spill)
    except OSError:  # no room, or something of the model's in the way: the text is cut, and says so
        return ""


def _write(text: str, spill: int) -> str:
    for number in count(len(os.listdir(spill)) + 1):
        name = f"{number}.txt"
        try:
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=spill)
        except FileExistsError:
            continue
        try:
            with open(file, "w", encoding="utf-8", errors="replace", newline="") as stream:
                stream.write(text)
        except OSError:
            os.unlink(name, dir_fd=spill)
            raise
        return f"{FOLDER}/{name}"
    raise AssertionError("numbers do not end")


def spilling(tools: Mapping[str, Tool], *, limit: int, how: str) -> dict[str, Tool]:
    """The same tools, none of which answers more than `limit` characters; what is longer is kept whole."""
    return {
        name: tool._replace(run=partial(_cut_run, tool.run, limit=limit, how=how))
        for name, tool in tools.items()
    }


def _cut_run(run: Callable[..., str], root: Path, /, *, limit: int, how: str, **given: Any) -> str:
    return spilled(run(root, **given), root, limit=limit, how=how, source=kept_among(given))


def kept_among(given: Mapping[str, Any]) -> str:
    """The kept file that a call reads, or ""."""
    name = given.get("path") or given.get("filePath") or ""
    return name if isinstance(name, str) and name.startswith(f"{FOLDER}/") else ""
