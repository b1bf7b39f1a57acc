"""The figure of the frontier: what is given up for how much idle time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Row = Mapping[str, Any]

# Colour by what becomes of the late, shape by order: apart in grey as well.
COLOUR = {
    "train": "#d1603d",
    "drop": "#e3a72f",
    "mask": "#12355b",
    "wait": "#4f7f6f",
    "split": "#8f2d56",
    "oversampled": "#7a8b99",
}
SHAPE = {"completion": "s", "oldest": "o", "admission": "D"}
COMMAND = "python benchmarks/schedule.py --parts frontier --out benchmarks/recorded/schedule"
TITLES = {
    "wholly": "trials of a task are as long as each other",
    "by half": "half of the variance of lengths is the task's",
    "not at all": "lengths have nothing in common",
}
LABELS = {
    "no bound": (6, -3),
    "completion, train": (6, 7),
    "completion, drop": (6, 3),
    "oldest, mask": (8, -4),
    "oldest, mask, max_late 4": (6, 4),
    "oldest, wait": (-22, 8),
    "16 of 20 oversampled, mask": (6, 3),
    "not built: split at the bound": (7, -10),
}
"""Rules that are named in the figure, and where beside their mark, in points."""
_INK, _GREY = "#1d1d1f", "#6e6e73"


def draw_frontier(rows: Sequence[Row], path: Path, *, commit: str) -> None:
    """Idle share against the share of sampled tokens that are trained too old, masked or thrown away; a panel a case.

    A thin mark is a seed, a thick one their mean; the line joins masking and waiting by the knob between them.
    """
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(4.4 * len(cases) + 0.4, 5.0), dpi=150, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
    for axes, case in zip(panels, cases):
        _panel(axes, [row for row in rows if row["case"] == case], case)
    panels[0].set_ylabel("sampled tokens that are too old, masked or thrown away", fontsize=9, color=_INK)
    title = (
        "No order is free: time, old tokens or long tasks. Splitting groups, not built, would give up least"
    )
    figure.text(0.012, 0.965, title, va="top", fontsize=12.5, fontweight="bold", color=_INK)
    hollow = "hollow: other group sizes, first steps in order, like lengths together"
    caption = f"{hollow}\n{COMMAND}  ·  commit {commit}"
    figure.text(0.012, 0.02, caption, fontsize=7.5, color=_GREY, family="monospace", linespacing=1.5)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.83, bottom=0.2, wspace=0.08)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(path))


def lost(row: Row) -> float:
    """Of the sampled tokens, those that are not trained within the bound."""
    kept = 1 - row["wasted"]
    return row["wasted"] + kept * (row["masked"] + (1 - row["masked"]) * row["stale"])


def _panel(axes: Axes, rows: Sequence[Row], case: str) -> None:
    means: dict[str, tuple[float, float]] = {}
    for name in dict.fromkeys(row["rule"] for row in rows):
        some = [row for row in rows if row["rule"] == name]
        colour, shape = _look(name)
        for row in some:
            axes.plot(row["idle"], lost(row), shape, color=colour, markersize=3, alpha=0.3, linewidth=0)
        means[name] = fmean(row["idle"] for row in some), fmean(map(lost, some))
        hollow = "in order" in name or "together" in name or "groups of" in name
        axes.plot(
            *means[name], shape, color=colour, markersize=7, markerfacecolor="white" if hollow else colour
        )
    ends = "oldest, mask", "oldest, wait"
    knob = [name for name in means if name in ends or "max_late" in name and "in order" not in name]
    knob.sort(key=lambda name: means[name])
    axes.plot(*zip(*(means[name] for name in knob)), "-", color=COLOUR["mask"], linewidth=1, alpha=0.6)
    for name in means.keys() & LABELS.keys():
        told, place = name.removeprefix("not built: "), LABELS[name]
        axes.annotate(
            told, means[name], place, textcoords="offset points", fontsize=7.5, color=_look(name)[0]
        )
    axes.set_title(TITLES[case], fontsize=9.5, color=_INK)
    axes.set_xlabel("trainer idle, share of the time", fontsize=9, color=_INK)
    axes.set_xlim(-0.02, 1)
    axes.set_ylim(-0.02, 0.75)
    axes.grid(True, color="#e6e6e6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=_GREY)


def _look(name: str) -> tuple[str, str]:
    """Colour and shape of a rule."""
    late = next((word for word in COLOUR if word in name), "train")
    shape = next((shape for word, shape in SHAPE.items() if name.startswith(word)), "o")
    return COLOUR[late], "*" if late == "split" else shape
