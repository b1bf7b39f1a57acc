"""Grades a frozen world against what a task's tests expect; trusts no file that an agent left."""

from .checks import Criterion, FrozenWorld, Verdict, verify

__all__ = ["Criterion", "FrozenWorld", "Verdict", "verify"]
