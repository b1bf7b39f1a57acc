"""Where in its rows a gap lies: under a rule that marks tokens, or in runs that begin at a telling token.

A token is a hit when its gap is larger than rounding explains, else a miss. What covers tokens earns HIT for each
hit and MISS for each miss, so covering pays where more than one token in four is a hit, and pays back what it
costs to say: little for a rule that marks tokens in all rows alike, more for a run in one row, most for a run
that may begin anywhere. The cheapest account of all hits wins: minimum description length, in whole numbers, so
that no rounding decides.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from .segment import dense, segment_sum
from .shapes import PerToken

HIT, MISS = 3, -1
RULE_COST = 12
"""Of a rule, once."""
MIXED_COST = 8
"""Of saying that caches are stale, for every row of two versions: each of them must show it."""
LEAK_COST, FREE_COST = 15, 18
"""Of a run that begins with its row, and of one that begins anywhere."""
NEVER = 1 << 40
LEAKED, CACHED, FREE = range(3)
AGED, OPENING, LATE = range(3)
ROUNDS = 2
"""Runs that one row may hold."""


class Layout(NamedTuple):
    """Marks of every token, in the order of rows and positions.

    Args:
        usable: in the mask and with finite facts; nothing else is ever covered.
        row: place of the row, rising.
        onset: [3, T], where a run may begin: with its row, with newer weights, anywhere.
        rule: [3, T], what a rule marks: older than the trainer, first tokens of a turn, late in the row.
        mixed_count: rows in which newer weights took over.
    """

    usable: PerToken
    row: PerToken
    onset: Tensor
    rule: Tensor
    mixed_count: Tensor


class Footprint(NamedTuple):
    """The best account of the hits.

    Args:
        score: what it earns; 0 when saying nothing is best.
        rule: [3] bool, which rules it uses.
        run: [T], LEAKED, CACHED or FREE inside a run, else -1.
    """

    score: Tensor
    rule: Tensor
    run: PerToken


def layout(
    usable: PerToken,
    row_id: PerToken,
    position: PerToken,
    token_in_turn: PerToken,
    policy_version: PerToken,
    *,
    trainer_version: int,
    boundary: int,
) -> Layout:
    """The marks of tokens that are sorted by row and position; see `attribution.TokenFact` for their meaning."""
    row = dense(row_id)
    earlier = _previous(policy_version >= 0, row)
    newer = (earlier >= 0) & (policy_version > policy_version[earlier])
    first = usable & (_previous(usable, row) < 0)
    last = torch.where(usable, position, 0).amax()
    return Layout(
        usable=usable,
        row=row,
        onset=torch.stack([first, newer, usable]),
        rule=torch.stack(
            [
                usable & (policy_version < trainer_version),
                usable & (token_in_turn < boundary),
                usable & (2 * position > last),
            ]
        ),
        mixed_count=(segment_sum(newer, row) > 0).sum(),
    )


def explain(hit: PerToken, marks: Layout, *, stale_version: bool, runs: tuple[bool, bool, bool]) -> Footprint:
    """The account of the hits that earns most: every choice of rules, and in every row the best runs beside them.

    Args:
        hit: bool per token, sorted as `marks`.
        stale_version: whether the rule of age may be used.
        runs: which of leaked, cached and free runs may be used.
    """
    score = scored(hit, marks.usable)
    choice = score.new_tensor(list(product((0, 1), repeat=4))).bool()
    rule, cached = choice[:, :3], choice[:, 3]
    covered = (rule[:, :, None] & marks.rule).any(1)
    total = (covered * score).sum(1) - RULE_COST * rule.sum(1) - MIXED_COST * marks.mixed_count * cached
    left = torch.where(covered, 0, score)
    price = torch.stack(
        [
            torch.full_like(total, LEAK_COST if runs[LEAKED] else NEVER),
            torch.where(cached & runs[CACHED], 0, NEVER),
            torch.full_like(total, FREE_COST if runs[FREE] else NEVER),
        ]
    )
    run = torch.full_like(left, -1)
    for _ in range(ROUNDS):
        gain, kind, inside = _best_kind(left, price, marks)
        total = total + gain
        run = torch.where(inside, kind, run)
        left = torch.where(inside, 0, left)
    total = torch.where(rule[:, AGED] & (not stale_version), -NEVER, total)
    best = (total * len(choice) - torch.arange(len(choice), device=total.device)).argmax()[None]
    return Footprint(total[best].squeeze(0), rule[best].squeeze(0), run[best].squeeze(0))


def scored(hit: PerToken, usable: PerToken) -> PerToken:
    """What a token earns when it is covered; 0 where there is nothing to see."""
    return torch.where(usable, torch.where(hit, HIT, MISS), 0)


def _best_kind(score: Tensor, price: Tensor, marks: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """In every row the run that earns most after its price: the sum over rows, and its kind and tokens, [K, T]."""
    found = [_strongest_run(score, onset, marks.row) for onset in marks.onset]
    gains = torch.stack([gain for gain, _ in found]) - price[:, :, None]
    rank = torch.arange(3, device=score.device)[:, None, None]
    key = (gains * 4 - rank).amax(0)
    kind = -key % 4
    gain = ((key + kind) // 4).clamp(min=0)
    inside = torch.stack([inside for _, inside in found]).gather(0, kind[None]).squeeze(0)
    opens = marks.row != torch.cat([marks.row[:1] - 1, marks.row[:-1]])
    return (gain * opens).sum(1), kind, inside & (gain > 0) & (score != 0)


def _strongest_run(score: Tensor, onset: PerToken, row: PerToken) -> tuple[Tensor, Tensor]:
    """For every token the largest sum of a run in its row that begins at an onset, and whether it lies in that run.

    The sum of a run is a difference of two running sums, so the best begin of each end is a running minimum;
    a lift that falls from row to row keeps the minimum inside the row.
    """
    place = torch.arange(score.shape[1], device=score.device)
    far = 4 * HIT * score.shape[1] + 4
    so_far = score.cumsum(1)
    lift = row * far
    lowest, begins = (torch.where(onset, so_far - score, far // 2) - lift).cummin(1)
    gain = so_far - lowest - lift
    rows = row.expand_as(gain)
    best = torch.full_like(gain, -NEVER).scatter_reduce(1, rows, gain, "amax").gather(1, rows)
    ends = torch.where(gain == best, place, score.shape[1])
    end = torch.full_like(gain, score.shape[1]).scatter_reduce(1, rows, ends, "amin").gather(1, rows)
    return best, (place >= begins.gather(1, end)) & (place <= end)


def _previous(chosen: PerToken, row: PerToken) -> PerToken:
    """The index of the last chosen token before this one in its row, -1 where there is none."""
    place = torch.arange(len(row), device=row.device)
    latest = torch.where(chosen, place, -1).cummax(0).values
    before = torch.cat([torch.full_like(place[:1], -1), latest[:-1]])
    return torch.where((before >= 0) & (row[before] == row), before, -1)
