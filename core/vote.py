"""Fan-out: a rollout whose history was rewritten has several rows, and still one vote in its group."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .segment import dense, segment_sum
from .shapes import PerRollout, PerRow, check_bool, check_float, check_integer, check_one_axis


class RolloutVote(NamedTuple):
    """One entry per rollout, made from rows; as many entries as there were rows, the spare ones not valid.

    Args:
        reward, valid, group_id: what the advantages take.
        rollout_index: for every row the position of its rollout in the other three.
    """

    reward: PerRollout
    valid: PerRollout
    group_id: PerRollout
    rollout_index: PerRow


def rollout_vote(reward: PerRow, valid: PerRow, group_id: PerRow, rollout_id: PerRow) -> RolloutVote:
    """One vote per rollout from rows that repeat its reward, so that a long history does not vote twice.

        vote = rollout_vote(reward, valid, group_id, rollout_id)
        told = group_mean_advantage(vote.reward, vote.valid, vote.group_id, tolerance=1e-6)
        row_advantage = told.advantage[vote.rollout_index]

    Args:
        reward: of every row; may be garbage where `valid` is False.
        valid: True where the row's reward counts; one that is not finite does not.
        group_id: of every row.
        rollout_id: rows of one rollout share it.

    Raises:
        ValueError: if rows of one rollout disagree; the message names it, and says inf of a row without a
            valid reward. Under torch.compile, where nothing can be raised, such a rollout is not valid.
    """
    check_float(reward=reward)
    check_bool(valid=valid)
    check_integer(group_id=group_id, rollout_id=rollout_id)
    check_one_axis("B", reward=reward, valid=valid, group_id=group_id, rollout_id=rollout_id)
    place, rows = dense(rollout_id), len(rollout_id)
    number = torch.arange(rows, device=place.device)
    first = torch.full_like(place, rows).scatter_reduce(0, place, number, "amin")
    present, first = first < rows, first.clamp(max=rows - 1)
    dtype = torch.promote_types(reward.dtype, torch.float32)
    told = torch.where(valid & reward.isfinite(), reward.to(dtype), torch.inf)
    same_reward = told == told[first][place]
    same_group = group_id == group_id[first][place]
    _check_agreement("reward", told, same_reward, rollout_id, first[place])
    _check_agreement("group", group_id, same_group, rollout_id, first[place])
    agreed = segment_sum(~(same_reward & same_group), place) == 0
    vote = present & agreed & told[first].isfinite()
    group = torch.where(present, group_id[first], 0)
    return RolloutVote(torch.where(vote, told[first], 0.0), vote, group, place)


def _check_agreement(name: str, told: PerRow, same: PerRow, rollout_id: PerRow, first: PerRow) -> None:
    """Name the first rollout whose rows differ from its first row; infinity stands for no valid reward."""
    if not torch.compiler.is_compiling() and not same.all():
        owner, other, one = (x[~same][0] for x in (rollout_id, told, told[first]))
        raise ValueError(f"rows of rollout {owner} must agree on the {name}, got {one} and {other}")
