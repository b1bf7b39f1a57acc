"""Laws of core.retry: one budget, no key before its time, no wait in vain; a conversation in virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core import retry
from core.retry import FAULTS, KeyState, Progress, Reply, RetryRule, Step

RULES = st.builds(
    RetryRule,
    attempts=st.integers(1, 8),
    base_s=st.floats(0.01, 2),
    ceiling_s=st.floats(2, 20),
    forms=st.integers(1, 3),
)
WAITS = st.none() | st.floats(0, 30)
REPLIES = st.one_of(
    st.builds(
        Reply, st.sampled_from([200, 400, 401, 404, 429, 500, 503, 529]), st.just(""), st.just(""), WAITS
    ),
    st.builds(Reply, st.none(), st.sampled_from(FAULTS[1:]), st.just(""), WAITS),
    st.just(Reply(429, "", "insufficient_quota", None)),
)


def said(status=None, fault="", code="", retry_after_s=None):
    return Reply(status, fault, code, retry_after_s)


@dataclass
class Conversation:
    """One question asked in virtual time: each call takes a second, the service answers from a list."""

    rule: RetryRule
    replies: list[Reply]
    keys: tuple[KeyState, ...]
    deadline_s: float = 60.0
    seed: int = 1
    progress: Progress = Progress()
    now_s: float = 0.0
    calls: list[tuple[float, int, int]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)

    def held(self) -> Step:
        """Runs to the end; the last step is a stop, or the use of a key that was answered well."""
        for _ in range(100):
            step = retry.next_step(
                self.progress,
                self.keys,
                rule=self.rule,
                now_s=self.now_s,
                deadline_s=self.deadline_s,
                seed=self.seed,
            )
            if step.kind == "stop":
                return step
            if step.kind == "wait":
                self.waits.append((self.now_s, step.until_s))
                self.now_s = step.until_s
                continue
            self.calls.append((self.now_s, step.key, self.progress.form))
            self.now_s += 1.0
            reply = self.replies[min(len(self.calls), len(self.replies)) - 1]
            self.progress, self.keys = retry.after_reply(
                self.progress,
                self.keys,
                reply,
                key=step.key,
                rule=self.rule,
                now_s=self.now_s,
                seed=self.seed,
            )
            if not self.progress.fault:
                return step
        raise AssertionError("it does not end")


RULE = RetryRule(attempts=5, base_s=1.0, ceiling_s=8.0, forms=3)


def talk(*replies, keys=1, rule=RULE, **more) -> tuple[Conversation, Step]:
    conversation = Conversation(rule, list(replies), (KeyState(),) * keys, **more)
    return conversation, conversation.held()


conversations = st.builds(
    Conversation,
    RULES,
    st.lists(REPLIES, min_size=1, max_size=8),
    st.lists(st.builds(KeyState, dead=st.booleans()), max_size=4).map(tuple),
    st.floats(0, 60),
    st.integers(0, 99),
)


@given(conversations)
def test_a_question_is_asked_at_most_as_often_as_its_budget_says_and_ends_by_its_deadline(talked):
    """cases.md G68: a policy of three attempts makes three calls, whatever the keys and the forms."""
    talked.held()
    assert len(talked.calls) <= talked.rule.attempts
    assert all(at < talked.deadline_s for at, _, _ in talked.calls)
    assert all(begun < until < talked.deadline_s for begun, until in talked.waits)


@given(conversations)
def test_no_key_is_used_before_its_time_nor_after_its_death(talked):
    held_until = [math.inf if state.dead else -math.inf for state in talked.keys]
    everyone_until = -math.inf
    talked.held()
    for (at, key, _), reply in zip(talked.calls, talked.replies + talked.replies[-1:] * 8):
        assert at >= max(held_until[key], everyone_until)
        fault, asked_s = retry.fault_of(reply), reply.retry_after_s or 0.0
        if fault == "key":
            held_until[key] = math.inf
        elif fault == "limited":
            held_until[key] = max(
                held_until[key], at + 1.0 + max(asked_s, talked.rule.base_s / 2 * (not asked_s))
            )
        elif fault in ("busy", "timeout", "connection"):
            everyone_until = at + 1.0 + asked_s


@given(conversations)
def test_a_conversation_ends_well_or_names_what_was_wrong_last(talked):
    step = talked.held()
    if step.kind == "use":
        assert talked.progress.fault == ""
    elif talked.calls and not all(state.dead for state in talked.keys):
        assert step.cause == talked.progress.fault != ""
    else:
        assert step.cause in ("key", "timeout", "limited")


@given(conversations)
def test_the_same_replies_make_the_same_plan(talked):
    again = Conversation(talked.rule, talked.replies, talked.keys, talked.deadline_s, talked.seed)
    assert talked.held() == again.held() and talked.calls == again.calls and talked.waits == again.waits


@given(st.integers(0, 99), st.integers(2, 4))
def test_a_limited_key_cools_while_another_is_used_at_once(seed, count):
    conversation, step = talk(said(429, retry_after_s=30.0), said(200), keys=count, seed=seed)
    (first, one, _), (second, other, _) = conversation.calls
    assert step.kind == "use" and one != other and second == first + 1.0 and not conversation.waits
    assert conversation.keys[one].free_at_s >= 31.0 and conversation.keys[other] == KeyState()


@given(st.floats(0, 50), st.integers(0, 99))
def test_a_wait_that_the_service_asks_for_is_kept_and_spread_by_little(asked_s, seed):
    """By less than the base each for the key and for who waits for it."""
    for status in (429, 503):
        conversation, _ = talk(said(status, retry_after_s=asked_s), said(200), seed=seed)
        at = conversation.calls[1][0]
        assert 1.0 + asked_s <= at < 1.0 + asked_s + 2 * RULE.base_s + 1e-9


def test_a_wait_beyond_the_deadline_is_not_begun():
    conversation, step = talk(said(429, retry_after_s=3600.0))
    assert step == Step("stop", -1, 1.0, "limited") and not conversation.waits


@given(st.integers(1, 100), st.integers(0, 99), st.floats(0.001, 9), st.floats(1, 99))
def test_back_off_lies_between_half_and_all_of_a_doubling_up_to_the_ceiling(failures, seed, base_s, more):
    ceiling_s = base_s * more
    wait = retry.backoff(failures, seed, 3, base_s=base_s, ceiling_s=ceiling_s)
    whole = min(ceiling_s, base_s * 2.0 ** (failures - 1))
    assert whole / 2 <= wait <= whole
    assert wait == retry.backoff(failures, seed, 3, base_s=base_s, ceiling_s=ceiling_s)


def test_a_back_off_after_thousands_of_failures_is_near_the_ceiling():
    assert 4.0 <= retry.backoff(5000, 0, base_s=1.0, ceiling_s=8.0) <= 8.0


def test_callers_that_fail_together_do_not_return_together():
    """cases.md G69: synchronised retries are a spike of their own."""
    waits = sorted(retry.backoff(1, seed, 1, 0, base_s=1.0, ceiling_s=8.0) for seed in range(100))
    assert waits[0] < 0.55 and waits[-1] > 0.95
    assert max(b - a for a, b in zip(waits, waits[1:])) < 0.1


def test_questions_that_wait_for_one_key_come_back_one_after_another():
    keys = (KeyState(free_at_s=5.0),)
    ends = sorted(
        retry.next_step(Progress(), keys, rule=RULE, now_s=0.0, deadline_s=60.0, seed=seed).until_s
        for seed in range(100)
    )
    assert 5.0 <= ends[0] and ends[-1] < 6.0 and max(b - a for a, b in zip(ends, ends[1:])) < 0.1
    near = retry.next_step(Progress(), keys, rule=RULE, now_s=0.0, deadline_s=5.0 + 1e-6, seed=3)
    assert near == Step("wait", -1, 5.0, "")


def test_every_seed_every_attempt_and_every_key_has_a_wait_of_its_own():
    def held(reply, seed, attempts, key):
        progress, keys = Progress(attempts=attempts), (KeyState(), KeyState())
        _, keys = retry.after_reply(progress, keys, reply, key=key, rule=RULE, now_s=0.0, seed=seed)
        return keys[key].free_at_s

    def come_back(seed, attempts):
        keys = (KeyState(free_at_s=5.0),)
        progress = Progress(attempts=attempts)
        return retry.next_step(progress, keys, rule=RULE, now_s=0.0, deadline_s=60.0, seed=seed).until_s

    cases = [(seed, attempts) for seed in (1, 2) for attempts in (1, 2)]
    for reply in (said(429), said(429, retry_after_s=1.0)):
        assert len({held(reply, *case, key) for case in cases for key in (0, 1)}) == 8
    assert len({come_back(*case) for case in cases}) == 4
    assert len({retry.backoff(1, 7, i, base_s=1.0, ceiling_s=8.0) for i in range(3)}) == 3


def test_only_who_waits_for_a_key_is_spread_and_never_beyond_the_deadline():
    def until(ready_s, deadline_s):
        progress, keys = Progress(ready_s=ready_s, fault="busy"), (KeyState(free_at_s=5.0),)
        return retry.next_step(progress, keys, rule=RULE, now_s=0.0, deadline_s=deadline_s, seed=3).until_s

    assert until(5.0, 60.0) == 5.0 and until(6.0, 60.0) == 6.0
    spread = until(0.0, 60.0)
    assert spread > 5.0 and until(0.0, spread) == 5.0


def test_a_key_that_cools_beyond_the_deadline_stops_as_limited():
    keys = (KeyState(free_at_s=9.0),)
    found = retry.next_step(Progress(), keys, rule=RULE, now_s=0.0, deadline_s=9.0, seed=0)
    assert found == Step("stop", -1, 0.0, "limited")


def test_a_key_is_free_at_its_time():
    keys = (KeyState(free_at_s=9.0),)
    found = retry.next_step(Progress(), keys, rule=RULE, now_s=9.0, deadline_s=60.0, seed=0)
    assert found == Step("use", 0, 9.0, "")


def test_further_attempts_may_use_further_keys():
    rule = RetryRule(attempts=99, base_s=1.0, ceiling_s=8.0, forms=1)
    used = [
        retry.next_step(
            Progress(attempts=n), (KeyState(),) * 3, rule=rule, now_s=0.0, deadline_s=1.0, seed=5
        ).key
        for n in range(30)
    ]
    assert set(used) == {0, 1, 2}


def test_failures_of_the_service_wait_longer_and_longer():
    conversation, step = talk(*[said(500)] * 5)
    lengths = [until - begun for begun, until in conversation.waits]
    assert step.cause == "busy" and len(conversation.calls) == 5
    assert all(whole / 2 <= length <= whole for length, whole in zip(lengths, (1.0, 2.0, 4.0, 8.0)))


def test_a_revoked_key_is_never_used_again_and_another_at_once():
    conversation, _ = talk(said(401), said(200), keys=2)
    assert [at for at, _, _ in conversation.calls] == [0.0, 1.0]
    assert conversation.keys[conversation.calls[0][1]].dead
    conversation, step = talk(said(401), keys=3)
    assert sorted(key for _, key, _ in conversation.calls) == [0, 1, 2] and step.cause == "key"


def test_a_spent_quota_is_no_rate_limit():
    conversation, step = talk(said(429, code="insufficient_quota"))
    assert step == Step("stop", -1, 1.0, "key") and conversation.keys[0].dead


def test_a_refused_form_is_followed_by_the_next_and_the_last_ends_it():
    conversation, step = talk(said(400))
    assert [(at, form) for at, _, form in conversation.calls] == [(0.0, 0), (1.0, 1), (2.0, 2)]
    assert step.cause == "refused"


@pytest.mark.parametrize("fault", ["unparsable", "truncated", "oversized"])
def test_an_answer_not_as_asked_is_asked_for_again_at_once_in_the_next_form(fault):
    conversation, step = talk(said(200, fault))
    assert [(at, form) for at, _, form in conversation.calls] == [
        (0.0, 0), (1.0, 1), (2.0, 2), (3.0, 2), (4.0, 2),
    ]  # fmt: skip
    assert step.cause == fault


def test_a_fatal_reply_ends_it():
    conversation, step = talk(said(404), keys=3)
    assert len(conversation.calls) == 1 and step.cause == "fatal"


def test_a_success_ends_a_row_of_limits():
    progress, keys = Progress(), (KeyState(strikes=4, free_at_s=3.0),)
    _, keys = retry.after_reply(progress, keys, said(200), key=0, rule=RULE, now_s=9.0, seed=0)
    assert keys == (KeyState(strikes=0, free_at_s=3.0),)


def test_a_limit_never_shortens_a_longer_one_that_another_call_met():
    keys = (KeyState(strikes=1, free_at_s=99.0),)
    _, keys = retry.after_reply(Progress(), keys, said(429), key=0, rule=RULE, now_s=9.0, seed=0)
    assert keys[0].free_at_s == 99.0 and keys[0].strikes == 2


@given(st.integers(0, 9))
def test_free_keys_share_the_work(attempts):
    keys = (KeyState(),) * 3
    used = [
        retry.next_step(
            Progress(attempts=attempts),
            keys,
            rule=RetryRule(attempts=99, base_s=1.0, ceiling_s=8.0, forms=1),
            now_s=0.0,
            deadline_s=1.0,
            seed=seed,
        ).key
        for seed in range(300)
    ]
    assert all(60 < used.count(key) < 140 for key in range(3))


@example(said(fault="timeout"), "timeout")
@example(said(200, "unparsable"), "unparsable")
@example(said(503, retry_after_s=1.0), "busy")
@example(said(529), "busy")
@example(said(408), "busy")
@example(said(429, code="rate_limit_exceeded"), "limited")
@example(said(401), "key")
@example(said(402), "key")
@example(said(403), "key")
@example(said(400), "refused")
@example(said(422), "refused")
@example(said(404), "fatal")
@example(said(413), "fatal")
@example(said(302), "fatal")
@example(said(204), "")
@given(REPLIES, st.none())
def test_every_reply_has_one_fault(reply, expected):
    assert retry.fault_of(reply) in FAULTS
    assert expected is None or retry.fault_of(reply) == expected


def step(**change):
    given_ = {"rule": RULE, "now_s": 0.0, "deadline_s": 9.0, "seed": 0}
    return retry.next_step(Progress(), (KeyState(),), **(given_ | change))


def test_no_key_at_all_stops_as_if_all_were_dead():
    found = retry.next_step(Progress(), (), rule=RULE, now_s=0.0, deadline_s=9.0, seed=0)
    assert found == Step("stop", -1, 0.0, "key")


def test_a_deadline_that_has_passed_stops():
    assert step(deadline_s=0.0) == Step("stop", -1, 0.0, "timeout")


@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda: RetryRule(attempts=0, base_s=1.0, ceiling_s=2.0, forms=1),
            "attempts must be positive, got 0",
        ),
        (lambda: RetryRule(attempts=1, base_s=1.0, ceiling_s=2.0, forms=0), "forms must be positive, got 0"),
        (
            lambda: RetryRule(attempts=1, base_s=math.nan, ceiling_s=2.0, forms=1),
            r"base_s must be positive and at most ceiling_s, got nan and 2\.0",
        ),
        (
            lambda: RetryRule(attempts=1, base_s=0.0, ceiling_s=2.0, forms=1),
            r"base_s must be positive and at most ceiling_s, got 0\.0 and 2\.0",
        ),
        (
            lambda: RetryRule(attempts=1, base_s=3.0, ceiling_s=2.0, forms=1),
            r"base_s must be positive and at most ceiling_s, got 3\.0 and 2\.0",
        ),
        (
            lambda: RetryRule(attempts=1, base_s=1.0, ceiling_s=math.inf, forms=1),
            r"base_s must be positive and at most ceiling_s, got 1\.0 and inf",
        ),
        (lambda: retry.fault_of(said()), "a reply must have a status or a fault, got neither"),
        (lambda: retry.fault_of(said(200, "odd")), "fault must be one of limited, .*, got 'odd'"),
        (lambda: retry.backoff(0, 0, base_s=1.0, ceiling_s=2.0), "failures must be positive, got 0"),
        (
            lambda: talk(said(429, retry_after_s=math.inf)),
            "retry_after_s must be finite and not negative, got inf",
        ),
        (
            lambda: talk(said(503, retry_after_s=-1.0)),
            r"retry_after_s must be finite and not negative, got -1\.0",
        ),
    ],
)
def test_bad_input_is_refused(call, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        call()
