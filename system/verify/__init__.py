"""Grades a frozen world against what a task's tests expect; trusts no file that an agent left."""

from .fault import VerifyError
from .grading import verify, verify_step
from .judge import Answer, Judge, JudgeClient, JudgeSettings, Question
from .verdict import Criterion, Verdict
from .world import GradedWorld

__all__ = [
    "Answer",
    "Criterion",
    "GradedWorld",
    "Judge",
    "JudgeClient",
    "JudgeSettings",
    "Question",
    "Verdict",
    "VerifyError",
    "verify",
    "verify_step",
]
