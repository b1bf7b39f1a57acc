"""A world after its agent is dead, seen from the host: what is there, and what differs from the start."""

from __future__ import annotations

import filecmp
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_OPAQUE = "user.overlay.opaque"

KEPT_RESULTS = ".spill/"
"""Where the tools keep long results whole: below it nothing counts as a change."""

DEEPEST, LONGEST = 64, 2048
"""Folders above an entry, and bytes of its path: a folder beyond is one entry, no plain file, and nothing in it is
seen. An agent can nest folders until no path and no stack holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWorld:
    """The final files of a world, as a diff over the original or as a whole copy.

    A symbolic link, device, pipe or socket that the agent made is never opened: `path` is None for it, as for what
    lies too deep (`DEEPEST`, `LONGEST`). A folder that may not be read is one entry, and no plain file.

    Example: `FrozenWorld(lower=world, upper=diff).path("fees.xlsx")`.

    Args:
        lower: the world as it was before the trial.
        upper: overlay diff on top of it, or None.
        root: the whole world after the trial (a copy), or None; exactly one of upper and root is given.
    """

    lower: Path
    upper: Path | None = None
    root: Path | None = None

    def __post_init__(self) -> None:
        if (self.upper is None) == (self.root is None):
            raise ValueError(f"exactly one of upper and root must be given, got {self.upper} and {self.root}")

    def path(self, rel: str) -> Path | None:
        """Host path of a regular file of the final world, or None. ValueError for a path that leaves it."""
        found = self._find(_inside(rel))
        return found if found is not None and stat.S_ISREG(found.lstat().st_mode) else None

    def files(self) -> list[str]:
        """Relative paths of the regular files of the final world, sorted."""
        return sorted(rel for rel, at in self._walk(PurePosixPath()) if stat.S_ISREG(at.lstat().st_mode))

    def changed(self) -> list[str]:
        """Relative paths of what was added, removed or given other content, sorted; special files count.

        The results that the tools keep for the model (`KEPT_RESULTS`) do not.
        """
        now = dict(self._walk(PurePosixPath()))
        before = dict(_walk_folder(self.lower, PurePosixPath()))
        differing = [rel for rel in now if rel in before and not _same(before[rel], now[rel])]
        changed = [*(now.keys() ^ before.keys()), *differing]
        return sorted(rel for rel in changed if not rel.startswith(KEPT_RESULTS))

    def _find(self, rel: PurePosixPath) -> Path | None:
        """Where an entry of the final world lies; None if it, or a real folder above it, is missing."""
        if _too_deep(rel):
            return None
        if self.root is not None:
            return _descend(self.root, rel)
        assert self.upper is not None
        at, covered = self.upper, False
        for index, part in enumerate(rel.parts):
            covered = covered or _opaque(at)
            at = at / part
            mode = _mode(at)
            if mode is None:
                return None if covered else _descend(self.lower, rel)
            if _whiteout(at):
                return None
            if index + 1 < len(rel.parts) and not stat.S_ISDIR(mode):
                return None
        return at

    def _walk(self, rel: PurePosixPath) -> Iterator[tuple[str, Path]]:
        """Every entry of the final world that is not a folder that can be gone through."""
        top = self.root or self.upper
        assert top is not None
        if not rel.parts and not _passable(top, rel):
            yield ".", top
            return
        if self.root is not None:
            yield from _walk_folder(self.root, rel)
            return
        here = top / rel
        names = set(os.listdir(here)) if _is_folder(here) else set()
        for name in sorted(names):
            at = here / name
            if _passable(at, rel / name):
                yield from self._walk(rel / name)
            elif not _whiteout(at):
                yield str(rel / name), at
        below = self.lower / rel
        if not (_is_folder(here) and _opaque(here)) and _is_folder(below):
            for name in sorted(set(os.listdir(below)) - names):
                if _passable(below / name, rel / name):
                    yield from _walk_folder(self.lower, rel / name)
                else:
                    yield str(rel / name), below / name


def can_hold_marks(folder: Path) -> bool:
    """Whether an overlay's upper layer can lie there: its marks are attributes that not every file system has."""
    try:
        os.setxattr(folder, "user.overlay.probe", b"y")
        os.removexattr(folder, "user.overlay.probe")
    except OSError:
        return False
    return True


def _inside(rel: str) -> PurePosixPath:
    path = PurePosixPath(rel)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in rel:
        raise ValueError(f"path must be relative and stay inside the world, got {rel!r}")
    return path


def _mode(path: Path) -> int | None:
    try:
        return path.lstat().st_mode
    except (
        FileNotFoundError,
        NotADirectoryError,
        PermissionError,
    ):  # the last: in a folder that its owner closed
        return None


def _too_deep(rel: PurePosixPath) -> bool:
    return len(rel.parts) > DEEPEST or len(os.fsencode(rel)) > LONGEST


def _passable(at: Path, rel: PurePosixPath) -> bool:
    """Whether this is a folder of which the entries are told, and not the folder itself."""
    return (
        _is_folder(at) and not _too_deep(rel / "x") and os.access(at, os.R_OK | os.X_OK, effective_ids=True)
    )


def _is_folder(path: Path) -> bool:
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _whiteout(path: Path) -> bool:
    """Overlay's mark of a deleted entry: a character device 0/0."""
    status = path.lstat()
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _opaque(folder: Path) -> bool:
    """Overlay's mark of a folder that hides the one below it."""
    try:
        return os.getxattr(folder, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:  # not set
        return False


def _descend(base: Path, rel: PurePosixPath) -> Path | None:
    """base/rel if every folder on the way is a real one."""
    at = base
    for part in rel.parts:
        if not _is_folder(at):
            return None
        at = at / part
    return at if _mode(at) is not None else None


def _walk_folder(base: Path, rel: PurePosixPath) -> Iterator[tuple[str, Path]]:
    for name in sorted(os.listdir(base / rel)):
        at = base / rel / name
        if _passable(at, rel / name):
            yield from _walk_folder(base, rel / name)
        else:
            yield str(rel / name), at


def _same(before: Path, now: Path) -> bool:
    if before == now:
        return True
    if not (stat.S_ISREG(before.lstat().st_mode) and stat.S_ISREG(now.lstat().st_mode)):
        return False
    try:
        return filecmp.cmp(before, now, shallow=False)
    except PermissionError:  # who closes a file to its readers has changed it
        return False
