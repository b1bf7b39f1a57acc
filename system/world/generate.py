"""Makes a set of worlds and tasks on disk, mixed over families and levels."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from .assignment import CALLS_OF_LEVEL, Assignment, draw_assignment
from .company import Company, make_company
from .distractor import MOST_DISTRACTORS
from .names import Split
from .office import write_distractors, write_world
from .task import write_task

LEVEL_SHARES = {1: 0.15, 2: 0.35, 3: 0.3, 4: 0.2}
"""Level → share of the tasks."""

_FIRST_COMPANY = 1_000_000
_COMPANIES_PER_SEED = 10_000
_REDRAWS = 200


def generate(
    folder: Path,
    *,
    split: Split,
    worlds: int,
    tasks: int,
    seed: int,
    level_shares: Mapping[int, float] = LEVEL_SHARES,
    distractors: int = 0,
) -> list[Path]:
    """Writes `worlds` companies to `folder/worlds/<id>` and `tasks` tasks to `folder/tasks/<id>`.

    The same arguments give the same bytes. The two splits share no entity name, two seeds share no company,
    and no company is one that a demonstration of a seed below four million shows.

    Args:
        level_shares: level → share; the counts are the nearest whole numbers that add up to `tasks`.
        distractors: old editions of its files that each world holds as well, at most 12; see `draw_distractors`.

    Returns:
        The task folders in the order in which they were drawn, levels mixed.

    Raises:
        ValueError: a number is out of range, or the worlds are too few for so many different tasks.
    """
    if not 0 <= distractors <= MOST_DISTRACTORS:
        raise ValueError(f"distractors must be from 0 to {MOST_DISTRACTORS}, got {distractors}")
    companies, drawn = draw(split=split, worlds=worlds, tasks=tasks, seed=seed, level_shares=level_shares)
    places = [write_world(company, folder / "worlds" / company.id) for company in companies]
    for company, place in zip(companies, places):
        write_distractors(company, place, distractors)
    return [
        write_task(assignment, companies[i], tasks=folder / "tasks", world=places[i], distractors=distractors)
        for i, assignment in drawn
    ]


def draw(
    *,
    split: Split,
    worlds: int,
    tasks: int,
    seed: int,
    level_shares: Mapping[int, float] = LEVEL_SHARES,
) -> tuple[list[Company], list[tuple[int, Assignment]]]:
    """What `generate` writes with these arguments: companies and assignments. Pure; raises as `generate` does."""
    if not 1 <= worlds <= _COMPANIES_PER_SEED:
        raise ValueError(f"worlds must be from 1 to {_COMPANIES_PER_SEED}, got {worlds}")
    if not tasks >= 1:
        raise ValueError(f"tasks must be positive, got {tasks}")
    if not seed >= 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    first = _FIRST_COMPANY + seed * _COMPANIES_PER_SEED
    companies = [make_company(first + i, split=split) for i in range(worlds)]
    return companies, draw_assignments(companies, tasks=tasks, seed=seed, level_shares=level_shares)


def draw_assignments(
    companies: list[Company], *, tasks: int, seed: int, level_shares: Mapping[int, float]
) -> list[tuple[int, Assignment]]:
    """Different assignments over the companies in turn, as (index of the company, assignment). Pure.

    Raises:
        ValueError: shares are not levels with positive sum, or the companies are too few.
    """
    levels = _levels(tasks, level_shares)
    random.Random(f"levels:{seed}").shuffle(levels)
    seen: set[tuple[int, str]] = set()
    drawn = []
    for number, level in enumerate(levels):
        place = number % len(companies)
        for attempt in range(_REDRAWS):
            assignment = draw_assignment(companies[place], level=level, index=number + attempt * len(levels))
            if (place, assignment.instruction) not in seen:
                break
        else:
            raise ValueError(f"worlds must be more for {tasks} different tasks, got {len(companies)}")
        seen.add((place, assignment.instruction))
        drawn.append((place, assignment))
    return drawn


def _levels(count: int, shares: Mapping[int, float]) -> list[int]:
    """Levels in proportion to their shares, by largest remainder."""
    total = sum(shares.values())
    if not set(shares) <= set(CALLS_OF_LEVEL) or not all(s >= 0 for s in shares.values()) or not total > 0:
        raise ValueError(f"level_shares must give levels {sorted(CALLS_OF_LEVEL)} shares, got {shares}")
    exact = {level: count * share / total for level, share in shares.items()}
    counts = {level: int(number) for level, number in exact.items()}
    by_remainder = sorted(exact, key=lambda level: (counts[level] - exact[level], level))
    for level in by_remainder[: count - sum(counts.values())]:
        counts[level] += 1
    return [level for level in sorted(counts) for _ in range(counts[level])]
