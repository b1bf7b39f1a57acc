"""core/centering.py against the formula, one token and one head entry at a time."""

from __future__ import annotations

import math

import oracle_centering as oracle
import oracle_kl
import pytest
import torch
from comparing import assert_same, flags, gradient, junk, logprobs, no_number, numbers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.centering import score_centering

Row = tuple[float, float, float, bool, list[float], list[float]]
"""logprob, rollout_logprob, advantage, loss_mask, head logprobs, head rollout logprobs"""

WIDTH = 3
caps = st.floats(0.3, 5) | st.just(math.inf)


@st.composite
def heads(draw: st.DrawFn) -> list[float]:
    """Logprobs of the first tokens of a distribution over one more."""
    logits = draw(st.lists(st.floats(-4, 4), min_size=WIDTH + 1, max_size=WIDTH + 1))
    return [math.log(x) for x in oracle_kl.softmax(logits)[:WIDTH]]


@st.composite
def broken_heads(draw: st.DrawFn) -> list[float]:
    """The same with an entry that is no number."""
    head = draw(heads())
    head[draw(st.integers(0, WIDTH - 1))] = draw(no_number)
    return head


poisoned = st.lists(junk, min_size=WIDTH, max_size=WIDTH)
advantages = st.floats(-3, 3)
rows_of = st.lists(
    st.tuples(logprobs, logprobs, advantages, st.just(True), heads(), heads() | broken_heads())
    | st.tuples(logprobs, no_number | st.just(-9999.0), advantages, st.just(True), heads(), heads())
    | st.tuples(junk, junk, junk, st.just(False), poisoned, poisoned),
    min_size=1,
    max_size=4,
)


def usable(row: Row) -> bool:
    """In the mask with a ratio that is a number."""
    return row[3] and math.isfinite(row[1]) and row[0] - row[1] < 700


def tensors(rows: list[Row]) -> list[Tensor]:
    """One tensor per column."""
    columns = list(zip(*rows))
    heads = [numbers([x for head in columns[k] for x in head]).reshape(len(rows), -1) for k in (4, 5)]
    return [*(numbers(columns[k]) for k in range(3)), flags(columns[3]), *heads]


@given(rows_of, caps)
def test_score_centering_is_the_formula_of_each_token(rows: list[Row], cap: float) -> None:
    expected = [
        oracle.centered(row[0], row[1], row[2], row[4], row[5], cap)
        if usable(row)
        else oracle.Centered(0.0, 0.0, [0.0] * WIDTH)
        for row in rows
    ]
    logprob, rollout, advantage, mask, head, head_rollout = tensors(rows)
    found = score_centering(logprob, rollout, advantage, mask, head, head_rollout, max_ratio=cap)
    assert_same(found, [one.value for one in expected], absolute=1e-11, what="value")
    slope = gradient(
        lambda leaf: score_centering(leaf, rollout, advantage, mask, head, head_rollout, max_ratio=cap),
        logprob.tolist(),
    )
    assert_same(slope, [one.slope for one in expected], what="slope")
    head_slope = gradient(
        lambda leaf: score_centering(
            logprob, rollout, advantage, mask, leaf.reshape(head.shape), head_rollout, max_ratio=cap
        ),
        head.flatten().tolist(),
    )
    assert_same(head_slope, [x for one in expected for x in one.head_slope], absolute=1e-11, what="head")


@given(
    st.integers(2, 4).flatmap(
        lambda n: st.tuples(*(st.lists(st.floats(-2, 2), min_size=n, max_size=n) for _ in range(2)))
    ),
    caps,
)
def test_with_the_whole_vocabulary_a_constant_advantage_has_no_expected_gradient(
    logits: tuple[list[float], ...], cap: float
) -> None:
    p, q = (oracle_kl.softmax(z) for z in logits)
    size = len(p)
    head_rollout = numbers([math.log(x) for x in q]).expand(size, size)
    leaf = numbers(logits[0]).requires_grad_(True)
    logprob = torch.log_softmax(leaf, dim=0)
    loss = score_centering(
        logprob, head_rollout[0], numbers([1.0] * size), flags([True] * size),
        logprob.expand(size, size), head_rollout, max_ratio=cap,
    )  # fmt: skip
    (numbers(q) * loss).sum().backward()
    assert leaf.grad is not None
    assert_same(leaf.grad, [0.0] * size, absolute=1e-9)


# losses.md 2.3.

P_HEAD, Q_HEAD = [0.4, 0.4], [0.5, 0.3]


def coefficients(cap: float) -> list[float]:
    """d value / d head logprob of one token with advantage 1."""
    head_rollout = numbers([math.log(x) for x in Q_HEAD]).reshape(1, 2)
    return gradient(
        lambda leaf: score_centering(
            numbers([-1.0]), numbers([-1.0]), numbers([1.0]), flags([True]),
            leaf.reshape(1, 2), head_rollout, max_ratio=cap,
        ),
        [math.log(x) for x in P_HEAD],
    )  # fmt: skip


def test_head_coefficients_under_a_cap_of_1_1() -> None:
    assert_same(coefficients(1.1), [0.0, -0.07])


def test_head_coefficients_without_weights_are_a_tenth_up_and_down() -> None:
    # A cap below every ratio makes the weight a constant, which is no weight at all but for its size.
    assert_same([x / 0.5 for x in coefficients(0.5)], [0.1, -0.1])


def test_head_coefficients_without_a_cap_vanish() -> None:
    assert_same(coefficients(math.inf), [0.0, 0.0])


def test_drift_of_three_tokens_is_q_minus_p() -> None:
    assert_same(oracle.drift([0.4, 0.4, 0.2], [0.5, 0.3, 0.2]), [0.1, -0.1, 0.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_head_token_that_the_sampler_did_not_report_is_not_in_the_head(bad: float) -> None:
    def value(head: list[float], head_rollout: list[float]) -> float:
        found = score_centering(
            numbers([-1.0]), numbers([-0.5]), numbers([1.0]), flags([True]),
            numbers(head).reshape(1, -1), numbers(head_rollout).reshape(1, -1), max_ratio=1.1,
        )  # fmt: skip
        return found.item()

    whole = value([-1.0, -2.0, -3.0], [-0.9, -2.5, bad])
    assert_same(whole, value([-1.0, -2.0], [-0.9, -2.5]))
