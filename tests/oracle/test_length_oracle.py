"""core/length.py against loops, and the published numbers."""

from __future__ import annotations

import math

import oracle_length as oracle
import pytest
import torch
from comparing import assert_same, flags, numbers, places
from hypothesis import given
from hypothesis import strategies as st

from core.length import length_penalised_reward, soft_overlong_punishment, source_penalised_reward

Row = tuple[float, bool, int, int, bool, int]
"""reward, solved, policy tokens, environment tokens, valid, group"""

counts = st.integers(0, 5000)
valid_rows = st.tuples(st.floats(-2, 2), st.booleans(), counts, counts, st.just(True), st.integers(-2, 1))
invalid_rows = st.tuples(
    st.sampled_from([math.nan, math.inf, 1.0]),
    st.booleans(),
    counts,
    counts,
    st.just(False),
    st.integers(-2, 1),
)
tables = st.lists(valid_rows | invalid_rows, max_size=10)
prices = st.floats(0, 2)
scales = st.floats(1, 1e4)


def columns(rows: list[Row]) -> tuple:
    """One list per column."""
    return tuple(list(column) for column in zip(*rows)) if rows else ([], [], [], [], [], [])


@given(tables, prices, scales)
def test_length_penalised_reward_is_the_papers_formula(rows: list[Row], price: float, scale: float) -> None:
    reward, solved, tokens, _, valid, group = columns(rows)
    found = length_penalised_reward(
        numbers(reward), flags(solved), places(tokens), flags(valid), places(group),
        coefficient=price, token_scale=scale,
    )  # fmt: skip
    assert_same(found, oracle.length_penalised(reward, solved, tokens, valid, group, price, scale))


@given(tables, prices, prices, scales)
def test_source_penalised_reward_has_one_price_for_writing_and_one_for_reading(
    rows: list[Row], policy: float, environment: float, scale: float
) -> None:
    reward, solved, wrote, read, valid, group = columns(rows)
    found = source_penalised_reward(
        numbers(reward), flags(solved), places(wrote), places(read), flags(valid), places(group),
        policy_coefficient=policy, environment_coefficient=environment, token_scale=scale,
    )  # fmt: skip
    expected = oracle.source_penalised(reward, solved, wrote, read, valid, group, policy, environment, scale)
    assert_same(found, expected)


@given(st.lists(st.integers(0, 200), max_size=6), st.integers(1, 150), st.data())
def test_soft_overlong_punishment_is_equation_13(lengths: list[int], limit: int, data: st.DataObject) -> None:
    cushion = data.draw(st.integers(1, limit))
    found = soft_overlong_punishment(places(lengths), max_length=limit, buffer=cushion, dtype=torch.float64)
    assert_same(found, [oracle.soft_overlong(n, limit, cushion) for n in lengths])


@pytest.mark.parametrize(("length", "punishment"), [(80, 0.0), (90, -0.5), (100, -1.0), (101, -1.0)])
def test_soft_overlong_punishment_table(length: int, punishment: float) -> None:
    found = soft_overlong_punishment(places([length]), max_length=100, buffer=20, dtype=torch.float64)
    assert_same(found, [punishment])


@pytest.mark.parametrize(
    ("solved", "first"),
    [([True, True, True, False], 0.9625), ([False] * 4, -0.0125)],
    ids=["three-of-four", "none-of-four"],
)
def test_adaptive_length_penalty_of_four_rollouts(solved: list[bool], first: float) -> None:
    found = length_penalised_reward(
        numbers([1.0 if s else 0.0 for s in solved]), flags(solved), places([500] * 4),
        flags([True] * 4), places([0] * 4), coefficient=0.1, token_scale=1000.0,
    )  # fmt: skip
    assert_same(found[0], first)
