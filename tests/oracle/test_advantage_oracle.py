"""core/advantage.py against loops over groups, and the published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import oracle_advantage as oracle
import pytest
from comparing import assert_same, flags, junk, numbers, places
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from core.advantage import (
    GroupAdvantage,
    batch_standard_advantage,
    group_mean_advantage,
    group_standard_advantage,
    leave_one_out_advantage,
    max_likelihood_advantage,
    token_advantage,
    whitened,
    whitened_per_group,
    zero_variance,
)

Table = tuple[list[float], list[bool], list[int]]
"""reward, valid, group_id"""

RULES: dict[str, tuple[Callable[..., GroupAdvantage], Callable[..., oracle.Answer]]] = {
    "group_mean": (group_mean_advantage, oracle.group_mean),
    "leave_one_out": (leave_one_out_advantage, oracle.leave_one_out),
    "max_likelihood": (max_likelihood_advantage, oracle.max_likelihood),
}

tolerances = st.sampled_from([0.0, 1e-6, 0.3])


@st.composite
def rollouts(draw: st.DrawFn) -> Table:
    """Rollouts in groups of any size, some without a valid reward, some with one that is no number."""
    reward = st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan, math.inf]) | st.floats(-3, 3)
    row = st.tuples(reward, st.sampled_from([True, True, False]), st.sampled_from([-7, 0, 3, 10**12]))
    rows = draw(st.lists(row, max_size=12))
    return [r for r, _, _ in rows], [v for _, v, _ in rows], [g for _, _, g in rows]


def spread(table: Table, group: int) -> float:
    """Largest minus smallest valid reward of a group."""
    rewards = [r for r, v, g in zip(*table) if g == group and v and math.isfinite(r)]
    return max(rewards) - min(rewards) if rewards else 0.0


def decidable(table: Table, tolerance: float) -> bool:
    """No spread and no mean within rounding of where the rule turns."""
    for group in set(table[2]):
        rewards = [r for r, v, g in zip(*table) if g == group and v and math.isfinite(r)]
        if rewards and 0 < abs(math.fsum(rewards)) < 1e-9:
            return False
        if 0 < abs(spread(table, group) - tolerance) < 1e-9:
            return False
    return True


def tensors(table: Table) -> tuple[Tensor, Tensor, Tensor]:
    """The table as a function takes it."""
    return numbers(table[0]), flags(table[1]), places(table[2])


@pytest.mark.parametrize("rule", RULES)
@given(table=rollouts(), tolerance=tolerances)
def test_advantage_is_what_the_loop_over_groups_gives(rule: str, table: Table, tolerance: float) -> None:
    assume(decidable(table, tolerance))
    function, expected = RULES[rule]
    found = function(*tensors(table), tolerance=tolerance)
    advantage, signal = expected(*table, tolerance)
    assert_same(found.has_signal, signal, what="has_signal")
    assert_same(found.advantage, advantage, what="advantage")


@given(rollouts(), tolerances, st.sampled_from([1e-8, 1e-6, 0.1]))
def test_group_standard_advantage_is_what_the_loop_over_groups_gives(
    table: Table, tolerance: float, epsilon: float
) -> None:
    assume(decidable(table, tolerance))
    assume(all(spread(table, group) == 0 or spread(table, group) > 1e-5 for group in table[2]))
    found = group_standard_advantage(*tensors(table), tolerance=tolerance, epsilon=epsilon)
    advantage, signal = oracle.group_standard(*table, tolerance, epsilon)
    assert_same(found.has_signal, signal, what="has_signal")
    assert_same(found.advantage, advantage, what="advantage")


@given(rollouts(), tolerances, st.sampled_from([1e-8, 1e-6, 0.1]))
def test_batch_standard_advantage_is_what_the_loop_over_groups_gives(
    table: Table, tolerance: float, epsilon: float
) -> None:
    assume(decidable(table, tolerance))
    assume(all(spread(table, group) == 0 or spread(table, group) > 1e-5 for group in table[2]))
    found = batch_standard_advantage(*tensors(table), tolerance=tolerance, epsilon=epsilon)
    advantage, signal = oracle.batch_standard(*table, tolerance, epsilon)
    assert_same(found.has_signal, signal, what="has_signal")
    assert_same(found.advantage, advantage, what="advantage")


values = st.sampled_from([0.0, 1.0, 2.0, 7.5]) | st.floats(-50, 50).map(lambda x: round(x, 3))
masked_values = st.lists(
    st.tuples(values, st.just(True), st.integers(-1, 1))
    | st.tuples(junk, st.just(False), st.integers(-1, 1)),
    max_size=9,
)


@given(masked_values, st.sampled_from([1e-8, 1e-3, 1.0]))
def test_whitened_is_the_textbook_formula_over_the_mask(
    rows: list[tuple[float, bool, int]], epsilon: float
) -> None:
    value, mask = [x for x, _, _ in rows], [m for _, m, _ in rows]
    found = whitened(numbers(value), flags(mask), epsilon=epsilon)
    assert_same(found, oracle.whitened(value, mask, epsilon), absolute=1e-10)


@given(masked_values, st.sampled_from([1e-8, 1e-3, 1.0]))
def test_whitened_per_group_is_the_textbook_formula_in_every_group(
    rows: list[tuple[float, bool, int]], epsilon: float
) -> None:
    value, mask, group = [x for x, _, _ in rows], [m for _, m, _ in rows], [g for _, _, g in rows]
    found = whitened_per_group(numbers(value), flags(mask), places(group), epsilon=epsilon)
    expected = oracle.whitened_per_group(value, mask, group, epsilon)
    assert_same(found, expected, absolute=1e-10)


@given(rollouts(), tolerances)
def test_zero_variance_is_what_the_loop_over_groups_gives(table: Table, tolerance: float) -> None:
    assume(decidable(table, tolerance))
    found = zero_variance(*tensors(table), tolerance=tolerance)
    assert_same(found, oracle.zero_variance(*table, tolerance))


@given(
    st.lists(st.floats(-3, 3), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=8),
)
def test_token_advantage_is_the_rollouts_on_trained_tokens(
    advantage: list[float], tokens: list[tuple[int, bool]]
) -> None:
    index, mask = [place % len(advantage) for place, _ in tokens], [m for _, m in tokens]
    found = token_advantage(numbers(advantage), places(index), flags(mask))
    assert_same(found, oracle.token_advantage(advantage, index, mask))


def one_group(
    function: Callable[..., GroupAdvantage], reward: Sequence[float], **knobs: float
) -> list[float]:
    """A single group of valid rollouts."""
    found = function(
        numbers(reward), flags([True] * len(reward)), places([5] * len(reward)), tolerance=1e-6, **knobs
    )
    return found.advantage.tolist()


# losses.md 4.


def test_grpo_of_two_of_four_is_0_866023903787() -> None:
    x = 0.866023903787
    found = one_group(group_standard_advantage, [1, 0, 0, 1], epsilon=1e-6)
    assert_same(found, [x, -x, -x, x], relative=1e-11)


def test_grpo_of_one_of_four_is_1_49999700001() -> None:
    found = one_group(group_standard_advantage, [1, 0, 0, 0], epsilon=1e-6)
    assert_same(found, [1.49999700001] + [-0.499999000002] * 3, relative=1e-11)


def test_dr_grpo_of_two_of_four_is_a_half() -> None:
    assert_same(one_group(group_mean_advantage, [1, 0, 0, 1]), [0.5, -0.5, -0.5, 0.5])


def test_rloo_of_two_of_four_is_two_thirds() -> None:
    assert_same(one_group(leave_one_out_advantage, [1, 0, 0, 1]), [2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_maxrl_of_one_of_four_is_three() -> None:
    assert_same(one_group(max_likelihood_advantage, [1, 0, 0, 0]), [3.0, -1.0, -1.0, -1.0])


@pytest.mark.parametrize("reward", [[1.0, -1.0], [0.0, -2.0]], ids=["mean-zero", "mean-negative"])
def test_maxrl_of_a_mean_that_is_not_positive_has_no_signal(reward: list[float]) -> None:
    assert_same(one_group(max_likelihood_advantage, reward), [0.0, 0.0])


@pytest.mark.parametrize("rule", RULES)
def test_a_group_of_one_has_no_advantage(rule: str) -> None:
    assert_same(one_group(RULES[rule][0], [0.7]), [0.0])


def test_a_group_of_one_has_no_standard_advantage() -> None:
    assert_same(one_group(group_standard_advantage, [0.7], epsilon=1e-6), [0.0])


@pytest.mark.parametrize(
    ("epsilon", "largest"), [(1e-8, 1.25), (1e-6, 0.0714)], ids=["full-size-fake-signal", "damped"]
)
def test_judge_noise_becomes_a_signal_only_without_a_tolerance(epsilon: float, largest: float) -> None:
    noisy = numbers([0.7, 0.7 + 1e-7, 0.7, 0.7])
    rest = (flags([True] * 4), places([0] * 4))
    exact = group_standard_advantage(noisy, *rest, tolerance=0.0, epsilon=epsilon).advantage
    assert_same(exact.max(), largest, absolute=5e-5)
    tolerant = group_standard_advantage(noisy, *rest, tolerance=1e-6, epsilon=epsilon).advantage
    assert_same(tolerant, [0.0] * 4)


def test_three_tenths_by_two_routes_are_no_difference() -> None:
    assert_same(one_group(group_standard_advantage, [0.1 + 0.2, 0.3], epsilon=0.0), [0.0, 0.0])


@pytest.mark.parametrize(
    ("valid", "expected"),
    [([True, True, False, True], [0.5, -1.0, 0.0, 0.5]), ([True] * 4, [2 / 3, -2 / 3, -2 / 3, 2 / 3])],
    ids=["crash-left-out", "crash-as-zero"],
)
def test_rloo_with_a_crash(valid: list[bool], expected: list[float]) -> None:
    found = leave_one_out_advantage(numbers([1, 0, 0, 1]), flags(valid), places([1] * 4), tolerance=1e-6)
    assert_same(found.advantage, expected)


def test_group_mean_with_a_timeout_is_over_the_live() -> None:
    found = group_mean_advantage(
        numbers([1, 1, 0, 0]), flags([True, True, True, False]), places([1] * 4), tolerance=1e-6
    )
    assert_same(found.advantage, [1 / 3, 1 / 3, -2 / 3, 0.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_does_not_vote(bad: float) -> None:
    assert_same(one_group(group_mean_advantage, [2, bad, 4]), [-1.0, 0.0, 1.0])


# recipe.md F.3 and F.5.

PAIRS = ([6.0, 3.0, 9.0, 12.0], [0, 0, 1, 1])


def of_pairs(function: Callable[..., GroupAdvantage], **knobs: float) -> list[float]:
    """Two groups of two."""
    return function(
        numbers(PAIRS[0]), flags([True] * 4), places(PAIRS[1]), tolerance=1e-6, **knobs
    ).advantage.tolist()


def test_group_mean_of_recipe_f3() -> None:
    assert_same(of_pairs(group_mean_advantage), [1.5, -1.5, -1.5, 1.5])


def test_group_standard_of_recipe_f3() -> None:
    expected = [0.7071, -0.7071, -0.7071, 0.7071]
    assert_same(of_pairs(group_standard_advantage, epsilon=1e-6), expected, absolute=1e-4)


def test_leave_one_out_of_recipe_f3() -> None:
    found = leave_one_out_advantage(
        numbers([6, 3, 9, 12, 1]), flags([True] * 5), places([0, 0, 1, 1, 2]), tolerance=1e-6
    )
    assert_same(found.advantage, [3.0, -3.0, -3.0, 3.0, 0.0])


def test_max_likelihood_of_recipe_f3() -> None:
    assert_same(of_pairs(max_likelihood_advantage), [1 / 3, -1 / 3, -1 / 7, 1 / 7])


def test_masked_member_of_recipe_f3_does_not_move_the_baseline() -> None:
    found = group_mean_advantage(
        numbers([1, 1, 0, 0]), flags([True, False, True, True]), places([0] * 4), tolerance=1e-6
    )
    assert_same(found.advantage, [2 / 3, 0.0, -1 / 3, -1 / 3])


@pytest.mark.parametrize("score", [0.5, 1.0])
def test_fifteen_equal_rewards_and_a_masked_zero_have_no_signal(score: float) -> None:
    found = group_mean_advantage(
        numbers([score] * 15 + [0.0]), flags([True] * 15 + [False]), places([0] * 16), tolerance=1e-6
    )
    assert_same(found.advantage, [0.0] * 16)
    assert not bool(found.has_signal.any())


def test_step_wise_rows_of_recipe_f3_carry_the_advantage_of_their_trajectory() -> None:
    group = group_mean_advantage(numbers([2, 0]), flags([True, True]), places([4, 4]), tolerance=1e-6)
    index = [0] * 4 + [1] * 1 + [0] * 3 + [1] * 2
    mask = [True, False, True, True, True, False, True, True, True, True]
    found = token_advantage(group.advantage, places(index), flags(mask))
    assert_same(found, [(1.0 if k == 0 else -1.0) if m else 0.0 for k, m in zip(index, mask)])


def test_zero_variance_of_recipe_f5_drops_the_middle_prompt() -> None:
    reward, group = numbers([1, 2, 3, 3, 5]), places([1, 1, 2, 2, 3])
    found = zero_variance(reward, flags([True] * 5), group, tolerance=1e-6)
    assert_same(found, [False, False, True, True, False])


@pytest.mark.parametrize(("tolerance", "dropped"), [(0.66670001, True), (0.6666, False)])
def test_zero_variance_of_recipe_f5_turns_at_the_spread(tolerance: float, dropped: bool) -> None:
    found = zero_variance(numbers([0.0, 0.6667]), flags([True] * 2), places([0, 0]), tolerance=tolerance)
    assert_same(found, [dropped] * 2)


def test_zero_variance_of_recipe_f5_looks_at_the_live_only() -> None:
    found = zero_variance(
        numbers([1, 1, 0, 7]), flags([True, True, False, False]), places([0] * 4), tolerance=1e-6
    )
    assert_same(found, [True] * 4)


@pytest.mark.parametrize("live", [0, 1])
def test_a_group_with_fewer_than_two_live_is_never_trained(live: int) -> None:
    valid = flags([index < live for index in range(3)])
    found = group_mean_advantage(numbers([1, 0, 0]), valid, places([0] * 3), tolerance=1e-6)
    assert not bool(found.has_signal.any())


# cases.md.


def test_g6_a_rollout_of_two_rows_votes_once() -> None:
    group = group_mean_advantage(numbers([1, 0, 1, 0]), flags([True] * 4), places([0] * 4), tolerance=1e-6)
    found = token_advantage(group.advantage, places([0, 0, 1, 2, 2, 3]), flags([True] * 6))
    assert_same(found, [0.5, 0.5, -0.5, 0.5, 0.5, -0.5])


@pytest.mark.parametrize(
    ("valid", "expected", "signal"),
    [
        ([True, True, False], [-1.0, 1.0, 0.0], [True, True, False]),
        ([True, False, False], [0.0, 0.0, 0.0], [False, False, False]),
    ],
)
def test_g7_excluded_rows_do_not_vote(valid: list[bool], expected: list[float], signal: list[bool]) -> None:
    found = group_mean_advantage(numbers([2, 4, 0]), flags(valid), places([0] * 3), tolerance=1e-6)
    assert_same(found.advantage, expected)
    assert_same(found.has_signal, signal)


def test_g8_a_scalar_advantage_is_masked_row_by_row() -> None:
    found = token_advantage(
        numbers([0.5]), places([0] * 8), flags([False, True, True, False, False, False, False, True])
    )
    assert_same(found, [0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5])


def test_g47_the_standard_deviation_is_the_groups_own() -> None:
    found = group_standard_advantage(
        numbers([0, 2, 10, 20]), flags([True] * 4), places([0, 0, 1, 1]), tolerance=1e-6, epsilon=0.0
    )
    assert_same(found.advantage, [-0.70710678, 0.70710678] * 2, absolute=1e-8)


@pytest.mark.parametrize(
    ("function", "size"), [(group_standard_advantage, 0.70710678), (batch_standard_advantage, 0.25)]
)
def test_g47_a_standard_deviation_is_the_groups_or_the_batchs_as_named(
    function: Callable[..., GroupAdvantage], size: float
) -> None:
    others = [1 - math.sqrt(23), 1 + math.sqrt(23)]  # with 0 and 2: a standard deviation of 4, n - 1
    found = function(
        numbers([0, 2, *others]), flags([True] * 4), places([0, 0, 1, 2]), tolerance=1e-6, epsilon=0.0
    )
    assert_same(found.advantage, [-size, size, 0.0, 0.0], absolute=1e-8)


def test_g48_whitening_is_over_the_whole_step() -> None:
    found = whitened(numbers([0, 2, 4, 6]), flags([True] * 4), epsilon=0.0)
    assert_same(found, [-1.3416, -0.4472, 0.4472, 1.3416], absolute=1e-4)


def test_g49_whitening_one_token_leaves_it() -> None:
    assert_same(whitened(numbers([3, math.nan]), flags([True, False]), epsilon=0.0), [3.0, 0.0])


def test_g50_whitening_per_row_is_per_row() -> None:
    found = whitened_per_group(numbers([1, 3, 10, 30]), flags([True] * 4), places([0, 0, 1, 1]), epsilon=0.0)
    assert_same(found, [-1.0, 1.0, -1.0, 1.0])


def test_whitening_takes_mean_and_variance_over_the_mask_only() -> None:
    value = numbers([2, 2, math.nan, -1, math.nan, math.nan]).reshape(2, 3)
    found = whitened(value, value.isfinite(), epsilon=0.0)
    assert_same(found, [[0.7071, 0.7071, 0.0], [-1.4142, 0.0, 0.0]], absolute=1e-4)
