"""Rows into micro-batches of a token budget: how few there must be, and packings that come down to it.

A row is its place in `lengths`, and `lengths` descends: the order of rows is the order of their lengths, so what
is decided here depends on the lengths alone.
"""

from __future__ import annotations

from collections.abc import Sequence

TRIES = 100
"""Steps of the search for the rows that fill one micro-batch best."""

REFILLS = 100
"""Micro-batches filled anew in the attempt to do with one fewer."""

Bins = list[tuple[int, ...]]
"""Rows of every micro-batch."""


def lower_bound(lengths: Sequence[int], *, token_budget: int) -> int:
    """No packing has fewer micro-batches than this, whatever it does: the bound L2 of Martello and Toth.

        oversize + halves + max_k max(0, ceil((sum of rows in [k, budget / 2] - room they find) / budget))

    Every row above half the budget has a micro-batch of its own; only those of at most budget - k leave room for
    rows of k or more. At least the sum over the budget, rounded up. Martello and Toth (1990), section 8.3.

    Args:
        lengths: tokens of the rows, in any order.
        token_budget: tokens of one micro-batch; a longer row has one to itself.
    """
    fitting = sorted(length for length in lengths if length <= token_budget)
    until = [0]
    for length in fitting:
        until.append(until[-1] + length)
    half = sum(2 * length <= token_budget for length in fitting)
    high, more = len(fitting), 0
    for low in range(half):
        while fitting[high - 1] > token_budget - fitting[low]:
            high -= 1
        room = (high - half) * token_budget - (until[high] - until[half])
        more = max(more, -((room - until[half] + until[low]) // token_budget))
    return len(lengths) - half + more


def filled(rows: Sequence[int], lengths: Sequence[int], *, token_budget: int, goal: int) -> Bins:
    """Micro-batches filled one after the other: the longest row left, then the rows that fill the rest best.

    "Best" is generous: what `goal` micro-batches may leave empty is shared out among those still to come, and
    a filling that leaves no more than its share is taken.

    Args:
        rows: the rows to pack, ascending.
        goal: how many micro-batches are hoped for; there may be more.
    """
    bins: Bins = [(row,) for row in rows if lengths[row] > token_budget]
    left = [row for row in rows if lengths[row] <= token_budget]
    spare = (goal - len(bins)) * token_budget - sum(lengths[row] for row in left)
    while left:
        first = left.pop(0)
        share = max(0, spare) / max(1, goal - len(bins))
        places, empty = _fullest(left, lengths, token_budget - lengths[first], share)
        bins.append((first, *[left[place] for place in places]))
        spare -= empty
        for place in reversed(places):
            del left[place]
    return bins


def refilled(bins: Bins, lengths: Sequence[int], *, token_budget: int, goal: int) -> Bins:
    """The same rows in fewer micro-batches, down to `goal`, as far as a bounded search finds them.

    The two emptiest micro-batches are given up; the others are filled anew from their own rows and the homeless
    ones, and never less than before, until the homeless fit into one.
    """
    while len(bins) > max(goal, 1):
        fewer = _one_fewer(bins, lengths, token_budget)
        if fewer is None:
            return bins
        bins = fewer
    return bins


def split(bins: Bins, cost: Sequence[float], *, count: int) -> Bins:
    """`count` micro-batches, by halving the dearest that has several rows; the rows must be enough."""
    bins = list(bins)
    while len(bins) < count:
        several = [place for place, rows in enumerate(bins) if len(rows) > 1]
        place = max(several, key=lambda place: sum(cost[row] for row in bins[place]))
        rows = sorted(bins[place])
        bins[place] = tuple(rows[::2])
        bins.append(tuple(rows[1::2]))
    return bins


def _one_fewer(bins: Bins, lengths: Sequence[int], token_budget: int) -> Bins | None:
    tokens = {rows: sum(lengths[row] for row in rows) for rows in bins}
    first, second, *rest = sorted(bins, key=lambda rows: (tokens[rows], rows))
    homeless = sorted(first + second)
    unchanged = 0
    for turn in range(REFILLS):
        if sum(lengths[row] for row in homeless) <= token_budget:
            return [*rest, tuple(homeless)]
        if unchanged == len(rest):
            return None
        place = turn % len(rest)
        pool = sorted((*rest[place], *homeless))
        places, empty = _fullest(pool, lengths, token_budget, 0)
        unchanged += 1
        if token_budget - empty > sum(lengths[row] for row in rest[place]):
            chosen = {pool[index] for index in places}
            rest[place] = tuple(sorted(chosen))
            homeless = [row for row in pool if row not in chosen]
            unchanged = 0
    return None


def _fullest(
    rows: Sequence[int], lengths: Sequence[int], room: int, spare: float
) -> tuple[tuple[int, ...], int]:
    """Places in `rows` whose lengths come nearest to `room` from below, and what they leave of it.

    Depth first, longer rows first. A row is replaced by a shorter one only where a further row could follow: alone
    it would leave more. The search ends when no more than `spare` is left, or after so many steps.
    """
    best: tuple[int, ...] = ()
    least, chosen = room, list[int]()
    place = _first_fitting(rows, lengths, room, 0)
    for _ in range(TRIES):
        if place < len(rows):
            chosen.append(place)
            room -= lengths[rows[place]]
            if room < least:
                best, least = tuple(chosen), room
                if room <= spare:
                    break
            place = _first_fitting(rows, lengths, room, place + 1)
        elif chosen:
            last = chosen.pop()
            length = lengths[rows[last]]
            room += length
            bound = min(length - 1, room - lengths[rows[-1]])
            place = _first_fitting(rows, lengths, bound, last + 1)
        else:
            break
    return best, least


def _first_fitting(rows: Sequence[int], lengths: Sequence[int], room: int, start: int) -> int:
    """The first place from `start` on whose row is no longer than `room`; the number of rows if there is none."""
    end = len(rows)
    while start < end:
        middle = (start + end) // 2
        if lengths[rows[middle]] <= room:
            end = middle
        else:
            start = middle + 1
    return start
