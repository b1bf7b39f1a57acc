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
    Save,
    Saved,
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
    started_s: float = 0.0
    ended_s: float = 0.0
    own: list[float] = field(default_factory=list)
    """Seconds of its start, its calls and its end: what it did itself; the engine did the rest."""
    own_since: float | None = None
    """Since when it does something itself."""
    kind: str = ""


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One optimizer step: when, on what, and how old that was."""

    version: int
    begun_s: float
    ended_s: float = 0.0
    lengths: list[int]
    "Tokens of each trained trajectory."
    trained: list[float]
    "Of each, the sampled tokens in the loss."
    ages: dict[int, float]
    "Trained tokens by age."
    masked: float
    "Sampled tokens of its batch that were left out of the loss."
    trial_ids: tuple[str, ...] = ()
    work_s: float = 0.0
    "What it would have taken had nobody else been at work."
    engine: dict[str, float] = field(default_factory=dict)
    "What the engines had done by its end."


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
    syncs: int = 0
    trials: dict[str, Trial] = field(default_factory=dict)
    "Those that have ended."
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
    stop_after: int | None = None,
) -> Record:
    """A run from Opened to Finished; `core.schedule` decides unless another policy is given.

    Args:
        limit_s: the virtual time at which it is broken off.
        stop_after: steps after which it is, so that no end is seen, in which less and less is under way.
    """
    steps = settings.steps if stop_after is None else stop_after
    return _Run(settings, cluster, workload, policy or Reducer(settings)).run(limit_s, steps)


class _Run:
    """Requests in the engines share a token clock: each advances by one while `token_s` seconds go by."""

    def __init__(self, settings: Settings, cluster: Cluster, workload: Workload, policy: Policy) -> None:
        self.cluster, self.workload, self.policy = cluster, workload, policy
        self.record = Record(settings=settings)
        self.now = self.work = self.clock = 0.0
        """Seconds; the same where nobody has to share a core; and tokens that each request has been given."""
        self.stall = 0.0
        """Work that the engines do before they give another token."""
        self.own = 0
        """Trials that do something themselves."""
        self.sync_begun = 0.0
        self.engine: dict[str, float] = dict.fromkeys(
            ("steps", "sampled_tokens", "context_tokens", "prefill_tokens", "cpu_s", "busy_s"), 0.0
        )
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

    def run(self, limit_s: float, steps: int) -> Record:
        self._tell(Opened(version=0))
        broken_off = steps < self.record.settings.steps
        while not self.policy.finished and self.now < limit_s and self._advance():
            if broken_off and len(self.record.steps) == steps:
                break
        self.record.seconds = self.now
        return self.record

    def _advance(self) -> bool:
        """To the next thing that ends."""
        while self.decoding and self.decoding[0][2].over:
            heapq.heappop(self.decoding)
        token_s = self._token_s()
        left = self.decoding[0][0] - self.clock if self.decoding else float("inf")
        # What stands still while weights move may have been done just before.
        due = self.work + self.stall + left * token_s if left > 0 else self.work
        if self.timers and self.timers[0][0] <= due:
            at, _, kind, what = heapq.heappop(self.timers)
            self._pass(max(at, self.work), token_s)
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
        return self.cluster.token_s(self.active, self.context)

    def _pass(self, until: float, token_s: float) -> None:
        """Lets everything go on until so much work is done."""
        cluster, work = self.cluster, until - self.work
        busy = cluster.engines if self.syncing else min(cluster.engines, self.active)
        passed = work / cluster.speed(engines=busy, trainers=self.training, trials=self.own)
        if token_s < float("inf"):
            stalled = min(self.stall, work)
            self.stall -= stalled
            self._sampled((work - stalled) / token_s)
            self.engine["cpu_s"] += stalled * cluster.engines + (work - stalled) * busy
            self.engine["busy_s"] += passed * busy
            self.record.engine_busy_s += passed * busy / cluster.engines
        self.record.running_s += passed * len(self.trials)
        self.now += passed
        self.work = until

    def _sampled(self, tokens: float) -> None:
        """Each request has been given so many."""
        self.clock += tokens
        self.engine["steps"] += tokens * min(self.active, self.cluster.engines)
        self.engine["sampled_tokens"] += tokens * self.active
        self.engine["context_tokens"] += tokens * self.context

    def _after(self, seconds: float, kind: str, what: Any) -> None:
        """Something that takes so much work by itself."""
        self.sequence += 1
        heapq.heappush(self.timers, (self.work + seconds, self.sequence, kind, what))

    def _by_itself(self, trial: Trial, seconds: float, kind: str) -> None:
        """A trial does something for which it needs no engine."""
        self.own += 1
        trial.own_since = self.now
        self._after(seconds, kind, trial)

    def _stops(self, trial: Trial) -> None:
        """It has done that, or is cancelled."""
        if trial.own_since is not None:
            self.own -= 1
            trial.own.append(self.now - trial.own_since)
            trial.own_since = None

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
                    self.syncing, self.sync_begun = True, self.now
                    self._after(self.cluster.sync_s, "_applied", action.version)
                case DropGroup():
                    self._drop(action)
                case Save():
                    self._after(0.0, "_saved", action.version)
                case Finished():
                    self.record.reason = action.reason
                case _:
                    pass

    def _saved(self, version: int) -> None:
        """A version is on disk: in no time, since that is another thread's work."""
        self._tell(Saved(version=version))

    def _start(self, action: StartTrial) -> None:
        plan = self.workload.trial(
            task=action.task, group=action.group_id, sample=action.sample, attempt=action.attempt
        )
        trial = Trial(action, plan, context=plan.prompt, started_s=self.now)
        self.trials[action.trial_id] = trial
        self.record.most_running = max(self.record.most_running, len(self.trials))
        self._by_itself(trial, self.cluster.start_s + self._prefill_s(plan.prompt), "_ask")

    def _prefill_s(self, tokens: int) -> float:
        """What a prompt takes beside the tokens that others are given."""
        return self.cluster.prefill_s * (1 - self.cluster.prefill_stops) * tokens

    def _train(self, action: Train) -> None:
        trials = [self.done.pop(trial_id) for trial_id in action.trial_ids]
        ages: dict[int, float] = {}
        masked = 0.0
        trained = [0.0] * len(trials)
        for row, trial in enumerate(trials):
            for version, tokens in trial.sampled.items():
                if version < action.min_version:
                    masked += tokens
                else:
                    trained[row] += tokens
                    age = action.version - version
                    ages[age] = ages.get(age, 0.0) + tokens
        lengths = [t.plan.length for t in trials]
        work_s = self.cluster.train_s([length for t in trials for length in t.plan.rows])
        self.step = StepRecord(
            version=action.version,
            begun_s=self.now,
            lengths=lengths,
            trained=trained,
            ages=ages,
            masked=masked,
            trial_ids=action.trial_ids,
            work_s=work_s,
        )
        self.training = True
        self._after(work_s, "_trained", action.version + 1)

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
        self.training, self.step.ended_s, self.step.engine = False, self.now, dict(self.engine)
        self.record.steps.append(self.step)
        self._tell(StepTrained(version=version))

    def _applied(self, version: int) -> None:
        for _, _, trial in self.decoding:
            if not trial.over:
                self._count(trial)
        self.version, self.syncing = version, False
        self.record.sync_s += self.now - self.sync_begun
        self.record.syncs += 1
        self._tell(WeightsApplied(version=version))

    def _ask(self, trial: Trial) -> None:
        """A completion begins, or waits for room."""
        if trial.over:
            return
        self._stops(trial)
        tokens = trial.plan.turns[trial.turn].tokens
        room = self.cluster.kv_tokens * self.cluster.engines
        if self.active and self.context + trial.context + tokens > room:
            self.queue.append(trial)
            return
        new = trial.plan.turns[trial.turn - 1].observed if trial.turn else trial.plan.prompt
        self.engine["prefill_tokens"] += new
        self.stall += self.cluster.prefill_s * self.cluster.prefill_stops * new / self.cluster.engines
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
        trial.context += turn.tokens + turn.observed - turn.forgotten
        trial.turn += 1
        if trial.turn == len(trial.plan.turns):
            self._by_itself(trial, self.cluster.verify_s, "_ended")
        else:
            self._by_itself(trial, turn.tool_s + self._prefill_s(turn.observed), "_ask")

    def _cancelled(self, trial: Trial) -> None:
        if trial.over:
            return
        if any(other is trial for _, _, other in self.decoding):
            self._count(trial)
            trial.over = True
            self._leave(trial)
        trial.over = True
        self._stops(trial)
        self.record.wasted += sum(trial.sampled.values())
        self._end(trial, "cancelled")

    def _ended(self, trial: Trial) -> None:
        if not trial.over:
            trial.over = True
            self._stops(trial)
            self._end(trial, "system_error" if trial.plan.reward is None else "solved")

    def _end(self, trial: Trial, kind: str) -> None:
        action = trial.action
        trial.kind, trial.ended_s = kind, self.now
        self.record.trials[action.trial_id] = trial
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
