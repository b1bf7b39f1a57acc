"""The report of a run: one self-contained page of numbers, figure and sampled trajectories, token by token.

`python -m system.record.report RUN_DIR` makes figure and page again from the files of a run.
"""

from __future__ import annotations

import base64
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from .figure import colour, draw
from .finding import finding, name, sentences
from .metrics import read_jsonl
from .table import COLUMNS, cell, clock, mean_staleness

Decode = Callable[[Sequence[int]], list[str]]

_HEALTH = (
    ("optimizer steps", "step", max, "d"),
    ("trained tokens", "trained_tokens", sum, ",d"),
    ("groups without signal", "zero_variance", sum, ",d"),
    ("masked share, mean", "masked_share", lambda values: sum(values) / len(values), ".2%"),
    ("sampler–trainer gap, largest", "mismatch", max, ".1e"),
    ("gradient norm, mean", "grad_norm", lambda values: sum(values) / len(values), ".3f"),
    ("versions in one trajectory, most", "versions_in_trajectory_max", max, "d"),
)


def write_report(run_dir: str | os.PathLike[str], *, decode: Decode, sample: int = 40) -> Path:
    """Writes figure.png and report.html from the files of a run, also of one that was interrupted.

    Args:
        decode: token ids -> one piece of text a token.
        sample: trajectories an arm in the viewer: solved, failed and truncated in turn, spread over the run.

    Raises:
        FileNotFoundError: the folder has no config.json, so it is not a run.
    """
    run = Path(run_dir)
    if not (run / "config.json").exists():
        raise FileNotFoundError(f"run_dir must hold config.json, got {run}")
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    summary = _optional_json(run / "summary.json")
    metrics = list(read_jsonl(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else []
    command = (summary or config).get("command") or "python experiments/ablate_aggregation.py"
    commit = (summary or {}).get("commit") or config.get("commit", "")
    figure = draw(metrics, summary, run / "figure.png", command=command, commit=commit)
    chosen, outcomes = _choose(run / "trajectories.jsonl", sample)
    facts = page_facts(config, summary, metrics, outcomes)
    facts |= {
        "figure": base64.b64encode(figure.read_bytes()).decode("ascii"),
        "command": command,
        "commit": commit,
        "run": run.name,
        "viewer": _for_script(viewer_data(chosen, _task_facts(metrics), decode)),
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    parts = {
        part: Markup((Path(__file__).parent / f"report.{part}").read_text("utf-8")) for part in ("css", "js")
    }
    page = environment.get_template("report.html.jinja").render(**facts, **parts)
    target = run / "report.html"
    target.write_text(page, encoding="utf-8")
    return target


def page_facts(
    config: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    metrics: Sequence[Mapping[str, Any]],
    outcomes: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Everything the page says in numbers, as text ready for the template."""
    values = summary or {}
    arms = {arm: values.get("arms", {}).get(arm, {}) for arm in _arms(config, summary, metrics)}
    rows = [("warm start", "", values.get("warm_start") or {})] if values.get("warm_start") else []
    rows += [(name(arm), colour(arm), numbers) for arm, numbers in arms.items()]
    throughput = values.get("throughput") or {}
    return {
        "finding": finding(summary),
        "sentences": sentences(summary),
        "interrupted": summary is None or summary.get("finished") is False,
        "headline": _headline(values, throughput, metrics),
        "columns": [heading.replace("\n", " ") for heading, _, _ in COLUMNS],
        "rows": [
            {"name": row, "colour": tint, "cells": [cell(numbers, key, form) for _, key, form in COLUMNS]}
            for row, tint, numbers in rows
        ],
        "staleness": _staleness(arms, metrics),
        "split": _split(throughput.get("cpu_seconds_per_trial") or {}),
        "levels": _levels(metrics),
        "health": _health(metrics),
        "outcomes": _outcomes(outcomes),
        "config": json.dumps(config, indent=2, ensure_ascii=False),
    }


def viewer_data(
    trajectories: Iterable[Mapping[str, Any]], task_facts: Mapping[str, Mapping[str, Any]], decode: Decode
) -> dict[str, Any]:
    """The sampled trajectories in the compact form that the page's script reads.

    Token texts go into one table. Per row: `t` indices into it, `l` logprob in hundredths, `m` and `v`
    the loss mask and the policy version as runs [value, count].
    """
    pieces: dict[str, int] = {}
    shown = []
    for trajectory in trajectories:
        rows = []
        for row in trajectory.get("rows") or []:
            texts = decode(row["token_ids"])
            if len(texts) != len(row["token_ids"]):
                raise ValueError(
                    f"decode must give one piece a token, got {len(texts)} for {len(row['token_ids'])}"
                )
            rows.append(
                {
                    "t": [pieces.setdefault(text, len(pieces)) for text in texts],
                    "l": [round(100 * (value or 0.0)) for value in row["rollout_logprob"]],
                    "m": _runs([int(trained) for trained in row["loss_mask"]]),
                    "v": _runs(row["policy_version"]),
                }
            )
        known = task_facts.get(trajectory.get("task", ""), {})
        outcome = dict(trajectory.get("outcome") or {})
        shown.append(
            {
                "id": trajectory["trial_id"],
                "arm": trajectory.get("arm") or "",
                "seed": trajectory.get("seed"),
                "purpose": trajectory.get("purpose", "train"),
                "task": trajectory.get("task", ""),
                **{key: trajectory.get(key, known.get(key)) for key in ("level", "family", "domain")},
                "kind": outcome.pop("kind", "?"),
                "cause": ", ".join(str(value) for value in outcome.values() if value not in (None, "")),
                "reward": trajectory.get("reward"),
                "criteria": trajectory.get("criteria") or [],
                "instruction": _instruction(trajectory),
                "seconds": _total(trajectory.get("seconds")),
                "rows": rows,
                "turns": [
                    {
                        "row": turn.get("row", 0),
                        "start": turn["start"],
                        "end": turn["end"],
                        "tool": turn.get("tool") or "",
                        "result": turn.get("result") or "",
                        "error": bool(turn.get("error")),
                    }
                    for turn in trajectory.get("turns") or []
                ],
            }
        )
    return {"pieces": list(pieces), "trajectories": shown}


def token_pieces(tokenizer_json: str | os.PathLike[str]) -> Decode:
    """A decode function over a tokenizer.json: one piece of text a token, half characters as U+FFFD."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    return lambda token_ids: [tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]


def _choose(path: Path, sample: int) -> tuple[list[dict[str, Any]], dict[str, Counter[str]]]:
    """Trajectories for the viewer and the count of outcomes an arm; the file is read twice, held never."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    if not path.exists():
        return [], outcomes
    places: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, trajectory in enumerate(read_jsonl(path)):
        arm, kind = trajectory.get("arm") or "", (trajectory.get("outcome") or {}).get("kind", "?")
        outcomes[arm][kind] += 1
        places[arm][kind].append(index)
    wanted = {index for kinds in places.values() for index in _mix(kinds, sample)}
    return [trajectory for index, trajectory in enumerate(read_jsonl(path)) if index in wanted], outcomes


def _mix(kinds: Mapping[str, Sequence[int]], sample: int) -> list[int]:
    """At most `sample` indices: as even over kinds as their counts allow, spread over each kind's range."""
    quota: Counter[str] = Counter()
    while sum(quota.values()) < sample:
        open_kinds = [kind for kind, indices in kinds.items() if quota[kind] < len(indices)]
        if not open_kinds:
            break
        quota[min(open_kinds, key=lambda kind: (quota[kind], kind))] += 1
    return [
        index
        for kind, many in quota.items()
        for index in (kinds[kind][place * len(kinds[kind]) // many] for place in range(many))
    ]


def _runs(values: Iterable[Any]) -> list[list[Any]]:
    return [[value, len(list(same))] for value, same in groupby(values)]


def _instruction(trajectory: Mapping[str, Any]) -> str:
    if trajectory.get("instruction"):
        return trajectory["instruction"]
    asked = (
        message["content"] for message in trajectory.get("messages") or [] if message.get("role") == "user"
    )
    return str(next(asked, ""))


def _total(seconds: Any) -> float | None:
    if isinstance(seconds, Mapping):
        return float(seconds["total"]) if "total" in seconds else sum(map(float, seconds.values()))
    return None if seconds is None else float(seconds)


def _arms(
    config: Mapping[str, Any], summary: Mapping[str, Any] | None, metrics: Iterable[Mapping[str, Any]]
) -> list[str]:
    known = [
        *((summary or {}).get("arms") or ()),
        *(config.get("arms") or ()),
        *(line["arm"] for line in metrics),
    ]
    return [arm for arm in dict.fromkeys(known) if arm != "warm_start"]


def _headline(
    summary: Mapping[str, Any], throughput: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    seconds = summary.get("seconds") or max((line.get("seconds") or 0.0 for line in metrics), default=0.0)
    facts = [(clock(seconds), "minutes" if seconds < 3600 else "hours")] if seconds else []
    if throughput.get("trials_per_minute") is not None:
        facts.append((f"{throughput['trials_per_minute']:.0f}", "trials a minute"))
    if throughput.get("first_step_seconds") is not None:
        facts.append((f"{throughput['first_step_seconds']:.0f} s", "to the first step"))
    cpu = throughput.get("cpu_seconds_per_trial") or {}
    if cpu:
        facts.append((f"{sum(cpu.values()):.2f} s", "CPU a trial"))
    steps = [line for line in metrics if "step" in line]
    if steps:
        facts.append((f"{len(steps)}", "optimizer steps"))
        facts.append((f"{sum(line.get('trained_tokens') or 0 for line in steps):,}", "tokens trained"))
    return facts


def _staleness(
    arms: Mapping[str, Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    lines = [line for line in metrics if "step" in line]
    shown = []
    for arm, numbers in arms.items():
        histogram: Counter[str] = Counter(numbers.get("staleness") or {})
        if not histogram:
            for line in lines:
                if line["arm"] == arm:
                    histogram.update(line.get("staleness") or {})
        if not (count := sum(histogram.values())):
            continue
        ages = range(int(max(histogram, key=int)) + 1)
        bars = [{"age": age, "share": histogram.get(str(age), 0) / count} for age in ages]
        mean = f"{mean_staleness(histogram):.2f}"
        shown.append({"name": name(arm), "colour": colour(arm), "mean": mean, "bars": bars})
    return shown


def _split(cpu_seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    total = sum(cpu_seconds.values())
    return [
        {"name": part, "seconds": f"{seconds:.3f}", "share": seconds / total}
        for part, seconds in cpu_seconds.items()
        if total > 0
    ]


def _levels(metrics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Held-out pass@1 by level and by family, of each arm's last evaluation, over its seeds."""
    last: dict[tuple[str, Any], Mapping[str, Any]] = {}
    for line in metrics:
        if line.get("eval") and line.get("tasks"):
            key = (line["arm"], line.get("seed"))
            if key not in last or (line.get("version") or 0) >= (last[key].get("version") or 0):
                last[key] = line
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (arm, _), line in last.items():
        for task in line["tasks"]:
            for group in (f"level {task.get('level')}", str(task.get("family"))):
                found[arm][group] += [float(passed) for passed in task.get("passed") or []]
    groups = sorted({group for arm in found.values() for group in arm if "None" not in group})
    groups = [g for g in groups if g.startswith("level")] + [g for g in groups if not g.startswith("level")]
    rows = [
        {
            "name": name(arm),
            "colour": "" if arm == "warm_start" else colour(arm),
            "cells": [sum(by[group]) / len(by[group]) if by.get(group) else None for group in groups],
        }
        for arm, by in found.items()
    ]
    return {"groups": groups, "rows": rows}


def _health(metrics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    lines: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in metrics:
        if "step" in line:
            lines[line["arm"]].append(line)
    rows = []
    for heading, key, reduce, form in _HEALTH:
        cells = []
        for arm in lines:
            values = [line[key] for line in lines[arm] if line.get(key) is not None]
            cells.append(format(reduce(values), form) if values else "–")
        if any(text != "–" for text in cells):
            rows.append({"name": heading, "cells": cells})
    return {"arms": [name(arm) for arm in lines], "rows": rows}


def _outcomes(outcomes: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    kinds = sorted({kind for arm in outcomes.values() for kind in arm})
    rows = [
        {"name": name(arm) or "–", "cells": [f"{counts.get(kind, 0):,}" for kind in kinds]}
        for arm, counts in outcomes.items()
    ]
    return {"kinds": [name(kind) for kind in kinds], "rows": rows}


def _task_facts(metrics: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {
        task["task"]: task
        for line in metrics
        if line.get("eval")
        for task in line.get("tasks") or []
        if "task" in task
    }


def _optional_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _for_script(value: Any) -> Markup:
    """JSON that no text inside can end or open a tag in."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def main(run_dir: Path, /, *, sample: int = 40, tokenizer: Path | None = None) -> Path:
    """Makes figure.png and report.html of a run again from its files.

    Args:
        run_dir: folder of the run.
        sample: trajectories an arm in the viewer.
        tokenizer: tokenizer.json of the policy; by default that of the folder config.json names.
    """
    if not (run_dir / "config.json").is_file():
        raise FileNotFoundError(f"run_dir must hold config.json, got {run_dir}")
    if tokenizer is None:
        config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        tokenizer = Path(config.get("policy", "policy")) / "tokenizer.json"
    if not tokenizer.exists():
        raise FileNotFoundError(f"tokenizer must be a tokenizer.json, got {tokenizer}, which does not exist")
    return write_report(run_dir, decode=token_pieces(tokenizer), sample=sample)


if __name__ == "__main__":
    import sys

    import tyro

    try:
        print(tyro.cli(main))
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        raise SystemExit(2) from None
