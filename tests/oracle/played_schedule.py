"""Random runs of core/schedule in a world where whatever can go wrong does, each under the auditor's eyes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from oracle import oracle_schedule as oracle

from core.schedule import (
    Action,
    CapacityChanged,
    DropGroup,
    Event,
    Finished,
    Opened,
    Reopened,
    Save,
    Saved,
    Settings,
    StartTrial,
    State,
    StepTrained,
    StopAsked,
    SyncWeights,
    Train,
    TrialEnded,
    WeightsApplied,
    begin,
    react,
)

LATE: tuple[Literal["wait", "drop", "mask", "train"], ...] = ("wait", "drop", "mask", "mask", "train")
ORDERS: tuple[Literal["oldest", "completion", "admission"], ...] = ("oldest", "completion", "admission")


def policy_of(draw: random.Random) -> Settings:
    """Small runs of every kind."""
    group_size, steps, late_group = draw.randint(2, 3), draw.randint(1, 5), draw.choice(LATE)
    return Settings(
        steps=steps,
        batch_groups=draw.randint(1, 3),
        group_size=group_size,
        max_staleness=draw.randint(0, 3),
        max_running=draw.randint(1, 16),
        max_retries=draw.randint(0, 2),
        min_valid=draw.randint(2, group_size),
        tolerance=0.0,
        max_zero_variance=draw.randint(0, 3),
        max_lost=draw.randint(0, 6),
        order=draw.choice(ORDERS),
        in_order_steps=draw.choice((0, 0, 1, 2)),
        late_group=late_group,
        requeue_stale=draw.random() < 0.5,
        task_count=draw.randint(1, 7),
        seed=draw.randint(0, 99),
        save_every=draw.randint(1, 2),
        evaluate_at=tuple(sorted(draw.sample(range(steps + 1), draw.randint(0, 2)))),
        evaluation_tasks=draw.randint(1, 2),
        evaluation_samples=draw.randint(1, 2),
        max_late=draw.choice((None, 0, 1, 2)) if late_group == "mask" else None,
        max_error_share=draw.choice((1.0, 1.0, 0.5, 0.2)),
        error_window=draw.randint(1, 9),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Odds:
    """What goes wrong, and how often.

    Args:
        broken: of a trial's ends, those that are system errors; a fifth of them is blameless.
        stop: someone asks for the end.
        killed: the run is killed and goes on, or its room changes.
        doubled: an event of before comes once more.
        unheard: a trial's end is not reported until nothing else happens.
        overtaken: it is the trial that began last that ends next.
    """

    broken: float = 0.0
    stop: float = 0.0
    killed: float = 0.0
    doubled: float = 0.0
    unheard: float = 0.0
    overtaken: float = 0.0


class Played:
    """A run against a world that answers in any order."""

    def __init__(self, policy: Settings, draw: random.Random, odds: Odds) -> None:
        self.policy, self.draw, self.odds = policy, draw, odds
        self.auditor = oracle.Auditor(policy)
        self.events: list[Event] = []
        self.answers: list[tuple[Action, ...]] = []
        self.states: list[State] = [begin()]
        self.running: dict[str, StartTrial] = {}
        self.unheard: dict[str, StartTrial] = {}
        self.waiting: list[Event] = [Opened(version=0)]
        self.applied = self.reopened = 0
        self.oldest: dict[str, int] = {}
        self.seen: Counter[str] = Counter()

    def run(self) -> Played:
        """Until it has finished; every run does."""
        for _ in range(3000):
            if self.auditor.finished:
                return self
            if self.events and self.draw.random() < self.odds.doubled:
                self.once_more(self.draw.choice(self.events[self.reopened :]))
            self.hear(self.next_event())
        raise AssertionError("the run does not end")

    def hear(self, event: Event) -> None:
        """One event, audited, and what follows from it."""
        state, actions = react(self.policy, self.states[-1], event)
        self.events.append(event)
        self.answers.append(actions)
        self.states.append(state)
        self.auditor.audit(event, actions)
        self.count(event, actions)
        for action in actions:
            self.carry_out(action)

    def once_more(self, event: Event) -> None:
        """An event that has been heard changes nothing; one that cannot follow is refused."""
        state = self.states[-1]
        if isinstance(event, TrialEnded):
            assert react(self.policy, state, event) == (state, ())
            self.seen["an end came twice"] += 1
        elif not isinstance(event, StopAsked | CapacityChanged | Reopened) and not state.finished:
            try:
                react(self.policy, state, event)
            except ValueError:
                self.seen["an answer that came twice was refused"] += 1
            else:
                raise AssertionError(f"{event} must be refused")

    def next_event(self) -> Event:
        """A trial ends, or the trainer or the engine answers; or something goes wrong."""
        if self.events and self.draw.random() < self.odds.killed:
            return self.killed() if self.draw.random() < 0.5 else self.other_room()
        if self.running and self.draw.random() < self.odds.stop:
            return StopAsked()
        while self.running and self.draw.random() < self.odds.unheard:
            name = self.draw.choice(list(self.running))
            self.unheard[name] = self.running.pop(name)
        if not self.running and not self.waiting:
            return self.found_out()
        if self.waiting and (not self.running or self.draw.random() < 0.4):
            return self.answered(self.draw.randrange(len(self.waiting)))
        last = self.draw.random() < self.odds.overtaken
        index = len(self.running) - 1 if last else self.draw.randrange(len(self.running))
        score = None if self.draw.random() < self.odds.broken else self.draw.choice([0.0, 0.5, 1.0, 1.0])
        return self.ended(index, score, blameless=score is None and self.draw.random() < 0.2)

    def answered(self, index: int) -> Event:
        """The trainer, the engine or the disk is done."""
        event = self.waiting.pop(index)
        self.applied = event.version if isinstance(event, WeightsApplied) else self.applied
        return event

    def ended(self, index: int, score: float | None, *, blameless: bool) -> Event:
        """One of the trials that run is over."""
        start = self.running.pop(list(self.running)[index])
        self.oldest[start.trial_id] = oldest = self.draw.randint(start.policy_version, self.applied)
        return replace(oracle.ended(start, score, oldest, self.applied), blameless=blameless)

    def killed(self) -> Event:
        """From either version on disk; nobody answers any more."""
        self.running, self.unheard, self.waiting = {}, {}, []
        self.applied, self.reopened = self.draw.choice(self.states[-1].saved), len(self.events)
        return Reopened(version=self.applied)

    def other_room(self) -> Event:
        """More trials side by side, or fewer."""
        return CapacityChanged(max_running=self.draw.randint(1, 12))

    def found_out(self) -> Event:
        """The worker of a trial that was silent is found dead; until then nothing but its place was lost."""
        self.check_standstill()
        start = self.unheard.pop(self.draw.choice(list(self.unheard)))
        self.seen["an end was not heard"] += 1
        return replace(oracle.ended(start, None, self.applied, self.applied), blameless=True)

    def check_standstill(self) -> None:
        """With a place free, as many groups are under way as may be, and too few are ready, or one is waited for."""
        state, policy = self.states[-1], self.policy
        room = policy.max_running if state.max_running is None else state.max_running
        if len(state.running) >= room or state.ending or state.evaluating is not None or state.redo:
            return
        groups = [g for g in state.groups.values() if g.purpose == "train"]
        admitted = min(policy.max_staleness + 1, policy.steps - state.trained) * policy.batch_groups
        assert len(groups) == admitted
        assert sum(g.ready > 0 for g in groups) < policy.batch_groups or self.held_back()
        self.seen["a standstill with a place free"] += 1

    def held_back(self) -> bool:
        """Whether enough groups are ready and nothing but a rule of order or lateness is in the way."""
        policy = self.policy
        return (
            policy.order == "admission"
            or policy.late_group == "wait"
            or policy.max_late is not None
            or (self.states[-1].trained < policy.in_order_steps)
        )

    def carry_out(self, action: Action) -> None:
        """What the shell would do."""
        if isinstance(action, StartTrial):
            self.running[action.trial_id] = action
        elif isinstance(action, Train):
            self.waiting.append(StepTrained(version=action.version + 1))
        elif isinstance(action, SyncWeights):
            self.waiting.append(WeightsApplied(version=action.version))
        elif isinstance(action, Save):
            self.waiting.append(Saved(version=action.version))

    def count(self, event: Event, actions: tuple[Action, ...]) -> None:
        """What has happened, so that a law that was never put to the test is noticed."""
        self.seen[type(event).__name__] += 1
        if isinstance(event, TrialEnded):
            self.seen["a system error"] += event.kind == "system_error"
            self.seen["a blameless error"] += event.blameless
        for action in actions:
            self.seen[type(action).__name__] += 1
            if isinstance(action, DropGroup):
                self.seen[f"dropped: {action.reason}"] += 1
            elif isinstance(action, StartTrial):
                self.seen["another attempt"] += action.attempt > 0
            elif isinstance(action, Train):
                self.seen["masked"] += any(self.oldest[t] < action.min_version for t in action.trial_ids)
                self.seen["a step taken again"] += action.version < self.states[-1].caught_up_at
            elif isinstance(action, Finished):
                self.seen["too many errors" if " of the last " in action.reason else action.reason] += 1
        state = self.states[-1]
        ready = sum(g.ready > 0 for g in state.groups.values())
        idle = state.applied == state.trained and not (state.training or state.saving or state.ending)
        self.seen["waited"] += (
            idle and ready >= self.policy.batch_groups and state.trained < self.policy.steps
        )
