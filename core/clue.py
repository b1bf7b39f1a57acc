"""What a trial left for triage, the clues in it, and which of five causes they speak for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .outcome import Outcome

CAUSES = ("verifier", "dependency", "tool", "harness", "policy")
"""verifier: the grade is wrong or there is none. dependency: a package or program was missing. tool: a tool broke, hung
or said nothing. harness: the engine, the sandbox or the loop. policy: what training is for. Of equal clues the
earlier counts: what can be repaired comes before what must be learnt."""

NOTED, FALLBACK, POSSIBLE, LIKELY, CERTAIN = range(5)
"""Weights of clues. NOTED: the policy got over it. FALLBACK: nothing better was found."""


class Step(NamedTuple):
    """One turn.

    Args:
        said: the completion's text.
        tool: the tool called; "" if none was.
        arguments: of the call, in any one spelling.
        result: what came back; "" for a call that never did.
        error: whether that was an error, or never came.
        seconds: that the call took.
    """

    said: str
    tool: str
    arguments: str
    result: str
    error: bool
    seconds: float


class Criterion(NamedTuple):
    """Something that was to be true. expected and got are "" where the verifier does not tell them apart."""

    name: str
    met: bool
    detail: str
    expected: str
    got: str


class Trace(NamedTuple):
    """What a trial left. agent_s is the time of all its turns, engine_s the engine's part of it."""

    outcome: Outcome
    reward: float | None
    steps: tuple[Step, ...]
    criteria: tuple[Criterion, ...]
    agent_s: float
    engine_s: float


class Signs(NamedTuple):
    """Texts by which a host says what happened, each enough when it occurs in a line.

    Args:
        missing: a package or program is not there.
        broken: a tool failed by itself.
        misused: the policy asked a tool for what cannot be had.
        cut: a result was cut without a way to the rest.
        server: a system error's cause is about the tools.
        sandbox: a system error's cause is about the place where a verifier ran.
    """

    missing: tuple[str, ...]
    broken: tuple[str, ...]
    misused: tuple[str, ...]
    cut: tuple[str, ...]
    server: tuple[str, ...]
    sandbox: tuple[str, ...]


class Clue(NamedTuple):
    """Evidence for a cause: `Clue("dependency", "missing_package", 3, 2, "bash", "No module named 'pandas'")`.

    turn counts from 0, -1 where it is about the whole trial; quote is the line that speaks.
    """

    cause: str
    rule: str
    weight: int
    turn: int
    tool: str
    quote: str


def likely_cause(clues: Sequence[Clue]) -> str:
    """The cause of the heaviest clue; of equal ones that which stands first in `CAUSES`."""
    if not clues:
        raise ValueError("clues must not be empty")
    return min(clues, key=lambda clue: (-clue.weight, CAUSES.index(clue.cause))).cause
