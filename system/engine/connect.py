"""A trial's way to its engine, by the address in its specification. No torch."""

from __future__ import annotations

import math

from system.engine.client import EngineClient
from system.engine.request import EngineConnection


def connect(address: str, *, deadline: float = math.inf, patience_s: float = math.inf) -> EngineConnection:
    """A client of the engine at an address; it connects at its first call.

    Args:
        address: path of a unix socket.
        deadline: on the clock of time.monotonic; `generate` raises TimeoutError then, and its request is dropped.
        patience_s: of the wait for any reply; an engine that needs longer is an EngineError.
    """
    return EngineClient(address, deadline=deadline, patience_s=patience_s)
