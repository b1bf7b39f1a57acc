"""Whether to ask a service again, with which key, and when: one budget over all calls, one owner of retries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from .check import check_count
from .counter import counter_hash, counter_uniform

FAULTS = (
    *("", "limited", "key", "busy", "timeout", "connection"),
    *("unparsable", "truncated", "oversized", "refused", "fatal"),
)
"""What was wrong with a call. limited: this key is asked too often. key: it is no good, now and later. busy,
timeout, connection: the service, whatever the key. unparsable, truncated, oversized: it answered, and not as
asked. refused: this way of asking. fatal: any way of asking."""

_LIKE_SERVICE = ("busy", "timeout", "connection")
_LIKE_ANSWER = ("unparsable", "truncated", "oversized", "refused")
_SPENT = ("insufficient_quota", "billing_hard_limit_reached", "invalid_api_key")
_LARGEST_DOUBLING = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRule:
    """The budget of one question. Example: `RetryRule(attempts=6, base_s=1.0, ceiling_s=30.0, forms=3)`.

    Args:
        attempts: most calls, over all keys and forms.
        base_s: back-off after the first failure; it doubles with each further one.
        ceiling_s: largest back-off.
        forms: ways to put the question, from the strictest; a service that refuses one is asked the next way.
    """

    attempts: int
    base_s: float
    ceiling_s: float
    forms: int

    def __post_init__(self) -> None:
        check_count("attempts", self.attempts, least=1)
        check_count("forms", self.forms, least=1)
        if not 0 < self.base_s <= self.ceiling_s < math.inf:
            raise ValueError(
                f"base_s must be positive and at most ceiling_s, got {self.base_s} and {self.ceiling_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyState:
    """One key of a pool: `KeyState(free_at_s=12.5, strikes=1, dead=False)`; strikes: limits hit in a row."""

    free_at_s: float = -math.inf
    strikes: int = 0
    dead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one question has got: `Progress(attempts=2, ready_s=7.5, form=1, fault="busy", final=False)`.

    Args:
        ready_s: no call before this, whatever the key.
        fault: what was wrong with the last call, one of `FAULTS`.
        final: no further call can help.
    """

    attempts: int = 0
    ready_s: float = -math.inf
    form: int = 0
    fault: str = ""
    final: bool = False


class Reply(NamedTuple):
    """What came back: a status, a fault seen by the caller, the service's error code, a wait it asks for."""

    status: int | None
    fault: str
    code: str
    retry_after_s: float | None


class Step(NamedTuple):
    """What to do: "use" a key, "wait" until a time, or "stop" with a cause (one of `FAULTS` but "")."""

    kind: str
    key: int
    until_s: float
    cause: str


def fault_of(reply: Reply) -> str:
    """What is wrong with a reply, one of `FAULTS`; what the caller saw goes before the status.

    A rate limit that names a spent quota is not waited for: the key is no good.
    """
    if reply.fault not in FAULTS:
        raise ValueError(f"fault must be one of {', '.join(FAULTS[1:])}, got {reply.fault!r}")
    if reply.fault:
        return reply.fault
    status = reply.status
    if status is None:
        raise ValueError("a reply must have a status or a fault, got neither")
    if 200 <= status < 300:
        return ""
    if status in (401, 402, 403) or (status == 429 and reply.code in _SPENT):
        return "key"
    if status == 429:
        return "limited"
    if status in (400, 422):
        return "refused"
    return "busy" if status in (408, 409, 425) or status >= 500 else "fatal"


def backoff(failures: int, seed: int, *index: int, base_s: float, ceiling_s: float) -> float:
    """Seconds to wait after so many failures in a row: between half and all of min(base · 2^(n−1), ceiling).

    The place between is drawn by seed and index, so that callers who failed together do not return together.
    """
    check_count("failures", failures, least=1)
    whole = min(ceiling_s, base_s * 2.0 ** min(failures - 1, _LARGEST_DOUBLING))
    return whole * (1 + counter_uniform(seed, *index)) / 2


def after_reply(
    progress: Progress,
    keys: tuple[KeyState, ...],
    reply: Reply,
    *,
    key: int,
    rule: RetryRule,
    now_s: float,
    seed: int,
) -> tuple[Progress, tuple[KeyState, ...]]:
    """How a reply to a call with a key changes the question's progress and the states of the keys.

    A wait that the service asks for is never cut short. It holds the key where that was limited, and the
    question where the service is at fault. An answer that is not as asked is asked for again at once.
    """
    fault = fault_of(reply)
    attempts = progress.attempts + 1
    state = keys[key]
    failures = state.strikes + 1 if fault == "limited" else attempts
    until_s = now_s + _wait(failures, reply, rule, seed, attempts, key)
    if fault == "limited":
        state = replace(state, strikes=failures, free_at_s=max(until_s, state.free_at_s))
    elif fault == "key":
        state = replace(state, dead=True)
    elif fault not in _LIKE_SERVICE:
        state = replace(state, strikes=0)
    further = fault in _LIKE_ANSWER and progress.form + 1 < rule.forms
    changed = replace(
        progress,
        attempts=attempts,
        ready_s=until_s if fault in _LIKE_SERVICE else progress.ready_s,
        form=progress.form + further,
        fault=fault,
        final=fault == "fatal" or (fault == "refused" and not further),
    )
    return changed, (*keys[:key], state, *keys[key + 1 :])


def _wait(failures: int, reply: Reply, rule: RetryRule, seed: int, *index: int) -> float:
    own = backoff(failures, seed, *index, base_s=rule.base_s, ceiling_s=rule.ceiling_s)
    if reply.retry_after_s is None:
        return own
    if not 0 <= reply.retry_after_s < math.inf:
        raise ValueError(f"retry_after_s must be finite and not negative, got {reply.retry_after_s}")
    return reply.retry_after_s + rule.base_s * counter_uniform(seed, *index)


def next_step(
    progress: Progress,
    keys: tuple[KeyState, ...],
    *,
    rule: RetryRule,
    now_s: float,
    deadline_s: float,
    seed: int,
) -> Step:
    """Use a key now, wait until one is free, or stop; never a wait that would end at the deadline or after it.

    Among free keys the seed chooses, so that the callers of a pool spread over it; those that wait for a key
    come back within `base_s` of its time, each at its own. Stopping names the last fault; where there was none,
    the keys or the time.
    """
    living = [index for index, state in enumerate(keys) if not state.dead]
    if not living:
        return Step("stop", -1, now_s, "key")
    own_s, key_s = max(now_s, progress.ready_s), min(keys[index].free_at_s for index in living)
    at_s = max(own_s, key_s)
    if progress.final or progress.attempts >= rule.attempts or not at_s < deadline_s:
        return Step("stop", -1, now_s, progress.fault or ("limited" if at_s > now_s else "timeout"))
    if at_s > now_s:
        spread_s = at_s + rule.base_s * counter_uniform(seed, progress.attempts)
        return Step("wait", -1, spread_s if key_s > own_s and spread_s < deadline_s else at_s, "")
    free = [index for index in living if keys[index].free_at_s <= now_s]
    return Step("use", free[counter_hash(seed, progress.attempts) % len(free)], now_s, "")
