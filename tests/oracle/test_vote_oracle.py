"""core/vote.py against a dictionary of rollouts."""

from __future__ import annotations

import math

import oracle_advantage
import oracle_vote as oracle
import pytest
from comparing import assert_same, flags, numbers, places
from hypothesis import given
from hypothesis import strategies as st

from core.advantage import group_mean_advantage
from core.vote import rollout_vote

Rollout = tuple[float, bool, int]
rewards = st.sampled_from([0.0, 0.5, 1.0, math.nan, math.inf]) | st.floats(-2, 2)
rollouts = st.dictionaries(
    st.integers(-(10**9), 10**9), st.tuples(rewards, st.booleans(), st.integers(-2, 2)), max_size=5
)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], list[bool], list[int], list[int]]:
    """Every rollout on one row or more, in any order."""
    table = draw(rollouts)
    names = [name for name in table for _ in range(draw(st.integers(1, 3)))]
    names = draw(st.permutations(names))
    return (
        [table[name][0] for name in names],
        [table[name][1] for name in names],
        [table[name][2] for name in names],
        list(names),
    )


@given(rows())
def test_rollout_vote_gives_every_row_its_rollouts_one_vote(
    table: tuple[list[float], list[bool], list[int], list[int]],
) -> None:
    reward, valid, group, rollout = table
    vote = rollout_vote(numbers(reward), flags(valid), places(group), places(rollout))
    expected = oracle.votes(*table)
    assert len(vote.reward) == len(vote.valid) == len(vote.group_id) == len(rollout)
    index = vote.rollout_index.tolist()
    assert len(set(index)) == len(expected), "rows of one rollout share a place, others do not"
    for row, name in enumerate(rollout):
        r, v, g = expected[name]
        place = index[row]
        assert vote.valid[place].item() == v
        assert vote.group_id[place].item() == g
        if v:
            assert_same(vote.reward[place], r)
    spare = [place for place in range(len(rollout)) if place not in index]
    assert not any(vote.valid[place].item() for place in spare)


@given(rows())
def test_advantage_of_votes_is_that_of_a_group_where_every_rollout_is_one_row(
    table: tuple[list[float], list[bool], list[int], list[int]],
) -> None:
    reward, valid, group, rollout = table
    vote = rollout_vote(numbers(reward), flags(valid), places(group), places(rollout))
    told = group_mean_advantage(vote.reward, vote.valid, vote.group_id, tolerance=1e-6)
    by_rollout = oracle.votes(*table)
    names = list(by_rollout)
    r, v, g = ([by_rollout[name][k] for name in names] for k in range(3))
    advantage, _ = oracle_advantage.group_mean(r, v, g, 1e-6)  # type: ignore[arg-type]
    expected = [advantage[names.index(name)] for name in rollout]
    assert_same(told.advantage[vote.rollout_index], expected)


def test_g6_rows_of_a_rewritten_history_do_not_vote_twice() -> None:
    reward, rollout = [1.0, 1.0, 0.0, 1.0, 1.0, 0.0], [0, 0, 1, 2, 2, 3]
    vote = rollout_vote(numbers(reward), flags([True] * 6), places([9] * 6), places(rollout))
    told = group_mean_advantage(vote.reward, vote.valid, vote.group_id, tolerance=1e-6)
    assert_same(told.advantage[vote.rollout_index], [0.5, 0.5, -0.5, 0.5, 0.5, -0.5])


def test_g10_rows_of_a_rollout_that_disagree_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="7"):
        rollout_vote(numbers([1.0, 0.0]), flags([True, True]), places([0, 0]), places([7, 7]))
