"""Rows shared by ranks that each compute some tokens of every row, so that attention costs all of them the same.

A row is cut into 2 * ranks equal chunks; rank r has chunk r and chunk 2 * ranks - 1 - r. What the ranks send
each other is keys and values alone: all that a query attends to is the beginning of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .check import check_count


class Share(NamedTuple):
    """What one rank has of rows that lie one after the other, each padded at its end.

    Args:
        padded: length of every row with its padding.
        take: place in the padded rows of each token that is here, in the order in which it is here.
        position: place inside its row of each token that is here.
        query_length: tokens that are here, segment by segment.
        key_length: tokens from the beginning of the row up to the last of the segment.
        key: place of each segment's keys among the tokens of all ranks, those of rank 0 first; empty for one rank,
            where a segment is a row and the keys are what is here.
    """

    padded: tuple[int, ...]
    take: tuple[int, ...]
    position: tuple[int, ...]
    query_length: tuple[int, ...]
    key_length: tuple[int, ...]
    key: tuple[int, ...]


def share(lengths: Sequence[int], *, ranks: int, rank: int, multiple: int) -> Share:
    """The tokens of one rank and the keys of their attention.

    Args:
        lengths: tokens of every row.
        ranks: how many share each row.
        rank: which of them.
        multiple: what the number of tokens of each rank must be a multiple of; the last row is padded for it.
    """
    check_count("ranks", ranks, least=1)
    check_count("multiple", multiple, least=1)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in 0..{ranks - 1}, got {rank}")
    if not lengths:
        raise ValueError("lengths must not be empty, got none")
    for length in lengths:
        check_count("every length", length, least=1)
    padded = _padded(lengths, unit=2 * ranks if ranks > 1 else 1, whole=ranks * multiple)
    if ranks == 1:
        position = tuple(place for length in padded for place in range(length))
        return Share(padded, tuple(range(sum(padded))), position, padded, padded, ())
    here = [_places(length, ranks, rank) for length in padded]
    starts = [sum(padded[:row]) for row in range(len(padded))]
    chunks = [length // (2 * ranks) for length in padded]
    ends = [(chunk * (rank + 1), chunk * (2 * ranks - rank)) for chunk in chunks]
    return Share(
        padded=padded,
        take=tuple(start + place for start, places in zip(starts, here) for place in places),
        position=tuple(place for places in here for place in places),
        query_length=tuple(chunk for chunk in chunks for _ in range(2)),
        key_length=tuple(end for pair in ends for end in pair),
        key=_keys(padded, starts, ends, ranks),
    )


def _padded(lengths: Sequence[int], *, unit: int, whole: int) -> tuple[int, ...]:
    """Every row a multiple of `unit`, all together one of `whole`."""
    padded = [-(-length // unit) * unit for length in lengths]
    missing = -sum(padded) % whole
    while missing % unit:
        missing += whole
    return (*padded[:-1], padded[-1] + missing)


def _places(length: int, ranks: int, rank: int) -> tuple[int, ...]:
    chunk = length // (2 * ranks)
    last = 2 * ranks - 1 - rank
    return (*range(rank * chunk, (rank + 1) * chunk), *range(last * chunk, (last + 1) * chunk))


def _keys(
    padded: Sequence[int], starts: Sequence[int], ends: Sequence[tuple[int, int]], ranks: int
) -> tuple[int, ...]:
    """Where the tokens of all ranks, one rank after the other, hold the beginning of each segment's row."""
    gathered = [0] * sum(padded)
    count = 0
    for rank in range(ranks):
        for length, start in zip(padded, starts):
            for place in _places(length, ranks, rank):
                gathered[start + place] = count
                count += 1
    return tuple(
        place for start, pair in zip(starts, ends) for end in pair for place in gathered[start : start + end]
    )
