"""core/aggregate.py against counting in loops, and the published tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import oracle_aggregate as oracle
import pytest
import torch
from comparing import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.aggregate import (
    prompt_mean_of_sequence_means_weight,
    prompt_mean_weight,
    sequence_mean_weight,
    sequence_sum_weight,
    token_mean_weight,
)
from tests.strategies import PackedStep, packed_steps, step_of

RULES: dict[str, tuple[Callable[..., Tensor], Callable[..., list[float]]]] = {
    "token_mean": (token_mean_weight, oracle.token_mean),
    "sequence_mean": (sequence_mean_weight, oracle.sequence_mean),
    "prompt_mean": (prompt_mean_weight, oracle.prompt_mean),
    "prompt_mean_of_sequence_means": (
        prompt_mean_of_sequence_means_weight,
        oracle.prompt_mean_of_sequence_means,
    ),
}


def weight(rule: str, step: PackedStep) -> Tensor:
    """A rule's weights of a step in float64."""
    return RULES[rule][0](step.loss_mask, step.row_id, step.group_id, dtype=torch.float64)


def reduced(rule: str, step: PackedStep) -> float:
    """Sum of weight times value over what is trained."""
    return oracle.weighted_sum(weight(rule, step).tolist(), step.value.tolist())


def sum_reduced(step: PackedStep, length: float) -> float:
    """The same for the sum over a constant length."""
    found = sequence_sum_weight(
        step.loss_mask, step.row_id, step.group_id, length=length, dtype=torch.float64
    )
    return oracle.weighted_sum(found.tolist(), step.value.tolist())


def step_from(*groups: Sequence[Sequence[float | None]]) -> PackedStep:
    """A step of groups of rows of values; None is not trained."""
    rows = sum(len(group) for group in groups)
    return step_of(
        [[list(row) for row in group] for group in groups], list(range(rows)), list(range(len(groups)))
    )


@pytest.mark.parametrize("rule", RULES)
@given(step=packed_steps())
def test_weight_is_what_counting_gives(rule: str, step: PackedStep) -> None:
    columns = (step.loss_mask.tolist(), step.row_id.tolist(), step.group_id.tolist())
    assert_same(weight(rule, step), RULES[rule][1](*columns), what=rule)


@given(step=packed_steps(), length=st.floats(0.01, 1e6))
def test_sequence_sum_weight_is_what_counting_gives(step: PackedStep, length: float) -> None:
    columns = (step.loss_mask.tolist(), step.row_id.tolist(), step.group_id.tolist())
    found = sequence_sum_weight(
        step.loss_mask, step.row_id, step.group_id, length=length, dtype=torch.float64
    )
    assert_same(found, oracle.sequence_sum(*columns, length))


# losses.md 3.2.

TABLE = step_from([[1, 1], [2, 2, 2, 2], [5]], [[3], [7, 7, 7]])
"""Two prompts of three and two rows; the numbers are losses of tokens."""


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ("token_mean", 39 / 11),
        ("sequence_mean", 3.6),
        ("prompt_mean", 4.07142857143),
        ("prompt_mean_of_sequence_means", 3.83333333333),
    ],
)
def test_table_of_two_prompts(rule: str, value: float) -> None:
    assert_same(reduced(rule, TABLE), value, relative=1e-11)


@pytest.mark.parametrize(("length", "value"), [(1.0, 7.8), (8.0, 0.975)])
def test_table_of_two_prompts_summed_over_a_constant_length(length: float, value: float) -> None:
    assert_same(sum_reduced(TABLE, length), value)


def test_token_mean_is_not_the_mean_of_the_ranks_means() -> None:
    first, second = step_from([[1, 1], [2, 2, 2, 2]]), step_from([[5]], [[3], [7, 7, 7]])
    naive = (reduced("token_mean", first) + reduced("token_mean", second)) / 2
    assert_same([naive, reduced("token_mean", TABLE)], [3.73333333333, 3.54545454545], relative=1e-11)


@pytest.mark.parametrize(
    ("parts", "naive"),
    [
        ([[[1, 1], [2, 2, 2, 2], [5]], [[3], [7, 7, 7]]], 4.07142857143),
        ([[[1, 1]], [[2, 2, 2, 2]], [[5]], [[3]], [[7, 7, 7]]], 3.6),
        ([[[1, 1], [7, 7, 7]], [[2, 2, 2, 2], [5], [3]]], 3.63333333333),
    ],
    ids=["by-prompt", "by-row", "mixed"],
)
def test_the_mean_of_micro_batch_means_has_as_many_answers_as_there_are_splits(
    parts: list[list[list[float]]], naive: float
) -> None:
    means = [reduced("token_mean", step_from(part)) for part in parts]
    assert_same(sum(means) / len(means), naive, relative=1e-11)
    whole = sum(len(row) for part in parts for row in part)
    split = sum(mean * sum(len(row) for row in part) / whole for mean, part in zip(means, parts))
    assert_same(split, 39 / 11)


@pytest.mark.parametrize(("fixed", "value"), [(True, 3.36363636364), (False, 3.7)])
def test_a_token_masked_off_policy_stays_or_leaves_the_denominator(fixed: bool, value: float) -> None:
    after = step_from([[1, 1], [None, 2, 2, 2], [5]], [[3], [7, 7, 7]])
    weights = weight("token_mean", TABLE if fixed else after).tolist()
    kept = [w if m else 0.0 for w, m in zip(weights, after.loss_mask.tolist())]
    assert_same(oracle.weighted_sum(kept, after.value.tolist()), value, relative=1e-11)


def test_a_prompt_without_a_trained_token_is_not_counted() -> None:
    assert_same(reduced("prompt_mean", step_from([[None, None]], [[6, 6], [6]])), 6.0)


# recipe.md F.2.


def test_reduce_sums_what_the_mask_keeps() -> None:
    masked, whole = step_from([[1, 2, 3], [4, None, None]]), step_from([[1, 2, 3], [4, 5, 6]])
    assert_same([sum_reduced(masked, 0.5), sum_reduced(whole, 0.5)], [10.0, 21.0])


def test_token_mean_of_recipe_f2_is_3_6_and_0_without_a_token() -> None:
    assert_same(reduced("token_mean", step_from([[1, 2, None], [4, 5, 6]])), 3.6)
    assert_same(reduced("token_mean", step_from([[None, None, None], [None, None, None]])), 0.0)


def test_sequence_mean_of_recipe_f2_is_2_25() -> None:
    assert_same(reduced("sequence_mean", step_from([[1, 2], [3, None]])), 2.25)


def test_sequence_sum_of_recipe_f2_is_0_7() -> None:
    assert_same(sum_reduced(step_from([[2, 3], [9, None]]), 10.0), 0.7)


def test_mean_of_micro_batch_means_of_recipe_f2_is_8_5_and_the_token_mean_is_64_sevenths() -> None:
    parts = [step_from([[2, 4], [6, None]]), step_from([[10, 12], [14, 16]])]
    assert_same(sum(reduced("token_mean", part) for part in parts) / 2, 8.5)
    whole = step_from([[2, 4], [6, None], [10, 12], [14, 16]])
    assert_same(reduced("token_mean", whole), 64 / 7)


def test_prompt_mean_of_recipe_f2_is_4_25() -> None:
    assert_same(reduced("prompt_mean", step_from([[1, 2], [3, None]], [[5, 6], [7, 8]])), 4.25)


COUNTS, ADVANTAGES = ((3, 1), (2, 4)), ((1.0, -1.0), (2.0, -2.0))


@pytest.mark.parametrize(
    ("rule", "scaled"),
    [
        ("prompt_mean", [[0.125, -0.125], [1 / 6, -1 / 6]]),
        ("token_mean", [[0.1, -0.1], [0.2, -0.2]]),
        ("sequence_mean", [[1 / 12, -0.25], [0.25, -0.125]]),
        ("sequence_sum", [[0.03125, -0.03125], [0.0625, -0.0625]]),
    ],
)
def test_weights_folded_into_advantages_of_recipe_f2(rule: str, scaled: list[list[float]]) -> None:
    step = step_from(*([[A] * n for n, A in zip(*pair)] for pair in zip(COUNTS, ADVANTAGES)))
    if rule == "sequence_sum":
        found = sequence_sum_weight(
            step.loss_mask, step.row_id, step.group_id, length=8.0, dtype=torch.float64
        )
    else:
        found = weight(rule, step)
    expected = [a for pair, n in zip(scaled, COUNTS) for a, k in zip(pair, n) for _ in range(k)]
    assert_same(found * step.value, expected)


def test_a_hundred_tokens_at_a_half_and_nine_hundred_at_three_tenths_average_to_0_32() -> None:
    step = step_from([[0.5] * 100], [[0.3] * 900])
    assert_same(reduced("token_mean", step), 0.32)
    assert_same(reduced("prompt_mean", step), 0.40)  # the mean of means is another rule, with its own name


def test_two_ranks_of_two_micro_batches_sum_to_9_as_a_mean_and_72_as_a_sum() -> None:
    rows = [[2, 4], [6, 8], [10, 12], [14, 16]]
    whole = step_from(rows)
    assert_same(reduced("token_mean", whole), 9.0)
    assert_same(sum_reduced(whole, 1 / 4), 72.0)
    weights = weight("token_mean", whole).tolist()
    per_rank = [
        oracle.weighted_sum(weights[:4], whole.value.tolist()[:4]),
        oracle.weighted_sum(weights[4:], whole.value.tolist()[4:]),
    ]
    assert_same(per_rank, [2.5, 6.5])
    assert_same(sum(per_rank), 9.0)


# cases.md, G1 to G5 and G51.


@pytest.mark.parametrize("split", [[[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]], [[2, 0], [1]], [[0, 1, 2]]])
def test_g1_token_mean_is_2_5_for_every_split_of_the_step(split: list[list[int]]) -> None:
    rows: list[list[float]] = [[1.0] * 4, [3.0] * 2, [5.0] * 2]
    weights = weight("token_mean", step_from(rows)).tolist()
    spans = [range(0, 4), range(4, 6), range(6, 8)]
    values = [x for row in rows for x in row]
    total = math.fsum(math.fsum(weights[t] * values[t] for row in part for t in spans[row]) for part in split)
    assert_same(total, 2.5)


def test_g2_four_ranks_of_two_rows_of_loss_1_give_1() -> None:
    rows = [[1.0] * n for n in (1, 2, 3, 4, 5, 6, 7, 8)]
    weights = weight("sequence_mean", step_from(rows)).tolist()
    ends = [0, 3, 10, 21, 36]
    assert_same(sum(math.fsum(weights[a:b]) for a, b in zip(ends, ends[1:])), 1.0)


def test_g3_only_trained_tokens_count_whatever_rows_of_padding_are_added() -> None:
    rows: list[list[float | None]] = [[1, None, 1], [None, 1, None]]
    assert_same(reduced("token_mean", step_from(rows)), 1.0)
    assert_same(reduced("token_mean", step_from([*rows, [None] * 3, [None] * 3, [None] * 2])), 1.0)


@pytest.mark.parametrize("rule", RULES)
def test_g4_an_empty_mask_gives_weights_of_zero(rule: str) -> None:
    assert_same(weight(rule, step_from([[None, None], [None]])), [0.0] * 3)


def test_g5_a_nan_outside_the_mask_leaves_the_token_mean_at_1_5() -> None:
    assert_same(reduced("token_mean", step_from([[None, 1, 2]])), 1.5)


@pytest.mark.parametrize(
    ("rule", "value"), [("prompt_mean", 6.0), ("token_mean", 3.6), ("sequence_mean", 14 / 3)]
)
def test_g51_a_dead_prompt_does_not_dilute(rule: str, value: float) -> None:
    assert_same(reduced(rule, step_from([[1, 1], [3, 3]], [[10]], [[None]])), value)


def test_ten_tokens_at_one_and_two_at_four_average_to_1_5() -> None:
    assert_same(reduced("token_mean", step_from([[1] * 10], [[4] * 2])), 1.5)


def test_a_row_without_a_trained_token_adds_nothing_to_the_denominator() -> None:
    found = weight("token_mean", step_from([[1] * 4], [[None]], [[1] * 6]))
    assert_same(1 / found[0], 10.0)  # not 11
