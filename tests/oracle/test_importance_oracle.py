"""core/importance.py against loops over tokens and rows, and the published table."""

from __future__ import annotations

import math

import oracle_importance as oracle
import pytest
from comparing import assert_same, flags, gradient, junk, logprobs, no_number, numbers, places
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from core.importance import (
    masked_importance_weight,
    reweighted,
    sequence_masked_importance_weight,
    sequence_truncated_importance_weight,
    truncated_importance_weight,
)
from core.loss_old import ppo_clip
from core.surrogate import TokenLoss

Columns = tuple[list[float], list[float], list[bool], list[int]]
"""old_logprob, rollout_logprob, loss_mask, row_id"""

lows = st.sampled_from([0.0, 0.5, 0.99]) | st.floats(0, 0.999)
highs = st.sampled_from([2.0, 1.01, math.inf]) | st.floats(1.001, 9)


@st.composite
def tokens(draw: st.DrawFn) -> Columns:
    """Up to eight tokens of up to three rows, some without a usable ratio, some poisoned."""
    row = st.sampled_from([-4, 0, 7])
    rows = draw(
        st.lists(
            st.tuples(logprobs, logprobs, st.just(True), row)
            | st.tuples(logprobs, no_number | st.just(-9999.0), st.just(True), row)
            | st.tuples(no_number, logprobs, st.just(True), row)
            | st.tuples(junk, junk, st.just(False), row),
            max_size=8,
        )
    )
    one, two, three, four = zip(*rows) if rows else ((), (), (), ())
    return list(one), list(two), list(three), list(four)


def tensors(batch: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """The first three columns as tensors."""
    return numbers(batch[0]), numbers(batch[1]), flags(batch[2])


@given(tokens(), highs)
def test_truncated_importance_weight_is_the_smaller_of_ratio_and_bound(batch: Columns, cap: float) -> None:
    found = truncated_importance_weight(*tensors(batch), max_weight=cap)
    assert_same(found, oracle.truncated(*batch[:3], cap))


@given(tokens(), lows, highs)
def test_masked_importance_weight_is_the_ratio_between_the_bounds(
    batch: Columns, low: float, high: float
) -> None:
    found = masked_importance_weight(*tensors(batch), min_weight=low, max_weight=high)
    assert_same(found, oracle.masked(*batch[:3], low, high))


@given(tokens(), highs)
def test_sequence_truncated_importance_weight_is_of_the_product_over_the_row(
    batch: Columns, cap: float
) -> None:
    found = sequence_truncated_importance_weight(*tensors(batch), places(batch[3]), max_weight=cap)
    assert_same(found, oracle.sequence_truncated(*batch, cap))


@given(tokens(), lows, highs)
def test_sequence_masked_importance_weight_keeps_rows_by_their_geometric_mean(
    batch: Columns, low: float, high: float
) -> None:
    logs = oracle.log_ratios(*batch[:3])
    for row in set(batch[3]):
        inside = oracle.of_row(logs, batch[3], row)
        geometric = math.exp(math.fsum(inside) / len(inside)) if inside else 1.5
        assume(abs(geometric - low) > 1e-9 and abs(geometric - high) > 1e-9)
    found = sequence_masked_importance_weight(
        *tensors(batch), places(batch[3]), min_weight=low, max_weight=high
    )
    assert_same(found, oracle.sequence_masked(*batch, low, high))


trained = st.lists(
    st.tuples(st.floats(-4, -0.01), st.floats(-4, -0.01), st.sampled_from([-1.0, 0.5]), st.floats(0, 3)),
    min_size=1,
    max_size=5,
)


@given(trained)
def test_reweighted_multiplies_value_slope_and_gradient(
    rows: list[tuple[float, float, float, float]],
) -> None:
    logprob, old, advantage, weight = (list(column) for column in zip(*rows))
    mask = flags([True] * len(rows))

    def loss(leaf: Tensor) -> TokenLoss:
        return ppo_clip(
            leaf, numbers(old), numbers(advantage), mask,
            epsilon_low=0.2, epsilon_high=0.3, max_ratio=math.inf,
        )  # fmt: skip

    plain, found = loss(numbers(logprob)), reweighted(loss(numbers(logprob)), numbers(weight))
    expected = [s * w for s, w in zip(plain.slope.tolist(), weight)]
    assert_same(found.slope, expected)
    assert_same(found.value, [s * lp for s, lp in zip(expected, logprob)])
    assert_same(gradient(lambda leaf: reweighted(loss(leaf), numbers(weight)).value, logprob), expected)
    assert_same(found.importance_ratio, plain.importance_ratio.tolist())
    out = [o or w == 0 for o, w in zip(plain.out_of_region.tolist(), weight)]
    assert_same(found.out_of_region, out)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_reweighted_reads_no_weight_where_nothing_is_trained(bad: float) -> None:
    mask = flags([False, True, True])
    loss = ppo_clip(
        numbers([-1, -1, -1]).requires_grad_(True), numbers([-1, math.nan, -1]), numbers([1, 1, 1]), mask,
        epsilon_low=0.2, epsilon_high=0.3, max_ratio=math.inf,
    )  # fmt: skip
    found = reweighted(loss, numbers([bad, bad, 2.0]))
    assert_same(found.slope, [0.0, 0.0, -2.0])
    assert_same(found.value, [0.0, 0.0, 2.0])
    assert_same(found.out_of_region, [False, False, False])


# recipe.md F.4, losses.md 2.4.


def of_logs(logs: list[float], mask: list[bool] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Old and rollout logprobs whose difference is given."""
    return numbers([x - 2 for x in logs]), numbers([-2.0] * len(logs)), flags(mask or [True] * len(logs))


def test_token_tis_of_recipe_f4() -> None:
    found = truncated_importance_weight(
        numbers([-1, -1.5, -0.5]), numbers([-1.5, -1, -1.5]), flags([True] * 3), max_weight=2.0
    )
    assert_same(found, [1.6487, 0.6065, 2.0], absolute=1e-4)


@pytest.mark.parametrize(
    ("logs", "mask", "weight"),
    [
        ([0.5, -0.5, 1.0], [True, True, True], 2.71828),
        ([1.0, 1.0, 1.0], [True, True, True], 5.0),
        ([0.5, math.nan, 1.0], [True, False, True], 4.4817),
    ],
    ids=["product", "capped", "masked-token-left-out"],
)
def test_sequence_tis_of_recipe_f4(logs: list[float], mask: list[bool], weight: float) -> None:
    found = sequence_truncated_importance_weight(*of_logs(logs, mask), places([0] * 3), max_weight=5.0)
    assert_same(found, [weight if m else 0.0 for m in mask], absolute=1e-4)


@pytest.mark.parametrize(
    ("logs", "low", "high", "kept"),
    [
        ([0.1, -0.1], 0.99, 1.01, 1.0),
        ([0.5] * 3, 0.9, 1.1, 0.0),
        ([0.0] * 3, 0.99, 1.01, 1.0),
        ([1.0] * 3, 0.99, 1.01, 0.0),
    ],
)
def test_geometric_mask_of_recipe_f4(logs: list[float], low: float, high: float, kept: float) -> None:
    found = sequence_masked_importance_weight(
        *of_logs(logs), places([3] * len(logs)), min_weight=low, max_weight=high
    )
    assert_same(found, [kept] * len(logs))


def test_token_mask_of_recipe_f4_includes_its_bounds() -> None:
    found = masked_importance_weight(*of_logs([0.0, 0.0, 2.0, -2.0]), min_weight=0.5, max_weight=2.0)
    assert_same(found, [1.0, 1.0, 0.0, 0.0])
    bounds = masked_importance_weight(
        numbers([math.log(0.5), math.log(2.0)]), numbers([0.0, 0.0]), flags([True, True]),
        min_weight=math.exp(math.log(0.5)), max_weight=math.exp(math.log(2.0)),
    )  # fmt: skip
    assert_same(bounds, [0.5, 2.0])


def test_the_geometric_mean_of_a_thousand_tokens_is_rejected_where_the_product_is_22026() -> None:
    batch, row = of_logs([0.01] * 1000), places([0] * 1000)
    rejected = sequence_masked_importance_weight(*batch, row, min_weight=0.99, max_weight=1.01)
    kept = sequence_masked_importance_weight(*batch, row, min_weight=0.99, max_weight=1.0101)
    product = sequence_truncated_importance_weight(*batch, row, max_weight=math.inf)
    assert_same([rejected[0], kept[0]], [0.0, 1.0])
    assert_same(product[0], 22026.4657948, relative=1e-9)


def test_ppo_with_token_tis_of_recipe_f1() -> None:
    logprob, mask = [-1.1, -0.9, -1.0], flags([True] * 3)
    old, roll = numbers([-1.0] * 3), numbers([-1.05] * 3)
    loss = ppo_clip(
        numbers(logprob), old, numbers([1, -1, 0.5]), mask,
        epsilon_low=0.2, epsilon_high=0.2, max_ratio=math.inf,
    )  # fmt: skip
    assert_same(loss.slope, [-0.9048, 1.1052, -0.5], absolute=1e-4)
    assert_same(loss.slope.sum(), -0.2997, absolute=1e-4)
    weight = truncated_importance_weight(old, roll, mask, max_weight=2.0)
    assert_same(weight, [1.05127] * 3, absolute=1e-5)
    assert_same(reweighted(loss, weight).slope.sum(), -0.3150, absolute=1e-4)


def test_a_fifth_a_quarter_and_three_tenths_under_tis_of_1_1() -> None:
    lp, old, roll = (numbers([math.log(x)]) for x in (0.3, 0.25, 0.2))
    mask = flags([True])
    loss = ppo_clip(lp, old, numbers([1.0]), mask, epsilon_low=0.2, epsilon_high=0.201, max_ratio=math.inf)
    weight = truncated_importance_weight(old, roll, mask, max_weight=1.1)
    assert_same(reweighted(loss, weight).slope, [-1.32])
