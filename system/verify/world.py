"""What a verifier sees of a world: how it was, how it is, and which paths differ."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class GradedWorld(Protocol):
    """What a sandbox leaves behind once nothing runs in it any more (`system.sandbox.FrozenWorld` is one)."""

    @property
    def lower(self) -> Path:
        """The pristine world."""
        ...

    def path(self, rel: str, /) -> Path | None:
        """Where a plain file of the world lies now; None for what is missing, special, or behind a link."""
        ...

    def files(self) -> list[str]:
        """Relative names of its plain files."""
        ...

    def changed(self) -> list[str]:
        """Relative names of all that was added, removed or given other content, special files included."""
        ...
