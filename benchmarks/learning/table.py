"""The table and figure of the learning benchmark, from the metrics of its runs.

    python benchmarks/learning/table.py benchmarks/learning/recorded

Reads every `<arm>-<seed>/metrics.jsonl` below the folder and below its folder `more`: the steps for the curves, the
evaluations for pass@1, which together are one evaluation of all their tasks.
Writes `table.md` and `figure.png` beside them.
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from core.estimate import Comparison, compare, mean_and_error, seeds_needed
from system.record.figure import colour
from system.record.metrics import read_jsonl

CONFIDENCE = 0.95


def runs_below(folder: Path) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """arm -> seed -> lines of metrics.jsonl."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for path in sorted((*folder.glob("*-*/metrics.jsonl"), *folder.glob("more/*-*/metrics.jsonl"))):
        arm, _, seed = path.parent.name.rpartition("-")
        found.setdefault(arm, {}).setdefault(int(seed), []).extend(read_jsonl(path))
    if "warm_start" not in found:
        raise ValueError(f"folder must hold warm_start-0/metrics.jsonl, got {folder} without it")
    return found


def held_out(lines: list[dict[str, Any]]) -> dict[str, float] | None:
    """pass@1 of each held-out task; None if there was no evaluation."""
    tasks = [task for line in lines if line.get("eval") for task in line["tasks"]]
    return {t["task"]: mean_and_error([float(p) for p in t["passed"]]).mean for t in tasks} or None


def paired(a: list[dict[str, float]], b: list[dict[str, float]], count: int) -> Comparison:
    """The difference b - a over seeds and tasks; its interval holds for `count` comparisons together."""
    tasks = sorted(set.intersection(*(set(scores) for scores in (*a, *b))))
    table = [[[scores[task] for task in tasks] for scores in side] for side in (a, b)]
    return compare(table[0], table[1], confidence=1 - (1 - CONFIDENCE) / count)


def difference(a: str, b: str, told: Comparison, count: int) -> str:
    """One row of the table of differences."""
    interval = f"{told.low:+.3f} to {told.high:+.3f}"
    needed = (
        ""
        if told.verdict != "tie" or not told.difference
        else str(
            seeds_needed(
                difference=told.difference,
                seed_spread=told.seed_spread,
                power=0.8,
                confidence=1 - (1 - CONFIDENCE) / count,
            )
        )
    )
    verdict = "tie" if told.verdict == "tie" else f"{b if told.verdict == 'b better' else a} better"
    return f"| {b} against {a} | {told.difference:+.3f} | {interval} | {verdict} | {needed} |"


def main(folder: Path) -> str:
    """Writes table.md and figure.png; returns the table."""
    runs = runs_below(folder)
    scores = {arm: [s for lines in seeds.values() if (s := held_out(lines))] for arm, seeds in runs.items()}
    start = scores.pop("warm_start")[0]
    arms = [arm for arm in scores if arm != "flipped"]
    unscored = [arm for arm in scores if not scores[arm]]
    text = ["| policy | seeds | held-out pass@1 of each seed | mean |", "|---|---|---|---|"]
    text.append(f"| warm start | | {mean_and_error(list(start.values())).mean:.3f} | |")
    for arm, found in ((arm, found) for arm, found in scores.items() if found):
        means = [mean_and_error(list(s.values())).mean for s in found]
        told = " ".join(f"{m:.3f}" for m in means)
        text.append(f"| {arm} | {len(found)} | {told} | {mean_and_error(means).mean:.3f} |")
    text += [
        "",
        "| difference in pass@1 | estimate | interval | verdict | seeds a tie would need |",
        "|---|---|---|---|---|",
    ]
    text += [
        difference("warm start", arm, paired([start] * len(scores[arm]), scores[arm], len(arms)), len(arms))
        for arm in arms
    ]
    pairs = [(a, b) for i, a in enumerate(arms) for b in arms[i + 1 :]]
    text += [difference(a, b, paired(scores[a], scores[b], len(pairs)), len(pairs)) for a, b in pairs]
    if scores.get("flipped"):
        flipped = scores["flipped"]
        text.append(difference("warm start", "flipped", paired([start] * len(flipped), flipped, 1), 1))
    tasks, attempts = (
        len(start),
        len(next(line for line in runs["warm_start"][0] if line.get("eval"))["tasks"][0]["passed"]),
    )
    text.append("")
    text.append(
        f"{tasks} held-out tasks, {attempts} trials each; intervals of 95 % over tasks and seeds (paired by task), "
        f"corrected for the {len(arms)} comparisons of their kind (Bonferroni)."
    )
    for arm in unscored:
        last = [[x["reward"] for x in lines if "step" in x][-5:] for lines in runs[arm].values()]
        told = ", ".join(f"{mean_and_error(rewards).mean:.3f}" for rewards in last)
        text.append(
            f"{arm}: not evaluated on held-out tasks; training reward of the last five steps, by seed: {told}."
        )
    (folder / "table.md").write_text("\n".join(text) + "\n")
    draw(runs, folder / "figure.png")
    return "\n".join(text)


def draw(runs: dict[str, dict[int, list[dict[str, Any]]]], path: Path) -> None:
    """Training reward by step: every seed thin, the mean thick."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for arm, seeds in runs.items():
        if arm == "warm_start":
            continue
        shade = "0.4" if arm == "flipped" else colour(arm)
        curves = [[line["reward"] for line in lines if "step" in line] for lines in seeds.values()]
        for curve in curves:
            axes.plot(
                range(1, len(curve) + 1),
                [float("nan") if r is None else r for r in curve],
                color=shade,
                lw=0.6,
            )
        means = [
            mean_and_error([r for r in column if r is not None]).mean for column in zip(*curves, strict=True)
        ]
        axes.plot(range(1, len(means) + 1), means, color=shade, lw=2.2, label=arm.replace("_", " "))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training reward (levels weighed as in the task set)")
    axes.set_title(
        "Reward rises under every aggregation and falls to nothing with the sign flipped", fontsize=10
    )
    axes.legend(frameon=False)
    figure.text(0.01, 0.01, "python benchmarks/learning/table.py benchmarks/learning/recorded", fontsize=6)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {sys.argv[0]} FOLDER")
    print(main(Path(sys.argv[1])))
