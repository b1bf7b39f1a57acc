"""A judge's second opinion on why a trial failed: it sees the trial, not what the rules said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from core.clue import CAUSES
from system.verify.fault import VerifyError
from system.verify.judge import Judge, Question
from system.verify.prompt import FENCE_RULE, Section, fenced, fresh_nonce

from .triage import MEANING, trace_of

_INSTRUCTIONS = """\
An agent worked on a task with tools and did not earn the full reward. Say which one of these causes is most likely to
blame, in which turn it shows (-1 if in none), and why, in one sentence that quotes what you saw.
{causes}
Blame the policy only if its tools told it what it needed and the grade is fair.

{rule}"""

SCHEMA = {
    "type": "object",
    "properties": {
        "cause": {"type": "string", "enum": list(CAUSES)},
        "turn": {"type": "integer"},
        "reason": {"type": "string"},
    },
    "required": ["cause", "turn", "reason"],
    "additionalProperties": False,
}


def question_of(line: Mapping[str, Any], *, limit: int) -> Question:
    """What a judge is asked about a line of trajectories.jsonl; long parts lose their middle."""
    trace = trace_of(line)
    turns = [
        f"turn {number}: {step.said}\n-> {'error ' if step.error else ''}{step.result}"
        for number, step in enumerate(trace.steps)
    ]
    outcome = trace.outcome
    became = [outcome.kind, outcome.reason, outcome.phase, outcome.cause, f"reward {trace.reward}"]
    criteria = [f"{'met' if c.met else 'not met'}: {c.name}: {c.detail}" for c in trace.criteria]
    sections = [
        Section("The task", line.get("instruction", "")),
        Section("What the agent did", "\n".join(turns) or "nothing is known"),
        Section("Its answer", line.get("answer", "")),
        Section("What became of it", ", ".join(part for part in became if part)),
        Section("The grade", "\n".join(criteria) or "none"),
    ]
    nonce = fresh_nonce(sections)
    causes = "\n".join(f"{cause}: {meaning}." for cause, meaning in MEANING.items())
    instructions = _INSTRUCTIONS.format(causes=causes, rule=FENCE_RULE.format(nonce=nonce))
    evidence = fenced(sections, nonce, limit=limit - len(instructions))
    return Question(name="triage", instructions=instructions, evidence=evidence, schema=SCHEMA)


def with_opinions(
    told: dict[str, Any], lines: Mapping[str, Mapping[str, Any]], judge: Judge, *, side_by_side: int
) -> dict[str, Any]:
    """The triage with a judge's word on the failures whose lines are given, and how often it agrees.

    Args:
        told: as `sorted_out` gives it; its failures get an "opinion".
        lines: of trajectories.jsonl, by trial id.
        judge: threads share it.
        side_by_side: questions at once.
    """
    asked = [failure for failure in told["failures"] if failure["trial_id"] in lines]
    with ThreadPoolExecutor(side_by_side) as pool:
        opinions = pool.map(lambda failure: _asked(judge, lines[failure["trial_id"]]), asked)
        for failure, opinion in zip(asked, opinions, strict=True):
            failure["opinion"] = opinion
    answered = [failure for failure in asked if "cause" in failure["opinion"]]
    same = sum(failure["opinion"]["cause"] == failure["cause"] for failure in answered)
    return {**told, "opinions": {"asked": len(asked), "answered": len(answered), "same": same}}


def _asked(judge: Judge, line: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(judge.ask(question_of(line, limit=judge.request_characters)).value)
    except VerifyError as error:
        return {"reason": f"no answer: {error}"}


def spread_over_causes(failures: Sequence[Mapping[str, Any]], *, most: int) -> list[str]:
    """Trial ids of failures to ask about: the causes take turns, so that a rare one is among them."""
    by_cause = [[f["trial_id"] for f in failures if f["cause"] == cause] for cause in CAUSES]
    rounds = max(map(len, by_cause), default=0)
    return [ids[number] for number in range(rounds) for ids in by_cause if number < len(ids)][:most]
