"""Laws of core.length: what a token costs, whom, and that length alone is no signal."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import poison
from torch import Tensor

from core import length
from core.advantage import group_mean_advantage, zero_variance

F64 = torch.float64


class Priced(NamedTuple):
    """What a penalty on two kinds of tokens takes."""

    reward: Tensor
    solved: Tensor
    policy_tokens: Tensor
    environment_tokens: Tensor
    valid: Tensor
    group_id: Tensor


def of(reward, solved, policy, environment=None, valid=None, group_id=None) -> Priced:
    count = len(reward)
    return Priced(
        torch.tensor(reward, dtype=F64),
        torch.tensor(solved, dtype=torch.bool),
        torch.tensor(policy, dtype=torch.long),
        torch.tensor([0] * count if environment is None else environment, dtype=torch.long),
        torch.tensor([True] * count if valid is None else valid, dtype=torch.bool),
        torch.tensor([0] * count if group_id is None else group_id, dtype=torch.long),
    )


@st.composite
def priced(draw):
    """Up to ten rollouts of three groups, some not valid."""
    tokens = st.integers(0, 200_000)
    reward = st.sampled_from([0.0, 0.5, 1.0, math.nan]) | st.floats(-2, 2)
    row = st.tuples(reward, st.booleans(), tokens, tokens, st.booleans(), st.sampled_from([-7, 0, 10**12]))
    rows = draw(st.lists(row, max_size=10))
    return of(*(list(column) for column in zip(*rows))) if rows else of([], [], [])


def two_prices(batch: Priced, policy=0.25, environment=0.1, scale=1e5) -> Tensor:
    return length.source_penalised_reward(
        *batch, policy_coefficient=policy, environment_coefficient=environment, token_scale=scale
    )


def one_price(batch: Priced, coefficient=0.1, scale=1000.0) -> Tensor:
    return length.length_penalised_reward(
        batch.reward,
        batch.solved,
        batch.policy_tokens,
        batch.valid,
        batch.group_id,
        coefficient=coefficient,
        token_scale=scale,
    )


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=-99.0), other.nan_to_num(nan=-99.0))


def by_loop(batch: Priced, policy: float, environment: float, scale: float) -> list[float]:
    rows = list(zip(*(field.tolist() for field in batch)))
    told = []
    for reward, _, own, seen, valid, group in rows:
        mates = [r for r in rows if r[5] == group and r[4] and math.isfinite(r[0])]
        rate = max(sum(r[1] for r in mates), 1) / max(len(mates), 1)
        told.append(reward - rate * (policy * own + environment * seen) / scale if valid else 0.0)
    return told


@given(batch=priced(), policy=st.floats(0, 2), environment=st.floats(0, 2))
def test_penalties_agree_with_a_loop_over_groups(batch, policy, environment):
    expected = by_loop(batch, policy, environment, 1e5)
    assert two_prices(batch, policy, environment).tolist() == pytest.approx(
        expected, rel=1e-12, abs=1e-12, nan_ok=True
    )


@given(batch=priced(), coefficient=st.floats(0, 2))
def test_one_price_is_two_of_which_the_environment_s_is_nothing(batch, coefficient):
    assert same(one_price(batch, coefficient), two_prices(batch, coefficient, 0.0, 1000.0))
    nothing = batch._replace(environment_tokens=torch.zeros_like(batch.environment_tokens))
    assert same(one_price(batch, coefficient), two_prices(nothing, coefficient, 7.0, 1000.0))


@given(batch=priced(), coefficient=st.floats(0, 2))
def test_equal_prices_are_one_price_on_the_whole_trajectory(batch, coefficient):
    whole = batch._replace(policy_tokens=batch.policy_tokens + batch.environment_tokens)
    two = two_prices(batch, coefficient, coefficient, 1000.0)
    assert torch.allclose(two, one_price(whole, coefficient), rtol=1e-12, atol=1e-9, equal_nan=True)


@given(batch=priced(), data=st.data())
def test_a_penalty_follows_its_rollout_through_any_permutation(batch, data):
    order = torch.tensor(data.draw(st.permutations(range(len(batch.reward)))), dtype=torch.long)
    assert same(two_prices(Priced(*(field[order] for field in batch))), two_prices(batch)[order])


@given(batch=priced())
def test_names_of_groups_do_not_matter(batch):
    assert same(two_prices(batch._replace(group_id=11 - 3 * batch.group_id)), two_prices(batch))


@given(batch=priced())
def test_groups_do_not_see_each_other(batch):
    for group in batch.group_id.unique():
        own = batch.group_id == group
        assert same(two_prices(batch)[own], two_prices(Priced(*(field[own] for field in batch))))


@given(batch=priced(), junk=poison, solved=st.booleans())
def test_a_rollout_that_is_not_valid_is_as_if_absent(batch, junk, solved):
    """It neither solves nor counts, and has reward 0, which nobody reads."""
    valid = batch.valid
    dirty = two_prices(
        batch._replace(
            reward=torch.where(valid, batch.reward, junk),
            solved=torch.where(valid, batch.solved, solved),
            policy_tokens=torch.where(valid, batch.policy_tokens, 10**15),
        )
    )
    assert same(dirty[valid], two_prices(Priced(*(field[valid] for field in batch))))
    assert not dirty[~valid].any()


@given(batch=priced())
def test_without_a_price_the_reward_stays(batch):
    expected = torch.where(batch.valid, batch.reward, 0.0)
    assert same(two_prices(batch, 0.0, 0.0), expected)


def test_a_token_costs_more_the_more_of_its_group_is_solved():
    """From the floor of one in K up to one."""
    cost = []
    for solved in range(5):
        batch = of([0.0] * 4, [i < solved for i in range(4)], [500] * 4)
        cost.append(-float(one_price(batch)[0]))
    assert cost == pytest.approx([0.0125, 0.0125, 0.025, 0.0375, 0.05], rel=1e-12)


def test_published_numbers():
    """arXiv:2506.05256: K = 4, beta .1, N 1000, 500 tokens; three solved, then none."""
    three = one_price(of([1, 1, 1, 0], [True, True, True, False], [500] * 4))
    none = one_price(of([0] * 4, [False] * 4, [500] * 4))
    assert three.tolist() == pytest.approx([0.9625, 0.9625, 0.9625, -0.0375], rel=1e-12)
    assert none.tolist() == pytest.approx([-0.0125] * 4, rel=1e-12)


def test_the_environment_s_tokens_have_their_own_coefficient():
    """.25 for the policy's tokens and .1 for what the tools answered, half of the group solved."""
    batch = of([1, 0], [True, False], [20_000, 10_000], [80_000, 40_000])
    told = two_prices(batch)
    assert told.tolist() == pytest.approx([1 - 0.5 * (0.05 + 0.08), -0.5 * (0.025 + 0.04)], rel=1e-12)


def test_a_failed_group_has_no_signal_although_its_lengths_differ():
    """Asked of the penalised reward it would have one; zero variance is asked of the task's."""
    batch = of([0, 0, 1, 0], [False, False, True, False], [900, 100, 500, 500], None, None, [1, 1, 2, 2])
    penalised = one_price(batch)
    assert group_mean_advantage(penalised, batch.valid, batch.group_id, tolerance=0.0).has_signal.all()
    flat = zero_variance(batch.reward, batch.valid, batch.group_id, tolerance=1e-6)
    told = group_mean_advantage(penalised, batch.valid & ~flat, batch.group_id, tolerance=0.0)
    assert told.has_signal.tolist() == [False, False, True, True]
    assert told.advantage.tolist() == pytest.approx([0, 0, 0.5, -0.5])


def punishment(tokens: Tensor, dtype=F64, max_length=100, buffer=20) -> Tensor:
    return length.soft_overlong_punishment(tokens, max_length=max_length, buffer=buffer, dtype=dtype)


def test_soft_overlong_published_numbers():
    """arXiv:2503.14476, Eq. 13, with 100 tokens of which 20 are the buffer."""
    told = punishment(torch.tensor([0, 79, 80, 81, 90, 99, 100, 101, 10**12]))
    assert told.tolist() == pytest.approx([0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1], abs=1e-12)


@given(st.lists(st.integers(0, 300), min_size=2, max_size=8), st.integers(1, 100))
def test_soft_overlong_falls_from_zero_to_minus_one_and_never_rises(tokens, buffer):
    told = punishment(torch.tensor(sorted(tokens)), buffer=buffer)
    assert told.max() <= 0 and told.min() >= -1 and (told[1:] <= told[:-1]).all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_soft_overlong_takes_any_shape(shape):
    assert torch.equal(punishment(torch.full(shape, 90)), torch.full(shape, -0.5, dtype=F64))


def test_results_are_float32_at_least():
    """A length of 2049 is not a float16."""
    batch = of([1.0, 0.0], [True, False], [2049, 1])
    for given_dtype, got in ((torch.float16, torch.float32), (torch.bfloat16, torch.float32), (F64, F64)):
        assert two_prices(batch._replace(reward=batch.reward.to(given_dtype))).dtype == got
        told = punishment(batch.policy_tokens, given_dtype, 2050, 2)
        assert told.dtype == got and told.tolist() == [-0.5, 0]
    assert punishment(torch.tensor([10, 250], dtype=torch.uint8)).tolist() == [0, -1]


@given(batch=priced())
def test_inputs_are_untouched(batch):
    before = [field.clone() for field in batch]
    two_prices(batch), one_price(batch), punishment(batch.policy_tokens)  # pyright: ignore[reportUnusedExpression]
    assert all(same(a, b) for a, b in zip(before, batch))


@pytest.mark.parametrize("function", [two_prices, one_price])
def test_a_penalty_compiles_into_one_graph(function):
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for batch in (of([1, 0, 1], [True, False, True], [5, 6, 7], None, None, [1, 1, 2]), of([], [], [])):
        assert torch.equal(compiled(batch), function(batch))
    compiled = torch.compile(punishment, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.tensor([90, 3])), punishment(torch.tensor([90, 3])))


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
def test_a_coefficient_must_be_a_finite_number_of_at_least_zero(value):
    batch = of([1.0], [True], [5])
    for knob in ("policy", "environment"):
        text = f"{knob}_coefficient must not be negative and must be finite, got {value}"
        with pytest.raises(ValueError, match=f"^{text}$"):
            two_prices(batch, **{knob: value})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_must_be_a_finite_number_above_zero(value):
    for function in (two_prices, one_price):
        with pytest.raises(ValueError, match=f"^token_scale must be positive and finite, got {value}$"):
            function(of([1.0], [True], [5]), scale=value)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_must_fit_the_length(buffer):
    text = f"buffer must be positive and at most max_length 100, got {buffer}"
    with pytest.raises(ValueError, match=f"^{text}$"):
        punishment(torch.tensor([5]), buffer=buffer)
    assert punishment(torch.tensor([50]), buffer=100).tolist() == [-0.5]


@pytest.mark.parametrize(
    "field, value, text",
    [
        ("solved", torch.ones(1), "solved must be bool, got torch.float32"),
        ("valid", torch.ones(1), "valid must be bool, got torch.float32"),
        ("policy_tokens", torch.ones(1), "policy_tokens must be an integer tensor, got torch.float32"),
        (
            "environment_tokens",
            torch.ones(1),
            "environment_tokens must be an integer tensor, got torch.float32",
        ),
        ("group_id", torch.ones(1), "group_id must be an integer tensor, got torch.float32"),
        (
            "reward",
            torch.ones(2),
            "reward, solved, policy_tokens, environment_tokens, valid and group_id must have one shape [N],"
            " got [(2,), (1,), (1,), (1,), (1,), (1,)]",
        ),
    ],
)
def test_bad_input_is_refused(field, value, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        two_prices(of([1.0], [True], [5])._replace(**{field: value}))


def test_lengths_that_are_not_integers_are_refused():
    text = "token_count must be an integer tensor, got torch.float32"
    batch = of([1.0], [True], [5])._replace(policy_tokens=torch.ones(1))
    for call in (partial(punishment, torch.ones(1)), partial(one_price, batch)):
        with pytest.raises(ValueError, match=f"^{text}$"):
            call()


def test_a_coefficient_is_called_by_its_own_name():
    with pytest.raises(ValueError, match="^coefficient must not be negative and must be finite, got nan$"):
        one_price(of([1.0], [True], [5]), math.nan)
