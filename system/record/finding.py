"""What a run found, in words: from the comparisons in summary.json, never from looking at the curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def name(arm: str) -> str:
    """An arm as people read it: `prompt_mean` -> `prompt mean`."""
    return arm.replace("_", " ")


def finding(summary: Mapping[str, Any] | None) -> str:
    """The title of the figure: which rule won on held-out tasks, or that none did."""
    comparisons = list((summary or {}).get("comparisons") or [])
    if not comparisons:
        return "No held-out comparison yet: the run stopped before its last evaluation"
    arms = sorted({arm for item in comparisons for arm in (item["a"], item["b"])})
    won = [item for item in comparisons if item["verdict"] != "tie"]
    if not won:
        widest = max(max(abs(item["low"]), abs(item["high"])) for item in comparisons)
        many = f"all {len(arms)} rules" if len(arms) > 2 else f"{name(arms[0])} and {name(arms[1])}"
        return f"No rule wins: {many} tie on held-out tasks (differences up to {widest:.2f} are not excluded)"
    lead = max(won, key=lambda item: abs(item["difference"]))
    better, worse = (lead["a"], lead["b"]) if lead["verdict"] == "a better" else (lead["b"], lead["a"])
    title = f"{name(better)} beats {name(worse)} by {abs(lead['difference']):.2f} on held-out tasks"
    rest = len(comparisons) - len(won)
    if len(won) > 1:
        title += f"; {len(won)} of {len(comparisons)} differences are supported"
    elif rest:
        title += "; the other differences are ties" if rest > 1 else "; the other difference is a tie"
    return title


def sentences(summary: Mapping[str, Any] | None) -> list[str]:
    """One sentence a comparison: the difference, its 95 % interval, the verdict, what a tie would need."""
    return [_sentence(item) for item in (summary or {}).get("comparisons") or []]


def _sentence(item: Mapping[str, Any]) -> str:
    metric = item.get("metric", "pass@1")
    a, b = name(item["a"]), name(item["b"])
    numbers = f"{item['difference']:+.3f} {metric} (95 % interval {item['low']:+.3f} to {item['high']:+.3f})"
    if item["verdict"] == "tie":
        need = item.get("seeds_needed")
        more = f"; a difference of this size would need about {need} seeds an arm" if need else ""
        return f"{a} against {b}: a tie, {numbers}{more}."
    better, worse = (a, b) if item["verdict"] == "a better" else (b, a)
    return f"{better} beats {worse}: {a} against {b} {numbers}."
