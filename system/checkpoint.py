"""What a killed run goes on from: weights and optimizer of one version, whole or not at all.

A version is written beside its place and moved there when it is on disk; `manifest.json` in it says what belongs to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = 2
"""Versions that stay: should the newest be damaged, there is one before."""


class SaveError(Exception):
    """A version could not be put on disk; the message says from which a run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One version on disk. `about` is what its writer wanted to know again."""

    folder: Path
    version: int
    about: dict[str, Any]


def write_checkpoint(
    root: Path, version: int, *, save: Callable[[Path], None], about: dict[str, Any]
) -> Checkpoint:
    """Write a version, then let older ones go.

    Args:
        root: folder of all versions of a run.
        save: writes the files of the version into a folder.
        about: kept with them; JSON.
    """
    folder, partial = root / f"version-{version:06d}", root / f".version-{version:06d}.partial"
    remove_partial(root)
    partial.mkdir(parents=True)
    try:
        _write(partial, version, save, about)
    except BaseException:
        remove_partial(root)  # the disk may be full
        raise
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    _to_disk(root)
    for old in _versions(root)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return Checkpoint(folder=folder, version=version, about=about)


def _write(partial: Path, version: int, save: Callable[[Path], None], about: dict[str, Any]) -> None:
    save(partial)
    files = {path.name: _digest(path) for path in sorted(partial.iterdir())}
    manifest = {"version": version, "files": files, "about": about}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for path in [*partial.iterdir(), partial]:
        _to_disk(path)


def remove_partial(root: Path) -> None:
    """Removes what was being written when a run was killed."""
    for partial in root.glob(".version-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def last_checkpoint(
    root: Path, *, known: Collection[int] | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest version that is whole, and a line for each newer one that is not.

    Args:
        known: versions that may be gone on from; any if None. A newer one can be there where the end of a journal
            was lost.
    """
    damaged = []
    for folder in reversed(_versions(root)):
        if fault := _fault(folder):
            damaged.append(f"checkpoint {folder.name} is left aside: {fault}")
            continue
        manifest = json.loads((folder / "manifest.json").read_text())
        if known is not None and manifest["version"] not in known:
            damaged.append(f"checkpoint {folder.name} is left aside: the journal does not tell of it")
            continue
        return Checkpoint(folder=folder, version=manifest["version"], about=manifest["about"]), damaged
    return None, damaged


def _versions(root: Path) -> list[Path]:
    return sorted(root.glob("version-*")) if root.is_dir() else []


def _fault(folder: Path) -> str:
    """What is wrong with a version; "" if it is whole."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        files, _, _ = dict(manifest["files"]), manifest["version"], manifest["about"]
        wrong = [name for name, digest in files.items() if _digest(folder / name) != digest]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{', '.join(wrong)} is not what was written" if wrong else ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
