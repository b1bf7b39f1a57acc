"""The asynchronous loop as a pure function: `(settings, state, event) -> (state, actions)`.

No clock, no I/O, no randomness beyond a counter-based hash. The live loop, the replay of a recorded run and a
simulator drive this same function; the same events give the same actions. The shell carries actions out in
order and reports back with events:

    Opened          ->  SyncWeights: no trial starts before the engine has the weights
    TrialEnded      ->  StartTrial into the free slot; Train when a batch of groups is complete
    StepTrained     ->  SyncWeights
    WeightsApplied  ->  StartTrial, Train; or an evaluation, during which no weights are applied
    StopAsked       ->  CancelTrial; drains what is in flight, then Finished

Rollouts go on while the trainer trains. One step is in flight at a time, from Train to WeightsApplied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from .counter import permutation
from .outcome import group_verdict
from .staleness import accepted_at, admission_capacity


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
        late_group: "wait" trains the oldest first, and waits if it must, so that no group gets too old;
            "drop" trains whatever is complete and drops what got too old.
        requeue_stale: a task dropped as too old is drawn again, next.
        task_count: training tasks, numbered from 0; each is drawn once an epoch, every epoch in its own
            order.
        seed: of that order.
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
    late_group: Literal["wait", "drop"]
    requeue_stale: bool
    task_count: int
    seed: int
    evaluate_at: tuple[int, ...]
    evaluation_tasks: int
    evaluation_samples: int

    def __post_init__(self) -> None:
        positive = {
            "batch_groups": self.batch_groups,
            "max_running": self.max_running,
            "task_count": self.task_count,
            "evaluation_samples": self.evaluation_samples,
        }
        not_negative = {
            "steps": self.steps,
            "max_staleness": self.max_staleness,
            "max_retries": self.max_retries,
            "tolerance": self.tolerance,
            "max_zero_variance": self.max_zero_variance,
            "max_lost": self.max_lost,
            "evaluation_tasks": self.evaluation_tasks,
        }
        for name, value in positive.items():
            if not value >= 1:
                raise ValueError(f"{name} must be positive, got {value}")
        for name, value in not_negative.items():
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if not 2 <= self.min_valid <= self.group_size:
            raise ValueError(
                f"min_valid must lie between 2 and group_size {self.group_size}, got {self.min_valid}"
            )
        if self.late_group not in ("wait", "drop"):
            raise ValueError(f"late_group must be wait or drop, got {self.late_group!r}")


# Events: what the shell reports.


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The run begins, or resumes, with the trainer at `version`."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """A trial is over and its slot is free: one per StartTrial; one of an unknown trial changes nothing.

    Args:
        kind: one of `core.outcome.KINDS`.
        valid: the reward counts; a solved or failed trial, or a truncated one that is scored.
        reward: None unless valid.
        version_min: oldest sampled token; None if none was sampled.
        version_max: newest.
    """

    trial_id: str
    kind: str
    valid: bool
    reward: float | None
    version_min: int | None
    version_max: int | None


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


Event = Opened | TrialEnded | StepTrained | WeightsApplied | StopAsked


# Actions: what the shell carries out.


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
        group_ids: the groups of the batch, oldest first.
        trial_ids: their valid trials, group by group; a group may have fewer than planned.
    """

    version: int
    group_ids: tuple[int, ...]
    trial_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncWeights:
    """Bring the trainer's `version` to the engine; the answer is WeightsApplied(version)."""

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


Action = StartTrial | CancelTrial | Train | SyncWeights | DropGroup | EvaluationEnded | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One place in a group: waiting, running, valid or lost.

    Args:
        version: a lower bound on its oldest token while running, that token's version once valid.
        reward: meaningful once valid.
    """

    attempt: int = 0
    status: Literal["waiting", "running", "valid", "lost"] = "waiting"
    version: int = 0
    reward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trials of one task; open until its fate is decided, then ready to be trained."""

    group_id: int
    task: int
    purpose: Literal["train", "eval"]
    ready: bool
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands. Values are never changed in place.

    Args:
        trained: optimizer steps the trainer has taken.
        applied: the version in the engine; None before the first weights.
        syncing: weights are on their way to the engine.
        training: groups of the step in flight.
        groups: by id, those that are open or ready; evaluation groups too.
        running: by trial id, its group and sample; trials of dropped groups too, until they end.
        next_group: the next group's id.
        drawn: training tasks drawn from the epochs so far.
        requeued: tasks to be drawn before the epochs go on.
        evaluating: the version under evaluation.
        zero_variance, lost: groups dropped for it since the last Train.
        ending: why the run ends early; empty otherwise.
        finished: Finished has been said.
    """

    trained: int = 0
    applied: int | None = None
    syncing: bool = False
    training: tuple[int, ...] = ()
    groups: Mapping[int, Group]
    running: Mapping[str, tuple[int, int]]
    next_group: int = 0
    drawn: int = 0
    requeued: tuple[int, ...] = ()
    evaluating: int | None = None
    zero_variance: int = 0
    lost: int = 0
    ending: str = ""
    finished: bool = False


Step = tuple[State, tuple[Action, ...]]


def begin() -> State:
    """The state before Opened."""
    return State(groups={}, running={})


def react(settings: Settings, state: State, event: Event) -> Step:
    """The state after an event, and what to do about it.

    Raises:
        ValueError: if the event cannot follow: a step that nobody asked for, weights that nobody sent.
    """
    if state.finished:
        return state, ()
    state, actions = _take(settings, state, event)
    for rule in (_drop_stale, _end_evaluation, _sync, _train, _fill, _finish):
        state, more = rule(settings, state)
        actions += more
    return state, actions


def replay(settings: Settings, events: Iterable[Event]) -> tuple[State, list[tuple[Action, ...]]]:
    """The state after all events, and the actions that followed each."""
    state, history = begin(), []
    for event in events:
        state, actions = react(settings, state, event)
        history.append(actions)
    return state, history


def task_at(settings: Settings, index: int) -> int:
    """The training task that is drawn as number `index`: position in an epoch, in that epoch's own order."""
    epoch, position = divmod(index, settings.task_count)
    return permutation(settings.task_count, settings.seed, epoch)[position]


def trial_id(group: Group, sample: int) -> str:
    """The name of the current attempt at a sample."""
    return f"{group.purpose}-{group.group_id}-{sample}-{group.samples[sample].attempt}"


# What each event says.


def _take(settings: Settings, state: State, event: Event) -> Step:
    match event:
        case Opened(version=version):
            return _open(settings, state, version)
        case TrialEnded():
            return _end_trial(settings, state, event)
        case StepTrained(version=version):
            if not state.training or version != state.trained + 1:
                raise ValueError(f"StepTrained must follow Train from {state.trained}, got version {version}")
            return replace(state, trained=version, training=()), ()
        case WeightsApplied(version=version):
            if not state.syncing or version != state.trained:
                raise ValueError(
                    f"WeightsApplied must follow SyncWeights of {state.trained}, got version {version}"
                )
            return _start_evaluation(settings, replace(state, applied=version, syncing=False))
        case StopAsked():
            return _end_early(state, "stop asked")


def _open(settings: Settings, state: State, version: int) -> Step:
    if state.applied is not None or state.syncing:
        raise ValueError(f"Opened must come once, got it again with version {version}")
    if not 0 <= version <= settings.steps:
        raise ValueError(f"version must lie between 0 and {settings.steps} steps, got {version}")
    drawn = accepted_at(version, batch_groups=settings.batch_groups)
    return replace(state, trained=version, drawn=drawn, syncing=True), (SyncWeights(version=version),)


def _end_trial(settings: Settings, state: State, event: TrialEnded) -> Step:
    if event.trial_id not in state.running:
        return state, ()
    group_id, index = state.running[event.trial_id]
    state = replace(state, running={k: v for k, v in state.running.items() if k != event.trial_id})
    if group_id not in state.groups:
        return state, ()
    group = state.groups[group_id]
    samples = list(group.samples)
    samples[index] = _ended(settings, samples[index], event)
    group = replace(group, samples=tuple(samples))
    return _settle(settings, _put(state, group), group)


def _ended(settings: Settings, sample: Sample, event: TrialEnded) -> Sample:
    if event.valid:
        if event.reward is None or not abs(event.reward) < float("inf"):
            raise ValueError(f"a valid reward must be finite, got {event.reward}")
        oldest = sample.version if event.version_min is None else event.version_min
        return replace(sample, status="valid", reward=event.reward, version=oldest)
    if event.kind == "system_error" and sample.attempt < settings.max_retries:
        return replace(sample, status="waiting", attempt=sample.attempt + 1)
    return replace(sample, status="lost")


def _settle(settings: Settings, state: State, group: Group) -> Step:
    """The fate of a training group, as far as it is known."""
    if group.purpose == "eval":
        return state, ()
    status = [sample.status for sample in group.samples]
    verdict = group_verdict(
        size=settings.group_size,
        valid=status.count("valid"),
        lost=status.count("lost"),
        retriable=sum(s.status == "waiting" and s.attempt > 0 for s in group.samples),
        min_valid=settings.min_valid,
    )
    if verdict == "drop":
        state, actions = _drop(replace(state, lost=state.lost + 1), group, "lost")
        if state.lost <= settings.max_lost:
            return state, actions
        state, more = _end_early(state, "too many lost groups")
        return state, actions + more
    if verdict not in ("complete", "survivors"):
        return state, ()
    reward = [sample.reward for sample in group.samples if sample.status == "valid"]
    flat = max(reward) - min(reward) <= settings.tolerance
    if flat and state.zero_variance < settings.max_zero_variance:
        return _drop(replace(state, zero_variance=state.zero_variance + 1), group, "zero_variance")
    return _put(state, replace(group, ready=True)), ()


def _end_early(state: State, reason: str) -> Step:
    """Let go of all training trials; a running evaluation, step or weight transfer still comes to its end."""
    if state.ending:
        return state, ()
    cancelled = tuple(
        CancelTrial(trial_id=trial)
        for trial, (group_id, _) in state.running.items()
        if group_id in state.groups and state.groups[group_id].purpose == "train"
    )
    kept = {k: g for k, g in state.groups.items() if g.purpose == "eval"}
    return replace(state, groups=kept, ending=reason), cancelled


# What follows from where the run stands, in this order after every event.


def _drop_stale(settings: Settings, state: State) -> Step:
    """Groups whose oldest trained token would be too old for the next step."""
    next_version = state.trained + bool(state.training)
    actions: tuple[Action, ...] = ()
    for group in list(state.groups.values()):
        oldest = min((s.version for s in group.samples if s.status == "valid"), default=next_version)
        if group.purpose == "train" and next_version - oldest > settings.max_staleness:
            state, more = _drop(state, group, "stale")
            actions += more
            if settings.requeue_stale:
                state = replace(state, requeued=(*state.requeued, group.task))
    return state, actions


def _start_evaluation(settings: Settings, state: State) -> Step:
    version = state.trained
    if state.ending or version not in settings.evaluate_at:
        return state, ()
    first = state.next_group
    empty = (Sample(),) * settings.evaluation_samples
    opened = {
        first + task: Group(group_id=first + task, task=task, purpose="eval", ready=False, samples=empty)
        for task in range(settings.evaluation_tasks)
    }
    groups = {**state.groups, **opened}
    return replace(state, evaluating=version, groups=groups, next_group=first + len(opened)), ()


def _end_evaluation(settings: Settings, state: State) -> Step:
    evaluation = [g for g in state.groups.values() if g.purpose == "eval"]
    if state.evaluating is None or any(
        s.status in ("waiting", "running") for g in evaluation for s in g.samples
    ):
        return state, ()
    kept = {k: g for k, g in state.groups.items() if g.purpose == "train"}
    ended = EvaluationEnded(version=state.evaluating)
    return replace(state, groups=kept, evaluating=None), (ended,)


def _sync(settings: Settings, state: State) -> Step:
    behind = state.applied is not None and state.applied < state.trained
    if not behind or state.syncing or state.evaluating is not None or state.ending:
        return state, ()
    return replace(state, syncing=True), (SyncWeights(version=state.trained),)


def _train(settings: Settings, state: State) -> Step:
    in_step = state.training or state.syncing or state.applied != state.trained
    if in_step or state.ending or state.trained >= settings.steps:
        return state, ()
    groups = sorted(
        (g for g in state.groups.values() if g.purpose == "train"), key=lambda g: (_born(g), g.group_id)
    )
    ready = [g for g in groups if g.ready]
    batch, rest = (
        ready[: settings.batch_groups],
        [g for g in groups if not g.ready and _born(g) < float("inf")],
    )
    if len(batch) < settings.batch_groups:
        return state, ()
    if (
        settings.late_group == "wait"
        and rest
        and not _in_time(settings, state, rest + ready[settings.batch_groups :])
    ):
        return state, ()
    chosen = tuple(g.group_id for g in batch)
    kept = {k: g for k, g in state.groups.items() if k not in chosen}
    trials = tuple(trial_id(g, i) for g in batch for i, s in enumerate(g.samples) if s.status == "valid")
    state = replace(state, training=chosen, groups=kept, zero_variance=0, lost=0)
    return state, (Train(version=state.trained, group_ids=chosen, trial_ids=trials),)


def _fill(settings: Settings, state: State) -> Step:
    """Start trials while slots are free: evaluation first, then the oldest group, then a new group."""
    if state.applied is None:
        return state, ()
    waiting = [
        (g.purpose == "train", g.group_id, i)
        for g in state.groups.values()
        for i, s in enumerate(g.samples)
        if s.status == "waiting"
    ]
    actions: list[Action] = []
    places = sorted(waiting)
    while len(state.running) < settings.max_running:
        if not places:
            if not _capacity(settings, state):
                break
            state, group = _open_group(settings, state)
            places = [(True, group.group_id, i) for i in range(settings.group_size)]
        _, group_id, index = places.pop(0)
        state, action = _start(state, state.groups[group_id], index)
        actions.append(action)
    return state, tuple(actions)


def _finish(settings: Settings, state: State) -> Step:
    opened = state.applied is not None or state.ending
    busy = state.training or state.syncing or state.running or state.evaluating is not None
    over = state.ending or (state.trained >= settings.steps and state.applied == state.trained)
    if busy or not opened or not over:
        return state, ()
    return replace(state, finished=True), (Finished(reason=state.ending or "all steps trained"),)


# Small questions and moves.


def _born(group: Group) -> float:
    """The oldest version that a trajectory of this group can have; infinity if none has started."""
    return min((s.version for s in group.samples if s.status in ("running", "valid")), default=float("inf"))


def _in_time(settings: Settings, state: State, groups: list[Group]) -> bool:
    """Whether these groups, after the step now considered, can still all be trained before they are too old.

    Earliest deadline first is feasible exactly when, for every deadline, what is due by then fits the steps
    left.
    """
    last = sorted(_born(g) + settings.max_staleness for g in groups)
    return all(
        due <= (version - state.trained) * settings.batch_groups for due, version in enumerate(last, start=1)
    )


def _capacity(settings: Settings, state: State) -> int:
    """How many training groups may be opened now."""
    if state.ending or state.applied is None:
        return 0
    train = [g for g in state.groups.values() if g.purpose == "train"]
    ready = sum(g.ready for g in train)
    accepted = accepted_at(state.trained, batch_groups=settings.batch_groups) + len(state.training) + ready
    by_staleness = admission_capacity(
        version=state.applied,
        accepted=accepted,
        running=len(train) - ready,
        batch_groups=settings.batch_groups,
        max_staleness=settings.max_staleness,
        max_running=settings.max_running,
    )
    needed = settings.steps * settings.batch_groups - accepted - (len(train) - ready)
    return max(0, min(by_staleness, needed))


def _open_group(settings: Settings, state: State) -> tuple[State, Group]:
    if state.requeued:
        task, state = state.requeued[0], replace(state, requeued=state.requeued[1:])
    else:
        task, state = task_at(settings, state.drawn), replace(state, drawn=state.drawn + 1)
    samples = (Sample(),) * settings.group_size
    group = Group(group_id=state.next_group, task=task, purpose="train", ready=False, samples=samples)
    return _put(replace(state, next_group=state.next_group + 1), group), group


def _start(state: State, group: Group, index: int) -> tuple[State, StartTrial]:
    version = state.applied or 0
    samples = list(group.samples)
    samples[index] = replace(samples[index], status="running", version=version)
    group = replace(group, samples=tuple(samples))
    name = trial_id(group, index)
    state = replace(_put(state, group), running={**state.running, name: (group.group_id, index)})
    return state, StartTrial(
        trial_id=name,
        group_id=group.group_id,
        task=group.task,
        sample=index,
        attempt=samples[index].attempt,
        purpose=group.purpose,
        policy_version=version,
    )


def _drop(state: State, group: Group, reason: Literal["zero_variance", "lost", "stale"]) -> Step:
    cancelled = tuple(
        CancelTrial(trial_id=trial_id(group, i)) for i, s in enumerate(group.samples) if s.status == "running"
    )
    state = replace(state, groups={k: g for k, g in state.groups.items() if k != group.group_id})
    return state, (DropGroup(group_id=group.group_id, task=group.task, reason=reason), *cancelled)


def _put(state: State, group: Group) -> State:
    return replace(state, groups={**state.groups, group.group_id: group})
