"""One vote per rollout, from rows that repeat it."""

from __future__ import annotations

import math
from collections.abc import Sequence

Vote = tuple[float, bool, int]
"""reward (0 unless valid), valid, group"""


def votes(
    reward: Sequence[float], valid: Sequence[bool], group_id: Sequence[int], rollout_id: Sequence[int]
) -> dict[int, Vote]:
    """By rollout what its rows agree on; a reward that is not finite does not count."""
    result: dict[int, Vote] = {}
    for r, v, g, rollout in zip(reward, valid, group_id, rollout_id):
        counts = v and math.isfinite(r)
        vote = (r if counts else 0.0, counts, g)
        if result.setdefault(rollout, vote) != vote:
            raise ValueError(rollout)
    return result
