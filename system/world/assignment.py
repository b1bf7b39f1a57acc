"""What a company's employee may be asked: the instruction, and what must be true afterwards. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from .company import Company, Fact, row_number

Family = Literal["find", "sum", "edit", "write"]
FAMILIES: tuple[Family, ...] = ("find", "sum", "edit", "write")

CALLS_OF_LEVEL: dict[int, tuple[int, int]] = {1: (1, 1), 2: (2, 4), 3: (5, 7), 4: (8, 14)}
"""The least and the most expert tool calls of a task of each level."""

_ITEMS: dict[int, dict[Family, tuple[float, int, int]]] = {
    1: {"find": (1.0, 1, 1)},
    2: {"find": (0.1, 1, 1), "sum": (0.4, 2, 3), "edit": (0.25, 1, 1), "write": (0.25, 1, 3)},
    3: {"sum": (0.45, 3, 6), "edit": (0.25, 2, 2), "write": (0.3, 3, 6)},
    4: {"sum": (0.45, 5, 10), "edit": (0.25, 2, 4), "write": (0.3, 5, 8)},
}
"""Level → family → (share, least and most items); the draw is repeated until the calls fit the level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A task before it is written down.

    Assignment(family="find", level=1, instruction="Find Norvik fee (fees.xlsx). Answer with the number.",
    calls=1, checks=({"kind": "answer_number", "expected": 4821}, {"kind": "unchanged", "except": []})).
    calls is the number of tool calls that the expert makes; checks is the content of tests/checks.json.
    """

    family: Family
    level: int
    instruction: str
    calls: int
    checks: tuple[dict[str, Any], ...]


def draw_assignment(company: Company, *, level: int, index: int) -> Assignment:
    """The assignment number `index` of a level in a company; the same arguments give the same one.

    Raises:
        ValueError: level is not one of 1, 2, 3, 4.
    """
    if level not in CALLS_OF_LEVEL:
        raise ValueError(f"level must be one of {sorted(CALLS_OF_LEVEL)}, got {level}")
    rng = random.Random(f"assignment:{company.id}:{level}:{index}")
    shares = _ITEMS[level]
    family = rng.choices(list(shares), [share for share, _, _ in shares.values()])[0]
    least_calls, most_calls = CALLS_OF_LEVEL[level]
    _, least_items, most_items = shares[family]
    candidates = _renewed(company) if family == "edit" else company.facts
    while True:
        facts = rng.sample(candidates, rng.randint(least_items, most_items))
        calls = expert_calls(family, facts)
        if least_calls <= calls <= most_calls and len({f.label for f in facts}) == len(facts):
            return _WORDING[family](company, level, calls, facts)


def expert_calls(family: Family, facts: list[Fact]) -> int:
    """How many tool calls the expert makes: one for each look-up (two by mail), and the work on top."""
    lookups = sum(2 if fact.source == "mail" else 1 for fact in facts)
    return lookups + {"find": 0, "sum": 1, "write": 1, "edit": 2 * len(facts)}[family]


def _renewed(company: Company) -> list[Fact]:
    """Facts outside the sheets whose label also stands in a sheet, with an older value."""
    in_sheets = {f.label for s in company.sources if s.kind == "xlsx" for f in s.facts}
    return [f for s in company.sources if s.kind != "xlsx" for f in s.facts if f.label in in_sheets]


def _listed(facts: list[Fact]) -> str:
    return ", ".join(f"{fact.label} ({fact.source})" for fact in facts)


def _unchanged(*except_paths: str) -> dict[str, Any]:
    return {"kind": "unchanged", "except": sorted(set(except_paths))}


def _find(company: Company, level: int, calls: int, facts: list[Fact]) -> Assignment:
    return Assignment(
        family="find",
        level=level,
        instruction=f"Find {_listed(facts)}. Answer with the number.",
        calls=calls,
        checks=({"kind": "answer_number", "expected": facts[0].value}, _unchanged()),
    )


def _sum(company: Company, level: int, calls: int, facts: list[Fact]) -> Assignment:
    return Assignment(
        family="sum",
        level=level,
        instruction=f"Add {_listed(facts)}. Answer with the total.",
        calls=calls,
        checks=({"kind": "answer_number", "expected": sum(f.value for f in facts)}, _unchanged()),
    )


def _write(company: Company, level: int, calls: int, facts: list[Fact]) -> Assignment:
    lines = [f"{fact.label},{fact.value}" for fact in facts]
    return Assignment(
        family="write",
        level=level,
        instruction=f"Write out.csv with one line name,value for {_listed(facts)}. Answer with done.",
        calls=calls,
        checks=({"kind": "file_lines", "path": "out.csv", "expected": lines}, _unchanged("out.csv")),
    )


def _edit(company: Company, level: int, calls: int, facts: list[Fact]) -> Assignment:
    sheets = [s for s in company.sources if s.kind == "xlsx"]
    places = {f.label: (s.name, f"B{row_number(i)}") for s in sheets for i, f in enumerate(s.facts)}
    sentences = [f"Set {f.label} in {places[f.label][0]} to the value in {f.source}." for f in facts]
    cells = [{"path": places[f.label][0], "cell": places[f.label][1], "expected": f.value} for f in facts]
    paths = sorted({cell["path"] for cell in cells})
    edited = {path: sorted(cell["cell"] for cell in cells if cell["path"] == path) for path in paths}
    return Assignment(
        family="edit",
        level=level,
        instruction=" ".join([*sentences, "Answer with done."]),
        calls=calls,
        checks=(
            *({"kind": "cell_value", **cell} for cell in cells),
            *({"kind": "other_cells_unchanged", "path": path, "except": edited[path]} for path in paths),
            _unchanged(*paths),
        ),
    )


_WORDING = {"find": _find, "sum": _sum, "edit": _edit, "write": _write}
