"""Rewards of several steps, with fractions."""

from __future__ import annotations

from fractions import Fraction


def mean_rewards(steps: list[dict[str, float]]) -> dict[str, Fraction]:
    """Add up what each step has of a reward, and divide by the steps."""
    total: dict[str, Fraction] = {}
    for step in steps:
        for name, value in step.items():
            total[name] = total.get(name, Fraction(0)) + Fraction(value)
    return {name: value / len(steps) for name, value in total.items()}


def final_rewards(steps: list[dict[str, float]]) -> dict[str, float]:
    """What is left when every step writes over the one before."""
    found: dict[str, float] = {}
    for step in steps:
        found = {name: value for name, value in step.items()}
    return found


def goes_on(rewards: dict[str, float], least: dict[str, float]) -> bool:
    """Threshold after threshold."""
    for name in least:
        if name not in rewards:
            return False
        if Fraction(rewards[name]) - Fraction(least[name]) < 0:
            return False
    return True
