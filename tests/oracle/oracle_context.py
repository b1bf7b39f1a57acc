"""Who has which token of a row, token by token."""

from __future__ import annotations

from collections.abc import Sequence


def owner(place: int, length: int, ranks: int) -> int:
    """The rank of a token: the row's 2 * ranks chunks go to 0, 1, ..., 1, 0."""
    chunk = place // (length // (2 * ranks))
    return min(chunk, 2 * ranks - 1 - chunk)


def padded(lengths: Sequence[int], ranks: int, multiple: int) -> list[int]:
    """The shortest rows, all but the last alone, that are cut evenly and give each rank a multiple of tokens."""
    unit = 2 * ranks if ranks > 1 else 1
    found = [next(n for n in range(length, length + unit) if n % unit == 0) for length in lengths]
    while sum(found) % (ranks * multiple):
        found[-1] += unit
    return found


def share(
    lengths: Sequence[int], ranks: int, rank: int, multiple: int
) -> tuple[list[int], list[tuple[int, int]], dict[tuple[int, int], list[tuple[int, int]]]]:
    """Padded lengths, the (row, place) of each token of the rank in order, and the keys that each may attend to."""
    rows = padded(lengths, ranks, multiple)
    here = [
        (row, place)
        for row, length in enumerate(rows)
        for place in range(length)
        if ranks == 1 or owner(place, length, ranks) == rank
    ]
    seen = {(row, place): [(row, earlier) for earlier in range(place + 1)] for row, place in here}
    return rows, here, seen
