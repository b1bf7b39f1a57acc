"""Criteria of a task, judged one by one by a model that sees the answer and what changed in the world."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .diff import changes, rendered
from .judge import Answer, Judge, Question
from .prompt import FENCE_RULE, Section, fenced, fresh_nonce
from .verdict import Criterion, Verdict
from .world import GradedWorld

SCORINGS = ("share", "all")
"""share: the reward is the share of criteria that are met. all: 1 if every one is, else 0."""

_FILES = ("bartleby.json", "archipelago.json")
_SIDE_BY_SIDE = 4
_RATIONALE = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """What a task demands: `Rubric(criteria=(("r1", "States a fee of 48"),), scoring="share", batched=False)`.

    Args:
        criteria: identifier and text of each.
        scoring: one of `SCORINGS`.
        batched: whether one question asks for all criteria; otherwise each has its own.
    """

    criteria: tuple[tuple[str, str], ...]
    scoring: str = "share"
    batched: bool = False

    def __post_init__(self) -> None:
        if not self.criteria:
            raise ValueError("rubric must have a criterion, got none")
        names = [name for name, _ in self.criteria]
        if len(set(names)) != len(names):
            raise ValueError(f"identifiers of a rubric must differ, got {names}")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, got {self.scoring!r}")


def read_rubric(task_folder: Path) -> Rubric | None:
    """The rubric in a task's metadata, None if it has none.

    Entries are {"id", "criterion"}, or {"verifier_id", "criteria"} as in APEX-Agents; "scoring" and "batched" stand
    beside the list.

    Raises:
        ValueError: there is one, and it is not like that.
    """
    for name in _FILES:
        file = task_folder / name
        about = json.loads(file.read_text()) if file.is_file() else {}
        if not isinstance(about, dict) or not about.get("rubric"):
            continue
        entries = about["rubric"]
        if not isinstance(entries, list):
            raise ValueError(f"rubric must be a list, got {entries!r}")
        return Rubric(
            criteria=tuple(_entry(entry, number) for number, entry in enumerate(entries, start=1)),
            scoring=about.get("scoring", "share"),
            batched=bool(about.get("batched", False)),
        )
    return None


def _entry(entry: Any, number: int) -> tuple[str, str]:
    if isinstance(entry, dict):
        name = entry.get("id", entry.get("verifier_id", f"criterion {number}"))
        text = entry.get("criterion", entry.get("criteria"))
        if isinstance(name, str) and isinstance(text, str) and text.strip():
            return name, text
    raise ValueError(f"a criterion of a rubric must have an id and a text, got {entry!r}")


def judged(rubric: Rubric, *, instruction: str, answer: str, world: GradedWorld, judge: Judge) -> Verdict:
    """Asks the judge about every criterion.

    Raises:
        VerifyError: an answer could not be had; then there is no verdict at all.
    """
    criteria = [text for _, text in rubric.criteria]
    sections = [
        Section("What the agent was asked to do", instruction),
        Section("Its final answer", answer or "(none)"),
        Section("What it changed in the files", _changes(world, judge.request_characters)),
    ]
    groups = [criteria] if rubric.batched else [[text] for text in criteria]
    questions = [_question(group, sections, judge.request_characters) for group in groups]
    pool = ThreadPoolExecutor(min(len(questions), _SIDE_BY_SIDE))
    try:
        answers = list(pool.map(judge.ask, questions))
    finally:
        pool.shutdown(
            wait=False, cancel_futures=True
        )  # whoever ends this need not wait for the other answers
    found = [said for reply in answers for said in _judgements(reply)]
    marked = tuple(
        Criterion(name=name, met=met, detail=rationale[:_RATIONALE], gate=False)
        for (name, _), (met, rationale) in zip(rubric.criteria, found, strict=True)
    )
    share = sum(criterion.met for criterion in marked) / len(marked)
    reward = share if rubric.scoring == "share" else float(share == 1.0)
    return Verdict(reward=reward, passed=share == 1.0, criteria=marked)


def _changes(world: GradedWorld, characters: int) -> str:
    listed = changes(world)
    return rendered(listed, characters=characters) if listed else "(nothing)"


_TASK = """\
You grade the work of an agent in a simulated office. You get what it was asked to do, its final answer, and every
change that it made to the files. Decide for each criterion whether it is met, by this evidence alone. A criterion
is met only if the evidence shows it; what is not shown is not met. First say in one or two sentences why, then decide.

{fence}
The criteria:
{criteria}
"""


def _question(criteria: list[str], sections: list[Section], limit: int) -> Question:
    nonce = fresh_nonce([*sections, *(Section("", text) for text in criteria)])
    listed = "\n".join(f"criterion_{number}: {text}" for number, text in enumerate(criteria, start=1))
    instructions = _TASK.format(fence=FENCE_RULE.format(nonce=nonce), criteria=listed)
    evidence = _fitting(sections, nonce, max(0, limit - len(instructions)))
    return Question(
        name="rubric", instructions=instructions, evidence=evidence, schema=_schema(len(criteria))
    )


def _fitting(sections: list[Section], nonce: str, limit: int) -> str:
    """Evidence of at most so many bytes: a judge's window is filled by rare letters long before as many characters."""
    room = limit
    while True:
        evidence = fenced(sections, nonce, limit=room)
        size = len(evidence.encode(errors="replace"))
        if size <= limit:
            return evidence
        room = min(room - 1, room * limit // size)


def _schema(count: int) -> dict[str, Any]:
    """One judgement for each criterion, no more and no less; the reason comes before the decision."""
    judgement = {
        "type": "object",
        "properties": {"rationale": {"type": "string"}, "met": {"type": "boolean"}},
        "required": ["rationale", "met"],
        "additionalProperties": False,
    }
    names = [f"criterion_{number}" for number in range(1, count + 1)]
    return {
        "type": "object",
        "properties": dict.fromkeys(names, judgement),
        "required": names,
        "additionalProperties": False,
    }


def _judgements(answer: Answer) -> list[tuple[bool, str]]:
    names = [f"criterion_{number}" for number in range(1, len(answer.value) + 1)]
    return [(answer.value[name]["met"], answer.value[name]["rationale"]) for name in names]
