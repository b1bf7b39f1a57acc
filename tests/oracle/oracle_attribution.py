"""Causes of a gap: the parts that have a formula, by trying every choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple


def rounding_noise(largest_logit: float, bits: int) -> float:
    """Uniform rounding error of numbers whose neighbours are 2^(exponent + 1 - bits) away."""
    exponent = 0
    while 2.0 ** (exponent + 1) <= abs(largest_logit):
        exponent += 1
    while 2.0**exponent > abs(largest_logit):
        exponent -= 1
    return 2.0 ** (exponent + 1 - bits) / math.sqrt(12)


def distance(value: Sequence[float], direction: Sequence[float], slope: float) -> float:
    """sum |value - slope direction|."""
    return math.fsum(abs(v - slope * d) for v, d in zip(value, direction))


def least_distance(value: Sequence[float], direction: Sequence[float]) -> float:
    """The least of it; it lies where one token's difference vanishes, or at 0."""
    slopes = [0.0] + [v / d for v, d in zip(value, direction) if d != 0]
    return min(distance(value, direction, slope) for slope in slopes)


class Closed(NamedTuple):
    """The best set of rescorings."""

    left: float
    members: frozenset[int]
    last: dict[int, float]
    """what each member closes beyond the others"""


FITTED = 0
"""Place of the rescoring that is fitted; given ones follow."""


def rescored(
    difference: Sequence[float],
    shift: Sequence[Sequence[float]],
    direction: Sequence[float],
    fit: bool,
    min_share: float,
) -> Closed:
    """Over all sets of which every member closes its share beyond the others, the one that leaves least."""

    def left(members: frozenset[int]) -> float:
        rest = [
            d + math.fsum(shift[k - 1][t] for k in members if k != FITTED) for t, d in enumerate(difference)
        ]
        if FITTED in members:
            return least_distance(rest, direction)
        return math.fsum(map(abs, rest))

    whole = left(frozenset())
    best = Closed(whole, frozenset(), {})
    places = ([FITTED] if fit else []) + list(range(1, len(shift) + 1))
    for size in range(1, len(places) + 1):
        for chosen in combinations(places, size):
            members = frozenset(chosen)
            mine = left(members)
            last = {k: left(members - {k}) - mine for k in members}
            if all(x >= min_share * whole for x in last.values()) and mine < best.left:
                best = Closed(mine, members, last)
    return best


HIT, MISS = 3, -1
RULE_COST, LEAK_COST, FREE_COST = 12, 15, 18


def best_account(
    gain: Sequence[int],
    row: Sequence[int],
    leak_onset: Sequence[bool],
    free_onset: Sequence[bool],
    rules: Sequence[Sequence[bool]],
    leaked: bool,
    free: bool,
) -> int:
    """The most that covering tokens earns: every choice of rules, and in every row every choice of runs."""
    best = 0
    for size in range(len(rules) + 1):
        for chosen in combinations(rules, size):
            ruled = [any(rule[t] for rule in chosen) for t in range(len(gain))]
            total = -RULE_COST * size
            for name in sorted(set(row)):
                tokens = [t for t in range(len(gain)) if row[t] == name]
                total += best_row(tokens, gain, ruled, leak_onset, free_onset, leaked, free)
            best = max(best, total)
    return best


def best_row(
    tokens: Sequence[int],
    gain: Sequence[int],
    ruled: Sequence[bool],
    leak_onset: Sequence[bool],
    free_onset: Sequence[bool],
    leaked: bool,
    free: bool,
) -> int:
    """From the last token back: leave a token to the rules, or begin a run that ends anywhere."""
    best = [0] * (len(tokens) + 1)
    for k in range(len(tokens) - 1, -1, -1):
        t = tokens[k]
        options = [best[k + 1] + (gain[t] if ruled[t] else 0)]
        for end in range(k + 1, len(tokens) + 1):
            covered = sum(gain[one] for one in tokens[k:end]) + best[end]
            if leaked and leak_onset[t]:
                options.append(covered - LEAK_COST)
            if free and free_onset[t]:
                options.append(covered - FREE_COST)
        best[k] = max(options)
    return best[0]
