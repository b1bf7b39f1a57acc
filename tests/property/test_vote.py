"""Laws of core.vote: however many rows a rollout has, its group hears it once."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Rollouts, poison, rollouts

from core.advantage import group_mean_advantage
from core.outcome import reward_per_rollout
from core.vote import rollout_vote

F64 = torch.float64


@st.composite
def fanned_out(draw):
    """Rollouts, and rows of them in any order: every rollout has one to three."""
    batch = draw(rollouts())
    counts = draw(st.lists(st.integers(1, 3), min_size=len(batch.reward), max_size=len(batch.reward)))
    owner = torch.tensor([i for i, count in enumerate(counts) for _ in range(count)], dtype=torch.long)
    order = torch.tensor(draw(st.permutations(range(len(owner)))), dtype=torch.long)
    return batch, owner[order]


def rows_of(batch: Rollouts, owner, names=lambda index: 7 - 10 * index):
    return batch.reward[owner], batch.valid[owner], batch.group_id[owner], names(owner)


def advantage_of(reward, valid, group_id):
    return group_mean_advantage(reward, valid, group_id, tolerance=1e-6)


@given(fan=fanned_out())
def test_rows_have_the_advantage_that_their_rollouts_have_without_them(fan):
    batch, owner = fan
    vote = rollout_vote(*rows_of(batch, owner))
    told = advantage_of(*vote[:3])
    expected = advantage_of(*batch)
    assert torch.equal(told.advantage[vote.rollout_index], expected.advantage[owner])
    assert torch.equal(told.has_signal[vote.rollout_index], expected.has_signal[owner])


@given(fan=fanned_out())
def test_every_valid_rollout_votes_once_with_its_own_reward(fan):
    batch, owner = fan
    vote = rollout_vote(*rows_of(batch, owner))
    assert vote.reward.shape == vote.valid.shape == vote.group_id.shape == owner.shape
    assert int(vote.valid.sum()) == int(batch.valid.sum())
    assert not vote.reward[~vote.valid].any()
    index, valid = vote.rollout_index, batch.valid[owner]
    assert torch.equal(vote.valid[index], valid)
    assert torch.equal(vote.reward[index][valid], batch.reward[owner][valid])
    assert torch.equal(vote.group_id[index], batch.group_id[owner])


@given(fan=fanned_out(), data=st.data())
def test_the_order_of_rows_does_not_matter(fan, data):
    rows = rows_of(*fan)
    order = torch.tensor(data.draw(st.permutations(range(len(rows[0])))), dtype=torch.long)
    moved, stayed = rollout_vote(*(x[order] for x in rows)), rollout_vote(*rows)
    assert all(torch.equal(a, b) for a, b in zip(moved[:3], stayed[:3]))
    assert torch.equal(moved.rollout_index, stayed.rollout_index[order])


@given(fan=fanned_out(), junk=poison)
def test_a_reward_that_is_not_valid_is_never_read(fan, junk):
    batch, owner = fan
    reward, *others = rows_of(batch, owner)
    place = torch.arange(len(owner))
    dirty = torch.where(batch.valid[owner], reward, torch.where(place % 2 == 0, junk, 0.25))
    for one, other in zip(rollout_vote(dirty, *others), rollout_vote(reward, *others)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_has_no_vote(junk):
    reward = torch.tensor([junk, junk, 1.0], dtype=F64)
    zeros = torch.zeros(3).long()
    vote = rollout_vote(reward, torch.ones(3).bool(), zeros, torch.tensor([0, 0, 1]))
    assert vote.valid.tolist() == [False, True, False] and vote.reward.tolist() == [0, 1, 0]


def test_a_longer_history_does_not_vote_twice():
    """G6, miles 2369: four rollouts, the two that passed have two rows; a row's vote would give .6667."""
    reward = torch.tensor([1.0, 1, 0, 1, 1, 0], dtype=F64)
    rollout = torch.tensor([0, 0, 1, 2, 2, 3])
    vote = rollout_vote(reward, torch.ones(6).bool(), torch.zeros(6).long(), rollout)
    told = advantage_of(*vote[:3]).advantage[vote.rollout_index]
    assert told.tolist() == [0.5, 0.5, -0.5, 0.5, 0.5, -0.5]


def test_rows_that_disagree_are_refused_as_they_are_without_tensors():
    """G10, miles 2498: rollout 7 with rewards 1 and 0."""
    text = re.escape("rows of rollout 7 must agree on the reward, got 1.0 and 0.0")
    with pytest.raises(ValueError, match=f"^{text}$"):
        reward_per_rollout([3, 7, 7], [0.5, 1.0, 0.0])
    with pytest.raises(ValueError, match=f"^{text}$"):
        rollout_vote(
            torch.tensor([0.5, 1.0, 0.0]),
            torch.ones(3).bool(),
            torch.zeros(3).long(),
            torch.tensor([3, 7, 7]),
        )


@pytest.mark.parametrize(
    "case, reward, valid, group_id, text",
    [
        ("one has no reward", [1, 1], [True, False], [4, 4], "on the reward, got 1.0 and inf"),
        ("one is not finite", [math.nan, 1], [True, True], [4, 4], "on the reward, got inf and 1.0"),
        ("two groups", [1, 1], [True, True], [4, 5], "on the group, got 4 and 5"),
        ("two groups, none valid", [1, 1], [False, False], [4, 5], "on the group, got 4 and 5"),
    ],
)
def test_rows_must_agree_on_what_their_rollout_is(case, reward, valid, group_id, text):
    with pytest.raises(ValueError, match=f"^rows of rollout -2 must agree {re.escape(text)}$"):
        rollout_vote(
            torch.tensor(reward, dtype=F64),
            torch.tensor(valid),
            torch.tensor(group_id),
            torch.full((2,), -2, dtype=torch.long),
        )


@pytest.mark.parametrize("reward, group_id", [([1.0, 0.0, 1.0], [0, 0, 0]), ([1.0, 1.0, 1.0], [0, 3, 0])])
def test_a_compiled_rollout_whose_rows_disagree_has_no_vote(reward, group_id):
    """Nothing can be raised there."""
    torch.compiler.reset()
    compiled = torch.compile(rollout_vote, fullgraph=True, backend="eager")
    vote = compiled(
        torch.tensor(reward), torch.ones(3).bool(), torch.tensor(group_id), torch.tensor([7, 7, 9])
    )
    assert vote.valid.tolist() == [False, True, False] and vote.reward.tolist() == [0, 1, 0]


@pytest.mark.parametrize("reward, group_id", [([1.0, 0.0, 1.0], [0, 0, 0]), ([1.0, 1.0, 1.0], [0, 3, 0])])
def test_a_rollout_whose_rows_disagree_has_no_vote_where_nothing_can_be_raised(reward, group_id, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    rows = torch.tensor(reward), torch.ones(3).bool(), torch.tensor(group_id), torch.tensor([7, 7, 9])
    vote = rollout_vote(*rows)
    assert vote.valid.tolist() == [False, True, False] and vote.reward.tolist() == [0, 1, 0]


def test_it_compiles_into_one_graph():
    torch.compiler.reset()
    compiled = torch.compile(rollout_vote, fullgraph=True, backend="eager")
    for count in (6, 0, 1):
        ids = torch.arange(count) // 2
        rows = ids.to(F64), ids > 0, ids // 2, 5 - ids
        for one, other in zip(compiled(*rows), rollout_vote(*rows)):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "given_dtype, got", [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (F64, F64)]
)
def test_votes_are_float32_at_least_and_inputs_are_untouched(given_dtype, got):
    rows = (
        torch.ones(2, dtype=given_dtype),
        torch.ones(2).bool(),
        torch.zeros(2).long(),
        torch.zeros(2).long(),
    )
    before = [x.clone() for x in rows]
    assert rollout_vote(*rows).reward.dtype == got
    assert all(torch.equal(a, b) for a, b in zip(before, rows))


@pytest.mark.parametrize(
    "position, value, text",
    [
        (1, torch.ones(2), "valid must be bool, got torch.float32"),
        (2, torch.ones(2), "group_id must be an integer tensor, got torch.float32"),
        (3, torch.ones(2), "rollout_id must be an integer tensor, got torch.float32"),
        (
            0,
            torch.ones(3),
            "reward, valid, group_id and rollout_id must have one shape [B], got [(3,), (2,), (2,), (2,)]",
        ),
    ],
)
def test_bad_input_is_refused(position, value, text):
    rows = [torch.ones(2), torch.ones(2).bool(), torch.zeros(2).long(), torch.zeros(2).long()]
    rows[position] = value
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        rollout_vote(*rows)
