"""Placement by walking along the nodes with fractions, and starts by counting ticks of a clock."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def roomiest(running: Sequence[int], slots: Sequence[int]) -> int | None:
    """Look at every node in turn; one that is less full than the best so far is better."""
    best: int | None = None
    least = Fraction(1)
    for node in range(len(slots)):
        if slots[node] and Fraction(running[node], slots[node]) < least:
            best, least = node, Fraction(running[node], slots[node])
    return best


def starts(waiting: int, takes: int, max_starting: int, spacing: int, ticks: int) -> list[int]:
    """The ticks at which trials start that all wait from the first on and take so many ticks to be up."""
    begun: list[int] = []
    for tick in range(ticks):
        starting = sum(1 for start in begun if tick < start + takes)
        rested = not begun or tick >= begun[-1] + spacing
        if len(begun) < waiting and starting < max_starting and rested:
            begun.append(tick)
    return begun
