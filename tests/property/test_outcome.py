"""Laws of core.outcome: a system error is not a zero."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import outcome
from core.outcome import Outcome

OUTCOMES = [
    Outcome(kind="solved"),
    Outcome(kind="failed"),
    *(Outcome(kind="truncated", reason=reason) for reason in outcome.TRUNCATIONS),
    Outcome(kind="system_error", phase="verify", cause="judge timed out"),
    Outcome(kind="cancelled"),
]


@pytest.mark.parametrize("case", OUTCOMES, ids=lambda o: o.reason or o.kind)
def test_an_outcome_survives_a_dictionary(case):
    assert Outcome(**asdict(case)) == case


@given(scored=st.sets(st.sampled_from(outcome.TRUNCATIONS)))
def test_only_what_the_policy_did_has_a_valid_reward(scored):
    for case in OUTCOMES:
        expected = case.kind in ("solved", "failed") or case.reason in scored
        assert outcome.has_valid_reward(case, scored_truncations=scored) is expected
        assert outcome.is_retriable(case) is (case.kind == "system_error")


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"kind": "crashed"}, "kind must be one of solved, failed, .* got 'crashed'"),
        ({"kind": "truncated"}, "reason must be set exactly when truncated, got 'truncated' with ''"),
        ({"kind": "failed", "reason": "context"}, "reason must be set exactly when truncated"),
        ({"kind": "truncated", "reason": "bored"}, "reason must be one of context, turn_cap, .* got 'bored'"),
        (
            {"kind": "system_error", "phase": "verify"},
            "a system error must name phase and cause, got 'verify' and ''",
        ),
        ({"kind": "system_error", "cause": "x"}, "a system error must name phase and cause, got '' and 'x'"),
        (
            {"kind": "failed", "phase": "verify"},
            "phase and cause must be empty unless a system error, got 'verify' and ''",
        ),
        (
            {"kind": "cancelled", "cause": "late"},
            "phase and cause must be empty unless a system error, got '' and 'late'",
        ),
    ],
)
def test_an_outcome_that_says_too_little_is_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        Outcome(**fields)


def test_an_unknown_truncation_is_refused():
    text = "scored_truncations must be among context, turn_cap, step_cap, wall_clock, got bored, tired"
    with pytest.raises(ValueError, match=f"^{text}$"):
        outcome.has_valid_reward(OUTCOMES[0], scored_truncations={"tired", "context", "bored"})


@pytest.mark.parametrize(
    "policy, counts, verdict",
    [
        ("wait: siblings still run", {"valid": 2, "lost": 1, "retriable": 0, "min_valid": 2}, "wait"),
        ("refill: a retry is left", {"valid": 3, "lost": 0, "retriable": 1, "min_valid": 2}, "refill"),
        ("survivors of at least two", {"valid": 3, "lost": 1, "retriable": 0, "min_valid": 2}, "survivors"),
        ("drop: all four or nothing", {"valid": 3, "lost": 1, "retriable": 0, "min_valid": 4}, "drop"),
    ],
)
def test_one_system_error_among_four_under_each_policy(policy, counts, verdict):
    assert outcome.group_verdict(size=4, **counts) == verdict


@st.composite
def counts(draw):
    size = draw(st.integers(2, 8))
    valid = draw(st.integers(0, size))
    lost = draw(st.integers(0, size - valid))
    retriable = draw(st.integers(0, size - valid - lost))
    minimum = draw(st.integers(2, size))
    return {"size": size, "valid": valid, "lost": lost, "retriable": retriable, "min_valid": minimum}


@given(case=counts())
def test_a_group_is_trained_only_with_enough_valid_rewards_and_nothing_left_to_come(case):
    verdict = outcome.group_verdict(**case)
    if verdict in ("complete", "survivors"):
        assert case["valid"] >= case["min_valid"] and case["valid"] + case["lost"] == case["size"]
        assert (verdict == "complete") == (case["lost"] == 0)
    if verdict in ("wait", "refill"):
        assert case["valid"] + case["lost"] < case["size"]
        assert case["size"] - case["lost"] >= case["min_valid"]
    assert (verdict == "drop") == (case["size"] - case["lost"] < case["min_valid"])


@given(case=counts())
def test_waiting_always_ends(case):
    """From any state, whatever becomes of the trials, a verdict is reached that is final."""
    open_trials = case["size"] - case["valid"] - case["lost"]
    for survivors in range(open_trials + 1):
        final = {
            **case,
            "valid": case["valid"] + survivors,
            "lost": case["lost"] + open_trials - survivors,
            "retriable": 0,
        }
        assert outcome.group_verdict(**final) in ("complete", "survivors", "drop")


GROUP = {"size": 4, "valid": 1, "lost": 1, "retriable": 1, "min_valid": 2}


@pytest.mark.parametrize(
    "change, text",
    [
        ({"min_valid": 1}, "min_valid must lie between 2 and the group size 4, got 1"),
        ({"min_valid": 5}, "min_valid must lie between 2 and the group size 4, got 5"),
        ({"valid": 3, "retriable": 0, "lost": 2}, r"counts must fit the group size 4, got 3 \+ 2 \+ 0"),
        ({"valid": 3}, r"counts must fit the group size 4, got 3 \+ 1 \+ 1"),
        ({"valid": -1}, r"counts must fit the group size 4, got -1 \+ 1 \+ 1"),
        ({"lost": -1}, r"counts must fit the group size 4, got 1 \+ -1 \+ 1"),
        ({"retriable": -1}, r"counts must fit the group size 4, got 1 \+ 1 \+ -1"),
        ({"size": 0}, "size must be positive, got 0"),
        ({"size": 4.0}, r"size must be a whole number, got 4\.0"),
        ({"min_valid": True}, "min_valid must be a whole number, got True"),
        ({"valid": 1.0}, r"valid must be a whole number, got 1\.0"),
        ({"lost": float("nan")}, "lost must be a whole number, got nan"),
        ({"retriable": False}, "retriable must be a whole number, got False"),
    ],
)
def test_impossible_counts_are_refused(change, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        outcome.group_verdict(**(GROUP | change))


@pytest.mark.parametrize("min_valid", [2, 4])
def test_the_bounds_of_min_valid_are_allowed(min_valid):
    assert outcome.group_verdict(size=4, valid=4, lost=0, retriable=0, min_valid=min_valid) == "complete"


def test_a_group_of_the_least_size_waits_for_both():
    assert outcome.group_verdict(size=2, valid=1, lost=0, retriable=0, min_valid=2) == "wait"
    assert outcome.group_verdict(size=2, valid=1, lost=0, retriable=1, min_valid=2) == "refill"


def test_rows_of_one_rollout_must_agree_on_the_reward():
    with pytest.raises(ValueError, match="rows of rollout 7 must agree on the reward, got 1.0 and 0.0"):
        outcome.reward_per_rollout([3, 7, 7], [0.5, 1.0, 0.0])
    with pytest.raises(ValueError, match="rows of rollout 7 must agree on the reward, got 0.0 and 1.0"):
        outcome.reward_per_rollout([7, 7], [0.0, 1.0])


def test_zero_is_a_reward_and_none_is_not():
    """Scores of 0.0 are kept where a default would take their place."""
    assert outcome.reward_per_rollout([1, 1, 2], [0.0, 0.0, None]) == {1: 0.0, 2: None}
    with pytest.raises(ValueError, match="rows of rollout 1 must agree on the reward, got None and 0.0"):
        outcome.reward_per_rollout([1, 1], [None, 0.0])


@given(rewards=st.dictionaries(st.integers(0, 9), st.none() | st.floats(-5, 5)), data=st.data())
def test_rewards_per_rollout_do_not_depend_on_how_many_rows_repeat_them_nor_on_their_order(rewards, data):
    rows = [owner for owner in rewards for _ in range(data.draw(st.integers(1, 3)))]
    rows = data.draw(st.permutations(rows))
    assert outcome.reward_per_rollout(rows, [rewards[owner] for owner in rows]) == rewards


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match=f"the reward of rollout 7 must be finite or None, got {value}"):
        outcome.reward_per_rollout([3, 7], [0.5, value])


def test_rollouts_and_rewards_must_be_equally_many():
    with pytest.raises(ValueError, match="rollout_id and reward must be equally long, got 2 and 1"):
        outcome.reward_per_rollout([1, 2], [0.5])


@pytest.mark.parametrize(
    "errors, trials, stop", [(2, 10, False), (3, 10, True), (3, 9, False), (0, 0, False), (10, 10, True)]
)
def test_a_run_stops_when_system_errors_pass_the_bound(errors, trials, stop):
    found = outcome.too_many_system_errors(system_errors=errors, trials=trials, max_rate=0.2, min_trials=10)
    assert found is stop


@pytest.mark.parametrize("rate, stop", [(0.0, True), (1.0, False)])
def test_the_ends_of_the_rate_are_none_and_all(rate, stop):
    assert outcome.too_many_system_errors(system_errors=1, trials=1, max_rate=rate, min_trials=0) is stop
    assert not outcome.too_many_system_errors(system_errors=0, trials=1, max_rate=rate, min_trials=0)


@given(scale=st.sampled_from([10, 100, 200, 1000]), trials=st.integers(1, 500), data=st.data())
def test_the_gate_is_at_the_rate_as_written_and_not_as_rounded(scale, trials, data):
    """3 of 600 at 0.005, and 29 of 100 at 0.29, are not too many; one more is."""
    share = data.draw(st.integers(0, scale))
    allowed = share * trials // scale
    for errors in {min(allowed, trials), min(allowed + 1, trials)}:
        found = outcome.too_many_system_errors(
            system_errors=errors, trials=trials, max_rate=float(f"{share / scale:.3f}"), min_trials=0
        )
        assert found == (errors * scale > share * trials)


@pytest.mark.parametrize(
    "errors, trials, rate", [(29, 100, 0.29), (3, 600, 0.005), (57, 100, 0.57), (1, 3, 1 / 3)]
)
def test_a_share_that_is_the_rate_is_not_above_it_and_one_more_is(errors, trials, rate):
    """0.29 * 100 is 28.999999999999996."""
    for more in (0, 1):
        found = outcome.too_many_system_errors(
            system_errors=errors + more, trials=trials, max_rate=rate, min_trials=0
        )
        assert found is bool(more)


def test_no_trial_has_too_many_system_errors():
    assert not outcome.too_many_system_errors(system_errors=0, trials=0, max_rate=0.0, min_trials=0)


AUDIT = {"system_errors": 1, "trials": 2, "max_rate": 0.5, "min_trials": 1}


@pytest.mark.parametrize(
    "change, text",
    [
        ({"system_errors": 3}, "system_errors must lie between 0 and 2 trials, got 3"),
        ({"system_errors": -1}, "system_errors must lie between 0 and 2 trials, got -1"),
        ({"system_errors": True}, "system_errors must be a whole number, got True"),
        ({"trials": -1}, "trials must not be negative, got -1"),
        ({"trials": 2.0}, r"trials must be a whole number, got 2\.0"),
        ({"min_trials": -1}, "min_trials must not be negative, got -1"),
        ({"max_rate": float("nan")}, "max_rate must lie between 0 and 1, got nan"),
        ({"max_rate": -0.1}, r"max_rate must lie between 0 and 1, got -0\.1"),
        ({"max_rate": 1.1}, r"max_rate must lie between 0 and 1, got 1\.1"),
    ],
)
def test_an_audit_that_could_not_stop_anything_is_refused(change, text):
    """With a NaN for a rate no number of errors would ever be too many."""
    with pytest.raises(ValueError, match=f"^{text}$"):
        outcome.too_many_system_errors(**(AUDIT | change))
