"""What laws are quantified over: packed steps, token batches, groups of rollouts, trajectories."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class PackedStep(NamedTuple):
    """All tokens of a step, in any order, with the value of each."""

    loss_mask: Tensor
    row_id: Tensor
    group_id: Tensor
    value: Tensor


class TokenBatch(NamedTuple):
    """What a surrogate takes, in float64."""

    logprob: Tensor
    rollout_logprob: Tensor
    advantage: Tensor
    loss_mask: Tensor


class Rollouts(NamedTuple):
    """What an advantage takes."""

    reward: Tensor
    valid: Tensor
    group_id: Tensor


def step_of(
    groups: list[list[list[float | None]]], row_names: list[int], group_names: list[int]
) -> PackedStep:
    """A step from groups of rows of values; None is a token that is not trained."""
    rows, mask, row_id, group_id = iter(row_names), [], [], []
    value: list[float] = []
    for group, group_name in zip(groups, group_names):
        for row in group:
            name = next(rows)
            for token in row:
                mask.append(token is not None)
                value.append(math.nan if token is None else token)
                row_id.append(name)
                group_id.append(group_name)
    return PackedStep(
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(row_id, dtype=torch.long),
        torch.tensor(group_id, dtype=torch.long),
        torch.tensor(value, dtype=torch.float64),
    )


@st.composite
def packed_steps(draw: st.DrawFn) -> PackedStep:
    """Ragged groups of ragged rows, some not trained at all, arbitrary distinct ids, tokens shuffled."""
    token = st.none() | st.integers(-8, 8).map(float)
    groups = draw(st.lists(st.lists(st.lists(token, max_size=5), max_size=3), min_size=1, max_size=4))
    names = st.integers(-(10**9), 10**9)
    row_count = sum(len(group) for group in groups)
    row_names = draw(st.lists(names, min_size=row_count, max_size=row_count, unique=True))
    group_names = draw(st.lists(names, min_size=len(groups), max_size=len(groups), unique=True))
    step = step_of(groups, row_names, group_names)
    order = torch.tensor(draw(st.permutations(range(len(step.value)))), dtype=torch.long)
    return PackedStep(*(field[order] for field in step))


@st.composite
def token_batches(draw: st.DrawFn) -> TokenBatch:
    """Up to eight tokens; ratios from far below to far above 1, some equal; probabilities below 1."""
    logprobs = st.sampled_from([-1e-9, -0.01, -0.2, -0.7, -1.0, -1.5, -3.0, -12.0]) | st.floats(-15, -1e-6)
    token = st.tuples(logprobs, logprobs, st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0]), st.booleans())
    rows = draw(st.lists(token, min_size=1, max_size=8))
    columns = list(zip(*rows))
    return TokenBatch(
        *(torch.tensor(column, dtype=torch.float64) for column in columns[:3]),
        loss_mask=torch.tensor(columns[3], dtype=torch.bool),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollouts:
    """Up to twelve rollouts in groups of any size, in any order, some not valid."""
    reward = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(-3, 3)
    rows = draw(st.lists(st.tuples(reward, st.booleans(), st.sampled_from([-7, 0, 3, 10**12])), max_size=12))
    columns = list(zip(*rows)) if rows else [(), (), ()]
    return Rollouts(
        torch.tensor(columns[0], dtype=torch.float64),
        torch.tensor(columns[1], dtype=torch.bool),
        torch.tensor(columns[2], dtype=torch.long),
    )


poison = st.sampled_from([math.nan, math.inf, -math.inf, -9999.0, 1e30])
"""What stands where nobody may read."""


def poisoned(value: Tensor, loss_mask: Tensor, junk: float) -> Tensor:
    """The value with junk wherever the mask is False."""
    return torch.where(loss_mask, value, junk)
