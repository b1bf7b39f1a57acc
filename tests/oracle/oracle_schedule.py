"""An auditor of the asynchronous loop: it sees events and actions only, and counts for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.counter import permutation
from core.schedule import (
    Action,
    CancelTrial,
    CapacityChanged,
    DropGroup,
    EvaluationEnded,
    Event,
    Finished,
    Opened,
    Reopened,
    Save,
    Saved,
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
    newest: dict[int, int] = field(default_factory=dict)
    errors: dict[int, int] = field(default_factory=dict)
    decided: int = 0
    """when its last sample was decided, as the number of the event"""
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
        self.room = settings.max_running
        self.saving = False
        self.on_disk = [0]
        self.line: dict[int, Train] = {}
        """the steps of the surviving line of weights, by version"""
        self.again: dict[int, Train] = {}
        """steps that a killed run had taken and must take again"""
        self.heard = self.lost = 0
        self.broken: list[bool] = []
        self.reason = ""

    def audit(self, event: Event, actions: Sequence[Action]) -> None:
        """One event and the actions that followed it."""
        assert not self.finished or not actions, "nothing after Finished"
        self.hear(event)
        for action in actions:
            if not isinstance(action, DropGroup | CancelTrial):
                self.judge()
            self.see(action)
        self.judge()
        if not self.finished:
            assert self.running or self.training or self.syncing or self.saving, (
                "a run that is not finished waits for something"
            )

    def hear(self, event: Event) -> None:
        """What the shell reports."""
        self.heard += 1
        if isinstance(event, Reopened):
            self.reopen(event.version)
        elif isinstance(event, CapacityChanged):
            self.room = event.max_running
        elif isinstance(event, Saved):
            self.saving = False
            self.on_disk.append(event.version)
        elif isinstance(event, Opened):
            self.trained = event.version
        elif isinstance(event, StepTrained):
            self.trained, self.training = event.version, False
        elif isinstance(event, WeightsApplied):
            self.applied, self.syncing = event.version, False
        elif isinstance(event, StopAsked):
            self.end_early("stop asked")
        elif event.trial_id in self.running:
            start = self.running.pop(event.trial_id)
            if event.kind != "cancelled" and not event.blameless:
                self.broken.append(event.kind == "system_error")
            group = self.groups[start.group_id]
            if event.valid and not group.fate:
                assert event.reward is not None
                group.reward[start.sample] = event.reward
                group.trial[start.sample] = event.trial_id
                group.oldest[start.sample] = (
                    start.policy_version if event.version_min is None else event.version_min
                )
                group.newest[start.sample] = (
                    group.oldest[start.sample] if event.version_max is None else event.version_max
                )
            elif event.kind == "system_error" and event.blameless:
                pass
            elif (
                event.kind == "system_error" and group.errors.get(start.sample, 0) < self.settings.max_retries
            ):
                group.errors[start.sample] = group.errors.get(start.sample, 0) + 1
            else:
                group.lost.add(start.sample)
            if len(group.reward) + len(group.lost) == self.settings.group_size:
                group.decided = self.heard

    def judge(self) -> None:
        """Too many system errors among the last trials end the run."""
        last = self.broken[-self.settings.error_window :]
        if len(last) == self.settings.error_window and sum(last) / len(last) > self.settings.max_error_share:
            self.end_early(
                f"{sum(last)} of the last {len(last)} trials were system errors, "
                f"more than max_error_share {self.settings.max_error_share}"
            )

    def end_early(self, reason: str) -> None:
        """Groups that are not decided are let go; their tasks come first should the run go on."""
        if not self.stopping:
            self.reason = reason
            let_go = [g for _, g in sorted(self.groups.items()) if g.purpose == "train" and not g.fate]
            let_go = [g for g in let_go if not g.decided]
            for group in let_go:
                group.fate = "let go"
            self.requeued = [g.task for g in let_go] + self.requeued
            self.stopping = True

    def reopen(self, version: int) -> None:
        """Steps after the version on disk are undone; what was under way is gone; all else stands."""
        assert version in self.on_disk[-2:]
        self.on_disk = [kept for kept in self.on_disk if kept <= version]
        self.again |= {v: step for v, step in self.line.items() if v >= version}
        self.line = {v: step for v, step in self.line.items() if v < version}
        self.trained, self.applied, self.running = version, None, {}
        self.broken = [] if self.stopping else self.broken
        self.training = self.saving = self.finished = self.stopping = False
        self.reason = ""
        self.syncing, self.evaluating = False, None
        for group in self.groups.values():
            if group.purpose == "eval" and not group.fate:
                group.fate = "begun again"

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
        elif isinstance(action, Save):
            assert self.settings.save_every and action.version == self.trained > self.on_disk[-1]
            last = action.version == self.settings.steps
            assert last or action.version % self.settings.save_every == 0
            assert not self.training and not self.saving
            self.saving = True
        elif isinstance(action, SyncWeights):
            assert not self.syncing and not self.training and action.version == self.trained
            assert self.evaluating is None, "no weights move during an evaluation"
            self.syncing = True
        elif isinstance(action, EvaluationEnded):
            self.end_evaluation(action.version)
        elif isinstance(action, Finished):
            assert action.reason == (self.reason or "all steps trained")
            self.finish()

    def start(self, action: StartTrial) -> None:
        """Slots, names, attempts, tasks, versions."""
        parts = (action.purpose, action.group_id, action.sample, action.attempt)
        assert action.trial_id == "-".join(map(str, parts)) and action.trial_id not in self.trial_ids
        assert self.applied is not None and action.policy_version == self.applied
        self.trial_ids.add(action.trial_id)
        self.running[action.trial_id] = action
        assert len(self.running) <= self.room
        if action.group_id not in self.groups:
            self.open(action)
        group = self.groups[action.group_id]
        assert not group.fate and action.task == group.task and action.purpose == group.purpose
        assert action.attempt == group.started.get(action.sample, 0)
        assert group.errors.get(action.sample, 0) <= self.settings.max_retries
        assert action.sample not in group.reward
        size = self.settings.group_size if action.purpose == "train" else self.settings.evaluation_samples
        assert 0 <= action.sample < size
        group.started[action.sample] = action.attempt + 1

    def open(self, action: StartTrial) -> None:
        """A new group: its number, its task, and whether staleness lets it in."""
        assert not self.stopping or action.purpose == "eval", "an evaluation that was begun comes to its end"
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
            self.lost += 1
            if self.lost > self.settings.max_lost:
                self.end_early("too many lost groups")
        else:
            late = self.settings.late_group
            versions = [*group.oldest.values(), *self.versions_running(action.group_id)]
            youngest = min(versions) if late == "drop" or late == "wait" else max(group.newest.values())
            assert late != "train" and self.next_version() - youngest > self.settings.max_staleness
            if self.settings.requeue_stale:
                self.requeued.append(action.task)

    def versions_running(self, group_id: int) -> list[int]:
        """Versions that running trials of a group began with."""
        return [one.policy_version for one in self.running.values() if one.group_id == group_id]

    def next_version(self) -> int:
        """From which the next step is taken."""
        ahead = sum(1 for version in self.again if version >= self.trained)
        return self.trained + (1 if self.training else 0) + ahead

    def in_order(self, action: Train) -> bool:
        """Oldest token first, first decided first, or first drawn first with none left out."""

        def oldest(group_id: int) -> tuple[int, int]:
            return min(self.groups[group_id].oldest.values()), group_id

        ids, wanted = list(action.group_ids), self.settings.order
        if wanted == "admission" or action.version < self.settings.in_order_steps:
            alive = sorted(n for n, g in self.groups.items() if g.purpose == "train" and not g.fate)
            return ids == alive[: len(ids)]
        waits = self.settings.late_group == "wait" or self.settings.max_late is not None
        if wanted == "oldest" or (waits and ids == sorted(ids, key=oldest)):
            return ids == sorted(ids, key=oldest)
        return ids == sorted(ids, key=lambda n: self.groups[n].decided)

    def has_signal(self, group: Seen) -> bool:
        """Valid rewards that differ."""
        rewards = group.reward.values()
        return max(rewards) - min(rewards) > self.settings.tolerance

    def train(self, action: Train) -> None:
        """A full batch of decided, fresh groups, oldest first."""
        assert not self.training and not self.syncing and not self.saving and action.version == self.trained
        assert len(action.group_ids) == self.settings.batch_groups
        late = self.settings.late_group
        oldest = max(0, action.version - self.settings.max_staleness)
        assert action.min_version == (0 if late == "train" else oldest)
        self.training, self.without_signal, self.lost = True, 0, 0
        self.line[action.version] = action
        if action.version in self.again:
            assert action == self.again.pop(action.version), "the same step once more"
            return
        assert self.in_order(action)
        trials = []
        for group_id in action.group_ids:
            group = self.groups[group_id]
            assert group.purpose == "train" and not group.fate
            assert len(group.reward) >= self.settings.min_valid
            assert not self.versions_running(group_id), "every sample is decided"
            age = action.version - min(group.oldest.values())
            assert age <= self.settings.max_staleness or late in ("mask", "train")
            assert late != "mask" or max(group.newest.values()) >= action.min_version
            trials += [group.trial[sample] for sample in sorted(group.trial)]
            group.fate = "trained"
        assert list(action.trial_ids) == trials
        if late == "wait" or self.settings.max_late is not None:
            assert self.overdue(action.version + 1) <= (self.settings.max_late or 0)

    def overdue(self, version: int) -> int:
        """Groups with a token, or perhaps one, that is too old to be trained from this version."""
        alive = [n for n, g in self.groups.items() if g.purpose == "train" and not g.fate]
        least = version - self.settings.max_staleness
        return sum(
            min([*self.groups[n].oldest.values(), *self.versions_running(n)], default=least) < least
            for n in alive
        )

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


def most_matched(wanted: Sequence[Sequence[tuple[int, int]]]) -> int:
    """How many can have one of the places that they want, each place being one's: by augmenting paths."""
    owner: dict[tuple[int, int], int] = {}

    def settled(one: int, tried: set[tuple[int, int]]) -> bool:
        for place in wanted[one]:
            if place not in tried:
                tried.add(place)
                if place not in owner or settled(owner[place], tried):
                    owner[place] = one
                    return True
        return False

    return sum(settled(one, set()) for one in range(len(wanted)))
