"""core/surrogate.py, core/check.py and core/shapes.py: what the surrogates share, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import oracle_loss as oracle
import pytest
import torch
from comparing import advantages, assert_same, flags, gradient, junk, logprobs, no_number, numbers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.check import check_count, check_whole
from core.shapes import (
    check_bool,
    check_float,
    check_integer,
    check_one_axis,
    check_one_shape,
    check_record,
    check_tensor,
)
from core.surrogate import (
    anchored,
    check_bounds,
    check_positive,
    check_shapes,
    detached_log_ratio,
    score_form,
)

Row = tuple[float, float, float, bool, float, bool]
"""logprob, anchor, advantage, loss_mask, coefficient, out_of_region"""

coefficients = st.floats(0, 5)
tokens = st.lists(
    st.tuples(logprobs, logprobs, advantages, st.just(True), coefficients, st.booleans())
    | st.tuples(logprobs, no_number | st.just(-9999.0), advantages, st.just(True), junk, st.booleans())
    | st.tuples(junk, junk, junk, st.just(False), junk, st.booleans()),
    max_size=8,
)


def plain(rows: list[Row]) -> tuple[list[float], list[bool]]:
    """Ratio and usability of every token."""
    logprob, anchor, advantage, mask = ([row[k] for row in rows] for k in range(4))
    found = oracle.surrogate(logprob, anchor, advantage, [bool(m) for m in mask], oracle.policy_gradient())
    return found.importance_ratio, [bool(m) and not bad for m, bad in zip(mask, found.unusable)]


def tensors(rows: list[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `anchored` takes."""
    return (
        numbers([row[0] for row in rows]),
        numbers([row[1] for row in rows]),
        numbers([row[2] for row in rows]),
        flags([row[3] for row in rows]),
    )


@given(tokens)
def test_anchored_is_the_arguments_where_usable_and_zero_elsewhere(rows: list[Row]) -> None:
    ratio, usable = plain(rows)
    token = anchored(*tensors(rows))
    assert_same(token.usable, usable, what="usable")
    assert_same(token.loss_mask, [row[3] for row in rows], what="loss_mask")
    assert_same(token.ratio, ratio, what="ratio")
    assert_same(token.anchor, [row[1] if u else 0.0 for row, u in zip(rows, usable)], what="anchor")
    assert_same(token.advantage, [row[2] if u else 0.0 for row, u in zip(rows, usable)], what="advantage")


@given(tokens)
def test_detached_log_ratio_is_the_difference_where_usable_and_zero_elsewhere(rows: list[Row]) -> None:
    _, usable = plain(rows)
    logprob, anchor, _, mask = tensors(rows)
    found, found_usable = detached_log_ratio(logprob.requires_grad_(True), anchor, mask)
    assert not found.requires_grad
    assert_same(found_usable, usable)
    assert_same(found, [row[0] - row[1] if u else 0.0 for row, u in zip(rows, usable)])


@given(tokens)
def test_score_form_is_minus_coefficient_times_advantage_times_logprob_inside_the_region(
    rows: list[Row],
) -> None:
    ratio, usable = plain(rows)
    logprob, anchor, advantage, mask = tensors(rows)
    coefficient, out = numbers([row[4] for row in rows]), flags([row[5] for row in rows])
    slope = [-row[4] * row[2] if u and not row[5] else 0.0 for row, u in zip(rows, usable)]
    found = score_form(anchored(logprob, anchor, advantage, mask), coefficient, out_of_region=out)
    assert_same(found.slope, slope, what="slope")
    assert_same(
        found.value, [s * row[0] if u else 0.0 for s, row, u in zip(slope, rows, usable)], what="value"
    )
    assert_same(found.importance_ratio, ratio, what="ratio")
    assert_same(found.out_of_region, [row[5] and u for row, u in zip(rows, usable)], what="out_of_region")
    assert_same(found.unusable, [row[3] and not u for row, u in zip(rows, usable)], what="unusable")

    def value(leaf: Tensor) -> Tensor:
        return score_form(anchored(leaf, anchor, advantage, mask), coefficient, out_of_region=out).value

    assert_same(gradient(value, logprob.tolist()), slope, what="gradient")


def refuses(check: Callable[[], object]) -> bool:
    """Whether a check raises ValueError."""
    try:
        check()
    except ValueError:
        return True
    return False


anything = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, -1.0, 1.0]) | st.floats()


@given(anything)
def test_check_positive_lets_positive_numbers_through(x: float) -> None:
    assert refuses(lambda: check_positive(epsilon=x)) != (x > 0)


@given(anything, anything)
def test_check_bounds_lets_two_bounds_in_order_through(low: float, high: float) -> None:
    assert refuses(lambda: check_bounds(low=low, high=high)) != (0 <= low < high)


@given(st.integers(-3, 3) | st.booleans() | st.floats() | st.sampled_from([None, "", "1"]))
def test_check_whole_lets_whole_numbers_through(value: object) -> None:
    assert refuses(lambda: check_whole("count", value)) == (type(value) is not int)


@given(st.integers(-3, 3) | st.booleans(), st.sampled_from([0, 1]))
def test_check_count_lets_whole_numbers_that_are_large_enough_through(value: int, least: int) -> None:
    whole = type(value) is int and value >= least
    assert refuses(lambda: check_count("count", value, least=least)) != whole


SHAPES = [(), (0,), (2,), (3,), (2, 1), (2, 3)]


@pytest.mark.parametrize("one", SHAPES)
@pytest.mark.parametrize("other", SHAPES)
def test_checks_of_shapes_let_equal_ones_through(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    def zeros(shape: tuple[int, ...]) -> Tensor:
        return numbers([0.0] * math.prod(shape)).reshape(shape)

    assert refuses(lambda: check_shapes(loss_mask=zeros(one).bool(), logprob=zeros(other))) != (one == other)
    assert refuses(lambda: check_shapes(loss_mask=zeros(one), logprob=zeros(one)))
    flat = one == other and len(one) == 1
    assert refuses(lambda: check_one_axis("T", a=zeros(one), b=zeros(other))) != flat
    assert refuses(lambda: check_one_shape(a=zeros(one), b=zeros(other))) != (one == other)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32, torch.float64])
def test_checks_of_kinds_let_masks_and_ids_through(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, dtype=dtype)
    assert refuses(lambda: check_bool(loss_mask=tensor)) != (dtype == torch.bool)
    assert refuses(lambda: check_integer(row_id=tensor)) != (dtype in (torch.int64, torch.int32))
    assert refuses(lambda: check_float(logprob=tensor)) != (dtype in (torch.float32, torch.float64))


@pytest.mark.parametrize("other", [None, 0.5, [0.5], torch.zeros(2).numpy(), torch.zeros(2)], ids=type)
def test_checks_of_kinds_refuse_what_is_no_tensor(other: object) -> None:
    assert refuses(lambda: check_tensor(logprob=other)) != isinstance(other, Tensor)


def test_a_record_is_told_by_its_kind() -> None:
    assert not refuses(lambda: check_record(tuple, one=(1,), other=()))
    assert refuses(lambda: check_record(tuple, one=(1,), other=[1]))
