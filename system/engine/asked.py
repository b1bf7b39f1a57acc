"""What an engine is asked, taken from the wire and checked before anything is done for it. No torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from system.engine.request import GenerateRequest


def parse_request(message: dict[str, Any]) -> GenerateRequest:
    """The request inside a generate message; every field must be there and no other."""
    given = {name: value for name, value in message.items() if name != "op"}
    known = {f.name for f in fields(GenerateRequest)}
    if given.keys() != known:
        missing, unknown = sorted(known - given.keys()), sorted(given.keys() - known)
        raise ValueError(
            f"request must have every field and no other, got missing {missing}, unknown {unknown}"
        )
    return GenerateRequest(**given)


def whole(value: object) -> bool:
    """Whether it is a whole number, and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: object) -> bool:
    """Whether it is a number, and not a truth value."""
    return whole(value) or isinstance(value, float)


def check_request(request: GenerateRequest, *, max_context: int, token_count: int) -> None:
    """Refuse what no engine can do.

    Raises:
        ValueError: one line with name, rule and value.
    """

    for name in ("request_id", "session_id"):
        value = getattr(request, name)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must be a text that is not empty, got {value!r}")
    for name in ("token_ids", "stop_token_ids"):
        ids = getattr(request, name)
        if not isinstance(ids, list) or not all(whole(i) and 0 <= i < token_count for i in ids):
            raise ValueError(f"{name} must be a list of ids from 0 to {token_count - 1}, got another value")
    if not request.token_ids:
        raise ValueError("token_ids must not be empty, got []")
    for name in ("max_tokens", "seed", "top_k"):
        if not whole(getattr(request, name)):
            raise ValueError(f"{name} must be a whole number, got {getattr(request, name)!r}")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {request.max_tokens}")
    if len(request.token_ids) >= max_context:
        raise ValueError(
            f"token_ids must leave room in the window of {max_context} tokens, got {len(request.token_ids)}"
        )
    if not number(request.temperature) or not 0 < request.temperature < float("inf"):
        raise ValueError(f"temperature must be positive, got {request.temperature!r}")


def check_plain_sampling(request: GenerateRequest) -> None:
    """Refuse every way to sample but the whole distribution at a temperature.

    Raises:
        ValueError: one line with name, rule and value.
    """
    only = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    for name, value in only.items():
        if not number(getattr(request, name)) or getattr(request, name) != value:
            raise ValueError(
                f"{name} must be {value}, since logprobs are of the distribution sampled from, "
                f"got {getattr(request, name)!r}"
            )
