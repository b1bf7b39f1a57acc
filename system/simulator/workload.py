"""What trials do: how many turns, how long each, how often solved; from a distribution or from what was recorded."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from system.record.metrics import read_jsonl


class Turn(NamedTuple):
    """A completion and what follows it: `Turn(tokens=600, observed=1500, tool_s=2.0)`.

    Where the template rewrites the past, a new row begins: `forgotten` tokens of the context are not in it.
    """

    tokens: int
    observed: int
    tool_s: float
    forgotten: int = 0


class TrialPlan(NamedTuple):
    """What a trial will do. `reward` is None for a system error."""

    prompt: int
    turns: tuple[Turn, ...]
    reward: float | None

    @property
    def length(self) -> int:
        """Tokens of the whole trajectory, of all its rows."""
        return sum(self.rows)

    @property
    def rows(self) -> list[int]:
        """Tokens of each row."""
        rows = [self.prompt]
        for turn in self.turns:
            rows[-1] += turn.tokens
            if turn.forgotten:
                rows.append(rows[-1] - turn.forgotten)
            rows[-1] += turn.observed
        return rows


class Workload(Protocol):
    """Draws trials; the same arguments give the same trial."""

    def trial(self, *, task: int, group: int, sample: int, attempt: int) -> TrialPlan: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalWorkload:
    """Lengths whose logarithm is normal, with a part that a task's trials share.

    Args:
        median: tokens of a trajectory.
        sigma: of its logarithm.
        shared: share of that variance that lies between tasks; the rest lies between the trials of a task.
        lowest, highest: bounds of a length.
        sampled: share of the tokens that the policy samples.
        turn_tokens: sampled tokens of a turn.
        tool_s: mean of a tool call, exponentially distributed.
        solved: mean of the solve rate of a task, which is spread evenly around it.
        system_error: rate.
        seed: of everything.
    """

    median: float
    sigma: float
    shared: float = 0.5
    lowest: int = 1
    highest: int = 1 << 60
    sampled: float = 1.0
    turn_tokens: float = math.inf
    tool_s: float = 0.0
    solved: float = 0.5
    system_error: float = 0.0
    seed: int = 0

    def trial(self, *, task: int, group: int, sample: int, attempt: int) -> TrialPlan:
        of_task = random.Random(f"{self.seed} {task}")
        z, solved = of_task.gauss(0, 1), of_task.uniform(0, 2 * min(self.solved, 1 - self.solved))
        solved += self.solved - min(self.solved, 1 - self.solved)
        own = random.Random(f"{self.seed} {task} {group} {sample} {attempt}")
        z = math.sqrt(self.shared) * z + math.sqrt(1 - self.shared) * own.gauss(0, 1)
        length = min(max(self.median * math.exp(self.sigma * z), self.lowest), self.highest)
        count = max(1, round(self.sampled * length / self.turn_tokens))
        tokens = max(1, round(self.sampled * length / count))
        observed = round((1 - self.sampled) * length / count)
        tool = [own.expovariate(1 / self.tool_s) if self.tool_s else 0.0 for _ in range(count)]
        tool[-1] = 0.0
        reward = None if own.random() < self.system_error else float(own.random() < solved)
        return TrialPlan(0, tuple(Turn(tokens, observed, s) for s in tool), reward)


class Recorded:
    """Groups as a run recorded them, drawn again at random, each once before one comes again.

    A group stays together: how alike its trials are, and so how often it has no signal, is that of the run. Where more
    samples are wanted than it had, they are repeated.

    Args:
        groups: the trials of each.
        seed: of the drawing.
    """

    def __init__(self, groups: list[list[TrialPlan]], *, seed: int = 0) -> None:
        self._groups = [plans for plans in groups if plans]
        if not self._groups:
            raise ValueError("trials must hold at least one, got none")
        random.Random(f"groups {seed}").shuffle(self._groups)

    @classmethod
    def of(cls, lines: Iterable[str], *, seed: int = 0) -> Recorded:
        """From the lines of a `trajectories.jsonl`."""
        return cls._of((json.loads(line) for line in lines), seed=seed)

    @classmethod
    def _of(cls, records: Iterable[dict[str, Any]], *, seed: int) -> Recorded:
        groups: dict[tuple[Any, ...], list[TrialPlan]] = defaultdict(list)
        for record in records:
            if plan := plan_of(record):
                groups[tuple(record.get(name) for name in GROUP) + (record["task"],)].append(plan)
        return cls(whole(groups.values()), seed=seed)

    @classmethod
    def read(cls, path: Path, *, seed: int = 0) -> Recorded:
        """From a `trajectories.jsonl`."""
        return cls._of(read_jsonl(path), seed=seed)

    def trial(self, *, task: int, group: int, sample: int, attempt: int) -> TrialPlan:
        plans = self._groups[group % len(self._groups)]
        return plans[(sample + attempt) % len(plans)]


GROUP = ("arm", "seed", "purpose", "group_id")
"""What tells a recorded group from the others."""


def whole(groups: Iterable[list[TrialPlan]]) -> list[list[TrialPlan]]:
    """Those of which at least three quarters of the largest one's trials are there: others were broken off."""
    told = list(groups)
    largest = max((len(plans) for plans in told), default=0)
    return [plans for plans in told if len(plans) >= 0.75 * largest]


def plan_of(record: dict[str, Any]) -> TrialPlan | None:
    """What a recorded trial did; None if it was broken off or says nothing of its turns."""
    turns = record.get("turns") or ()
    if record["outcome"]["kind"] not in ("solved", "failed", "truncated") or not turns:
        return None
    rows = [row["token_ids"] for row in record["rows"]]
    told = []
    for at, turn in enumerate(turns):
        row, following = turn.get("row", 0), turns[at + 1] if at + 1 < len(turns) else None
        kept, end = turn["end"], following["start"] if following else len(rows[-1])
        if (next_row := following.get("row", 0) if following else len(rows) - 1) != row:
            kept = common_prefix(rows[row][: turn["end"]], rows[next_row][:end])
        told.append(
            Turn(
                turn["end"] - turn["start"],
                end - kept,
                turn.get("seconds", 0.0),
                turn["end"] - kept,
            )
        )
    return TrialPlan(turns[0]["start"], tuple(told), record.get("reward"))


def common_prefix(one: list[int], other: list[int]) -> int:
    """Number of first tokens in which two rows agree."""
    pairs = zip(one, other)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
