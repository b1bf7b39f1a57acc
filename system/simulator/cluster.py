"""How long things take: rates of engines, trainer and tools as a few numbers that can be measured or derived."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a run. Example: `Cluster(engines=12, decode_s=0.02, ...)`.

    A decode step of an engine with b requests of c tokens of context in all takes
    `decode_s + decode_request_s * b + decode_context_s * c` seconds, and gives each of them a token.

    Where fewer `cores` than that are common to all that works, each of n at work gets `cores / n` of one, and takes
    so much longer: an engine with a request, a training step, every trial that starts, calls a tool or is graded, and
    what else goes on there.

    Args:
        engines: replicas among which the requests are spread evenly.
        decode_s: of a decode step, whatever its batch: weights are read once.
        decode_request_s: more for each request.
        decode_context_s: more for each token of context: keys and values are read.
        prefill_s: for each token of a prompt or an observation that the engine has not seen.
        prefill_stops: share of that time in which its engine gives no token to the others.
        kv_tokens: context that one engine holds; a trajectory beyond it waits until another ends.
        step_s: of an optimizer step, whatever its batch.
        train_token_s: more for each token of the batch.
        train_square_s: more for each row's tokens squared: attention.
        sync_s: until new weights are in the engines, which stand still meanwhile.
        cores: common to engines, trainer and trials; without end where each has its own.
        others: of what else is at work there all the time, in cores that it would take.
        trial_load: share of a core that a trial takes, if it gets it, while it starts, calls a tool or is graded.
        start_s: of a sandbox.
        verify_s: of grading.
    """

    engines: int = 1
    decode_s: float = 0.02
    decode_request_s: float = 0.0
    decode_context_s: float = 0.0
    prefill_s: float = 0.0
    prefill_stops: float = 0.0
    kv_tokens: float = math.inf
    step_s: float = 0.0
    train_token_s: float = 0.0
    train_square_s: float = 0.0
    sync_s: float = 0.0
    cores: float = math.inf
    others: float = 0.0
    trial_load: float = 1.0
    start_s: float = 0.0
    verify_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.engines >= 1:
            raise ValueError(f"engines must be positive, got {self.engines}")
        if not self.cores > 0:
            raise ValueError(f"cores must be positive, got {self.cores}")
        for name in ("prefill_stops", "trial_load"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not self.decode_s + self.decode_request_s > 0:
            raise ValueError("decode_s or decode_request_s must be positive, got 0")

    def token_s(self, requests: int, context: float) -> float:
        """Seconds for one token of each of so many requests, over all engines."""
        busy = min(self.engines, requests)
        return self.decode_s + (self.decode_request_s * requests + self.decode_context_s * context) / busy

    def speed(self, *, engines: int, trainers: int, trials: int) -> float:
        """What share of its full speed each has while so many are at work."""
        wanted = engines + trainers + self.trial_load * trials + self.others
        return min(1.0, self.cores / wanted) if wanted else 1.0

    def train_s(self, rows: list[int]) -> float:
        """Seconds for a step on rows of so many tokens."""
        squares = sum(n * n for n in rows)
        return self.step_s + self.train_token_s * sum(rows) + self.train_square_s * squares
