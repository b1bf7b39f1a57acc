"""How few and how even are the micro-batches of a step, beside two planners in use, and what does planning cost?

One command: `python -m benchmarks.pack`. A step is 256 rows of lognormal lengths between 2K and 128K tokens, with
a budget of 160,000 tokens and 1 to 8 ranks. `ours` is `core.pack.plan`. `heap` gives each rank an equal run of
rows and puts each row, longest first, into its least loaded micro-batch that has room. `KK` is Karmarkar and Karp:
rows to ranks by cost, then a rank's rows into micro-batches by cost, one more until all fit the budget. Both fill
up with empty micro-batches until all ranks have as many as the one with the most.

By median length, over all seeds: the worst and the mean of rounds over the fewest there could be (the sum over
the budget, rounded up, over the ranks, rounded up), the same of the dearest rank over the mean of the ranks, and
milliseconds of this process for one plan. `proven` is the share of plans whose number of rounds is proven to be
the least (`core.pack.fewest`). Every plan is a line of `--raw`. One run is kept in `recorded/pack.txt` and `.csv`.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import math
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from core.pack import cost, fewest, plan

PER_TOKEN, PER_SQUARE = 24576.0, 1.0
"""A model of seven billion parameters, in units of its attention."""

BUDGET = 160_000
Hands = Sequence[Sequence[Sequence[int]]]


class Line(NamedTuple):
    """One plan."""

    planner: str
    median: int
    seed: int
    ranks: int
    rounds: int
    area: int
    """Rounds that the sum of lengths alone would need."""
    bound: int
    """Rounds below which there is no plan."""
    imbalance: float
    milliseconds: float


def step(seed: int, median: int, rows: int) -> list[int]:
    """Lengths of one step."""
    draw = random.Random(seed)
    return [min(128_000, max(2_000, int(median * math.exp(draw.gauss(0, 1))))) for _ in range(rows)]


def price(lengths: Sequence[int]) -> float:
    """Work of a packed micro-batch."""
    return cost(lengths, per_token=PER_TOKEN, per_square=PER_SQUARE)


def ours(lengths: list[int], ranks: int) -> Hands:
    """core.pack."""
    return plan(lengths, token_budget=BUDGET, ranks=ranks, per_token=PER_TOKEN, per_square=PER_SQUARE)


def heap(lengths: list[int], ranks: int) -> Hands:
    """Rows to ranks in the order they come; longest first into the least loaded micro-batch, if it fits."""
    share = -(-len(lengths) // ranks)
    hands: list[list[list[int]]] = []
    for rank in range(ranks):
        rows = range(rank * share, min(len(lengths), (rank + 1) * share))
        bins: list[tuple[int, int, list[int]]] = []
        for row in sorted(rows, key=lambda i: -lengths[i]):
            if bins and bins[0][0] + lengths[row] <= BUDGET:
                load, number, least = bins[0]
                heapq.heapreplace(bins, (load + lengths[row], number, [*least, row]))
            else:
                heapq.heappush(bins, (lengths[row], len(bins), [row]))
        hands.append([rows for _, _, rows in bins])
    return with_dummies(hands)


def karmarkar_karp(values: Sequence[float], parts: int) -> list[list[int]]:
    """Largest differencing: the two partitions that differ most are joined, the heaviest part with the lightest."""
    states: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for index, value in enumerate(values):
        state = [(value, [index]), *[(0.0, list[int]()) for _ in range(parts - 1)]]
        states.append((-value if parts > 1 else 0.0, index, state))
    heapq.heapify(states)
    number = len(values)
    while len(states) > 1:
        _, _, a = heapq.heappop(states)
        _, _, b = heapq.heappop(states)
        joined = [(x + y, [*p, *q]) for (x, p), (y, q) in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(states, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [rows for _, rows in states[0][2]]


def differencing(lengths: list[int], ranks: int) -> Hands:
    """Karmarkar and Karp twice, with as many micro-batches as it takes to fit."""
    hands: list[list[list[int]]] = []
    for rows in karmarkar_karp([price([length]) for length in lengths], ranks):
        count = max(1, -(-sum(lengths[row] for row in rows) // BUDGET))
        while True:
            parts = karmarkar_karp([price([lengths[row]]) for row in rows], count)
            bins = [[rows[place] for place in part] for part in parts]
            if all(len(b) <= 1 or sum(lengths[row] for row in b) <= BUDGET for b in bins):
                break
            count += 1
        hands.append(bins)
    return with_dummies(hands)


def with_dummies(hands: list[list[list[int]]]) -> Hands:
    """As many micro-batches on every rank as on the one with the most."""
    most = max(map(len, hands))
    return [[*hand, *[[] for _ in range(most - len(hand))]] for hand in hands]


PLANNERS: dict[str, Callable[[list[int], int], Hands]] = {"ours": ours, "heap": heap, "KK": differencing}


def measure(name: str, median: int, seed: int, ranks: int, rows: int) -> Line:
    """One plan, checked and measured; the time is the least of three."""
    lengths, spent = step(seed, median, rows), math.inf
    hands = PLANNERS[name](lengths, ranks)
    for _ in range(3):
        start = time.process_time()
        PLANNERS[name](lengths, ranks)
        spent = min(spent, time.process_time() - start)
    if sorted(row for hand in hands for rows in hand for row in rows) != list(range(rows)):
        raise RuntimeError(f"{name} must plan every row once")
    if any(len(b) > 1 and sum(lengths[row] for row in b) > BUDGET for hand in hands for b in hand):
        raise RuntimeError(f"{name} must keep the budget")
    loads = [price([lengths[row] for rows in hand for row in rows]) for hand in hands]
    return Line(
        name,
        median,
        seed,
        ranks,
        len(hands[0]),
        math.ceil(math.ceil(sum(lengths) / BUDGET) / ranks),
        math.ceil(fewest(lengths, token_budget=BUDGET) / ranks),
        max(loads) * ranks / sum(loads),
        1e3 * spent,
    )


def row(lines: Sequence[Line]) -> str:
    """One row of the table."""
    count = [line.rounds / line.area for line in lines]
    even = [line.imbalance for line in lines]
    spent = [line.milliseconds for line in lines]
    proven = sum(line.rounds == line.bound for line in lines) / len(lines)
    return (
        f"{lines[0].median:7,} {lines[0].planner:>5} | {max(count):6.3f} {statistics.fmean(count):6.3f} {proven:7.0%} "
        f"| {max(even):6.3f} {statistics.fmean(even):6.3f} | {statistics.median(spent):6.1f} {max(spent):6.1f}"
    )


def host() -> str:
    """Commit, processor and interpreter."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    named = [text for text in Path("/proc/cpuinfo").read_text().splitlines() if text.startswith("model name")]
    processor = named[0].partition(": ")[2] if named else platform.processor()
    return f"commit {commit or 'unknown'}, {processor}, Python {platform.python_version()}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--medians", type=int, nargs="+", default=[8_000, 16_000, 32_000, 64_000])
    parser.add_argument("--raw", type=Path, default=None, help="a .csv with a line for every plan")
    options = parser.parse_args()
    print(f"{host()}; {options.rows} rows, ranks {options.ranks}, {options.seeds} seeds")
    print(" median       |  rounds / fewest       |  dearest/mean |  ms")
    print("               |  worst   mean  proven |  worst   mean |    p50    max")
    lines: list[Line] = []
    for median in options.medians:
        for name in PLANNERS:
            cases = [(seed, ranks) for seed in range(options.seeds) for ranks in options.ranks]
            found = [measure(name, median, seed, ranks, options.rows) for seed, ranks in cases]
            print(row(found), flush=True)
            lines += found
    if options.raw is not None:
        with options.raw.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Line._fields)
            writer.writerows(lines)


if __name__ == "__main__":
    main()
