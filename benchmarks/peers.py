"""What others do about staleness, as small policies for the simulator; and what could be done besides.

Each keeps to the rule that its source describes, in our own words and code, and leaves out whatever is not about which
groups start, which are trained and which are let go: no retries, no filter, no evaluation, no end of a run. A version
counts optimizer steps; `bound` is what the source calls maximal staleness, off-policyness or off-policy steps.

    CountRule        SkyRL, fully asynchronous trainer (docs.skyrl.ai, tutorials/fully_async), and the published recipe
    OldestFirst      the same count, oldest groups first: AReaL (arXiv 2505.24298, section 5.1) and the Tinker cookbook
                     (tinker-docs.thinkingmachines.ai, cookbook/rl/async)
    Synchronous      verl's default loop; S = 0 anywhere
    OneStepOff       verl, recipe one_step_off_policy (verl.readthedocs.io, advance/one_step_off); also SkyRL's example
    DropByVersion    prime-rl, max_off_policy_steps (github.com/PrimeIntellect-ai/prime-rl, orchestrator/dispatcher.py)
    Oversampled      more trials than a group needs, the slow ones cancelled: offered by several under that name
    SplitAtTheBound  nobody's that we know of: see there
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.schedule import (
    Action,
    CancelTrial,
    DropGroup,
    Event,
    Opened,
    Settings,
    StartTrial,
    StepTrained,
    SyncWeights,
    Train,
    TrialEnded,
    WeightsApplied,
    task_at,
)


@dataclass(slots=True)
class Group:
    """A task's trials: those under way, and those that ended and are not trained yet."""

    group_id: int
    task: int
    version: int
    "The engine's when the group was drawn."
    started: int = 0
    running: set[str] = field(default_factory=set)
    done: dict[str, int] = field(default_factory=dict)
    "By trial, the version of its oldest token."
    ready: int = 0
    "Its place in the order of completion, from 1; 0 while a trial of it is under way."
    cut: bool = False
    "Some of its trials have been trained."


class Pool:
    """The count rule in the order of completion, nothing ever dropped; the other rules differ in a method or two.

    A group may be drawn while fewer than (bound + 1 + version) * batch have been, those let go left out: so at most
    (bound + 1) * batch are under way or waiting at a time.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bound = settings.max_staleness
        self.batch_groups = settings.batch_groups
        self.size = settings.group_size
        self.trained = 0
        self.applied: int | None = None
        self.training = self.syncing = self.finished = False
        self.groups: dict[int, Group] = {}
        self.running: dict[str, int] = {}
        self.drawn = self.let_go = self.completed = 0

    def tell(self, event: Event) -> list[Action]:
        match event:
            case Opened():
                return self.sync()
            case TrialEnded():
                actions = self.ended(event)
            case StepTrained(version=version):
                self.trained, self.training = version, False
                actions = []
            case WeightsApplied(version=version):
                self.applied, self.syncing = version, False
                actions = self.aged()
            case _:
                actions = []
        if self.trained >= self.settings.steps:
            self.finished = True
            return actions
        if self.applied != self.trained and not self.training and not self.syncing and self.may_sync():
            return [*actions, *self.sync()]
        return [*actions, *self.train(), *self.fill()]

    def sync(self) -> list[Action]:
        self.syncing = True
        return [SyncWeights(version=self.trained)]

    def fill(self) -> list[Action]:
        """Trials of groups that are drawn, oldest first; then of new groups."""
        actions: list[Action] = []
        if self.applied is None:
            return actions
        open_ones = [g for g in self.groups.values() if g.started < self.size]
        while len(self.running) < self.settings.max_running:
            if not open_ones:
                if self.capacity() <= 0:
                    break
                open_ones = [self.draw()]
            actions.append(self.start(open_ones[0]))
            if open_ones[0].started == self.size:
                open_ones.pop(0)
        return actions

    def draw(self) -> Group:
        group = Group(self.drawn, task_at(self.settings, self.drawn), self.applied or 0)
        self.groups[group.group_id] = group
        self.drawn += 1
        return group

    def start(self, group: Group) -> StartTrial:
        name = f"train-{group.group_id}-{group.started}-0"
        started = StartTrial(
            trial_id=name,
            group_id=group.group_id,
            task=group.task,
            sample=group.started,
            attempt=0,
            purpose="train",
            policy_version=self.applied or 0,
        )
        group.started += 1
        group.running.add(name)
        self.running[name] = group.group_id
        return started

    def ended(self, event: TrialEnded) -> list[Action]:
        group = self.groups.get(self.running.pop(event.trial_id))
        if group is None or event.trial_id not in group.running:
            return []
        group.running.remove(event.trial_id)
        if event.valid:
            group.done[event.trial_id] = event.version_min if event.version_min is not None else group.version
        if self.complete(group):
            self.completed += 1
            group.ready = self.completed
        return []

    def complete(self, group: Group) -> bool:
        return group.started == self.size and not group.running and not group.ready

    def train(self) -> list[Action]:
        if self.training or self.syncing or self.applied != self.trained:
            return []
        batch = self.batch()
        if not batch:
            return []
        self.training = True
        trials = tuple(trial for _, part in batch for trial in part)
        for group, part in batch:
            group.done = {trial: version for trial, version in group.done.items() if trial not in part}
            group.cut = True
            if group.ready and not group.done:
                del self.groups[group.group_id]
        groups = tuple(group.group_id for group, _ in batch)
        return [
            Train(version=self.trained, group_ids=groups, trial_ids=trials, min_version=self.min_version())
        ]

    def drop(self, group: Group) -> list[Action]:
        """Let a group go, what runs of it cancelled."""
        del self.groups[group.group_id]
        self.let_go += 1
        cancelled = [CancelTrial(trial_id=name) for name in sorted(group.running)]
        return [DropGroup(group_id=group.group_id, task=group.task, reason="stale"), *cancelled]

    # What the rules differ in.

    def capacity(self) -> int:
        return (self.bound + 1 + (self.applied or 0)) * self.batch_groups - (self.drawn - self.let_go)

    def batch(self) -> list[tuple[Group, list[str]]]:
        """The groups of the next step, with the trials to be trained; empty while there are too few."""
        ready = sorted((g for g in self.groups.values() if g.ready), key=self.place)[: self.batch_groups]
        return [(g, list(g.done)) for g in ready] if len(ready) == self.batch_groups else []

    def place(self, group: Group) -> tuple[int, int]:
        return group.ready, group.group_id

    def min_version(self) -> int:
        """The oldest version that is trained; these rules train all."""
        return 0

    def may_sync(self) -> bool:
        return True

    def aged(self) -> list[Action]:
        """What becomes of groups when new weights are in the engine."""
        return []


class CountRule(Pool):
    """SkyRL's: bounded on the whole, not group by group; what is too old is trained and counted."""


class OldestFirst(Pool):
    """The count rule; of the groups that are complete, those drawn under the oldest weights first."""

    def place(self, group: Group) -> tuple[int, int]:
        return group.version, group.group_id


class Synchronous(Pool):
    """A batch is drawn, all of it ends, it is trained, the weights are moved; then the next."""

    def capacity(self) -> int:
        fresh = self.applied == self.trained and not self.training
        return self.batch_groups * (self.trained + 1) - self.drawn if fresh else 0


class OneStepOff(Pool):
    """While a batch is trained the next is sampled, with the weights of before; both end before weights move."""

    def capacity(self) -> int:
        """One batch ahead of the one in training."""
        begun = self.trained + self.training
        return (begun + 1) * self.batch_groups - self.drawn

    def may_sync(self) -> bool:
        return sum(g.ready > 0 for g in self.groups.values()) >= self.batch_groups


class DropByVersion(Pool):
    """prime-rl's: with new weights, whatever group began more than `bound` versions ago goes, running or waiting.

    Its own gate on starting is a lead in steps; here it is the count rule, as for the others.
    """

    def aged(self) -> list[Action]:
        oldest = (self.applied or 0) - self.bound
        late = [g for g in self.groups.values() if g.version < oldest]
        return [action for group in late for action in self.drop(group)]


class Oversampled(OldestFirst):
    """Groups are started larger than they are trained: the first so many to end count, the others are cancelled.

    Biased: what is cancelled is what is long.
    """

    def __init__(self, settings: Settings, *, spare: int) -> None:
        super().__init__(settings)
        self.needed, self.size = settings.group_size, settings.group_size + spare

    def complete(self, group: Group) -> bool:
        return len(group.done) == self.needed and not group.ready

    def ended(self, event: TrialEnded) -> list[Action]:
        group_id = self.running.get(event.trial_id, -1)
        super().ended(event)
        group = self.groups.get(group_id)
        if group is None or not group.ready:
            return []
        late, group.running = sorted(group.running), set()
        group.started = self.size
        return [CancelTrial(trial_id=name) for name in late]

    def min_version(self) -> int:
        return max(0, self.trained - self.bound)


class SplitAtTheBound(OldestFirst):
    """A group is not held back by its slowest trial: what has ended of it is trained before it gets too old.

    When the oldest token of the ended trials of a group would be too old for the step after the next one to be taken,
    and at least two have ended, those are trained; each later one when it ends, masked as far as it is too old. The
    baseline of every trial is then the mean reward of the *others* that had ended by that time and stays so: it does
    not depend on the trial itself, so that the gradient is unbiased (tests/test_schedule_benchmark.py enumerates it).
    A step takes as many trials as before, whatever groups they are of.
    """

    def capacity(self) -> int:
        """The count rule in trials."""
        waiting = sum(len(g.done) + len(g.running) + self.size - g.started for g in self.groups.values())
        most = (self.bound + 1) * self.batch_groups * self.size
        return (most - (self.training * self.batch_groups * self.size) - waiting) // self.size

    def batch(self) -> list[tuple[Group, list[str]]]:
        groups = [g for g in self.groups.values() if g.done and (g.ready or g.cut or self.urgent(g))]
        groups.sort(key=lambda g: (min(g.done.values()), g.group_id))
        most, chosen = self.batch_groups * self.size, []
        for group in groups:
            part = list(group.done)[:most]
            chosen.append((group, part))
            most -= len(part)
            if not most:
                return chosen
        return []

    def urgent(self, group: Group) -> bool:
        return len(group.done) >= 2 and min(group.done.values()) <= self.trained - self.bound

    def min_version(self) -> int:
        return max(0, self.trained - self.bound)
