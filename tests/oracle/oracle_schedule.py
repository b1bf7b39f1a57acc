"""An auditor of the asynchronous loop: it sees events and actions only, and counts for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.counter import permutation
from core.schedule import (
    Action,
    CancelTrial,
    DropGroup,
    EvaluationEnded,
    Event,
    Finished,
    Opened,
    Settings,
    StartTrial,
    StepTrained,
    StopAsked,
    SyncWeights,
    Train,
    TrialEnded,
    WeightsApplied,
)


def task_at(settings: Settings, index: int) -> int:
    """Draw epochs, each in its own order, until number `index` is reached."""
    drawn: list[int] = []
    while len(drawn) <= index:
        drawn += permutation(settings.task_count, settings.seed, len(drawn) // settings.task_count)
    return drawn[index]


@dataclass
class Seen:
    """What was started of a group and what came back."""

    task: int
    purpose: str
    started: dict[int, int] = field(default_factory=dict)
    """by sample, attempts so far"""
    reward: dict[int, float] = field(default_factory=dict)
    oldest: dict[int, int] = field(default_factory=dict)
    trial: dict[int, str] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    fate: str = ""


class Auditor:
    """Asserts of every answer to every event what the documents promise."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.groups: dict[int, Seen] = {}
        self.running: dict[str, StartTrial] = {}
        self.trial_ids: set[str] = set()
        self.trained = 0
        self.applied: int | None = None
        self.training = self.syncing = self.stopping = self.finished = False
        self.evaluated: list[int] = []
        self.evaluating: int | None = None
        self.without_signal = 0
        self.drawn: list[int] = []
        self.requeued: list[int] = []

    def audit(self, event: Event, actions: Sequence[Action]) -> None:
        """One event and the actions that followed it."""
        assert not self.finished or not actions, "nothing after Finished"
        self.hear(event)
        for action in actions:
            self.see(action)
        if not self.finished:
            assert self.running or self.training or self.syncing, (
                "a run that is not finished waits for something"
            )

    def hear(self, event: Event) -> None:
        """What the shell reports."""
        if isinstance(event, Opened):
            self.trained = event.version
        elif isinstance(event, StepTrained):
            self.trained, self.training = event.version, False
        elif isinstance(event, WeightsApplied):
            self.applied, self.syncing = event.version, False
        elif isinstance(event, StopAsked):
            self.stopping = True
        elif event.trial_id in self.running:
            start = self.running.pop(event.trial_id)
            group = self.groups[start.group_id]
            if event.valid and not group.fate:
                assert event.reward is not None
                group.reward[start.sample] = event.reward
                group.trial[start.sample] = event.trial_id
                group.oldest[start.sample] = (
                    start.policy_version if event.version_min is None else event.version_min
                )
            elif event.kind != "system_error" or start.attempt == self.settings.max_retries:
                group.lost.add(start.sample)

    def see(self, action: Action) -> None:
        """What the loop asks for."""
        if isinstance(action, StartTrial):
            self.start(action)
        elif isinstance(action, CancelTrial):
            assert action.trial_id in self.running
        elif isinstance(action, DropGroup):
            self.drop(action)
        elif isinstance(action, Train):
            self.train(action)
        elif isinstance(action, SyncWeights):
            assert not self.syncing and not self.training and action.version == self.trained
            assert self.evaluating is None, "no weights move during an evaluation"
            self.syncing = True
        elif isinstance(action, EvaluationEnded):
            self.end_evaluation(action.version)
        elif isinstance(action, Finished):
            self.finish()

    def start(self, action: StartTrial) -> None:
        """Slots, names, attempts, tasks, versions."""
        parts = (action.purpose, action.group_id, action.sample, action.attempt)
        assert action.trial_id == "-".join(map(str, parts)) and action.trial_id not in self.trial_ids
        assert self.applied is not None and action.policy_version == self.applied
        self.trial_ids.add(action.trial_id)
        self.running[action.trial_id] = action
        assert len(self.running) <= self.settings.max_running
        if action.group_id not in self.groups:
            self.open(action)
        group = self.groups[action.group_id]
        assert not group.fate and action.task == group.task and action.purpose == group.purpose
        assert action.attempt == group.started.get(action.sample, 0) <= self.settings.max_retries
        assert action.sample not in group.reward
        size = self.settings.group_size if action.purpose == "train" else self.settings.evaluation_samples
        assert 0 <= action.sample < size
        group.started[action.sample] = action.attempt + 1

    def open(self, action: StartTrial) -> None:
        """A new group: its number, its task, and whether staleness lets it in."""
        assert not self.stopping
        assert action.group_id > max(self.groups, default=-1)
        self.groups[action.group_id] = Seen(action.task, action.purpose)
        if action.purpose == "eval":
            self.evaluating = self.applied
            assert self.applied in self.settings.evaluate_at
            return
        if self.requeued:
            assert action.task == self.requeued.pop(0)
        else:
            assert action.task == task_at(self.settings, len(self.drawn))
            self.drawn.append(action.task)
        assert self.applied is not None
        alive = sum(
            1 for one in self.groups.values() if one.purpose == "train" and one.fate in ("", "trained")
        )
        assert alive <= (self.settings.max_staleness + self.applied + 1) * self.settings.batch_groups
        assert alive <= self.settings.steps * self.settings.batch_groups

    def drop(self, action: DropGroup) -> None:
        """The reason must be true."""
        group = self.groups[action.group_id]
        assert group.purpose == "train" and not group.fate and group.task == action.task
        group.fate = action.reason
        if action.reason == "zero_variance":
            assert not self.has_signal(group) and len(group.reward) >= self.settings.min_valid
            self.without_signal += 1
            assert self.without_signal <= self.settings.max_zero_variance
        elif action.reason == "lost":
            assert self.settings.group_size - len(group.lost) < self.settings.min_valid
        else:
            versions = [*group.oldest.values(), *self.versions_running(action.group_id)]
            assert self.next_version() - min(versions) > self.settings.max_staleness
            if self.settings.requeue_stale:
                self.requeued.append(action.task)

    def versions_running(self, group_id: int) -> list[int]:
        """Versions that running trials of a group began with."""
        return [one.policy_version for one in self.running.values() if one.group_id == group_id]

    def next_version(self) -> int:
        """From which the next step is taken."""
        return self.trained + (1 if self.training else 0)

    def age_order(self, group_id: int) -> tuple[int, int]:
        """The version of the oldest token, then the number."""
        return min(self.groups[group_id].oldest.values()), group_id

    def has_signal(self, group: Seen) -> bool:
        """Valid rewards that differ."""
        rewards = group.reward.values()
        return max(rewards) - min(rewards) > self.settings.tolerance

    def train(self, action: Train) -> None:
        """A full batch of decided, fresh groups, oldest first."""
        assert not self.training and not self.syncing and action.version == self.trained
        assert len(action.group_ids) == self.settings.batch_groups
        assert list(action.group_ids) == sorted(action.group_ids, key=self.age_order)
        trials = []
        for group_id in action.group_ids:
            group = self.groups[group_id]
            assert group.purpose == "train" and not group.fate
            assert len(group.reward) >= self.settings.min_valid
            assert not self.versions_running(group_id), "every sample is decided"
            age = action.version - min(group.oldest.values())
            assert age <= self.settings.max_staleness
            trials += [group.trial[sample] for sample in sorted(group.trial)]
            group.fate = "trained"
        assert list(action.trial_ids) == trials
        self.training, self.without_signal = True, 0

    def end_evaluation(self, version: int) -> None:
        """All trials of the version are over, on that version's weights."""
        assert self.evaluating is not None and version == self.evaluating
        groups = [g for g in self.groups.values() if g.purpose == "eval" and not g.fate]
        if not self.stopping:
            assert sorted(g.task for g in groups) == list(range(self.settings.evaluation_tasks))
            assert all(sorted(g.started) == list(range(self.settings.evaluation_samples)) for g in groups)
        assert not any(one.purpose == "eval" for one in self.running.values())
        for group in groups:
            group.fate = "evaluated"
        self.evaluated.append(self.evaluating)
        self.evaluating = None

    def finish(self) -> None:
        """Nothing is in flight."""
        assert not self.running and not self.training and not self.syncing and not self.finished
        self.finished = True


def ended(start: StartTrial, score: float | None, oldest: int, newest: int) -> TrialEnded:
    """The report of a trial; no score is a system error."""
    return TrialEnded(
        trial_id=start.trial_id,
        kind="system_error" if score is None else "solved" if score > 0 else "failed",
        valid=score is not None,
        reward=score,
        version_min=oldest,
        version_max=newest,
    )
