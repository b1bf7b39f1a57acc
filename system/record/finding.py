"""What a run found, in words: from the comparisons in summary.json, never from looking at the curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def name(arm: str) -> str:
    """An arm as people read it: `prompt_mean` -> `prompt mean`."""
    return arm.replace("_", " ")


def finding(summary: Mapping[str, Any] | None) -> str:
    """The title of the figure: which rule won on held-out tasks, or that none did."""
    comparisons = list((summary or {}).get("comparisons") or [])
    if not comparisons:
        if (summary or {}).get("finished"):
            return "One policy alone: nothing to compare"
        return "No held-out comparison yet: the run stopped before its last evaluation"
    arms = sorted({arm for item in comparisons for arm in (item["a"], item["b"])})
    won = [item for item in comparisons if item["verdict"] != "tie"]
    if not won:
        widest = max(max(abs(_low(item)), abs(_high(item))) for item in comparisons)
        many = f"all {len(arms)} rules" if len(arms) > 2 else f"{name(arms[0])} and {name(arms[1])}"
        if not widest:  # an interval without width is not knowledge: too little was asked
            return f"No rule wins: {many} got the same score on every held-out task"
        return f"No rule wins: {many} tie on held-out tasks (differences up to {widest:.2f} are not excluded)"
    beaten: dict[str, list[Mapping[str, Any]]] = {}
    for item in won:
        beaten.setdefault(item["a"] if item["verdict"] == "a better" else item["b"], []).append(item)
    best = max(
        beaten, key=lambda arm: (len(beaten[arm]), max(abs(item["difference"]) for item in beaten[arm]))
    )
    losers = [
        f"{name(item['b'] if item['a'] == best else item['a'])} by {abs(item['difference']):.2f}"
        for item in sorted(beaten[best], key=lambda item: -abs(item["difference"]))
    ]
    return (
        f"On held-out tasks {name(best)} beats {' and '.join(losers)}{_others(comparisons, won, len(losers))}"
    )


def _others(comparisons: list[Mapping[str, Any]], won: list[Mapping[str, Any]], told: int) -> str:
    ties, more = len(comparisons) - len(won), len(won) - told
    parts = [f"{more} more supported"] if more else []
    parts += [f"{ties} tie{'s' if ties > 1 else ''}"] if ties else []
    return f" ({', '.join(parts)})" if parts else ""


def sentences(summary: Mapping[str, Any] | None) -> list[str]:
    """One sentence a comparison, with the start first: difference, interval, verdict, and what a tie would need.

    One more where each arm ran with a single seed.

    A comparison is what `core.estimate.compare` says of arms a and b: `difference` is b minus a.
    """
    told = summary or {}
    items = [*(told.get("gains") or []), *(told.get("comparisons") or [])]
    lines = [_sentence(item) for item in items]
    if any(item.get("seed_spread_measured") is False for item in items):
        lines.append(
            "One seed an arm: the intervals are over tasks alone, not over what another seed would bring."
        )
    return lines


def _sentence(item: Mapping[str, Any]) -> str:
    metric = item.get("metric", "pass@1")
    a, b, difference, low, high = (
        name(item["a"]),
        name(item["b"]),
        item["difference"],
        _low(item),
        _high(item),
    )
    if item["verdict"] == "a better":
        a, b, difference, low, high = b, a, -difference, -high, -low
    if low == high == 0:
        return f"{b} against {a}, a tie: the same {metric} on every held-out task."
    interval = f"{100 * item.get('confidence', 0.95):.3g} % interval {_signed(low)} to {_signed(high)}"
    if item["verdict"] != "tie":
        return f"{b} beats {a}: {_signed(difference)} {metric}, {interval}."
    need = item.get("seeds_needed")
    more = f"; a difference of this size would show with about {need} seeds an arm" if need else ""
    if need and item.get("seed_spread_measured") is False:
        more += f" if runs spread by {item['seed_spread']:.2f} over seeds"
    return f"{b} against {a}, a tie: {_signed(difference)} {metric}, {interval}{more}."


def _low(item: Mapping[str, Any]) -> float:
    """The lower end of an interval; one without end is null in JSON."""
    return -math.inf if item["low"] is None else item["low"]


def _high(item: Mapping[str, Any]) -> float:
    return math.inf if item["high"] is None else item["high"]


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
