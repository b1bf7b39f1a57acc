"""The live loop: carries out what `core.schedule` decides over a fleet, an engine and a trainer, and reports back.

Follow a token: `engine/batch.py` samples it, `harness/office.py` appends it to a ledger of `core/tito.py`,
`trial.py` brings the ledger home, `step_rows` here puts it in a step batch, `trainer/torch_trainer.py` weighs it
(`core/aggregate.py`) and turns it into gradient (`core/loss.py`). Sockets and pipes between the processes carry it
as it is.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from core.advantage import GroupAdvantage
from core.outcome import Outcome, has_valid_reward
from core.schedule import (
    Action,
    CancelTrial,
    DropGroup,
    EvaluationEnded,
    Event,
    Finished,
    Opened,
    Save,
    Saved,
    Settings,
    StartTrial,
    State,
    StepTrained,
    SyncWeights,
    Train,
    TrialEnded,
    WeightsApplied,
    begin,
    react,
)
from core.staleness import fresh_mask
from system.checkpoint import SaveError
from system.engine import Applied, Router
from system.fleet import Fleet
from system.journal import Journal
from system.trainer import StepMetrics, StepRow, TrainerProcess

SCORED_TRUNCATIONS = ("context", "turn_cap", "step_cap")
"""Limits of the policy's own making: such a trial keeps the reward it got. The wall clock also measures the machine."""

ENGINE = "engine"
"""Phase of a system error that is the engine's end: its trials are tried again, and none of them is blamed."""

POLL_S = 0.01

Result = dict[str, Any]
AdvantageFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], GroupAdvantage]


class Observer(Protocol):
    """Is told what happens; decides nothing."""

    def trial(self, action: StartTrial, result: Result, *, valid: bool) -> None: ...
    def dropped(self, action: DropGroup) -> None: ...
    def step(
        self,
        action: Train,
        results: Sequence[Result],
        metrics: StepMetrics,
        *,
        idle_s: float,
        engine: Mapping[str, Any],
    ) -> None:
        """A step was taken, after the trainer had waited for so long; what the engines last told of themselves."""
        ...

    def evaluation(self, version: int, trials: Sequence[tuple[StartTrial, Result]]) -> None:
        """All trials of an evaluation that have a valid reward."""
        ...

    def note(self, text: str) -> None:
        """Something that a person may want to know."""
        ...

    def tick(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Those who carry actions out. Without a trainer the engines keep the weights they have: evaluation alone."""

    fleet: Fleet
    engine: Router
    trainer: TrainerProcess | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where a killed run stood, and what it goes on with.

    Args:
        state: after the last event that was written.
        events: what to tell the schedule first: that the run is reopened.
        results: of the trials that are trained from now on, by trial id.
        gone: groups whose trials need no keeping.
    """

    state: State
    events: tuple[Event, ...]
    results: dict[str, Result]
    gone: frozenset[int]


class Loop:
    """One run of the schedule from Opened to Finished.

    Args:
        settings: the schedule's policy.
        crew: fleet, engine, trainer.
        name: of this run; it begins every trial id, so that logs of several runs can lie in one file.
        spec: what the fleet needs for a trial, from the action and the full trial id; but for its engine's address.
        advantage: one of core.advantage with its settings bound.
        journal: gets every event with its actions.
        observer: is told what happens.
        save: puts the trainer's version on disk; in a thread of its own, while the fleet goes on.
        reset_kv: caches are recomputed at every change of weights; else a trajectory keeps what older ones cached.
        resumed: where to go on; from the start if None.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        crew: Crew,
        name: str,
        spec: Callable[[StartTrial, str], dict[str, Any]],
        advantage: AdvantageFunction,
        journal: Journal,
        observer: Observer,
        save: Callable[[int], object] | None = None,
        reset_kv: bool = False,
        resumed: Resumed | None = None,
    ) -> None:
        self.settings, self.crew, self.name, self.spec = settings, crew, name, spec
        self.advantage, self.journal, self.observer = advantage, journal, observer
        self.save, self.reset_kv = save, reset_kv
        self.state = resumed.state if resumed else begin()
        self.pending: deque[Event] = deque(resumed.events if resumed else [Opened(version=0)])
        self.started: dict[str, StartTrial] = {}
        self.held: dict[str, StartTrial] = {}
        """Those that wait because no engine lives, in order."""
        self.results: dict[str, Result] = dict(resumed.results) if resumed else {}
        self.gone: set[int] = set(resumed.gone) if resumed else set()
        self.saving: tuple[int, Future[object]] | None = None
        self.pool = ThreadPoolExecutor(1)
        self.evaluated: list[tuple[StartTrial, Result]] = []
        self.training: Train | None = None
        self.trainer_free_since = time.monotonic()
        self.idle_s = 0.0
        self.reason = ""

    def run(self) -> str:
        """Until the schedule says Finished; returns its reason."""
        with self.pool:
            while self.pending or not self.state.finished:
                event = self._next_event()
                self.state, actions = react(self.settings, self.state, event)
                self.journal.write(event, actions)
                for action in actions:
                    self._carry_out(action)
        return self.reason

    def _next_event(self) -> Event:
        while not self.pending:
            self.observer.tick()
            self._look_at_engines()
            for result in self.crew.fleet.poll(self._patience_s()):
                self.pending.append(self._trial_ended(result))
            if self.training and self.crew.trainer and (metrics := self.crew.trainer.poll(0.0)):
                self.pending.append(self._step_trained(self.training, metrics))
            if self.saving and self.saving[1].done():
                self.pending.append(self._saved(*self.saving))
        return self.pending.popleft()

    def _saved(self, version: int, written: Future[object]) -> Saved:
        self.saving = None
        try:
            written.result()
        except Exception as error:  # whatever a disk or a trainer says: told with what a resumed run has
            last = self.state.saved[-1]
            told = f"version {version} must be saved, got {error}; a resumed run goes on from version {last}"
            raise SaveError(told) from error
        return Saved(version=version)

    def _look_at_engines(self) -> None:
        for happened in self.crew.engine.poll(POLL_S):
            if isinstance(happened, Applied):
                self.pending.append(WeightsApplied(version=happened.version))
            else:
                self.observer.note(str(happened))
        while self.held and self._start(next(iter(self.held.values()))):
            continue

    def _patience_s(self) -> float:
        """How long to wait for the fleet: not at all where weights were waited for already."""
        if self.crew.engine.moving or self.pending:
            return 0.0
        return POLL_S if self.training or self.saving else 0.2

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartTrial():
                self.started[action.trial_id] = action
                self._start(action)
            case CancelTrial():
                self._cancel(action.trial_id)
            case Train():
                self._train(action)
            case SyncWeights():
                self._sync(action.version)
            case Save():
                if self.save is None:
                    raise ValueError("a run that saves must be told how, got no save")
                self.saving = action.version, self.pool.submit(self.save, action.version)
            case DropGroup():
                self._forget(action.group_id)
                self.observer.dropped(action)
            case EvaluationEnded():
                self.observer.evaluation(action.version, self.evaluated)
                self.evaluated = []
            case Finished():
                self.reason = action.reason

    def _start(self, action: StartTrial) -> bool:
        """Start a trial where an engine lives, or hold it until one does; whether it started."""
        name = self._full(action.trial_id)
        address = self.crew.engine.place(name)
        if address is None:
            self.held[action.trial_id] = action
            return False
        self.held.pop(action.trial_id, None)
        self.crew.fleet.start({**self.spec(action, name), "engine_address": address})
        return True

    def _cancel(self, trial_id: str) -> None:
        if self.held.pop(trial_id, None) is None:
            self.crew.fleet.cancel(self._full(trial_id))
        else:
            result = {"trial_id": self._full(trial_id), "outcome": {"kind": "cancelled"}}
            self.pending.append(self._trial_ended(result))

    def _trial_ended(self, result: Result) -> TrialEnded:
        failed = may_be_the_engine(result)
        if (cause := self.crew.engine.release(result["trial_id"], failed=failed)) and failed:
            result = lost_with_engine(result, cause)
        trial_id = result["trial_id"].removeprefix(f"{self.name}/")
        action = self.started.pop(trial_id)
        event = trial_ended(trial_id, result)
        self.observer.trial(action, result, valid=event.valid)
        if event.valid and action.purpose == "eval":
            self.evaluated.append((action, result))
        elif event.valid and action.group_id not in self.gone:
            self.results[trial_id] = {**result, "group_id": action.group_id}
        return event

    def _train(self, action: Train) -> None:
        if self.crew.trainer is None:
            raise ValueError("a run that trains must have a trainer, got none")
        self.training = action
        self.idle_s = time.monotonic() - self.trainer_free_since
        results = [self.results[trial_id] for trial_id in action.trial_ids]
        rows = step_rows(results, self.advantage, min_version=action.min_version)
        self.crew.trainer.start_step(rows, version=action.version)

    def _step_trained(self, action: Train, metrics: StepMetrics) -> StepTrained:
        self.trainer_free_since, self.training = time.monotonic(), None
        results = [self.results.pop(trial_id) for trial_id in action.trial_ids]
        engine = self.crew.engine.heard()
        self.observer.step(action, results, metrics, idle_s=self.idle_s, engine=engine)
        for group_id in action.group_ids:
            self._forget(group_id)
        return StepTrained(version=action.version + 1)

    def _sync(self, version: int) -> None:
        if self.crew.trainer is not None:
            reset_kv = self.reset_kv or self.state.applied is None
            self.crew.engine.begin_update(version, self.crew.trainer.weights_path, reset_kv=reset_kv)
        else:
            self.pending.append(WeightsApplied(version=version))

    def _forget(self, group_id: int) -> None:
        self.gone.add(group_id)  # a trial of it that was cancelled can still end well
        self.results = {name: r for name, r in self.results.items() if r["group_id"] != group_id}

    def _full(self, trial_id: str) -> str:
        return f"{self.name}/{trial_id}"


def may_be_the_engine(result: Result) -> bool:
    """Whether a trial failed where it needs its engine: in a turn, or when it lets go of it."""
    outcome = result["outcome"]
    return outcome["kind"] == "system_error" and outcome["phase"] in ("agent", "teardown")


def lost_with_engine(result: Result, cause: str) -> Result:
    """The result of a trial that failed when its engine ended: it names what failed, not where that was noticed."""
    return {**result, "blameless": True, "outcome": {**result["outcome"], "phase": ENGINE, "cause": cause}}


def trial_ended(trial_id: str, result: Result) -> TrialEnded:
    """What the schedule must know of a trial's result."""
    outcome = Outcome(**result["outcome"])
    valid = has_valid_reward(outcome, scored_truncations=SCORED_TRUNCATIONS)
    versions = [v for row in result.get("rows", ()) for v in row["policy_version"] if v >= 0]
    return TrialEnded(
        trial_id=trial_id,
        kind=outcome.kind,
        valid=valid,
        reward=result["reward"] if valid else None,
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        blameless=outcome.kind == "system_error" and bool(result.get("blameless")),
    )


def step_rows(
    results: Sequence[Result], advantage: AdvantageFunction, *, min_version: int = 0
) -> list[StepRow]:
    """The step batch of some trials: the rows of every group that has a signal, each with its trial's advantage.

    Tokens of an older version than `min_version` are not trained.
    """
    reward = torch.tensor([r["reward"] for r in results], dtype=torch.float64)
    group_id = torch.tensor([r["group_id"] for r in results])
    group = advantage(reward, torch.ones(len(results), dtype=torch.bool), group_id)
    rows = []
    for result, value, signal in zip(
        results, group.advantage.tolist(), group.has_signal.tolist(), strict=True
    ):
        for index, row in enumerate(result["rows"] if signal else ()):
            spans = tuple(
                (t["request_id"], t["start"], t["end"]) for t in result["turns"] if t["row"] == index
            )
            rows.append(
                StepRow(
                    row_id=f"{result['trial_id']}#{index}",
                    trial_id=result["trial_id"],
                    group_id=result["group_id"],
                    token_ids=list(row["token_ids"]),
                    loss_mask=fresh_mask(row["loss_mask"], row["policy_version"], min_version=min_version),
                    rollout_logprob=list(row["rollout_logprob"]),
                    policy_version=list(row["policy_version"]),
                    advantage=value,
                    requests=spans,
                )
            )
    return rows
