"""The likeliest cause by going through the list of causes."""

from __future__ import annotations


def likely_cause(clues: list[tuple[str, int]], causes: tuple[str, ...]) -> str:
    """Of the heaviest, the first by the list of causes."""
    heaviest = max(weight for _, weight in clues)
    among = {cause for cause, weight in clues if weight == heaviest}
    return next(cause for cause in causes if cause in among)
