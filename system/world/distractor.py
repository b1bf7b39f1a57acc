"""Files that a task does not ask for: old editions of a company's files, other values under the same labels. Pure."""

from __future__ import annotations

import random
from dataclasses import replace

from .company import Company, Source

MOST_DISTRACTORS = 12
"""More old lines of one label would not fit what a search over all files shows."""

_LAST_YEAR = 2025


def draw_distractors(company: Company, count: int) -> tuple[Source, ...]:
    """Old editions of the company's files in turn, the newest first, such as `old/fees_2025.xlsx`.

    Their values have as many digits as those of today, and none of them is true anywhere today: whoever reads the
    wrong edition gives a wrong answer.

    Raises:
        ValueError: count is not from 0 to 12.
    """
    if not 0 <= count <= MOST_DISTRACTORS:
        raise ValueError(f"distractors must be from 0 to {MOST_DISTRACTORS}, got {count}")
    rng = random.Random(f"distractors:{company.id}")
    files = [source for source in company.sources if "." in source.name]
    today = {fact.value for fact in company.facts}
    return tuple(
        _edition(rng, files[index % len(files)], _LAST_YEAR - index // len(files), today)
        for index in range(count)
    )


def _edition(rng: random.Random, source: Source, year: int, today: set[int]) -> Source:
    stem, _, kind = source.name.rpartition(".")
    name = f"old/{stem}_{year}.{kind}"
    facts = [replace(fact, value=_other(rng, fact.value, today), source=name) for fact in source.facts]
    rng.shuffle(facts)
    return replace(source, name=name, facts=tuple(facts))


def _other(rng: random.Random, value: int, today: set[int]) -> int:
    low = 10 ** (len(str(value)) - 1)
    while True:
        drawn = rng.randrange(low, 10 * low)
        if drawn not in today:
            return drawn
