"""The policy of a run, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..check import check_count, check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The policy of a run, as data.

    Args:
        steps: optimizer steps in all.
        batch_groups: groups in one step.
        group_size: trials in one group.
        max_staleness: versions that the oldest token of a trained trajectory may lag behind the trainer; 0 is
            synchronous.
        max_running: trials side by side, evaluation included.
        max_retries: further attempts at one sample after system errors.
        min_valid: fewest valid rewards with which a group is trained, at least 2.
        tolerance: a group whose valid rewards lie within it has no signal.
        max_zero_variance: groups without a signal that are dropped and replaced between two steps; further
            ones fill their place in the batch, so that a policy that solves all or nothing still comes to
            an end.
        max_lost: groups dropped for want of valid rewards between two steps; one more finishes the run.
        order: which of the groups that are ready are trained: "oldest" token first; "completion", those that
            were ready first; or "admission", those that were drawn first, which waits for all of them.
        in_order_steps: so many first steps are taken in the order of admission, whatever `order` says. In the
            others the first batches are of tasks that are short, and so the policy's start is of those alone.
        late_group: what becomes of a group that the others would leave too old. "wait" takes no step that
            would; "drop" drops it; "mask" trains of it what is young enough, token by token; "train" trains it
            whole, however old, which bounds the age only on average and is for comparison.
        max_late: where it is "mask", groups that a step may leave too old; if it would leave more, it waits until
            enough of them have ended. 0 masks nothing and takes the steps of "wait"; None never waits.
        max_error_share: of the last trials that ended, the share that the system may have broken; beyond it the run
            finishes. 1 never finishes it.
        error_window: so many are the last; fewer are not judged. Blameless and cancelled ones are left out.
        requeue_stale: a task dropped as too old is drawn again, next.
        task_count: training tasks, numbered from 0; each is drawn once an epoch, every epoch in its own
            order.
        seed: of that order.
        save_every: the trainer's version is saved after each so many steps, and after the last; 0 for never.
        evaluate_at: versions at which to evaluate; 0 is before training, `steps` after it.
        evaluation_tasks: evaluation tasks, numbered from 0.
        evaluation_samples: trials of each.
    """

    steps: int
    batch_groups: int
    group_size: int
    max_staleness: int
    max_running: int
    max_retries: int
    min_valid: int
    tolerance: float
    max_zero_variance: int
    max_lost: int
    order: Literal["oldest", "completion", "admission"]
    in_order_steps: int
    late_group: Literal["wait", "drop", "mask", "train"]
    requeue_stale: bool
    task_count: int
    seed: int
    save_every: int
    evaluate_at: tuple[int, ...]
    evaluation_tasks: int
    evaluation_samples: int
    max_late: int | None = None
    max_error_share: float = 1.0
    error_window: int = 64

    def __post_init__(self) -> None:
        positive = {
            "group_size": self.group_size,
            "batch_groups": self.batch_groups,
            "max_running": self.max_running,
            "task_count": self.task_count,
            "evaluation_samples": self.evaluation_samples,
            "error_window": self.error_window,
        }
        not_negative = {
            "steps": self.steps,
            "max_staleness": self.max_staleness,
            "max_retries": self.max_retries,
            "max_zero_variance": self.max_zero_variance,
            "max_lost": self.max_lost,
            "evaluation_tasks": self.evaluation_tasks,
            "in_order_steps": self.in_order_steps,
            "save_every": self.save_every,
        }
        for name, value in positive.items():
            check_count(name, value, least=1)
        for name, value in not_negative.items():
            check_count(name, value, least=0)
        for version in self.evaluate_at:
            check_count("every version of evaluate_at", version, least=0)
        check_whole("seed", self.seed)
        check_whole("min_valid", self.min_valid)
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance must not be negative and must be finite, got {self.tolerance}")
        if not 0 <= self.max_error_share <= 1:
            raise ValueError(f"max_error_share must lie between 0 and 1, got {self.max_error_share}")
        if not 2 <= self.min_valid <= self.group_size:
            raise ValueError(
                f"min_valid must lie between 2 and group_size {self.group_size}, got {self.min_valid}"
            )
        if self.order not in ("oldest", "completion", "admission"):
            raise ValueError(f"order must be oldest, completion or admission, got {self.order!r}")
        if self.late_group not in ("wait", "drop", "mask", "train"):
            raise ValueError(f"late_group must be wait, drop, mask or train, got {self.late_group!r}")
        if self.max_late is not None:
            check_count("max_late", self.max_late, least=0)
            if self.late_group != "mask":
                raise ValueError(
                    f"max_late must be None unless late_group is mask, got {self.max_late} with {self.late_group!r}"
                )
