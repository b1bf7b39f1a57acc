"""The figure of a run: reward while training, and what came of it on held-out tasks."""

from __future__ import annotations

import math
import os
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .finding import finding, name

# One colour and line a rule, the same in every figure. Luminance rises down the list: apart in grey as well.
COLOUR = {
    "prompt_mean": "#12355b",
    "sequence_sum": "#8f2d56",
    "prompt_mean_of_sequence_means": "#4f7f6f",
    "token_mean": "#d1603d",
    "sequence_mean": "#e3a72f",
}
_SPARE = ("#7a8b99", "#57407c", "#a3b18a")
_LINE = {
    "prompt_mean": "-",
    "sequence_sum": (0, (1, 1.2)),
    "token_mean": (0, (5, 1.5)),
    "sequence_mean": (0, (6, 1.5, 1, 1.5)),
}
_INK, _GREY = "#1d1d1f", "#6e6e73"


def colour(arm: str) -> str:
    """The colour of an arm: that of its rule where the rule is known, else a spare one fixed by its name."""
    return COLOUR.get(arm) or _SPARE[sum(arm.encode()) % len(_SPARE)]


def draw(
    metrics: Iterable[Mapping[str, Any]],
    summary: Mapping[str, Any] | None,
    path: str | os.PathLike[str],
    *,
    command: str,
    commit: str,
) -> Path:
    """Draws reward curves (each seed thin, the smoothed mean thick) beside held-out bars with their 95 % intervals.

    The title is the finding; the caption is the command that makes the figure again, and the commit.

    Args:
        metrics: lines of metrics.jsonl; evaluation lines are left out of the curves.
        summary: summary.json, or None for a run that was stopped: then there are curves only.
        path: where the PNG goes; its folder is made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9.6, 4.7), dpi=200, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.75, 1))
    title = textwrap.fill(_capital(finding(summary)), 92)
    figure.text(0.012, 0.965, title, va="top", fontsize=12.5, fontweight="bold", color=_INK, linespacing=1.25)
    top = 0.87 if "\n" not in title else 0.82
    figure.subplots_adjust(left=0.065, right=0.985, top=top, bottom=0.2, wspace=0.2)
    curves = _curves(metrics)
    _draw_curves(left, curves)
    _draw_bars(right, summary or {}, list(curves))
    caption = f"{command}\n{_sample_size(curves, summary or {})}" + (
        f"  ·  commit {commit}" if commit else ""
    )
    figure.text(
        0.012,
        0.02,
        caption,
        ha="left",
        va="bottom",
        fontsize=7.5,
        color=_GREY,
        family="monospace",
        linespacing=1.5,
    )
    canvas.print_png(str(path))
    return path


Levels = Mapping[str, tuple[float, float]]
"""Level -> number of trials and their mean reward."""

Curves = dict[str, dict[int, list[tuple[int, Levels]]]]
"""Arm -> seed -> (optimizer steps taken, what the trials of that time got)."""

_REACH = 2
"""A thick line takes in what lies up to so many steps away on either side."""


def _curves(metrics: Iterable[Mapping[str, Any]]) -> Curves:
    """Rewards by the version at which trials were started; of the steps themselves while a run is not so far."""
    curves: dict[str, dict[int, list[tuple[int, Levels]]]] = defaultdict(lambda: defaultdict(list))
    lines = [line for line in metrics if not line.get("eval")]
    complete = any("levels" in line for line in lines)
    for line in lines:
        points = curves[line["arm"]][int(line["seed"])]
        if "levels" in line:
            levels = {level: (told["trials"], told["reward"]) for level, told in line["levels"].items()}
            points.append((int(line["version"]), levels))
        elif not complete and line.get("reward") is not None:
            points.append((int(line["step"]), {"": (1, float(line["reward"]))}))
    drawn = {arm: {seed: p for seed, p in sorted(seeds.items()) if p} for arm, seeds in curves.items()}
    return {arm: seeds for arm, seeds in drawn.items() if seeds}


def pooled(points: Iterable[Levels], share: Mapping[str, float]) -> float:
    """Mean reward of several points together, every level weighed by its share; NaN if one of them has no trial."""
    trials: dict[str, float] = defaultdict(float)
    total: dict[str, float] = defaultdict(float)
    for point in points:
        for level, (count, reward) in point.items():
            trials[level] += count
            total[level] += count * reward
    if any(not trials[level] for level in share):
        return math.nan
    return sum(weight * total[level] / trials[level] for level, weight in share.items())


def _shares(curves: Curves) -> dict[str, float]:
    """Share of each level in all trials of a run."""
    count: dict[str, float] = defaultdict(float)
    for seeds in curves.values():
        for points in seeds.values():
            for _, levels in points:
                for level, (trials, _) in levels.items():
                    count[level] += trials
    return {level: trials / sum(count.values()) for level, trials in count.items()}


def _draw_curves(axes: Axes, curves: Curves) -> None:
    ends: list[tuple[float, float, str]] = []
    share, heights = _shares(curves), [0.5]
    for arm, seeds in curves.items():
        for points in seeds.values():
            alone = [(step, pooled([levels], share)) for step, levels in sorted(points)]
            known = [(step, reward) for step, reward in alone if reward == reward]  # or the line is in pieces
            axes.plot(
                [x for x, _ in known], [y for _, y in known], color=colour(arm), linewidth=0.7, alpha=0.4
            )
            heights += [reward for _, reward in known]
        # A mean over fewer seeds than there are would jump where a seed stops.
        last_common = min(max(step for step, _ in points) for points in seeds.values())
        every = [point for points in seeds.values() for point in points]
        steps = sorted({step for step, _ in every if step <= last_common})
        rewards = [pooled([told for s, told in every if abs(s - step) <= _REACH], share) for step in steps]
        told = [(step, reward) for step, reward in zip(steps, rewards, strict=True) if reward == reward]
        if not told:
            continue
        steps, rewards = zip(*told)
        axes.plot(
            steps,
            rewards,
            color=colour(arm),
            linewidth=2.2,
            linestyle=_LINE.get(arm, "-"),
            marker="o" if len(told) == 1 else "",
        )
        ends.append((rewards[-1], steps[-1], arm))
    low, high = _limits(heights)
    axes.set_ylim(low, high)
    last = max((step for _, step, _ in ends), default=1)
    axes.set_xlim(0, last * 1.3 + 0.5)
    for height, (_, _, arm) in zip(
        _apart([end[0] for end in sorted(ends)], 0.062 * (high - low)), sorted(ends)
    ):
        axes.text(
            last * 1.02 + 0.2,
            height,
            textwrap.fill(name(arm), 14),
            color=colour(arm),
            fontsize=8.5,
            va="center",
            fontweight="bold",
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer steps taken when the trial began", color=_INK, fontsize=9)
    axes.set_ylabel("reward in training (thick: mean of 5 steps)", color=_INK, fontsize=9)
    if not ends:
        axes.text(
            0.5, 0.5, "no optimizer step yet", transform=axes.transAxes, ha="center", color=_GREY, fontsize=9
        )
    _bare(axes)


def _draw_bars(axes: Axes, summary: Mapping[str, Any], order: Sequence[str]) -> None:
    arms = summary.get("arms") or {}
    scored = [
        arm
        for arm in [*order, *(arm for arm in arms if arm not in order)]
        if _score(arms.get(arm)) is not None
    ]
    tops = [0.1]
    for place, arm in enumerate(scored):
        mean, se = _score(arms[arm]) or (0.0, 0.0)
        axes.bar(place, mean, width=0.62, color=colour(arm), edgecolor="white")
        axes.errorbar(place, mean, yerr=1.96 * se, color=_INK, linewidth=1.1, capsize=3.5)
        axes.text(place, mean + 1.96 * se, f" {mean:.2f}", ha="center", va="bottom", fontsize=8.5, color=_INK)
        tops.append(mean + 1.96 * se)
    warm = _score(summary.get("warm_start"))
    if warm is not None:
        ends = (-0.6, max(len(scored), 1) - 0.5)
        axes.fill_between(
            ends, warm[0] - 1.96 * warm[1], warm[0] + 1.96 * warm[1], color="#e5e5ea", linewidth=0, zorder=0.6
        )
        axes.plot(ends, (warm[0], warm[0]), color=_GREY, linewidth=1.3, linestyle=(0, (2, 2)))
        axes.text(
            ends[1] + 0.06, warm[0], f"warm\nstart\n{warm[0]:.2f}", fontsize=8, color=_GREY, va="center"
        )
        tops.append(warm[0] + 1.96 * warm[1])
    axes.set_xlim(-0.6, max(len(scored), 1) - (0.0 if warm else 0.4))
    axes.set_ylim(0, min(1.05, max(tops) * 1.14))
    axes.set_xticks(range(len(scored)), [textwrap.fill(name(arm), 9) for arm in scored], fontsize=8.5)
    axes.set_ylabel("pass@1, held out (95 % interval)", color=_INK, fontsize=9)
    if not scored:
        axes.text(
            0.5,
            0.5,
            "no held-out evaluation yet",
            transform=axes.transAxes,
            ha="center",
            color=_GREY,
            fontsize=9,
        )
    _bare(axes)


def _score(arm: Mapping[str, Any] | None) -> tuple[float, float] | None:
    score = (arm or {}).get("pass_at_1") or {}
    return None if score.get("mean") is None else (float(score["mean"]), float(score.get("se") or 0.0))


def _limits(rewards: Sequence[float]) -> tuple[float, float]:
    """The tenths of [0, 1] around the rewards, at least 0.4 apart: noise must not look like a result."""
    if not rewards:
        return 0.0, 1.0
    low, high = math.floor(min(rewards) * 10) / 10, math.ceil(max(rewards) * 10) / 10
    missing = max(0.0, 0.4 - (high - low)) / 2
    low, high = max(0.0, low - missing), min(1.0, high + missing)
    return max(0.0, min(low, high - 0.4)), min(1.0, max(high, low + 0.4)) + 0.01


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Rising heights, moved up where needed so that each is `gap` above the one before."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    # Shift the block down by half of what the top label was pushed, so that labels stay near their lines.
    push = (placed[-1] - heights[-1]) / 2 if placed else 0.0
    return [height - push for height in placed]


def _sample_size(curves: Mapping[str, Mapping[int, object]], summary: Mapping[str, Any]) -> str:
    seeds = max((len(seeds) for seeds in curves.values()), default=0)
    words = [f"{seeds} seed{'' if seeds == 1 else 's'} an arm"]
    config = summary.get("config") or {}
    for key, word in (("tasks_held_out", "held-out tasks"), ("attempts", "attempts each")):
        if config.get(key) is not None:
            words.append(f"{config[key]} {word}")
    return ", ".join(words)


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c7c7cc")
    axes.tick_params(colors=_INK, labelsize=8.5, length=3, color="#c7c7cc")
    axes.grid(axis="y", color="#ececf0", linewidth=0.8)
    axes.set_axisbelow(True)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
