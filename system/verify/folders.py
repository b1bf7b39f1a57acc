"""A frozen world that is a plain folder beside its pristine copy."""

from __future__ import annotations

import filecmp
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderWorld:
    """What changed is found by comparing: `FolderWorld(lower=Path("pristine"), current=Path("copy"))`."""

    lower: Path
    current: Path

    def path(self, name: str) -> Path | None:
        """Where the file or folder of that relative name lies now; None if it is gone."""
        place = self.current / name
        return place if os.path.lexists(place) else None

    def changed(self) -> list[str]:
        """Relative names of all files that were added, removed or altered, and of added links, sorted."""
        before, after = _names(self.lower), _names(self.current)
        return sorted((before ^ after) | {name for name in before & after if not self._same(name)})

    def _same(self, name: str) -> bool:
        old, new = self.lower / name, self.current / name
        return not new.is_symlink() and new.is_file() and filecmp.cmp(old, new, shallow=False)


def _names(root: Path) -> set[str]:
    found = set()
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        found |= {(Path(folder) / name).relative_to(root).as_posix() for name in (*files, *links)}
    return found
