"""The figure of a plan: what each way to share the machines comes to, and how old the tokens are that are trained."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, GREY = "#1d1d1f", "#6e6e73"
FIRST, SECOND = "#12355b", "#d1603d"


class Point(NamedTuple):
    """A way to share the machines: how many sample, and what came of it."""

    place: int
    throughput: float
    trainer_idle: float
    engine_idle: float | None


def draw_plan(
    points: Sequence[Point],
    ages: Mapping[int, float],
    path: Path,
    *,
    title: str,
    marks: Mapping[int, str],
    places: str,
    throughput: str,
    command: str,
    commit: str,
) -> Path:
    """Draws throughput, idle shares and the age of trained tokens side by side.

    Args:
        points: in the order of their places.
        ages: share of the trained tokens by age, of the best.
        path: where the PNG goes.
        title: the finding.
        marks: what to write at some of the places.
        places: what they count; the name of the axis.
        throughput: its name and unit.
        command, commit: that make it again.
    """
    figure = Figure(figsize=(9.6, 4.2), dpi=200, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.3, 1.3, 0.8))
    title = textwrap.fill(title[:1].upper() + title[1:], 96)
    figure.text(0.012, 0.965, title, va="top", fontsize=11.5, fontweight="bold", color=INK, linespacing=1.25)
    figure.subplots_adjust(left=0.065, right=0.985, top=0.8, bottom=0.22, wspace=0.32)
    across = [point.place for point in points]
    left.plot(across, [p.throughput for p in points], color=FIRST, linewidth=2, marker="o", markersize=3.5)
    for point in points:
        if point.place in marks:
            left.axvline(point.place, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0.5)
            left.text(
                point.place, 0, f" {marks[point.place]}", fontsize=7.5, color=GREY, rotation=90, va="bottom"
            )
    _named(left, places, throughput)
    middle.plot(across, [p.trainer_idle for p in points], color=FIRST, linewidth=2, label="trainer")
    if any(p.engine_idle is not None for p in points):
        known = [(p.place, p.engine_idle) for p in points if p.engine_idle is not None]
        middle.plot(*zip(*known), color=SECOND, linewidth=2, linestyle=(0, (5, 1.5)), label="engines")
    middle.set_ylim(0, 1)
    middle.legend(frameon=False, fontsize=8)
    _named(middle, places, "share of the time idle")
    right.bar(list(ages), list(ages.values()), color=FIRST, width=0.7)
    _named(right, "versions that a token is old", "share of the trained tokens")
    figure.text(
        0.012, 0.02, f"{command}" + (f"  ·  commit {commit}" if commit else ""),
        ha="left", va="bottom", fontsize=7, color=GREY, family="monospace",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(path))
    return path


def _named(axes: Axes, across: str, up: str) -> None:
    axes.set_xlabel(across, color=INK, fontsize=8.5)
    axes.set_ylabel(up, color=INK, fontsize=8.5)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c7c7cc")
    axes.tick_params(colors=INK, labelsize=8, length=3, color="#c7c7cc")
    axes.grid(axis="y", color="#ececf0", linewidth=0.8)
    axes.set_axisbelow(True)
