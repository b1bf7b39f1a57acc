"""A lower bound on micro-batches, by going through every threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence


def lower_bound(lengths: Sequence[int], budget: int) -> int:
    """L2 of Martello and Toth: rows above budget - k, above half, and from k on, for every k."""
    oversize = [s for s in lengths if s > budget]
    rows = [s for s in lengths if s <= budget]
    best = 0
    for k in range(0, budget // 2 + 1):
        alone = [s for s in rows if s > budget - k]
        half = [s for s in rows if budget / 2 < s <= budget - k]
        small = [s for s in rows if k <= s <= budget / 2]
        room = len(half) * budget - sum(half)
        more = max(0, math.ceil((sum(small) - room) / budget))
        best = max(best, len(alone) + len(half) + more)
    return len(oversize) + best
