"""Events, which the shell reports, and actions, which it carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The run begins, or resumes, with the trainer at `version`."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopened:
    """A run that was killed goes on, from the last version that was saved.

    Trials that were under way are gone and start anew. Steps that were taken after that version are taken again, on
    the same trials in the same order; what ended before the run was killed is as it was.
    """

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The trainer's `version` lies on disk, whole: a run that is killed from now on goes on from it."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityChanged:
    """So many trials may now run side by side; none that runs is ended for it."""

    max_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """A trial is over and its slot is free: one per StartTrial; one of an unknown trial changes nothing.

    Args:
        kind: one of `core.outcome.KINDS`.
        valid: the reward counts; a solved or failed trial, or a truncated one that is scored.
        reward: None unless valid.
        version_min: oldest sampled token; None if none was sampled.
        version_max: newest.
        blameless: a system error of what trials share, as an engine or a worker that died: the place waits for
            another attempt however often, so whoever reports this bounds how often it may happen.
    """

    trial_id: str
    kind: str
    valid: bool
    reward: float | None
    version_min: int | None
    version_max: int | None
    blameless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """The step is done; the trainer now has `version`."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsApplied:
    """The engine samples from `version`."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """Someone wants the run to end soon and cleanly."""


Event = Opened | Reopened | Saved | CapacityChanged | TrialEnded | StepTrained | WeightsApplied | StopAsked


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTrial:
    """Start one attempt.

    Args:
        trial_id: unique in the run, as in "train-12-3-0": purpose, group, sample, attempt.
        task: index into the training or the evaluation tasks.
        policy_version: what the engine has now; tokens may turn out newer, never older.
    """

    trial_id: str
    group_id: int
    task: int
    sample: int
    attempt: int
    purpose: Literal["train", "eval"]
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTrial:
    """Nobody needs this trial any more; its TrialEnded is still awaited."""

    trial_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Take one optimizer step from `version` on these trials; the answer is StepTrained(version + 1).

    Args:
        group_ids: the groups of the batch, in the order in which `Settings.order` takes them.
        trial_ids: their valid trials, group by group; a group may have fewer than planned.
        min_version: tokens that were sampled from an older one are left out of the loss.
    """

    version: int
    group_ids: tuple[int, ...]
    trial_ids: tuple[str, ...]
    min_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncWeights:
    """Bring the trainer's `version` to the engine; the answer is WeightsApplied(version)."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Put the trainer's `version` on disk; the answer is Saved(version). No step begins before."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropGroup:
    """This group is never trained: its reason is zero_variance, lost or stale."""

    group_id: int
    task: int
    reason: Literal["zero_variance", "lost", "stale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded:
    """Every evaluation trial of `version` is over. The shell answers nothing."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Nothing is in flight and nothing will be."""

    reason: str


Action = StartTrial | CancelTrial | Train | SyncWeights | Save | DropGroup | EvaluationEnded | Finished
