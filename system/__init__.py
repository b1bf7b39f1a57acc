"""Effects: gathers facts, asks core, carries the answer out. Decides nothing that core could decide."""

from pathlib import Path

import core

if core.__file__ is None or Path(core.__file__).resolve().parent.parent != Path(__file__).resolve().parent.parent:
    raise ImportError(
        f"core must be the folder beside system, got {core.__file__}: another installed distribution ships a package"
        " named core; install Bartleby in an environment of its own"
    )
