"""core/retry.py against tables and a search over whole seconds."""

from __future__ import annotations

import oracle_retry as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.retry import (
    FAULTS,
    KeyState,
    Progress,
    Reply,
    RetryRule,
    after_reply,
    backoff,
    fault_of,
    next_step,
)

seconds = st.integers(-3, 12)


@pytest.mark.parametrize("code", ["", "insufficient_quota", "rate_limit_exceeded"])
def test_fault_of_every_status(code: str) -> None:
    for status in range(100, 600):
        assert fault_of(Reply(status, "", code, None)) == oracle.fault_of(status, code), status


@given(st.integers(1, 90), st.integers(0, 9), st.sampled_from([0.5, 1.0, 3.0]))
def test_backoff_is_a_part_of_a_repeated_doubling(failures: int, seed: int, base_s: float) -> None:
    whole = oracle.whole_backoff(failures, base_s, 20.0)
    assert whole / 2 <= backoff(failures, seed, base_s=base_s, ceiling_s=20.0) <= whole


@given(
    seconds,
    st.lists(st.none() | seconds, max_size=4),
    st.integers(0, 6),
    st.integers(0, 12),
    st.integers(0, 5),
)
def test_next_step_is_the_first_second_at_which_a_key_may_be_used(
    ready_s: int, free_at_s: list[int | None], now_s: int, deadline_s: int, seed: int
) -> None:
    keys = tuple(
        KeyState(free_at_s=0.0, dead=True) if free is None else KeyState(free_at_s=free) for free in free_at_s
    )
    step = next_step(
        Progress(ready_s=ready_s),
        keys,
        rule=RetryRule(attempts=1, base_s=1.0, ceiling_s=1.0, forms=1),
        now_s=now_s,
        deadline_s=deadline_s,
        seed=seed,
    )
    expected = oracle.first_call(ready_s, free_at_s, now_s, deadline_s)
    if expected is None:
        assert step.kind == "stop"
    elif expected[0] > now_s:
        assert step.kind == "wait" and expected[0] <= step.until_s < min(expected[0] + 1, deadline_s)
    else:
        assert step.kind == "use" and step.key in expected[1]


@given(
    st.sampled_from(FAULTS[1:]),
    st.none() | st.integers(0, 40),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_after_reply_holds_who_must_wait(
    fault: str, asked_s: int | None, attempts: int, form: int, forms: int
) -> None:
    rule = RetryRule(attempts=9, base_s=2.0, ceiling_s=8.0, forms=forms)
    before = Progress(attempts=attempts, form=min(form, forms - 1))
    keys = (KeyState(), KeyState())
    failures = 1 if fault == "limited" else attempts + 1
    whole = oracle.whole_backoff(failures, 2.0, 8.0)
    after, states = after_reply(
        before, keys, Reply(None, fault, "", asked_s), key=1, rule=rule, now_s=100.0, seed=5
    )
    expected = oracle.held(fault, asked_s, 100.0, whole / 2)
    assert states[0] == keys[0] and states[1].dead == expected["dead"]
    for at_least, found in ((expected["key"], states[1].free_at_s), (expected["question"], after.ready_s)):
        if at_least is None:
            assert found < 0
        else:
            assert at_least <= found <= at_least + (whole / 2 if asked_s is None else 2.0)
    answered = fault in ("unparsable", "truncated", "oversized", "refused")
    assert after.form == (min(before.form + 1, forms - 1) if answered else before.form)
    assert after.final == (fault == "fatal" or (fault == "refused" and before.form == forms - 1))
    assert (after.attempts, after.fault) == (attempts + 1, fault)
