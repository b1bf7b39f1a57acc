"""What graded trials say about a policy. What two sets say about two is in `comparison`, and can be had here."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .check import check_count, check_whole
from .comparison import Comparison as Comparison
from .comparison import compare as compare
from .comparison import holm as holm
from .comparison import seeds_needed as seeds_needed
from .comparison import variance_of


def pass_at_k(*, trials: int, passed: int, k: int) -> float:
    """The chance that of k trials at a task at least one passes, unbiased: 1 - C(n - c, k) / C(n, k).

    Trials are rollouts, not rows. Average over tasks afterwards. arXiv:2107.03374.
    """
    _check_counts(trials, passed, k)
    return 1 - math.comb(trials - passed, k) / math.comb(trials, k)


def pass_power_k(*, trials: int, passed: int, k: int) -> float:
    """The chance that k trials at a task all pass (pass^k), unbiased: C(c, k) / C(n, k). arXiv:2406.12045."""
    _check_counts(trials, passed, k)
    return math.comb(passed, k) / math.comb(trials, k)


class Count(NamedTuple):
    """Trials of one problem, and how many of them passed."""

    trials: int
    passed: int


def counts_by_problem(
    problem_id: Sequence[Hashable], rollout_id: Sequence[Hashable], passed: Sequence[bool]
) -> dict[Hashable, Count]:
    """Trials and passes of every problem, from rows of which one rollout may have several; it counts once.

    Args:
        problem_id, rollout_id: whose row it is; rollouts of two problems may bear the same name.
        passed: what became of the rollout, repeated in each of its rows.

    Raises:
        ValueError: if the lists differ in length, or two rows of a rollout disagree; the message names it.
    """
    if not len(problem_id) == len(rollout_id) == len(passed):
        raise ValueError(
            "problem_id, rollout_id and passed must be equally long, "
            f"got {len(problem_id)}, {len(rollout_id)} and {len(passed)}"
        )
    found: dict[Hashable, dict[Hashable, bool]] = {}
    for problem, rollout, value in zip(problem_id, rollout_id, passed, strict=True):
        if found.setdefault(problem, {}).setdefault(rollout, bool(value)) != bool(value):
            raise ValueError(f"rows of rollout {rollout} must agree on whether it passed, got both")
    return {problem: Count(len(one), sum(one.values())) for problem, one in found.items()}


def mean_pass_at_k(counts: Sequence[Count], *, k: int) -> Mean:
    """pass@k of every problem, then their mean, with its error over problems: never k trials of all at once.

    Raises:
        ValueError: a problem has fewer than k trials.
    """
    return mean_and_error([pass_at_k(trials=c.trials, passed=c.passed, k=k) for c in counts])


class Mean(NamedTuple):
    """A mean and its standard error; NaN where there is nothing to tell it from."""

    mean: float
    error: float


def mean_and_error(values: Sequence[float]) -> Mean:
    """The mean of independent values and its standard error, with n - 1."""
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"every value must be finite, got {value}")
    if not values:
        return Mean(math.nan, math.nan)
    mean = math.fsum(values) / len(values)
    return Mean(mean, math.sqrt(variance_of(values) / len(values)) if len(values) > 1 else math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What one trial did.

    Example: `Behaviour(turns=3, sampled_tokens=60, tool_calls=2, tool_errors=0, context_exhausted=False)`.
    """

    turns: int
    sampled_tokens: int
    tool_calls: int
    tool_errors: int
    context_exhausted: bool

    def __post_init__(self) -> None:
        check_count("turns", self.turns, least=0)
        check_count("sampled_tokens", self.sampled_tokens, least=0)
        check_count("tool_calls", self.tool_calls, least=0)
        check_count("tool_errors", self.tool_errors, least=0)
        if self.tool_errors > self.tool_calls:
            raise ValueError(f"tool_errors must be at most {self.tool_calls} calls, got {self.tool_errors}")


class BehaviourRates(NamedTuple):
    """Over a set of trials: sums first, then one division; NaN where there is nothing to divide by."""

    turns: float
    tokens_per_turn: float
    tool_success: float
    context_exhausted: float


def behaviour_rates(trials: Sequence[Behaviour]) -> BehaviourRates:
    """Turns a trial, sampled tokens a turn, share of tool calls without error, of trials out of context."""
    turns = sum(t.turns for t in trials)
    calls = sum(t.tool_calls for t in trials)
    return BehaviourRates(
        turns=_share(turns, len(trials)),
        tokens_per_turn=_share(sum(t.sampled_tokens for t in trials), turns),
        tool_success=_share(calls - sum(t.tool_errors for t in trials), calls),
        context_exhausted=_share(sum(t.context_exhausted for t in trials), len(trials)),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _check_counts(trials: int, passed: int, k: int) -> None:
    for name, value in (("trials", trials), ("passed", passed), ("k", k)):
        check_whole(name, value)
    if not 0 <= passed <= trials:
        raise ValueError(f"passed must lie between 0 and {trials} trials, got {passed}")
    if not 1 <= k <= trials:
        raise ValueError(f"k must lie between 1 and {trials} trials, got {k}")
