"""What an audit tells of its trials: outcomes, causes, rewards, tools, times, what is left; as JSON, tables, a page."""

from __future__ import annotations

import math
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from core.outcome import Outcome, has_valid_reward, too_many_system_errors

Result = Mapping[str, Any]

PHASES = ("start", "ready", "agent", "engine", "freeze", "verify", "teardown", "trial")
"""Where a trial's time goes: the sandbox; until every tool is listed; the agent with its calls and the engine; the end
of every process; the grade; the end of the sandbox; all, as who waits for it sees it."""

SCORED = ("context", "turn_cap", "step_cap")
"""Limits of the policy's own making."""

_VARYING = re.compile(r"0x[0-9a-f]+|/[^\s:,'\")]+|\d+(?:\.\d+)?")


class Tally:
    """Takes results in, one by one, and keeps what the report needs of them.

    Args:
        planned: trials that there should be.
    """

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self.outcomes: Counter[str] = Counter()
        self.causes: dict[tuple[str, str], list[str]] = {}
        self.rewards: list[float] = []
        self.unsolved: list[dict[str, Any]] = []
        self.calls: dict[str, list[float]] = {}
        self.failures: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {name: [] for name in PHASES}
        self.cpu_seconds: list[float] = []
        self.restarts = self.repairs = 0

    @property
    def trials(self) -> int:
        """How many ended."""
        return self.outcomes.total()

    @property
    def system_errors(self) -> int:
        """How many ended so."""
        return self.outcomes["system_error"]

    def add(self, result: Result, *, task: str, seconds: float) -> None:
        """A trial ended.

        Args:
            result: as the fleet gives it.
            task: its id.
            seconds: from its start to its result.
        """
        outcome = Outcome(**result["outcome"])
        self.outcomes[outcome.kind if not outcome.reason else f"{outcome.kind}: {outcome.reason}"] += 1
        if outcome.kind == "system_error":
            key = outcome.phase, alike(outcome.cause)
            self.causes.setdefault(key, []).append(result["trial_id"])
        valid = has_valid_reward(outcome, scored_truncations=SCORED)
        if valid:
            self.rewards.append(result["reward"])
        if not valid or result["reward"] < 1.0:
            reward = result["reward"] if valid else None
            about = {"task": task, "trial_id": result["trial_id"], "reward": reward}
            self.unsolved.append({**about, "outcome": dict(result["outcome"])})
        for turn in result.get("turns", ()):
            if turn["tool"]:
                self.calls.setdefault(turn["tool"], []).append(turn["seconds"])
                self.failures[turn["tool"]] += turn["error"]
        for name, value in {**result.get("seconds", {}), "trial": seconds}.items():
            self.seconds[name].append(value)
        self.cpu_seconds.append(result.get("cpu_seconds", {}).get("trial", 0.0))
        self.restarts += result.get("tool_restarts", 0)
        self.repairs += result.get("repairs", 0)

    def report(self, *, seconds: float) -> dict[str, Any]:
        """All but what the audit's script knows; `seconds` is how long the trials took together."""
        every_call = [value for values in self.calls.values() for value in values]
        return {
            "planned": self.planned,
            "trials": self.trials,
            "outcomes": dict(self.outcomes.most_common()),
            "system_errors": {
                "count": self.system_errors,
                "share": self.system_errors / self.trials if self.trials else 0.0,
                "causes": [
                    {"phase": phase, "cause": cause, "count": len(names), "trials": names[:3]}
                    for (phase, cause), names in sorted(self.causes.items(), key=lambda one: -len(one[1]))
                ],
            },
            "rewards": {
                "valid": len(self.rewards),
                "of_one": sum(reward == 1.0 for reward in self.rewards),
                "mean": fmean(self.rewards) if self.rewards else None,
            },
            "unsolved": self.unsolved,
            "tools": {
                name: {
                    "calls": len(values),
                    "failures": self.failures[name],
                    "failure_rate": self.failures[name] / len(values),
                    "seconds": spread(values),
                }
                for name, values in sorted(self.calls.items())
            },
            "tool_restarts": self.restarts,
            "repairs": self.repairs,
            "latency": {
                **{name: spread(values) for name, values in self.seconds.items() if values},
                **({"call": spread(every_call)} if every_call else {}),
            },
            "cpu_seconds_per_trial": spread(self.cpu_seconds) if self.cpu_seconds else None,
            "seconds": seconds,
            "trials_per_minute": 60 * self.trials / seconds if seconds > 0 else 0.0,
        }


def alike(cause: str) -> str:
    """A cause without what differs between two occurrences of it: numbers, addresses, paths."""
    return _VARYING.sub("#", cause)[:200]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and largest: each the least value that so large a share does not exceed.

    Example: `spread([1.0, 2.0, 3.0]) == {"p50": 2.0, "p95": 3.0, "max": 3.0}`
    """
    if not values:
        raise ValueError("values must not be empty")
    ordered = sorted(values)
    at = {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in (("p50", 0.5), ("p95", 0.95))}
    return {**at, "max": ordered[-1]}


def faults(report: Mapping[str, Any], *, max_system_error: float, all_solved: bool) -> list[str]:
    """Why an audit is not passed, a line each; none if it is.

    Args:
        report: with `left` in it.
        max_system_error: largest share of system errors.
        all_solved: whether every trial must have the reward 1.0, as the expert's must.
    """
    found = []
    errors, trials = report["system_errors"]["count"], report["trials"]
    if too_many_system_errors(system_errors=errors, trials=trials, max_rate=max_system_error, min_trials=1):
        share = report["system_errors"]["share"]
        found.append(
            f"{errors} of {trials} trials met a system error: {share:.2%}, at most {max_system_error:.2%}"
        )
    if trials < report["planned"]:
        found.append(f"{trials} of {report['planned']} trials ended")
    for what, names in report["left"]["after"].items():
        if names:
            found.append(f"{len(names)} {what} are left: {', '.join(names[:3])}")
    short = trials - report["rewards"]["of_one"]
    if all_solved and short:
        found.append(f"{short} of {trials} rewards are not 1.0")
    return found


def tables(report: Mapping[str, Any]) -> Iterable[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """Title, headings and rows of each table."""
    trials = max(1, report["trials"])
    yield (
        "outcome",
        ("outcome", "trials", "share"),
        [(kind, str(count), f"{count / trials:.2%}") for kind, count in report["outcomes"].items()],
    )
    if causes := report["system_errors"]["causes"]:
        rows = [
            (c["phase"], c["cause"], str(c["count"]), f"{c['count'] / trials:.2%}", c["trials"][0])
            for c in causes
        ]
        yield "causes of system errors", ("phase", "cause", "trials", "share", "for example"), rows
    yield (
        "milliseconds of a trial",
        ("part", "median", "95 %", "longest"),
        [
            (name, *(f"{1000 * report['latency'][name][key]:.1f}" for key in ("p50", "p95", "max")))
            for name in (*PHASES[:4], "call", *PHASES[4:])
            if name in report["latency"]
        ],
    )
    yield (
        "tools",
        ("tool", "calls", "failed", "share", "median ms", "95 %", "longest"),
        [
            (
                name,
                str(tool["calls"]),
                str(tool["failures"]),
                f"{tool['failure_rate']:.1%}",
                *(f"{1000 * tool['seconds'][key]:.1f}" for key in ("p50", "p95", "max")),
            )
            for name, tool in report["tools"].items()
        ],
    )
    left = report["left"]
    yield (
        "left on the machine",
        ("", "before", "after"),
        [(what, str(len(left["before"][what])), str(len(names))) for what, names in left["after"].items()],
    )


def sentences(report: Mapping[str, Any]) -> list[str]:
    """The audit in a few sentences, the verdict first."""
    rewards, errors, after = report["rewards"], report["system_errors"]["count"], report["left"]["after"]
    mean = "none" if rewards["mean"] is None else f"{rewards['mean']:.3f}"
    cpu = report["cpu_seconds_per_trial"]
    verdict = "passed" if report["passed"] else "not passed: " + "; ".join(report["faults"])
    if not report["finished"]:
        verdict = f"stopped after {report['trials']} of {report['planned']} trials; " + verdict
    left = ", ".join(f"{len(after[what])} {what}" for what in ("processes", "mounts", "files"))
    rate, side = report["trials_per_minute"], report["concurrency"]
    return [
        f"Audit {verdict}.",
        f"{rewards['of_one']} of {report['trials']} rewards are 1.0 (mean {mean}); {errors} system errors.",
        f"Left behind: {left}.",
        f"{rate:.0f} trials a minute at {side} side by side, in {report['seconds']:.0f} s"
        + (f"; {1000 * cpu['p50']:.0f} ms of CPU a trial (median)." if cpu else "."),
    ]


def print_audit(report: Mapping[str, Any], *, console: Console | None = None) -> None:
    """Prints the tables and the sentences."""
    console = console or Console()
    for title, headings, rows in tables(report):
        if not rows:
            continue
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
        for place, heading in enumerate(headings):
            words = place == 0 or heading in ("cause", "for example")
            table.add_column(heading, justify="left" if words else "right", no_wrap=heading != "cause")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(Text(title, style="bold"))
        console.print(table)
        console.print()
    for sentence in sentences(report):
        console.print(Text(sentence), soft_wrap=True)
    for one in report["unsolved"][:10]:
        console.print(Text(f"  {one['task']} {described(one)}: {one['replay']}"), soft_wrap=True)


def page(report: Mapping[str, Any]) -> str:
    """The same in Markdown, for people."""
    first, *more = sentences(report)
    parts = [f"# {first.removesuffix('.')}", *more]
    about = [f"`{report['command']}`", f"commit {report['commit']}" if report["commit"] else ""]
    parts.append(", ".join(part for part in [*about, report["machine"]] if part))
    for title, headings, rows in tables(report):
        if rows:
            parts += [f"## {title[0].upper()}{title[1:]}", markdown_table(headings, rows)]
    if report["unsolved"]:
        listed = [(one["task"], described(one), f"`{one['replay']}`") for one in report["unsolved"][:50]]
        parts += [
            "## Trials without a reward of 1.0",
            markdown_table(("task", "what became of it", "again"), listed),
        ]
    named = [f"- {what}: {name}" for what, names in report["left"]["after"].items() for name in names[:20]]
    if named:
        parts += ["## What is left", "\n".join(named)]
    return "\n\n".join(parts) + "\n"


def described(one: Mapping[str, Any]) -> str:
    """What became of a trial that was not solved, in a few words."""
    outcome = one["outcome"]
    if outcome["kind"] == "system_error":
        return f"system error, {outcome['phase']}: {outcome['cause']}"[:200]
    graded = "no reward" if one["reward"] is None else f"reward {one['reward']:.2f}"
    return f"{outcome['kind']} {outcome.get('reason', '')}".strip() + f", {graded}"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; what would end a cell is escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in line) + " |"
        for line in lines
    )


def machine_name() -> str:
    """Cores and kind of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor() or platform.machine()}"
