"""core/retry.py against its formula, and against a world that breaks in every way."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.retry import FAULTS, KeyState, Progress, Reply, RetryRule, after_reply, backoff, fault_of, next_step

times = st.floats(0.01, 60)


@given(st.integers(1, 80), st.integers(0, 2**40), st.lists(st.integers(0, 99), max_size=2), times, times)
def test_backoff_lies_between_half_and_all_of_a_doubling_under_its_ceiling(
    failures: int, seed: int, index: list[int], base: float, ceiling: float
) -> None:
    whole = base
    for _ in range(failures - 1):
        whole = min(2 * whole, ceiling)
    whole = min(whole, ceiling)
    found = backoff(failures, seed, *index, base_s=base, ceiling_s=ceiling)
    assert whole / 2 * (1 - 1e-12) <= found <= whole * (1 + 1e-12)
    assert found == backoff(failures, seed, *index, base_s=base, ceiling_s=ceiling)


def test_backoff_is_spread_over_its_half() -> None:
    draws = [backoff(1, 0, k, base_s=1.0, ceiling_s=9.0) for k in range(2000)]
    mean = math.fsum(draws) / len(draws)
    assert abs(mean - 0.75) < 5 * 0.5 / math.sqrt(12 * len(draws))


@pytest.mark.parametrize("fault", [one for one in FAULTS if one])
def test_fault_of_takes_what_the_caller_saw_before_the_status(fault: str) -> None:
    assert fault_of(Reply(status=200, fault=fault, code="", retry_after_s=None)) == fault


@pytest.mark.parametrize(
    ("status", "code", "fault"),
    [
        (200, "", ""),
        (429, "", "limited"),
        (429, "insufficient_quota", "key"),
        (401, "", "key"),
        (503, "", "busy"),
    ],
)
def test_fault_of_a_status(status: int, code: str, fault: str) -> None:
    assert fault_of(Reply(status=status, fault="", code=code, retry_after_s=None)) == fault


REPLIES = [
    Reply(status=200, fault="", code="", retry_after_s=None),
    Reply(status=429, fault="", code="", retry_after_s=None),
    Reply(status=429, fault="", code="", retry_after_s=7.0),
    Reply(status=429, fault="", code="insufficient_quota", retry_after_s=None),
    Reply(status=503, fault="", code="", retry_after_s=None),
    Reply(status=503, fault="", code="", retry_after_s=3.0),
    *(Reply(status=None, fault=fault, code="", retry_after_s=None) for fault in FAULTS if fault),
]

rules = st.builds(
    RetryRule,
    attempts=st.integers(1, 6),
    base_s=st.floats(0.1, 2),
    ceiling_s=st.floats(2, 20),
    forms=st.integers(1, 3),
)


@settings(max_examples=100)
@given(rules, st.integers(1, 3), st.integers(0, 10**6), st.floats(1, 200))
def test_a_question_keeps_its_budget_its_waits_and_its_deadline(
    rule: RetryRule, pool: int, seed: int, deadline: float
) -> None:
    world, now, calls = random.Random(seed), 0.0, 0
    progress, keys = Progress(), (KeyState(),) * pool
    key_asked, asked, dead = [-math.inf] * pool, -math.inf, [False] * pool
    for _ in range(60):
        step = next_step(progress, keys, rule=rule, now_s=now, deadline_s=deadline, seed=seed)
        if step.kind == "stop":
            assert step.cause in FAULTS and step.cause
            return
        if step.kind == "wait":
            assert now < step.until_s < deadline
            now = step.until_s
            continue
        assert step.kind == "use" and calls < rule.attempts and now < deadline
        assert now >= asked and now >= key_asked[step.key] and not dead[step.key]
        calls += 1
        now += world.random()
        reply = world.choice(REPLIES)
        fault = fault_of(reply)
        progress, keys = after_reply(progress, keys, reply, key=step.key, rule=rule, now_s=now, seed=seed)
        assert progress.attempts == calls and progress.fault == fault and progress.form < rule.forms
        dead[step.key] = dead[step.key] or fault == "key"
        if reply.retry_after_s is not None:
            until = now + reply.retry_after_s
            if fault == "limited":
                key_asked[step.key] = max(key_asked[step.key], until)
            else:
                asked = max(asked, until)
        if not fault:
            return
    raise AssertionError("a question without end")
