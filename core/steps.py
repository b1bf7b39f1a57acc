"""What a task of several steps earns, and whether its next step is reached: Harbor's two rules and its threshold.

A step's rewards are numbers with names. Steps that were never reached have none and are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def goes_on(rewards: Mapping[str, float], *, least: Mapping[str, float]) -> bool:
    """Whether a step earned enough for the next one to follow: every named reward is at least so much.

    Args:
        rewards: of the step that ended.
        least: by name; a reward that the step does not have is below any. Empty, every step goes on.

    Raises:
        ValueError: a reward is not finite, or a threshold is no number.
    """
    _check(rewards)
    for name, value in least.items():
        if math.isnan(value):
            raise ValueError(f"least {name} must be a number, got {value}")
    return all(rewards.get(name, -math.inf) >= value for name, value in least.items())


def mean_rewards(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each reward's mean over the steps that were graded; a step that lacks it counts as 0.

    Args:
        rewards: of the steps in their order.

    Raises:
        ValueError: no step was graded, or a reward is not finite.
    """
    _check_steps(rewards)
    names = dict.fromkeys(name for step in rewards for name in step)
    # Divided first: a sum of large numbers could leave the range of floats.
    return {name: math.fsum(step.get(name, 0.0) / len(rewards) for step in rewards) for name in names}


def final_rewards(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The rewards of the last step that was graded. Args and raises as `mean_rewards`."""
    _check_steps(rewards)
    return dict(rewards[-1])


def _check_steps(rewards: Sequence[Mapping[str, float]]) -> None:
    if not rewards:
        raise ValueError("rewards must be of at least one step, got none")
    for step in rewards:
        _check(step)


def _check(rewards: Mapping[str, float]) -> None:
    for name, value in rewards.items():
        if not math.isfinite(value):
            raise ValueError(f"reward {name} must be finite, got {value}")
