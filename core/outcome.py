"""What became of a trial, and what that means for its group: a system error is not a zero."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from .check import check_count, check_whole

KINDS = ("solved", "failed", "truncated", "system_error", "cancelled")
"""solved, failed: the verifier spoke. truncated: the policy met a limit. The last two have no reward."""

TRUNCATIONS = ("context", "turn_cap", "step_cap", "wall_clock")
"""Which limit: the window, the tokens of one turn, the number of turns, the clock. Kept apart on purpose."""

FINISH_REASONS = ("stop", "length", "abort")
"""How one completion ended: at a stop token, at the token limit, or interrupted by the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one trial.

    Example: `Outcome(kind="system_error", phase="verify", cause="judge timed out")`.

    Args:
        kind: one of `KINDS`.
        reason: which limit was hit, one of `TRUNCATIONS`; empty unless truncated.
        phase: where a system error happened (start, agent, verify, teardown, process); empty otherwise.
        cause: the error in one line; empty otherwise.
    """

    kind: str
    reason: str = ""
    phase: str = ""
    cause: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if (self.kind == "truncated") != (self.reason != ""):
            raise ValueError(
                f"reason must be set exactly when truncated, got {self.kind!r} with {self.reason!r}"
            )
        if self.reason and self.reason not in TRUNCATIONS:
            raise ValueError(f"reason must be one of {', '.join(TRUNCATIONS)}, got {self.reason!r}")
        if self.kind == "system_error" and not (self.phase and self.cause):
            raise ValueError(
                f"a system error must name phase and cause, got {self.phase!r} and {self.cause!r}"
            )
        if self.kind != "system_error" and (self.phase or self.cause):
            raise ValueError(
                f"phase and cause must be empty unless a system error, got {self.phase!r} and {self.cause!r}"
            )


def has_valid_reward(outcome: Outcome, *, scored_truncations: Collection[str]) -> bool:
    """Whether the verifier's number says something about the policy, and so may vote in the group's baseline.

    Solved and failed always; a system error or a cancelled trial never; a truncated one when its limit is
    among `scored_truncations` (wall_clock is best left out where the clock also measures a slow machine).
    """
    unknown = sorted(set(scored_truncations) - set(TRUNCATIONS))
    if unknown:
        raise ValueError(
            f"scored_truncations must be among {', '.join(TRUNCATIONS)}, got {', '.join(unknown)}"
        )
    return outcome.kind in ("solved", "failed") or (
        outcome.kind == "truncated" and outcome.reason in scored_truncations
    )


def is_retriable(outcome: Outcome) -> bool:
    """Whether another attempt at the same sample is owed: the machine failed, not the policy."""
    return outcome.kind == "system_error"


def group_verdict(*, size: int, valid: int, lost: int, retriable: int, min_valid: int) -> str:
    """What to do with a group now: `refill`, `wait`, `complete`, `survivors` or `drop`.

    The policy is the numbers: retries allowed make `retriable` positive (refill), `min_valid` below `size`
    lets survivors train, `min_valid == size` drops a group that lost one.

    Args:
        size: trials the group was planned with.
        valid: trials that ended with a valid reward.
        lost: trials that ended without one and will not be tried again.
        retriable: trials that ended without one and may be tried again.
        min_valid: the fewest valid rewards that still make a group; 2 is the least that has a baseline.
    """
    check_count("size", size, least=1)
    check_whole("min_valid", min_valid)
    for name, count in (("valid", valid), ("lost", lost), ("retriable", retriable)):
        check_whole(name, count)
    if not 2 <= min_valid <= size:
        raise ValueError(f"min_valid must lie between 2 and the group size {size}, got {min_valid}")
    if min(valid, lost, retriable) < 0 or valid + lost + retriable > size:
        raise ValueError(f"counts must fit the group size {size}, got {valid} + {lost} + {retriable}")
    if size - lost < min_valid:
        return "drop"
    if retriable:
        return "refill"
    if valid + lost < size:
        return "wait"
    return "complete" if valid == size else "survivors"


def reward_per_rollout(
    rollout_id: Sequence[Hashable], reward: Sequence[float | None]
) -> dict[Hashable, float | None]:
    """One reward per rollout from rows that repeat it; None is no reward, 0.0 is one.

    Raises:
        ValueError: if two rows of a rollout disagree, or a reward is no finite number; the message names the rollout.
    """
    if len(rollout_id) != len(reward):
        raise ValueError(
            f"rollout_id and reward must be equally long, got {len(rollout_id)} and {len(reward)}"
        )
    found: dict[Hashable, float | None] = {}
    for owner, value in zip(rollout_id, reward, strict=True):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"the reward of rollout {owner} must be finite or None, got {value}")
        if owner in found and found[owner] != value:
            raise ValueError(
                f"rows of rollout {owner} must agree on the reward, got {found[owner]} and {value}"
            )
        found[owner] = value
    return found


def too_many_system_errors(*, system_errors: int, trials: int, max_rate: float, min_trials: int) -> bool:
    """The audit gate: whether the share of system errors is above `max_rate`, once enough trials ended."""
    check_count("trials", trials, least=0)
    check_count("min_trials", min_trials, least=0)
    check_whole("system_errors", system_errors)
    if not 0 <= max_rate <= 1:
        raise ValueError(f"max_rate must lie between 0 and 1, got {max_rate}")
    if not 0 <= system_errors <= trials:
        raise ValueError(f"system_errors must lie between 0 and {trials} trials, got {system_errors}")
    # A quotient of whole numbers is rounded as the written rate is, so equal ones are equal; a product need not be.
    return trials >= min_trials and system_errors > 0 and system_errors / trials > max_rate
