"""Grades a frozen world against what a task's tests expect; trusts no file that an agent left."""

from .checks import Criterion, GradedWorld, Verdict, verify

__all__ = ["Criterion", "GradedWorld", "Verdict", "verify"]
