"""The event loop: virtual time goes from one thing that ends to the next, and `core.schedule` is told each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.schedule import (
    Action,
    CancelTrial,
    DropGroup,
    Event,
    Finished,
    Opened,
    Settings,
    StartTrial,
    StepTrained,
    SyncWeights,
    Train,
    TrialEnded,
    WeightsApplied,
    begin,
    react,
)

from .cluster import Cluster
from .workload import TrialPlan, Workload


@dataclass(slots=True)
class Trial:
    """A trial under way: where it is, and of which version its tokens are."""

    action: StartTrial
    plan: TrialPlan
    turn: int = 0
    context: int = 0
    begun: float = 0.0
    """On the token clock, when the current completion began; or when weights last changed within it."""
    sampled: dict[int, float] = field(default_factory=dict)
    over: bool = False


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One optimizer step: when, on what, and how old that was."""

    version: int
    begun_s: float
    ended_s: float = 0.0
    lengths: list[int]
    "Tokens of each trained trajectory."
    ages: dict[int, float]
    "Trained tokens by age."
    masked: float
    "Sampled tokens of its batch that were left out of the loss."


@dataclass(slots=True, kw_only=True)
class Record:
    """What a simulated run leaves behind."""

    settings: Settings
    steps: list[StepRecord] = field(default_factory=list)
    seconds: float = 0.0
    engine_busy_s: float = 0.0
    "Time in which an engine had a request, averaged over engines."
    running_s: float = 0.0
    "Trials under way, integrated over time."
    sync_s: float = 0.0
    sampled: float = 0.0
    wasted: float = 0.0
    "Sampled tokens of trials that were cancelled, dropped or lost."
    dropped: dict[str, int] = field(default_factory=dict)
    dropped_lengths: list[int] = field(default_factory=list)
    most_running: int = 0
    reason: str = ""


class Policy(Protocol):
    """Who decides what a run does next: told each event, it answers with actions, in their order."""

    @property
    def finished(self) -> bool: ...

    def tell(self, event: Event) -> Sequence[Action]: ...


class Reducer:
    """`core.schedule` as a policy."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.state = settings, begin()

    @property
    def finished(self) -> bool:
        return self.state.finished

    def tell(self, event: Event) -> Sequence[Action]:
        self.state, actions = react(self.settings, self.state, event)
        return actions


def simulate(
    settings: Settings,
    cluster: Cluster,
    workload: Workload,
    *,
    policy: Policy | None = None,
    limit_s: float = 1e12,
) -> Record:
    """A run from Opened to Finished, or to a virtual time; `core.schedule` decides unless another policy is given."""
    return _Run(settings, cluster, workload, policy or Reducer(settings)).run(limit_s)


class _Run:
    """Requests in the engines share a token clock: each advances by one while `token_s` seconds go by."""

    def __init__(self, settings: Settings, cluster: Cluster, workload: Workload, policy: Policy) -> None:
        self.cluster, self.workload, self.policy = cluster, workload, policy
        self.record = Record(settings=settings)
        self.now = self.clock = 0.0
        self.version = 0
        self.training = self.syncing = False
        self.context = 0.0
        self.timers: list[tuple[float, int, str, Any]] = []
        self.decoding: list[tuple[float, int, Trial]] = []
        self.active = 0
        self.queue: list[Trial] = []
        self.trials: dict[str, Trial] = {}
        self.done: dict[str, Trial] = {}
        "Valid trials that wait to be trained."
        self.dropped: set[int] = set()
        self.step: StepRecord | None = None
        self.sequence = 0

    def run(self, limit_s: float) -> Record:
        self._tell(Opened(version=0))
        while not self.policy.finished and self.now < limit_s and self._advance():
            continue
        self.record.seconds = self.now
        return self.record

    def _advance(self) -> bool:
        """To the next thing that ends."""
        while self.decoding and self.decoding[0][2].over:
            heapq.heappop(self.decoding)
        token_s = self._token_s()
        left = self.decoding[0][0] - self.clock if self.decoding else float("inf")
        due = self.now + left * token_s if left > 0 else self.now  # what stands still may be done all the same
        if self.timers and self.timers[0][0] <= due:
            at, _, kind, what = heapq.heappop(self.timers)
            self._pass(max(at, self.now), token_s)
            getattr(self, kind)(what)
            return True
        if not self.decoding or due == float("inf"):
            return False
        self._pass(due, token_s)
        self.clock, _, trial = heapq.heappop(self.decoding)
        self._completed(trial)
        return True

    def _token_s(self) -> float:
        if not self.active:
            return float("inf")
        if self.syncing:
            return float("inf")
        slowed = 1 - self.cluster.shared if self.training else 1.0
        return self.cluster.token_s(self.active, self.context) / slowed

    def _pass(self, until: float, token_s: float) -> None:
        passed = until - self.now
        if token_s < float("inf"):
            self.clock += passed / token_s
            self.record.engine_busy_s += passed * min(1.0, self.active / self.cluster.engines)
        self.record.running_s += passed * len(self.trials)
        self.now = until

    def _after(self, seconds: float, kind: str, what: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.timers, (self.now + seconds, self.sequence, kind, what))

    # What the schedule asks for.

    def _tell(self, event: Event) -> None:
        for action in self.policy.tell(event):
            match action:
                case StartTrial():
                    self._start(action)
                case CancelTrial():
                    self._after(0.0, "_cancelled", self.trials[action.trial_id])
                case Train():
                    self._train(action)
                case SyncWeights():
                    self.syncing = True
                    self._after(self.cluster.sync_s, "_applied", action.version)
                case DropGroup():
                    self._drop(action)
                case Finished():
                    self.record.reason = action.reason
                case _:
                    pass

    def _start(self, action: StartTrial) -> None:
        plan = self.workload.trial(
            task=action.task, group=action.group_id, sample=action.sample, attempt=action.attempt
        )
        trial = Trial(action, plan, context=plan.prompt)
        self.trials[action.trial_id] = trial
        self.record.most_running = max(self.record.most_running, len(self.trials))
        self._after(self.cluster.start_s + self.cluster.prefill_s * plan.prompt, "_ask", trial)

    def _train(self, action: Train) -> None:
        trials = [self.done.pop(trial_id) for trial_id in action.trial_ids]
        ages: dict[int, float] = {}
        masked = 0.0
        for version, tokens in (sampled for trial in trials for sampled in trial.sampled.items()):
            if version < action.min_version:
                masked += tokens
            else:
                age = action.version - version
                ages[age] = ages.get(age, 0.0) + tokens
        lengths = [t.plan.length for t in trials]
        self.step = StepRecord(
            version=action.version, begun_s=self.now, lengths=lengths, ages=ages, masked=masked
        )
        self.training = True
        self._after(self.cluster.train_s(lengths), "_trained", action.version + 1)

    def _drop(self, action: DropGroup) -> None:
        self.record.dropped[action.reason] = self.record.dropped.get(action.reason, 0) + 1
        self.dropped.add(action.group_id)
        for name in [k for k, trial in self.done.items() if trial.action.group_id == action.group_id]:
            trial = self.done.pop(name)
            if action.reason != "zero_variance":
                self.record.wasted += sum(trial.sampled.values())
                self.record.dropped_lengths.append(trial.plan.length)

    # What comes of it.

    def _trained(self, version: int) -> None:
        assert self.step is not None
        self.training, self.step.ended_s = False, self.now
        self.record.steps.append(self.step)
        self._tell(StepTrained(version=version))

    def _applied(self, version: int) -> None:
        for _, _, trial in self.decoding:
            if not trial.over:
                self._count(trial)
        self.version, self.syncing = version, False
        self.record.sync_s += self.cluster.sync_s
        self._tell(WeightsApplied(version=version))

    def _ask(self, trial: Trial) -> None:
        """A completion begins, or waits for room."""
        if trial.over:
            return
        tokens = trial.plan.turns[trial.turn].tokens
        room = self.cluster.kv_tokens * self.cluster.engines
        if self.active and self.context + trial.context + tokens > room:
            self.queue.append(trial)
            return
        self.active += 1
        self.context += trial.context + tokens
        trial.begun = self.clock
        self.sequence += 1
        heapq.heappush(self.decoding, (self.clock + tokens, self.sequence, trial))

    def _count(self, trial: Trial) -> None:
        """Tokens since the last count are of the version that the engines have."""
        tokens = self.clock - trial.begun
        if tokens > 0:
            trial.sampled[self.version] = trial.sampled.get(self.version, 0.0) + tokens
            self.record.sampled += tokens
        trial.begun = self.clock

    def _leave(self, trial: Trial) -> None:
        """Its request is out of the engines; who waits for room may have it."""
        self.active -= 1
        self.context -= trial.context + trial.plan.turns[trial.turn].tokens
        waiting, self.queue = self.queue, []
        for other in waiting:
            self._ask(other)

    def _completed(self, trial: Trial) -> None:
        self._count(trial)
        self._leave(trial)
        turn = trial.plan.turns[trial.turn]
        trial.context += turn.tokens + turn.observed
        trial.turn += 1
        if trial.turn == len(trial.plan.turns):
            self._after(self.cluster.verify_s, "_ended", trial)
        else:
            self._after(turn.tool_s + self.cluster.prefill_s * turn.observed, "_ask", trial)

    def _cancelled(self, trial: Trial) -> None:
        if trial.over:
            return
        if any(other is trial for _, _, other in self.decoding):
            self._count(trial)
            trial.over = True
            self._leave(trial)
        trial.over = True
        self.record.wasted += sum(trial.sampled.values())
        self._end(trial, "cancelled")

    def _ended(self, trial: Trial) -> None:
        if not trial.over:
            trial.over = True
            self._end(trial, "system_error" if trial.plan.reward is None else "solved")

    def _end(self, trial: Trial, kind: str) -> None:
        action = trial.action
        del self.trials[action.trial_id]
        valid = kind == "solved"
        if valid and action.purpose == "train" and action.group_id not in self.dropped:
            self.done[action.trial_id] = trial
        elif kind == "system_error" or valid:
            self.record.wasted += sum(trial.sampled.values()) * (action.purpose == "train")
        self._tell(
            TrialEnded(
                trial_id=action.trial_id,
                kind=kind,
                valid=valid,
                reward=trial.plan.reward if valid else None,
                version_min=min(trial.sampled, default=None) if valid else None,
                version_max=max(trial.sampled, default=None) if valid else None,
            )
        )
