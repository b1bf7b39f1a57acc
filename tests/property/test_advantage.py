"""Laws of core.advantage: who votes in the baseline, and when a group says nothing."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from functools import partial

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


def batch_standard(*args, tolerance=TOLERANCE):
    return advantage.batch_standard_advantage(*args, tolerance=tolerance, epsilon=1e-6)


RULES = {
    "mean": group_mean,
    "standard": standard,
    "batch standard": batch_standard,
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
    everyone = [v for votes in members.values() for v in votes]
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
            value = (reward - mean) / (statistics.stdev(votes) + 1e-6)
        elif says and rule == "batch standard":
            value = (reward - mean) / (statistics.stdev(everyone) + 1e-6)
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
        assert torch.equal(moved.advantage, function(*batch).advantage[order]), rule


@given(batch=rollouts())
def test_names_of_groups_do_not_matter(batch):
    for rule, function in RULES.items():
        renamed = function(batch.reward, batch.valid, 11 - 3 * batch.group_id)
        assert torch.equal(renamed.advantage, function(*batch).advantage), rule


@given(batch=rollouts(), data=st.data())
def test_groups_do_not_see_each_other(batch, data):
    """Any split of the batch between groups gives the same, save where the batch is the yardstick."""
    for rule in RULES.keys() - {"batch standard"}:
        whole = RULES[rule](*batch)
        for group in batch.group_id.unique():
            own = batch.group_id == group
            alone = RULES[rule](*(field[own] for field in batch))
            assert torch.equal(whole.advantage[own], alone.advantage), rule
            assert torch.equal(whole.has_signal[own], alone.has_signal), rule


@given(batch=rollouts(), junk=poison)
def test_a_rollout_that_is_not_valid_is_as_if_absent(batch, junk):
    """Nothing leaks from it, and it gets nothing."""
    for rule, function in RULES.items():
        dirty = function(torch.where(batch.valid, batch.reward, junk), *batch[1:])
        alone = function(*(field[batch.valid] for field in batch))
        assert torch.allclose(dirty.advantage[batch.valid], alone.advantage, rtol=0, atol=0), rule
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
        assert torch.allclose(result.advantage[:-1], function(*batch).advantage, rtol=0, atol=0), rule
        assert not result.has_signal[-1] and result.advantage[-1] == 0, rule


@given(batch=rollouts())
def test_advantages_of_a_group_sum_to_zero(batch):
    for rule in ("mean", "standard", "batch standard", "leave one out"):
        result = RULES[rule](*batch).advantage
        for group in batch.group_id.unique():
            assert abs(float(result[batch.group_id == group].sum())) < 1e-6, rule


@given(batch=rollouts(), shift=st.sampled_from([-2.0, 0.5, 4.0]))
def test_a_shift_of_all_rewards_changes_nothing(batch, shift):
    for rule in ("mean", "standard", "batch standard", "leave one out"):
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


@pytest.mark.parametrize("function", [*RULES.values(), partial(advantage.zero_variance, tolerance=0.0)])
@pytest.mark.parametrize(
    "change, text",
    [
        ({"valid": torch.ones(2)}, "valid must be bool, got torch.float32"),
        ({"group_id": torch.zeros(2)}, "group_id must be an integer tensor, got torch.float32"),
        (
            {"reward": torch.ones(1)},
            "reward, valid and group_id must have one shape [N], got [(1,), (2,), (2,)]",
        ),
        (
            {"valid": torch.ones(3).bool()},
            "reward, valid and group_id must have one shape [N], got [(2,), (3,), (2,)]",
        ),
    ],
)
def test_bad_input_is_refused(function, change, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        function(*of([1.0, 0.0])._replace(**change))


@pytest.mark.parametrize("tolerance", [math.nan, -1e-9])
def test_a_tolerance_that_is_negative_or_no_number_is_refused(tolerance):
    for function in (*RULES.values(), advantage.zero_variance):
        with pytest.raises(ValueError, match=f"^tolerance must not be negative, got {tolerance}$"):
            function(*of([1.0, 0.0]), tolerance=tolerance)


@pytest.mark.parametrize("epsilon", [math.nan, -1.0])
def test_an_epsilon_that_is_negative_or_no_number_is_refused(epsilon):
    batch = of([1.0, 0.0])
    for function in (
        partial(advantage.group_standard_advantage, *batch, tolerance=0.0),
        partial(advantage.batch_standard_advantage, *batch, tolerance=0.0),
        partial(advantage.whitened, *batch[:2]),
        partial(advantage.whitened_per_group, *batch),
    ):
        with pytest.raises(ValueError, match=f"^epsilon must not be negative, got {epsilon}$"):
            function(epsilon=epsilon)


def test_a_group_s_own_std_and_the_batch_s_are_two_functions():
    """G47, prime-rl 1188: group [0, 2] in a batch whose std is 4."""
    far = 1 + math.sqrt(46)
    batch = of([0, 2, far, far], None, [5, 5, 6, 6])
    assert float(batch.reward.std()) == pytest.approx(4)
    local = advantage.group_standard_advantage(*batch, tolerance=1e-6, epsilon=0.0)
    whole = advantage.batch_standard_advantage(*batch, tolerance=1e-6, epsilon=0.0)
    assert local.advantage.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0, 0])
    assert whole.advantage.tolist() == pytest.approx([-0.25, 0.25, 0, 0])
    assert whole.has_signal.tolist() == [True, True, False, False]


def test_a_group_of_one_trains_nothing():
    """G46, OpenRLHF 1250: with a mean for its baseline it has no signal, whatever its reward."""
    for rule, function in RULES.items():
        told = function(*of([0.7, 1.0, 0.0], None, [1, 2, 3]))
        assert not told.has_signal.any() and not told.advantage.any(), rule


def test_a_mean_that_is_zero_but_for_rounding_is_no_yardstick():
    """0.1 + 0.2 - 0.3 leaves 1e-17, by which nothing may be divided."""
    for reward in ([0.1, 0.2, -0.3], [0.3, -0.2, -0.1]):
        told = max_likelihood(*of(reward))
        assert not told.has_signal.any() and not told.advantage.any()
    # Of two rewards 2 apart: up to 2 * 2 * 2^-52 it is rounding.
    assert not max_likelihood(*of([1.0, -1.0 + 2**-50])).has_signal.any()
    assert max_likelihood(*of([1.0, -1.0 + 2**-48])).has_signal.all()
    assert max_likelihood(*of([0.0] * 2000 + [1.0])).advantage[-1] == pytest.approx(2000)


def test_a_spread_however_small_or_large_gives_finite_advantages():
    """With no tolerance and no epsilon, squares of the rewards would be 0 or infinite."""
    for scale in (1e-200, 1e200):
        told = advantage.group_standard_advantage(*of([0, scale]), tolerance=0.0, epsilon=0.0)
        assert told.advantage.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


@given(batch=rollouts(), junk=poison)
def test_whitened_values_have_mean_zero_and_std_one(batch, junk):
    """And depend on nothing outside the mask."""
    value, mask, _ = batch
    white = advantage.whitened(torch.where(mask, value, junk), mask, epsilon=1e-9)
    inside = value[mask]
    assert not white[~mask].any() and white.isfinite().all()
    if len(inside) > 1:
        mean, std = statistics.fmean(inside.tolist()), statistics.pstdev(inside.tolist())
        expected = [(v - mean) / (std + 1e-9) for v in inside.tolist()]
        assert white[mask].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    else:
        assert torch.equal(white[mask], inside)


@given(batch=rollouts(), data=st.data())
def test_whitening_follows_its_tokens_through_permutation_and_padding(batch, data):
    value, mask, _ = batch
    order = torch.tensor(data.draw(st.permutations(range(len(value)))), dtype=torch.long)
    white = advantage.whitened(value, mask, epsilon=0.0)
    assert torch.equal(advantage.whitened(value[order], mask[order], epsilon=0.0), white[order])
    padded = torch.cat([value, torch.tensor([math.nan, 9.0], dtype=F64)])
    longer = advantage.whitened(padded, torch.cat([mask, torch.zeros(2).bool()]), epsilon=0.0)
    assert torch.equal(longer[:-2], white) and not longer[-2:].any()


@given(batch=rollouts())
def test_whitening_per_group_is_whitening_each_alone(batch):
    value, mask, group_id = batch
    whole = advantage.whitened_per_group(value, mask, group_id, epsilon=1e-6)
    for group in group_id.unique():
        own = group_id == group
        assert torch.equal(whole[own], advantage.whitened(value[own], mask[own], epsilon=1e-6))


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4), (2, 1, 2)])
def test_whitening_takes_the_whole_step_in_any_shape(shape):
    """G48, slime 2235: the shards [0, 2] and [4, 6] share their statistics."""
    value = torch.tensor([0.0, 2, 4, 6], dtype=F64).view(shape)
    white = advantage.whitened(value, torch.ones(shape).bool(), epsilon=0.0)
    assert white.shape == shape
    assert white.flatten().tolist() == pytest.approx([-1.3416, -0.4472, 0.4472, 1.3416], abs=1e-4)


def test_whitening_leaves_a_value_alone_as_it_is():
    """G49, ROLL 370cb24c: its std is 0, or NaN with n - 1."""
    one = torch.tensor([3.0, 9.0], dtype=F64)
    assert advantage.whitened(one, torch.tensor([True, False]), epsilon=1e-8).tolist() == [3, 0]
    assert advantage.whitened(one, torch.tensor([False, False]), epsilon=1e-8).tolist() == [0, 0]
    assert advantage.whitened(one[:0], torch.zeros(0).bool(), epsilon=1e-8).shape == (0,)


@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
def test_whitening_makes_equal_values_exactly_zero(epsilon):
    """0.1 three times has a mean that is off by a bit."""
    white = advantage.whitened(torch.full((3,), 0.1, dtype=F64), torch.ones(3).bool(), epsilon=epsilon)
    assert white.tolist() == [0, 0, 0]


def test_whitening_counts_only_what_is_in_the_mask():
    """The mean of [2, 2, -1] is 1, not .5 with the padding in it."""
    value = torch.tensor([[2.0, 2, 0], [-1, 0, 0]], dtype=F64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    white = advantage.whitened(value, mask, epsilon=0.0)
    assert white[mask].tolist() == pytest.approx([0.70710678, 0.70710678, -1.41421356])


def test_whitening_per_group_is_per_row_of_a_table():
    """G50, OpenRLHF 1250: [[1, 3], [10, 30]], not along the other axis."""
    value = torch.tensor([1.0, 3, 10, 30], dtype=F64)
    white = advantage.whitened_per_group(value, torch.ones(4).bool(), torch.tensor([0, 0, 1, 1]), epsilon=0.0)
    assert white.tolist() == [-1, 1, -1, 1]


def test_a_nan_inside_the_mask_is_seen():
    value = torch.tensor([1.0, math.nan, 3.0], dtype=F64)
    assert advantage.whitened(value, torch.ones(3).bool(), epsilon=1e-8).isnan().all()


@pytest.mark.parametrize(
    "function, text",
    [
        (
            partial(advantage.whitened, torch.ones(2), torch.ones(3).bool()),
            "value and loss_mask must have one shape, got [(2,), (3,)]",
        ),
        (
            partial(advantage.whitened, torch.ones(2), torch.ones(2)),
            "loss_mask must be bool, got torch.float32",
        ),
        (
            partial(advantage.whitened_per_group, torch.ones(2), torch.ones(2).bool(), torch.zeros(2)),
            "group_id must be an integer tensor, got torch.float32",
        ),
        (
            partial(advantage.whitened_per_group, torch.ones(2), torch.ones(2).bool(), torch.zeros(1).long()),
            "value, loss_mask and group_id must have one shape [T], got [(2,), (2,), (1,)]",
        ),
    ],
)
def test_whitening_refuses_bad_input(function, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        function(epsilon=1e-8)


def test_a_token_outside_the_mask_may_have_any_rollout():
    """Padding has none."""
    told = advantage.token_advantage(
        torch.tensor([0.5, 1.0]),
        torch.tensor([[-1, 1], [99, 0]]),
        torch.tensor([[False, True], [False, True]]),
    )
    assert told.tolist() == [[0, 1.0], [0, 0.5]]
    none = advantage.token_advantage(torch.zeros(0), torch.tensor([0, 7]), torch.zeros(2).bool())
    assert none.tolist() == [0, 0]


def test_an_advantage_outside_the_mask_may_be_garbage():
    garbage = torch.tensor([0.5, math.nan])
    told = advantage.token_advantage(garbage, torch.tensor([0, 1]), torch.tensor([True, False]))
    assert told.tolist() == [0.5, 0]


@pytest.mark.parametrize("given_dtype, got", [(torch.bfloat16, torch.float32), (F64, F64)])
def test_token_advantages_are_float32_at_least(given_dtype, got):
    told = advantage.token_advantage(
        torch.ones(1, dtype=given_dtype), torch.zeros(2).long(), torch.ones(2).bool()
    )
    assert told.dtype == got


@pytest.mark.parametrize("stray", [-1, 2, 10**12])
def test_a_trained_token_of_no_rollout_is_refused(stray):
    """A negative index would silently be another rollout's."""
    with pytest.raises(
        ValueError, match=f"^rollout_index must be at least 0 and below the 2 rollouts, got {stray}$"
    ):
        advantage.token_advantage(torch.ones(2), torch.tensor([1, stray]), torch.ones(2).bool())


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((torch.ones(1), torch.zeros(2).long(), torch.ones(2)), "loss_mask must be bool, got torch.float32"),
        (
            (torch.ones(1), torch.zeros(2), torch.ones(2).bool()),
            "rollout_index must be an integer tensor, got torch.float32",
        ),
        (
            (torch.ones(1), torch.zeros(2).long(), torch.ones(3).bool()),
            "rollout_index and loss_mask must have one shape, got [(2,), (3,)]",
        ),
        (
            (torch.ones(1, 1), torch.zeros(2).long(), torch.ones(2).bool()),
            "advantage must have one shape [N], got (1, 1)",
        ),
    ],
)
def test_token_advantage_refuses_bad_input(arguments, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        advantage.token_advantage(*arguments)


@pytest.mark.parametrize("rule", [*RULES, "zero variance", "whitened"])
def test_a_rule_compiles_into_one_graph(rule):
    """No shape depends on the data."""
    others = {
        "zero variance": lambda *batch: (advantage.zero_variance(*batch, tolerance=TOLERANCE),),
        "whitened": lambda value, mask, _: (advantage.whitened(value, mask, epsilon=1e-8),),
    }
    function = (RULES | others)[rule]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for batch in (of([1, 0, 1], [True, True, False]), of([1, 1, 0, 4], None, [1, 2, 1, 2]), of([])):
        for one, other in zip(compiled(*batch), function(*batch)):
            assert torch.equal(one, other)


def test_a_compiled_token_of_no_rollout_has_no_number():
    """Nothing can be raised there, so it must not pass for a zero."""
    torch.compiler.reset()
    compiled = torch.compile(advantage.token_advantage, fullgraph=True, backend="eager")
    mask = torch.tensor([True, True, True, False])
    told = compiled(torch.tensor([0.5, 1.0]), torch.tensor([1, -1, 2, 5]), mask)
    assert told[[0, 3]].tolist() == [1, 0] and told[1:3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_an_index_of_few_bits_is_an_index(dtype):
    index, mask = torch.tensor([1, 1, 1], dtype=dtype), torch.tensor([True, True, True])
    assert advantage.token_advantage(torch.tensor([10.0, 20.0]), index, mask).tolist() == [20.0, 20.0, 20.0]
