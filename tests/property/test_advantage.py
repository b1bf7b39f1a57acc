"""Laws of core.advantage: who votes in the baseline, and when a group says nothing."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Rollouts, poison, rollouts

from core import advantage

F64 = torch.float64
TOLERANCE = 1e-6


def group_mean(*args, tolerance=TOLERANCE):
    return advantage.group_mean_advantage(*args, tolerance=tolerance)


def standard(*args, tolerance=TOLERANCE):
    return advantage.group_standard_advantage(*args, tolerance=tolerance, epsilon=1e-6)


def leave_one_out(*args, tolerance=TOLERANCE):
    return advantage.leave_one_out_advantage(*args, tolerance=tolerance)


def max_likelihood(*args, tolerance=TOLERANCE):
    return advantage.max_likelihood_advantage(*args, tolerance=tolerance)


RULES = {
    "mean": group_mean,
    "standard": standard,
    "leave one out": leave_one_out,
    "max likelihood": max_likelihood,
}


def of(reward, valid=None, group_id=None) -> Rollouts:
    count = len(reward)
    return Rollouts(
        torch.tensor(reward, dtype=F64),
        torch.tensor([True] * count if valid is None else valid, dtype=torch.bool),
        torch.tensor([0] * count if group_id is None else group_id, dtype=torch.long),
    )


def by_loop(rule: str, batch: Rollouts) -> tuple[list[float], list[bool]]:
    members: dict[int, list[float]] = defaultdict(list)
    for reward, valid, group in zip(*(field.tolist() for field in batch)):
        if valid and math.isfinite(reward):
            members[group].append(reward)
    found, signal = [], []
    for reward, valid, group in zip(*(field.tolist() for field in batch)):
        votes = members[group]
        mean = sum(votes) / len(votes) if votes else 0.0
        says = valid and math.isfinite(reward) and len(votes) > 1 and max(votes) - min(votes) > TOLERANCE
        says = says and (rule != "max likelihood" or mean > 0)
        value = 0.0
        if says and rule == "mean":
            value = reward - mean
        elif says and rule == "standard":
            value = (reward - mean) / (
                math.sqrt(sum((v - mean) ** 2 for v in votes) / (len(votes) - 1)) + 1e-6
            )
        elif says and rule == "leave one out":
            value = reward - (sum(votes) - reward) / (len(votes) - 1)
        elif says:
            value = (reward - mean) / mean
        found.append(value)
        signal.append(says)
    return found, signal


@given(batch=rollouts())
def test_advantages_agree_with_a_loop_over_groups(batch):
    for rule, function in RULES.items():
        result = function(*batch)
        expected, signal = by_loop(rule, batch)
        assert result.has_signal.tolist() == signal, rule
        assert result.advantage.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9), rule


@given(batch=rollouts(), data=st.data())
def test_advantage_follows_its_rollout_through_any_permutation(batch, data):
    order = torch.tensor(data.draw(st.permutations(range(len(batch.reward)))), dtype=torch.long)
    for rule, function in RULES.items():
        moved = function(*(field[order] for field in batch))
        assert torch.equal(moved.has_signal, function(*batch).has_signal[order]), rule
        assert torch.allclose(moved.advantage, function(*batch).advantage[order], rtol=0, atol=1e-9), rule


@given(batch=rollouts())
def test_names_of_groups_do_not_matter(batch):
    for rule, function in RULES.items():
        renamed = function(batch.reward, batch.valid, 11 - 3 * batch.group_id)
        assert torch.equal(renamed.advantage, function(*batch).advantage), rule


@given(batch=rollouts(), junk=poison)
def test_a_rollout_that_is_not_valid_is_as_if_absent(batch, junk):
    """Nothing leaks from it, and it gets nothing."""
    for rule, function in RULES.items():
        dirty = function(torch.where(batch.valid, batch.reward, junk), *batch[1:])
        alone = function(*(field[batch.valid] for field in batch))
        assert torch.allclose(dirty.advantage[batch.valid], alone.advantage, rtol=0, atol=1e-9), rule
        assert torch.equal(dirty.has_signal[batch.valid], alone.has_signal), rule
        assert not dirty.advantage[~batch.valid].any() and not dirty.has_signal[~batch.valid].any(), rule


@given(batch=rollouts(), junk=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_reward_that_is_not_finite_is_not_valid(batch, junk):
    extra = Rollouts(
        torch.cat([batch.reward, torch.tensor([junk], dtype=F64)]),
        torch.cat([batch.valid, torch.tensor([True])]),
        torch.cat([batch.group_id, torch.tensor([0])]),
    )
    for rule, function in RULES.items():
        result = function(*extra)
        assert torch.allclose(result.advantage[:-1], function(*batch).advantage, rtol=0, atol=1e-9), rule
        assert not result.has_signal[-1] and result.advantage[-1] == 0, rule


@given(batch=rollouts())
def test_advantages_of_a_group_sum_to_zero(batch):
    for rule in ("mean", "standard", "leave one out"):
        result = RULES[rule](*batch).advantage
        for group in batch.group_id.unique():
            assert abs(float(result[batch.group_id == group].sum())) < 1e-6, rule


@given(batch=rollouts(), shift=st.sampled_from([-2.0, 0.5, 4.0]))
def test_a_shift_of_all_rewards_changes_nothing(batch, shift):
    for rule in ("mean", "standard", "leave one out"):
        moved = RULES[rule](batch.reward + shift, *batch[1:], tolerance=1e-3)
        same = RULES[rule](*batch, tolerance=1e-3)
        if torch.equal(moved.has_signal, same.has_signal):
            assert torch.allclose(moved.advantage, same.advantage, rtol=1e-6, atol=1e-6), rule


@given(batch=rollouts())
def test_no_signal_means_an_advantage_of_exactly_zero(batch):
    for rule, function in RULES.items():
        result = function(*batch)
        assert not result.advantage[~result.has_signal].any(), rule
        assert result.advantage.isfinite().all(), rule


@given(batch=rollouts())
def test_zero_variance_and_signal_split_the_groups_of_two_and_more(batch):
    flat = advantage.zero_variance(*batch, tolerance=TOLERANCE)
    signal = group_mean(*batch).has_signal
    for group in batch.group_id.unique():
        own = batch.group_id == group
        several = int((own & batch.valid).sum()) >= 2
        assert bool(flat[own].all()) == bool(flat[own].any())
        assert several == (bool(flat[own].any()) != bool(signal[own].any())) or not several
        assert several or not (flat[own].any() or signal[own].any())


@given(batch=rollouts())
def test_leave_one_out_is_group_mean_stretched(batch):
    count = torch.tensor([int(((batch.group_id == g) & batch.valid).sum()) for g in batch.group_id])
    stretched = group_mean(*batch).advantage * count / (count - 1).clamp(min=1)
    assert torch.allclose(leave_one_out(*batch).advantage, stretched, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "case, rule, reward, valid, group_id, expected",
    [
        ("two groups of two", "mean", [6, 3, 9, 12], None, [0, 0, 1, 1], [1.5, -1.5, -1.5, 1.5]),
        (
            "two groups of two",
            "standard",
            [6, 3, 9, 12],
            None,
            [0, 0, 1, 1],
            [0.7071, -0.7071, -0.7071, 0.7071],
        ),
        ("a third group of one", "leave one out", [6, 3, 9, 12, 1], None, [0, 0, 1, 1, 2], [3, -3, -3, 3, 0]),
        (
            "two groups of two",
            "max likelihood",
            [6, 3, 9, 12],
            None,
            [0, 0, 1, 1],
            [1 / 3, -1 / 3, -1 / 7, 1 / 7],
        ),
        ("one of four is not valid", "mean", [1, 1, 0, 0], [1, 0, 1, 1], None, [2 / 3, 0, -1 / 3, -1 / 3]),
        ("fifteen alike and a 0 that is not valid", "mean", [0.5] * 15 + [0], [1] * 15 + [0], None, [0] * 16),
        ("one of three is not valid", "mean", [2, 4, 0], [1, 1, 0], None, [-1, 1, 0]),
        ("only one is valid", "mean", [2, 4, 0], [1, 0, 0], None, [0, 0, 0]),
        ("a group of one", "mean", [0.7], None, None, [0]),
        ("a group of one", "leave one out", [0.7], None, None, [0]),
        ("std with n - 1", "standard", [0, 2], None, None, [-0.7071, 0.7071]),
        ("two of four pass", "standard", [1, 0, 0, 1], None, None, [0.866, -0.866, -0.866, 0.866]),
        ("one of four passes", "standard", [1, 0, 0, 0], None, None, [1.5, -0.5, -0.5, -0.5]),
        ("two of four pass", "leave one out", [1, 0, 0, 1], None, None, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("one of four is not valid", "leave one out", [1, 0, 0, 1], [1, 1, 0, 1], None, [0.5, -1, 0, 0.5]),
        ("one of four passes", "max likelihood", [1, 0, 0, 0], None, None, [3, -1, -1, -1]),
        ("the mean is not positive", "max likelihood", [-1, 1], None, None, [0, 0]),
        ("judge noise", "standard", [0.7, 0.7 + 1e-7, 0.7, 0.7], None, None, [0, 0, 0, 0]),
        ("float noise", "mean", [0.1 + 0.2, 0.3], None, None, [0, 0]),
    ],
)
def test_worked_examples(case, rule, reward, valid, group_id, expected):
    result = RULES[rule](*of(reward, None if valid is None else [bool(v) for v in valid], group_id))
    assert result.advantage.tolist() == pytest.approx(expected, abs=1e-4)


def test_the_spread_must_exceed_the_tolerance():
    """A spread that equals the tolerance is no difference."""
    assert not group_mean(*of([1.0, 1.5]), tolerance=0.5).has_signal.any()
    assert group_mean(*of([1.0, 1.5]), tolerance=0.49).has_signal.all()
    assert not group_mean(*of([1.0, 1.0]), tolerance=0.0).has_signal.any()


def test_zero_variance_needs_a_group_of_two():
    """A group alone has no signal, and no variance to be zero."""
    batch = of([1, 2, 3, 3, 5], None, [1, 1, 2, 2, 3])
    assert advantage.zero_variance(*batch, tolerance=1e-6).tolist() == [False, False, True, True, False]
    assert group_mean(*batch).has_signal.tolist() == [True, True, False, False, False]


def test_rows_of_one_rollout_vote_once():
    """Four rollouts, of which two have two rows."""
    once = group_mean(*of([1, 0, 1, 0])).advantage
    rollout_of_row = torch.tensor([0, 0, 1, 2, 2, 3])
    rows = advantage.token_advantage(once, rollout_of_row, torch.ones(6, dtype=torch.bool))
    assert rows.tolist() == [0.5, 0.5, -0.5, 0.5, 0.5, -0.5]


def test_every_row_masks_its_rollouts_advantage_itself():
    mask = torch.tensor([False, True, True, False, False, False, False, True])
    spread = advantage.token_advantage(torch.tensor([0.5]), torch.zeros(8, dtype=torch.long), mask)
    assert spread.tolist() == [0, 0.5, 0.5, 0, 0, 0, 0, 0.5]


def test_arithmetic_is_float32_at_least_and_inputs_are_untouched():
    batch = of([1.0, 0.0, 1.0])
    before = [field.clone() for field in batch]
    for function in RULES.values():
        function(*batch)
        for given_dtype, got in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
            assert function(batch.reward.to(given_dtype), *batch[1:]).advantage.dtype == got
    assert all(torch.equal(a, b) for a, b in zip(before, batch))


@pytest.mark.parametrize("rule", RULES)
def test_bad_input_is_refused(rule):
    batch = of([1.0, 0.0])
    with pytest.raises(ValueError, match="tolerance must not be negative, got nan"):
        RULES[rule](*batch, tolerance=math.nan)
    with pytest.raises(ValueError, match="valid must be bool, got torch.int64"):
        RULES[rule](batch.reward, batch.valid.long(), batch.group_id)
    with pytest.raises(ValueError, match=r"reward, valid and group_id must have one shape \[N\], got"):
        RULES[rule](batch.reward[:1], batch.valid, batch.group_id)


def test_standard_refuses_a_negative_epsilon():
    with pytest.raises(ValueError, match="epsilon must not be negative, got -1"):
        advantage.group_standard_advantage(*of([1.0, 0.0]), tolerance=0.0, epsilon=-1)
