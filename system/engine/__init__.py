"""Token ids in; token ids, log-probabilities and policy versions out.

This file, `request.py` and `client.py` never import torch: trial processes use them after a fork.
"""

from system.engine.client import EngineClient, EngineHandle, OtherEngine, RunningEngine, start_embedded_engine
from system.engine.request import (
    Completion,
    Engine,
    EngineError,
    FinishReason,
    GenerateRequest,
    check_reply,
)

__all__ = [
    "Completion",
    "Engine",
    "EngineClient",
    "EngineError",
    "EngineHandle",
    "FinishReason",
    "GenerateRequest",
    "OtherEngine",
    "RunningEngine",
    "check_reply",
    "start_embedded_engine",
]
