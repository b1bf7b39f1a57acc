"""Token ids in; token ids, log-probabilities and policy versions out.

This file and what it imports never import torch: trial processes use them after a fork.
"""

from system.engine.client import EngineClient
from system.engine.connect import connect
from system.engine.request import (
    Completion,
    Engine,
    EngineConnection,
    EngineError,
    EngineSilent,
    FinishReason,
    GenerateRequest,
    RunningEngine,
    check_reply,
)
from system.engine.router import Applied, Back, Happening, Lost, RestartRule, Router, Transfer
from system.engine.running import EngineHandle, OtherEngine, start_embedded_engine

__all__ = [
    "Applied",
    "Back",
    "Completion",
    "Engine",
    "EngineClient",
    "EngineConnection",
    "EngineError",
    "EngineHandle",
    "EngineSilent",
    "FinishReason",
    "GenerateRequest",
    "Happening",
    "Lost",
    "OtherEngine",
    "RestartRule",
    "Router",
    "RunningEngine",
    "Transfer",
    "check_reply",
    "connect",
    "start_embedded_engine",
]
