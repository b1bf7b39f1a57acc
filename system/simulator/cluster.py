"""How long things take: rates of engines, trainer and tools as a few numbers that can be measured or derived."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a run. Example: `Cluster(engines=12, decode_s=0.02, ...)`.

    A decode step of an engine with b requests of c tokens of context in all takes
    `decode_s + decode_request_s * b + decode_context_s * c` seconds, and gives each of them a token.

    Args:
        engines: replicas among which the requests are spread evenly.
        decode_s: of a decode step, whatever its batch: weights are read once.
        decode_request_s: more for each request.
        decode_context_s: more for each token of context: keys and values are read.
        prefill_s: for each token of a prompt or an observation.
        kv_tokens: context that one engine holds; a trajectory beyond it waits until another ends.
        step_s: of an optimizer step, whatever its batch.
        train_token_s: more for each token of the batch.
        train_square_s: more for each row's tokens squared: attention.
        sync_s: until new weights are in the engines, which stand still meanwhile.
        shared: share of the engines' speed that a training step takes from them, where both use the same machine.
        start_s: of a sandbox.
        verify_s: of grading.
    """

    engines: int = 1
    decode_s: float = 0.02
    decode_request_s: float = 0.0
    decode_context_s: float = 0.0
    prefill_s: float = 0.0
    kv_tokens: float = math.inf
    step_s: float = 0.0
    train_token_s: float = 0.0
    train_square_s: float = 0.0
    sync_s: float = 0.0
    shared: float = 0.0
    start_s: float = 0.0
    verify_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.engines >= 1:
            raise ValueError(f"engines must be positive, got {self.engines}")
        if not 0 <= self.shared < 1:
            raise ValueError(f"shared must lie between 0 and 1, got {self.shared}")
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not self.decode_s + self.decode_request_s > 0:
            raise ValueError("decode_s or decode_request_s must be positive, got 0")

    def token_s(self, requests: int, context: float) -> float:
        """Seconds for one token of each of so many requests, over all engines."""
        busy = min(self.engines, requests)
        return self.decode_s + (self.decode_request_s * requests + self.decode_context_s * context) / busy

    def train_s(self, rows: list[int]) -> float:
        """Seconds for a step on rows of so many tokens."""
        squares = sum(n * n for n in rows)
        return self.step_s + self.train_token_s * sum(rows) + self.train_square_s * squares
