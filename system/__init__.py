"""Effects: gathers facts, asks core, carries the answer out. Decides nothing that core could decide."""

from pathlib import Path

import core

_ROOT = Path(__file__).resolve().parent.parent

if core.__file__ is None or Path(core.__file__).resolve().parent.parent != _ROOT:
    raise ImportError(
        f"core must be the folder beside system, got {core.__file__}: another distribution ships a package"
        " named core; install Bartleby in an environment of its own"
    )
