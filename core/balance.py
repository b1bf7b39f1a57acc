"""Ranks that all wait for the slowest: micro-batches dealt so that each rank has as much to compute as the others.

As in `bins`, a row is its place in `lengths`, which descends. A hand is the micro-batches of one rank, () a dummy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .bins import Bins, filled, split

EVEN = 2e-3
"""What the dearest rank may cost above the mean, as a share of it, before rows are exchanged."""

EXCHANGES = 40
"""How many exchanges at most."""

PARTNERS = 3
"""How many of the cheapest ranks the dearest tries to exchange with."""


def spread(
    lengths: Sequence[int], cost: Sequence[float], *, token_budget: int, ranks: int, rounds: int
) -> list[Bins] | None:
    """Hands of at most `rounds` micro-batches, rows dealt first and packed afterwards; None where they do not fit.

    Longest first, each row to the cheapest rank with room, which is half-way between an equal share of all
    tokens and what `rounds` micro-batches hold. The last rows are kept for ranks with fewer rows than rounds.
    """
    tokens = [min(length, token_budget) for length in lengths]
    room = [(rounds * token_budget + sum(tokens) / ranks) / 2] * ranks
    load = [0.0] * ranks
    hands: list[list[int]] = [[] for _ in range(ranks)]
    missing = rounds * ranks
    for row in range(len(lengths)):
        last = missing >= len(lengths) - row
        able = [r for r in range(ranks) if tokens[row] <= room[r] and not (last and len(hands[r]) >= rounds)]
        if not able:
            return None
        rank = min(able, key=load.__getitem__)
        missing -= len(hands[rank]) < rounds
        hands[rank].append(row)
        load[rank] += cost[row]
        room[rank] -= tokens[row]
    packed = [filled(hand, lengths, token_budget=token_budget, goal=rounds) for hand in hands]
    if max(map(len, packed)) > rounds:
        return None
    return [split(bins, cost, count=min(rounds, len(hand))) for bins, hand in zip(packed, hands)]


def levelled(
    hands: Sequence[Bins], lengths: Sequence[int], cost: Sequence[float], *, token_budget: int
) -> list[Bins]:
    """The same hands after exchanges between the dearest rank and a cheaper one, until they cost the same.

    An exchange swaps two micro-batches, swaps two rows, or moves one: whichever comes nearest to halving the gap
    of the two ranks. It keeps the budget, the number of micro-batches, and a row in each that had one.
    """
    hands = list(hands)
    load = [_cost(hand, cost) for hand in hands]
    bound = sum(load) / len(load) * (1 + EVEN)
    for _ in range(EXCHANGES):
        dear = max(range(len(load)), key=load.__getitem__)
        if load[dear] <= bound:
            break
        cheaper = sorted((r for r in range(len(load)) if load[r] < load[dear]), key=load.__getitem__)[
            :PARTNERS
        ]
        pairs = ((r, _exchange(hands[dear], hands[r], lengths, cost, token_budget)) for r in cheaper)
        rank, exchanged = next((pair for pair in pairs if pair[1] is not None), (dear, None))
        if exchanged is None:
            break
        hands[dear], hands[rank] = exchanged
        load[dear], load[rank] = _cost(hands[dear], cost), _cost(hands[rank], cost)
    return hands


_Offer = tuple[float, int, int, tuple[int, ...]]
"""Cost, length, micro-batch and rows of what the cheap hand may give back."""


class _Move(NamedTuple):
    """Rows `out` of micro-batch `place` of the dear hand against rows `back` of `other` of the cheap one."""

    miss: float
    place: int
    out: tuple[int, ...]
    other: int
    back: tuple[int, ...]


def _exchange(
    dear: Bins, cheap: Bins, lengths: Sequence[int], cost: Sequence[float], token_budget: int
) -> tuple[Bins, Bins] | None:
    """Both hands after the best exchange; None if none makes the dearer of the two cheaper."""
    half = (_cost(dear, cost) - _cost(cheap, cost)) / 2
    room = [token_budget - sum(lengths[row] for row in rows) for rows in cheap]
    moves = [*_whole(dear, cheap, cost, half), *_single(dear, cheap, room, lengths, cost, half)]
    move = min(moves, key=lambda move: move.miss)
    if not move.miss < half:
        return None
    dear, cheap = list(dear), list(cheap)
    dear[move.place] = tuple(sorted({*dear[move.place], *move.back} - {*move.out}))
    cheap[move.other] = tuple(sorted({*cheap[move.other], *move.out} - {*move.back}))
    return dear, cheap


def _whole(dear: Bins, cheap: Bins, cost: Sequence[float], half: float) -> list[_Move]:
    """For each micro-batch of the dear hand those of the cheap hand that cost most nearly `half` less."""
    offers = sorted((_cost([rows], cost), other, rows) for other, rows in enumerate(cheap))
    prices = [price for price, _, _ in offers]
    found: list[_Move] = []
    for place, rows in enumerate(dear):
        own = _cost([rows], cost)
        at = _below(prices, own - half)
        for price, other, back in offers[max(0, at - 1) : at + 1]:
            found.append(_Move(abs(own - price - half), place, rows, other, back))
    return found


def _single(
    dear: Bins, cheap: Bins, room: list[int], lengths: Sequence[int], cost: Sequence[float], half: float
) -> list[_Move]:
    """Better and better moves of one row of the dear hand for one row, or none, of the cheap hand.

    What returns is shorter than what leaves, so only the cheap hand's room can forbid it.
    """
    nothing: list[_Offer] = [(0.0, 0, other, ()) for other in range(len(cheap))]
    offers = sorted(
        nothing
        + [(cost[row], lengths[row], other, (row,)) for other, rows in enumerate(cheap) for row in rows]
    )
    prices, sizes = [offer[0] for offer in offers], [offer[1] for offer in offers]
    found: list[_Move] = []
    least = half
    for place, row in ((place, row) for place, rows in enumerate(dear) for row in rows):
        first, middle = _below(sizes, lengths[row] - max(room)), _below(prices, cost[row] - half)
        for side in (range(max(first, middle), len(offers)), range(middle - 1, first - 1, -1)):
            for price, length, other, back in (offers[at] for at in side):
                miss = abs(cost[row] - price - half)
                if miss >= least:
                    break
                if lengths[row] - length <= room[other] and (back or len(dear[place]) > 1):
                    found.append(_Move(miss, place, (row,), other, back))
                    least = miss
                    break
    return found


def _below(ascending: Sequence[float], value: float) -> int:
    """How many are less than `value`."""
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


def _cost(hand: Bins, cost: Sequence[float]) -> float:
    return sum(cost[row] for rows in hand for row in rows)
