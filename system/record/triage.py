"""Failed trials of a run, sorted by likely cause: its lines read into core's records, the clues written for people."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from core.clue import CAUSES, Clue, Criterion, Signs, Step, Trace, likely_cause
from core.outcome import Outcome
from system.harness.chat import parse_completion

from .audit import markdown_table

SIGNS = Signs(
    missing=(
        *(
            "No module named",
            "ModuleNotFoundError",
            "command not found",
            "is not installed",
            "bwrap not found",
        ),
        *("cannot open shared object file", "executable file not found"),
    ),
    broken=(
        *("broke off during this call", "error: no answer within", "must end within", "must say what it did"),
        *(
            f"error: {name}Error"
            for name in ("Key", "Type", "Attribute", "Index", "Runtime", "Memory", "Name")
        ),
        *(
            f"error: {name}Error"
            for name in ("Recursion", "Assertion", "ZeroDivision", "Overflow", "OS", "EOF")
        ),
        *("error: BadZipFile", "error: XMLSyntaxError", "error: NotImplementedError"),
    ),
    misused=("error",),
    cut=("[... cut ...]",),
    server=("tool server", "tools missing", "tools could not be listed", "ConnectionError", "MCPError"),
    sandbox=("sandbox:",),
)
"""How this system says what happened."""

MEANING = {
    "verifier": "the grade is missing, or would not take another spelling of what it wants",
    "dependency": "a package or a program was missing",
    "tool": "a tool broke, hung, or said nothing",
    "harness": "the engine, the sandbox or the agent loop failed, or kept from the policy what it needed",
    "policy": "the model's own mistake",
}

_SPELLING = re.compile(r"expected (?P<expected>.+?), got (?P<got>.+)", re.DOTALL)


def is_failure(line: Mapping[str, Any]) -> bool:
    """Whether a line of trajectories.jsonl is of a trial that ended without the full reward by itself."""
    outcome = line["outcome"]["kind"]
    return outcome not in ("solved", "cancelled") and not (outcome == "failed" and line["reward"] >= 1)


def trace_of(line: Mapping[str, Any]) -> Trace:
    """A line of trajectories.jsonl as core reads it."""
    whole = {"turns": [0, len(line.get("turns", ()))], "messages": [0, len(line.get("messages", ()))]}
    steps: list[Step] = []
    for part in line.get("steps") or [whole]:
        messages = line["messages"][slice(*part["messages"])] if "messages" in line else []
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        turns = line["turns"][slice(*part["turns"])] if "turns" in line else []
        steps += [_step(turn, text) for turn, text in zip(turns, [*said, *[""] * (len(turns) - len(said))])]
    seconds = line.get("seconds", {})
    return Trace(
        outcome=Outcome(**line["outcome"]),
        reward=line.get("reward"),
        steps=tuple(steps),
        criteria=tuple(_criterion(criterion) for criterion in line.get("criteria", ())),
        agent_s=seconds.get("agent", 0.0),
        engine_s=seconds.get("engine", 0.0),
    )


def _step(turn: Mapping[str, Any], text: str) -> Step:
    return Step(
        said=text,
        tool=turn["tool"],
        arguments=json.dumps(turn["arguments"], sort_keys=True, ensure_ascii=False),
        result=turn["result"],
        error=turn["error"] or (not turn["tool"] and parse_completion(text).error is not None),
        seconds=turn.get("seconds", 0.0),
    )


def _criterion(record: Mapping[str, Any]) -> Criterion:
    spelt = _SPELLING.fullmatch(record["detail"])
    expected, got = (spelt["expected"], spelt["got"]) if spelt else ("", "")
    return Criterion(record["name"], record["met"], record["detail"], _bare(expected), _bare(got))


def _bare(text: str) -> str:
    """Without the quotes of a repr."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def sorted_out(
    lines: Iterable[Mapping[str, Any]], clues: Callable[[Trace], Sequence[Clue]]
) -> dict[str, Any]:
    """Counts by cause and every failure with its clues."""
    failures: list[dict[str, Any]] = []
    trials = 0
    for line in lines:
        trials += 1
        try:
            trace = trace_of(line) if is_failure(line) else None
        except (KeyError, TypeError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"line {trials} must be a recorded trial, got one with {told}") from None
        if trace is not None:
            found = clues(trace)
            names = ("trial_id", "arm", "seed", "task", "family", "level", "instruction", "reward", "outcome")
            about = {name: line[name] for name in names if name in line}
            told = [clue._asdict() for clue in found]
            failures.append({**about, "cause": likely_cause(found), "clues": told})
    return {"trials": trials, "failed": len(failures), "causes": counted(failures), "failures": failures}


def counted(failures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Cause → how many failures, their share, and the rules that decided."""
    causes = {}
    for cause in CAUSES:
        mine = [failure for failure in failures if failure["cause"] == cause]
        rules = Counter(first_clue(failure)["rule"] for failure in mine)
        share = len(mine) / len(failures) if failures else 0.0
        causes[cause] = {"count": len(mine), "share": share, "rules": dict(rules.most_common())}
    return causes


def first_clue(failure: Mapping[str, Any]) -> Mapping[str, Any]:
    """The clue that decided: the heaviest of the likely cause."""
    return next(clue for clue in failure["clues"] if clue["cause"] == failure["cause"])


def examples(failures: Sequence[Mapping[str, Any]], cause: str, *, most: int) -> list[Mapping[str, Any]]:
    """Failures of a cause, one of each rule before a second of any."""
    mine = [failure for failure in failures if failure["cause"] == cause]
    seen: Counter[str] = Counter()
    ranked = []
    for place, failure in enumerate(mine):
        rule = first_clue(failure)["rule"]
        ranked.append((seen[rule], place, failure))
        seen[rule] += 1
    return [failure for _, _, failure in sorted(ranked, key=lambda one: one[:2])[:most]]


def print_triage(told: Mapping[str, Any], *, console: Console | None = None) -> None:
    """One row a cause."""
    console = console or Console()
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for heading in ("likely cause", "failed", "share", "rules"):
        table.add_column(heading, justify="right" if heading in ("failed", "share") else "left")
    for cause, row in told["causes"].items():
        table.add_row(cause, str(row["count"]), f"{row['share']:.0%}", Text(_rules(row)))
    console.print(table)
    console.print(Text(f"{told['failed']} of {told['trials']} trials did not earn 1"))
    if "opinions" in told:
        console.print(Text(_agreement(told["opinions"])))


def page(told: Mapping[str, Any], *, folder: str) -> str:
    """The same for people, with three examples of each cause."""
    parts = [f"# {told['failed']} of {told['trials']} trials did not earn 1", f"`{folder}`"]
    rows = [
        (cause, MEANING[cause], str(row["count"]), f"{row['share']:.0%}", _rules(row))
        for cause, row in told["causes"].items()
    ]
    parts.append(markdown_table(("likely cause", "meaning", "failed", "share", "rules"), rows))
    if "opinions" in told:
        parts.append(_agreement(told["opinions"]))
    for cause, row in told["causes"].items():
        if row["count"]:
            parts.append(f"## {cause[0].upper()}{cause[1:]}: {row['count']}")
            parts += [_example(failure) for failure in examples(told["failures"], cause, most=3)]
    return "\n\n".join(parts) + "\n"


def _rules(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{rule} {count}" for rule, count in row["rules"].items())


def _agreement(opinions: Mapping[str, Any]) -> str:
    return (
        f"A judge was asked about {opinions['asked']}: it names the same cause for {opinions['same']} of "
        f"{opinions['answered']} that it answered."
    )


def _example(failure: Mapping[str, Any]) -> str:
    outcome = failure["outcome"]
    became = " ".join(filter(None, (outcome["kind"], outcome.get("reason", ""), outcome.get("phase", ""))))
    reward = "none" if failure.get("reward") is None else f"{failure['reward']:.2f}"
    lines = [f"**{failure['trial_id']}** (task {failure.get('task', '?')}): {became}, reward {reward}"]
    if failure.get("instruction"):
        lines.append(f"> {' '.join(failure['instruction'].split())[:300]}")
    lines += [f"- {_said(clue)}" for clue in failure["clues"][:4]]
    if opinion := failure.get("opinion"):
        lines.append(
            f"- judge: {opinion.get('cause', 'no answer')}, {' '.join(opinion['reason'].split())[:300]}"
        )
    return "\n".join([lines[0], "", *lines[1:]])


def _said(clue: Mapping[str, Any]) -> str:
    place = ", ".join(filter(None, (f"turn {clue['turn']}" if clue["turn"] >= 0 else "", clue["tool"])))
    quote = " ".join(clue["quote"].split()).replace("`", "'")[:200]
    return f"{clue['cause']}, {clue['rule']}{f' ({place})' if place else ''}: `{quote}`"
