"""The one way in which grading itself fails: an error of the system, which has a cause and no reward."""

from __future__ import annotations

CAUSES = (
    *("judge_missing", "judge_gone", "judge_limited", "judge_key", "judge_busy", "judge_timeout"),
    *("judge_connection", "judge_unparsable", "judge_truncated", "judge_oversized", "judge_refused"),
    *("judge_fatal", "task", "sandbox", "script_timeout", "reward_missing", "reward_unreadable"),
)
"""judge_missing: the task has a rubric, and no judge was given. judge_gone: the judge's process is. judge_*: what
was wrong with the last call, in the words of `core.retry.FAULTS`. task: the task's own tests are at fault.
sandbox, script_timeout, reward_*: a foreign test script could not be run, did not end, left no reward, left
something else."""


class VerifyError(RuntimeError):
    """Grading failed, whatever the agent did: a system error, never a reward of 0.

    Example: `VerifyError("judge_timeout", "no answer within 180 s in 4 calls")`.
    """

    def __init__(self, cause: str, detail: str) -> None:
        if cause not in CAUSES:
            raise ValueError(f"cause must be one of {', '.join(CAUSES)}, got {cause!r}")
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail
