"""The engine's records and its protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length", "abort"]


class EngineError(RuntimeError):
    """The engine refused a request; the message is its one line. The engine lives on."""


class EngineSilent(EngineError):
    """The engine did not answer within the time that it is given; it may be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One turn to sample. Nothing has a default: what is not said here is not taken from some config file.

    Example: GenerateRequest(request_id="t1/0", session_id="t1", token_ids=[1, 2, 3], max_tokens=64,
    stop_token_ids=[5], seed=7, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
    """

    request_id: str
    session_id: str
    """The trial: its cached keys and values are kept from one turn to the next."""
    token_ids: list[int]
    """The whole prompt, from the first token of the row."""
    max_tokens: int
    stop_token_ids: list[int]
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What was sampled, one entry per token in each list; a stop token is the last one.

    Example: Completion(request_id="t1/0", token_ids=[9, 5], logprob=[-0.5, -0.25], policy_version=[3, 4],
    finish_reason="stop")
    """

    request_id: str
    token_ids: list[int]
    logprob: list[float]
    """Under the distribution that was sampled from, temperature included; each a float32 value, exactly."""
    policy_version: list[int]
    """Version of the weights that sampled the token; it can change inside a turn."""
    finish_reason: FinishReason
    """stop: a stop token. length: max_tokens or the window is used up. abort: given up by the engine."""


def check_reply(request: GenerateRequest, completion: Completion, *, vocabulary: int) -> None:
    """Refuse a completion that no engine may give to the request: what it holds is not the policy's doing.

    Args:
        vocabulary: ids of tokens are below it.

    Raises:
        EngineError: it is another request's, has no token or too many, stops without a stop token, or holds an id
            that is none.
    """
    ids, asked = completion.token_ids, request.max_tokens
    if completion.request_id != request.request_id:
        raise EngineError(f"request_id of a reply must be {request.request_id}, got {completion.request_id}")
    if not isinstance(ids, list) or not 1 <= len(ids) <= asked:
        count = len(ids) if isinstance(ids, list) else type(ids).__name__
        raise EngineError(f"a reply must have 1 to {asked} token_ids, got {count}")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise EngineError(f"token_ids of a reply must be from 0 to {vocabulary - 1}, got {token!r}")
    if completion.finish_reason == "stop" and ids[-1] not in request.stop_token_ids:
        raise EngineError(f"a reply that stops must end with a stop token, got {ids[-1]}")


class Engine(Protocol):
    """What a trial has of an engine: it samples completions from the newest weights that were brought to it."""

    def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn; blocks until it is finished. TimeoutError at the caller's deadline, where it has one."""
        ...

    def release(self, session_id: str) -> None:
        """Forget a session's cache; a request of it that still runs is finished as `abort`."""
        ...

    def close(self) -> None:
        """Let go of the engine; what it still runs for this caller is dropped."""
        ...


class EngineConnection(Engine, Protocol):
    """An engine as `system.engine.connect` opens it."""

    deadline: float
    """On the clock of time.monotonic; `generate` raises TimeoutError then. May be set anew between two calls."""


class RunningEngine(Protocol):
    """What the driver has of an engine: whoever is in charge of it.

    All but `fault` and `address` are called in threads that live as long as the run, and never two at once, but for
    `stats`.
    """

    @property
    def address(self) -> str:
        """What a trial needs to connect: path of a unix socket. It outlives a restart."""
        ...

    def fault(self, timeout_s: float) -> str:
        """Why it does not run any more, in one line; "" while it does, after waiting so long to see it end."""
        ...

    def restart(self) -> None:
        """End what is left of it and start it anew with the weights that it began with; blocks until it listens.

        Raises:
            EngineError: it did not start, or is not ours to start.
        """
        ...

    def update_weights(self, version: int, weights: str, *, reset_kv: bool) -> None:
        """Swap the weights between two decode steps; running requests go on under the new version.

        Args:
            version: of them; each token sampled from now on carries it.
            weights: where they are, as trainer and engine understand it; the path of a safetensors file.
            reset_kv: the caches of all sessions, running ones included, are recomputed under the new weights. Without,
                a session keeps what older weights cached of it; another session never gets that.

        Raises:
            EngineError: they are refused, and the old ones stay.
            EngineSilent, OSError: it does not answer.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Counters: running, waiting, sampled_tokens, busy_s, cpu_s, policy_version and more.

        Raises:
            EngineSilent, OSError: it does not answer, within a time of its own.
        """
        ...

    def close(self) -> None:
        """End it, where it is ours to end."""
        ...
