"""The table a run ends with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .finding import finding, name, sentences

# Heading, key in an arm of summary.json, how it is written.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("pass@1", "pass_at_1", "estimate"),
    ("reward", "reward", "estimate"),
    ("turns", "turns", ".1f"),
    ("tokens\na turn", "tokens_per_turn", ".0f"),
    ("tools\nok", "tool_success", ".0%"),
    ("context\nfull", "context_exhaustion", ".1%"),
    ("stale", "staleness", "histogram"),
    ("idle", "trainer_idle", ".0%"),
    ("time", "seconds", "clock"),
)


def final_table(summary: Mapping[str, Any]) -> Table:
    """One row an arm and one for the warm start; held-out numbers with plus or minus one standard error."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("arm", min_width=13)
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    warm = summary.get("warm_start")
    if warm:
        table.add_row(
            Text("warm start", style="dim"),
            *(Text(cell(warm, key, form), style="dim") for _, key, form in COLUMNS),
        )
    for arm, values in (summary.get("arms") or {}).items():
        table.add_row(Text(name(arm), style="bold"), *(cell(values, key, form) for _, key, form in COLUMNS))
    return table


def cell(values: Mapping[str, Any], key: str, form: str) -> str:
    """One number of an arm as text; an en dash where it was not measured."""
    value = values.get(key)
    if form == "estimate":
        mean, error = _known((value or {}).get("mean")), _known((value or {}).get("se"))
        return "–" if mean is None else f"{mean:.2f}" + ("" if error is None else f" ±{error:.2f}")
    if form == "histogram":
        return "–" if not value else f"{mean_staleness(value):.2f}"
    if (value := _known(value)) is None:
        return "–"
    return clock(value) if form == "clock" else format(value, form)


def _known(value: float | None) -> float | None:
    """A number, or None for one that is missing or not finite."""
    return None if value is None or not math.isfinite(value) else value


def mean_staleness(histogram: Mapping[Any, float]) -> float:
    """The mean of a staleness histogram {age in policy versions: count}."""
    count = sum(histogram.values())
    return sum(int(age) * many for age, many in histogram.items()) / count if count else 0.0


def clock(seconds: float) -> str:
    """Seconds as people read them: `7:05`, `1:02:10`."""
    minutes, second = divmod(int(round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def print_summary(summary: Mapping[str, Any], *, console: Console | None = None) -> None:
    """Prints the table, the finding, and one sentence a comparison."""
    console = console or Console()
    console.print(final_table(summary))
    console.print()
    console.print(Text(finding(summary), style="bold"))
    for sentence in sentences(summary):
        console.print(Text(sentence))
