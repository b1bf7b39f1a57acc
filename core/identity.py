"""Token identity: what the trainer used is, token for token and bit for bit, what the engine emitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .check import check_whole


class Emission(NamedTuple):
    """One request as the engine itself recorded it.

    Example: `Emission(prompt_ids=(7, 8), token_ids=(2,), logprob=(-0.3,), policy_version=(4,))`.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprob: Sequence[float]
    policy_version: Sequence[int]


class Span(NamedTuple):
    """Where a row holds the completion of a request: tokens `start` to `end`, end left out."""

    start: int
    end: int
    emission: Emission


def identity_faults(
    token_ids: Sequence[int],
    loss_mask: Sequence[bool],
    rollout_logprob: Sequence[float],
    policy_version: Sequence[int],
    spans: Sequence[Span],
) -> tuple[str, ...]:
    """In what a row differs from what the engine emitted for it; empty if in nothing.

    A row is identical when each span holds the tokens, log-probabilities and versions of its request, equal as
    numbers and not nearly; when the row up to the span is the prompt of that request, so that the policy was asked in
    the context it is trained in; and when exactly the tokens of the spans are trained.

    Args:
        token_ids, loss_mask, rollout_logprob, policy_version: the row, one entry per token.
        spans: its completions in the order in which they lie in the row.

    Raises:
        ValueError: the row's lists differ in length, or the spans do not lie one after the other from 0 on.
    """
    count = len(token_ids)
    if not count == len(loss_mask) == len(rollout_logprob) == len(policy_version):
        raise ValueError(
            "token_ids, loss_mask, rollout_logprob and policy_version must be equally long, "
            f"got {count}, {len(loss_mask)}, {len(rollout_logprob)} and {len(policy_version)}"
        )
    _check_spans(spans)
    faults: list[str] = []
    emitted = [False] * count
    for number, (start, end, emission) in enumerate(spans):
        row = (token_ids[start:end], rollout_logprob[start:end], policy_version[start:end])
        engine = (emission.token_ids, emission.logprob, emission.policy_version)
        names = ("token_ids", "logprob", "policy_version")
        pairs = [("prompt", token_ids[:start], emission.prompt_ids), *zip(names, row, engine)]
        for name, ours, theirs in pairs:
            at = _first_difference(ours, theirs)
            if at is not None:
                faults.append(f"completion {number} differs in {name} at {at}")
        emitted[start:end] = [True] * len(emitted[start:end])
    at = _first_difference(emitted, [bool(trained) for trained in loss_mask])
    if at is not None:
        faults.append(f"loss_mask differs from the completions at {at}")
    return tuple(faults)


def _check_spans(spans: Sequence[Span]) -> None:
    before = 0
    for number, (start, end, _) in enumerate(spans):
        check_whole("every start", start)
        check_whole("every end", end)
        if not before <= start <= end:
            raise ValueError(
                f"span {number} must begin at {before} or later and not end before, got {start} to {end}"
            )
        before = end


def _first_difference(a: Sequence[float], b: Sequence[float]) -> int | None:
    """The first index at which two sequences differ; the shorter one's length if one begins the other; else None.

    A NaN differs from everything, itself included.
    """
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))
