"""Which tokens are trained, row by row."""

from __future__ import annotations

from collections.abc import Sequence


def next_in_row(value: Sequence[float], row_id: Sequence[int], fill: float) -> list[float]:
    """The next token's value if it is of the same row."""
    result = []
    for t, row in enumerate(row_id):
        follows = t + 1 < len(row_id) and row_id[t + 1] == row
        result.append(value[t + 1] if follows else fill)
    return result


def sampled_only(loss_mask: Sequence[bool], policy_version: Sequence[int]) -> list[bool]:
    """In the mask and sampled by some version."""
    return [m and version >= 0 for m, version in zip(loss_mask, policy_version)]


def rows_kept(loss_mask: Sequence[bool], row_index: Sequence[int], keep: Sequence[bool]) -> list[bool]:
    """In the mask and of a row that is there and kept."""
    return [m and 0 <= row < len(keep) and keep[row] for m, row in zip(loss_mask, row_index)]
