"""Laws of core.schedule: whatever ends when, the run ends, nothing is too old, and history repeats itself."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from oracle.played_schedule import Odds, Played, policy_of

from core import schedule
from core.schedule import (
    CancelTrial,
    CapacityChanged,
    DropGroup,
    EvaluationEnded,
    Finished,
    Group,
    Opened,
    Reopened,
    Sample,
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
from core.schedule import order as order_of_steps

BASE = {
    "steps": 3,
    "batch_groups": 2,
    "group_size": 3,
    "max_staleness": 1,
    "max_running": 6,
    "max_retries": 1,
    "min_valid": 2,
    "tolerance": 1e-6,
    "max_zero_variance": 3,
    "max_lost": 10**6,
    "order": "oldest",
    "in_order_steps": 0,
    "late_group": "wait",
    "requeue_stale": False,
    "task_count": 5,
    "seed": 7,
    "save_every": 0,
    "evaluate_at": (),
    "evaluation_tasks": 2,
    "evaluation_samples": 2,
}


def settings_of(**changes) -> Settings:
    return Settings(**{**BASE, **changes})


@dataclass
class World:
    """A shell with a fake clock: what is pending ends in an order drawn from a seed."""

    settings: Settings
    seed: int
    lost_rate: float = 0.1
    solved_rate: float = 0.5
    slow_rate: float = 0.2
    stop_after: int | None = None
    crashes: tuple[int, ...] = ()
    older: bool = False
    events: list = field(default_factory=list)
    actions: list = field(default_factory=list)
    states: list = field(default_factory=list)
    versions: dict = field(default_factory=dict)
    newest: dict = field(default_factory=dict)
    fixed: dict = field(default_factory=dict)
    blameless_rate: float = 0.0
    kinds: dict = field(default_factory=dict)

    def run(self, version: int = 0, limit: int = 20000) -> World:
        for record in (self.events, self.actions, self.states, self.versions, self.newest):
            record.clear()
        self.kinds = dict(self.fixed)
        rng = random.Random(self.seed)
        state, applied = schedule.begin(), version
        pending: list[tuple[float, Any]] = [(0.0, Opened(version=version))]
        clock = 0.0
        while pending:
            assert len(self.events) < limit, "the run does not end"
            if len(self.events) in self.crashes and not state.finished:
                applied = state.saved[0] if self.older else state.saved[-1]
                pending = [(clock, Reopened(version=applied))]
            pending.sort(key=lambda item: item[0])
            clock, event = pending.pop(0)
            if isinstance(event, StartTrial):
                event = self.trial_ends(event, rng, applied)
            if isinstance(event, WeightsApplied):
                applied = event.version
            events: list[Any] = [event]
            if self.stop_after is not None and len(self.events) == self.stop_after:
                events.append(StopAsked())
            for each in events:
                state, actions = schedule.react(self.settings, state, each)
                self.events.append(each)
                self.actions.append(actions)
                self.states.append(state)
                for action in actions:
                    delay = rng.random() * (20 if rng.random() < self.slow_rate else 1)
                    if isinstance(action, StartTrial):
                        pending.append((clock + delay, action))
                    elif isinstance(action, CancelTrial):
                        (index,) = [
                            i
                            for i, (_, p) in enumerate(pending)
                            if getattr(p, "trial_id", "") == action.trial_id
                        ]
                        self.kinds[action.trial_id] = "cancelled"
                        pending[index] = (clock, pending[index][1])
                    elif isinstance(action, Train):
                        pending.append((clock + 2 * delay, StepTrained(version=action.version + 1)))
                    elif isinstance(action, SyncWeights):
                        pending.append((clock + delay / 5, WeightsApplied(version=action.version)))
                    elif isinstance(action, Save):
                        pending.append((clock + delay / 2, Saved(version=action.version)))
        return self

    def trial_ends(self, action: StartTrial, rng: random.Random, applied: int) -> TrialEnded:
        kind = "system_error" if rng.random() < self.lost_rate else "solved"
        kind = self.kinds.setdefault(action.trial_id, kind)
        blameless = kind == "system_error" and rng.random() < self.blameless_rate
        first = rng.randint(action.policy_version, applied)
        self.versions[action.trial_id] = first
        self.newest[action.trial_id] = applied
        valid = kind == "solved"
        return TrialEnded(
            trial_id=action.trial_id,
            kind=kind,
            valid=valid,
            reward=float(rng.random() < self.solved_rate) if valid else None,
            version_min=first if valid else None,
            version_max=applied if valid else None,
            blameless=blameless,
        )

    def said(self, kind):
        return [action for actions in self.actions for action in actions if isinstance(action, kind)]


@st.composite
def worlds(draw, **fixed):
    late = fixed.get("late_group") or draw(st.sampled_from(["wait", "drop", "mask", "mask", "train"]))
    changes = {
        "steps": draw(st.integers(0, 5)),
        "batch_groups": draw(st.integers(1, 4)),
        "group_size": draw(st.integers(2, 4)),
        "max_staleness": draw(st.integers(0, 3)),
        "max_running": draw(st.integers(1, 20)),
        "max_retries": draw(st.integers(0, 2)),
        "max_zero_variance": draw(st.integers(0, 4)),
        "order": draw(st.sampled_from(["oldest", "completion", "admission"])),
        "in_order_steps": draw(st.sampled_from([0, 0, 1, 3])),
        "late_group": late,
        "max_late": draw(st.sampled_from([None, 0, 1, 2])) if late == "mask" else None,
        "requeue_stale": draw(st.booleans()),
        "task_count": draw(st.integers(1, 9)),
        "evaluate_at": draw(st.sampled_from([(), (0,), (0, 3), (0, 1, 2, 3, 4, 5)])),
        **fixed,
    }
    return World(
        settings_of(**changes),
        seed=draw(st.integers(0, 10**6)),
        lost_rate=draw(st.sampled_from([0.0, 0.1, 0.4])),
        solved_rate=draw(st.sampled_from([0.0, 0.5, 0.9])),
    )


@given(world=worlds())
@example(World(settings_of(max_running=1, max_staleness=0), seed=0))
def test_every_run_takes_all_its_steps_and_finishes(world):
    """No deadlock for any order of ends, any losses, all rewards equal included."""
    world.run()
    assert world.states[-1].finished
    assert world.actions[-1][-1] == Finished(reason="all steps trained")
    assert [train.version for train in world.said(Train)] == list(range(world.settings.steps))
    assert [sync.version for sync in world.said(SyncWeights)] == list(range(world.settings.steps + 1))
    assert len(world.said(Finished)) == 1


@given(world=worlds())
def test_no_trained_token_is_older_than_the_bound(world):
    """Whole trajectories, or what the step says to leave out of them; every group has something left to train."""
    world.run()
    late, bound = world.settings.late_group, world.settings.max_staleness
    for train in world.said(Train):
        assert train.min_version == (0 if late == "train" else max(0, train.version - bound))
        assert all(world.versions[trial] <= train.version for trial in train.trial_ids)
        if late in ("wait", "drop"):
            assert all(world.versions[trial] >= train.min_version for trial in train.trial_ids)
        fresh = {t.split("-")[1] for t in train.trial_ids if world.newest[t] >= train.min_version}
        assert late == "train" or fresh == {str(group) for group in train.group_ids}


@given(world=worlds(late_group="train"))
def test_where_age_is_bounded_on_average_alone_nothing_is_dropped_for_it(world):
    world.run()
    assert not [drop for drop in world.said(DropGroup) if drop.reason == "stale"]


@given(world=worlds(late_group="mask"))
def test_where_old_tokens_are_masked_a_group_is_dropped_only_if_no_other_are_left(world):
    world.run()
    valid = {e.trial_id: e for e in world.events if isinstance(e, TrialEnded) and e.valid}
    for actions, state in zip(world.actions, world.states):
        for drop in (a for a in actions if isinstance(a, DropGroup) and a.reason == "stale"):
            mine = [e for t, e in valid.items() if t.startswith(f"train-{drop.group_id}-")]
            newest = [e.version_max for e in mine if e.version_max is not None]
            assert max(newest) < state.trained + bool(state.training) - world.settings.max_staleness


@given(world=worlds(late_group="mask"), most=st.integers(0, 3))
def test_a_step_leaves_no_more_groups_too_old_than_it_may(world, most):
    """Those that are under way or ready and have, or may have, a token that the next step must leave out."""
    world.settings = replace(world.settings, max_late=most)
    world.run()
    for actions, state in zip(world.actions, world.states):
        for train in (a for a in actions if isinstance(a, Train)):
            least = train.version + 1 - world.settings.max_staleness
            old = [g for g in state.groups.values() if g.purpose == "train" and g.born < least]
            assert len(old) <= most


@given(world=worlds(late_group="mask", max_late=0))
def test_masking_that_waits_for_every_group_is_waiting_and_masks_nothing(world):
    world.run()
    assert all(world.versions[t] >= train.min_version for train in world.said(Train) for t in train.trial_ids)
    masked = list(world.actions)
    world.settings = replace(world.settings, late_group="wait", max_late=None)
    assert world.run().actions == masked


@given(world=worlds(late_group="mask", max_late=None))
def test_masking_that_may_leave_any_number_too_old_never_waits(world):
    actions = list(world.run().actions)
    world.settings = replace(world.settings, max_late=10**6)
    assert world.run().actions == actions


@given(world=worlds(order="admission"))
def test_in_the_order_of_admission_no_group_is_overtaken(world):
    world.run()
    trained = [group for train in world.said(Train) for group in train.group_ids]
    assert trained == sorted(trained)


@given(world=worlds(order="completion", late_group="train", in_order_steps=0))
def test_in_the_order_of_completion_the_first_that_are_ready_are_trained(world):
    world.run()
    trained = [group for train in world.said(Train) for group in train.group_ids]
    ready = {}
    for state in world.states:
        ready |= {g.group_id: g.ready for g in state.groups.values() if g.ready}
    assert [ready[g] for g in trained if g in ready] == sorted(ready[g] for g in trained if g in ready)


@given(world=worlds(in_order_steps=2, late_group="drop"))
def test_the_first_steps_may_be_taken_in_order(world):
    world.run()
    first = [group for train in world.said(Train)[:2] for group in train.group_ids]
    assert first == sorted(first)
    for train in world.said(Train)[:2]:
        left = [s for s in world.states if s.training == train.group_ids][0].groups.values()
        assert all(g.group_id > max(train.group_ids) for g in left if g.purpose == "train")


@given(world=worlds(late_group="wait"))
def test_waiting_for_late_groups_drops_none_as_too_old(world):
    world.run()
    assert not [drop for drop in world.said(DropGroup) if drop.reason == "stale"]


@given(world=worlds(max_staleness=0))
def test_staleness_zero_is_synchronous(world):
    world.run()
    for train in world.said(Train):
        assert {world.versions[trial] for trial in train.trial_ids} == {train.version}
    for state in world.states:
        if state.training:
            assert not [g for g in state.groups.values() if g.purpose == "train"]


@given(world=worlds())
def test_running_trials_never_exceed_the_cap(world):
    world.run()
    assert all(len(state.running) <= world.settings.max_running for state in world.states)
    assert not world.states[-1].running


@given(world=worlds())
def test_groups_under_way_never_exceed_the_admission_bound(world):
    world.run()
    s = world.settings
    for state in world.states:
        if state.applied is not None:
            under_way = sum(g.purpose == "train" for g in state.groups.values()) + len(state.training)
            bound = (s.max_staleness + state.applied + 1) * s.batch_groups
            assert state.trained * s.batch_groups + under_way <= min(bound, s.steps * s.batch_groups)


@given(world=worlds(evaluate_at=(0, 1, 2, 3, 4, 5)))
def test_a_running_sample_is_no_older_than_the_weights_it_started_from(world):
    world.run()
    for actions, state in zip(world.actions, world.states):
        for start in (action for action in actions if isinstance(action, StartTrial)):
            sample = state.groups[start.group_id].samples[start.sample]
            assert (sample.status, sample.version) == ("running", start.policy_version)
        assert {g.ready for g in state.groups.values() if g.purpose == "eval"} <= {0}


@given(world=worlds(requeue_stale=True))
def test_no_group_is_drawn_before_a_trial_of_it_starts(world):
    world.run()
    for state in world.states:
        groups = [g for g in state.groups.values() if g.purpose == "train"]
        assert all(any(s.status != "waiting" or s.attempt for s in g.samples) for g in groups)


@given(world=worlds(max_zero_variance=4))
def test_dropped_groups_are_counted_anew_after_every_step(world):
    world.run()
    for actions, state in zip(world.actions, world.states):
        if any(isinstance(action, Train) for action in actions):
            assert (state.zero_variance, state.lost) == (0, 0)


@pytest.mark.parametrize("changes", [{"trained": 3, "applied": 3}, {"ending": "stop asked"}])
def test_no_step_is_chosen_beyond_the_last_nor_once_the_run_ends(changes):
    samples = (Sample(status="valid"), Sample(status="valid", reward=1.0))
    groups = {i: Group(group_id=i, task=i, purpose="train", ready=i + 1, samples=samples) for i in range(2)}
    settings = settings_of(max_staleness=3)
    state = replace(schedule.begin(), trained=2, applied=2, groups=groups)
    assert order_of_steps.train(settings, state)[1] == (
        Train(
            version=2,
            group_ids=(0, 1),
            trial_ids=("train-0-0-0", "train-0-1-0", "train-1-0-0", "train-1-1-0"),
            min_version=0,
        ),
    )
    state = replace(state, **changes)
    assert order_of_steps.train(settings, state) == (state, ())


@given(world=worlds())
def test_a_batch_has_its_groups_once_with_enough_valid_trials(world):
    world.run()
    trained = [g for train in world.said(Train) for g in train.group_ids]
    dropped = [drop.group_id for drop in world.said(DropGroup)]
    assert len(set(trained + dropped)) == len(trained + dropped)
    ended = {e.trial_id: e for e in world.events if isinstance(e, TrialEnded)}
    for train in world.said(Train):
        assert len(train.group_ids) == world.settings.batch_groups
        per_group = Counter(int(trial.split("-")[1]) for trial in train.trial_ids)
        assert set(per_group) == set(train.group_ids)
        assert all(2 <= n <= world.settings.group_size for n in per_group.values())
        assert all(ended[trial].valid for trial in train.trial_ids)


@given(world=worlds())
def test_a_system_error_is_tried_again_so_often_and_never_trained(world):
    """A trial without a reward is no zero."""
    world.run()
    attempts = defaultdict(list)
    for start in world.said(StartTrial):
        attempts[start.group_id, start.sample].append(start)
    for starts in attempts.values():
        assert [s.attempt for s in starts] == list(range(len(starts)))
        assert len(starts) <= world.settings.max_retries + 1
        assert all(world.kinds[s.trial_id] == "system_error" for s in starts[:-1])
    trained = {trial for train in world.said(Train) for trial in train.trial_ids}
    assert all(world.kinds[trial] == "solved" for trial in trained)


@given(world=worlds(max_retries=0))
def test_an_error_of_what_trials_share_is_nobodys_error_and_tried_again_however_often(world):
    world.lost_rate, world.blameless_rate = 0.4, 1.0
    world.run()
    assert not [drop for drop in world.said(DropGroup) if drop.reason == "lost"]
    assert all(s.errors == 0 for state in world.states for g in state.groups.values() for s in g.samples)
    assert not any(state.recent.count(True) for state in world.states)
    trained = Counter(trial.split("-")[1] for train in world.said(Train) for trial in train.trial_ids)
    assert set(trained.values()) <= {world.settings.group_size}


@given(
    world=worlds(save_every=1),
    share=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
    window=st.integers(1, 12),
    crashes=st.lists(st.integers(1, 60), max_size=2, unique=True),
)
def test_a_run_ends_when_the_system_broke_too_many_of_the_last_trials_and_not_before(
    world, share, window, crashes
):
    """Blameless and cancelled trials do not count, nor does what came before an end when the run is reopened."""
    world.settings = replace(world.settings, max_error_share=share, error_window=window)
    world.blameless_rate, world.crashes = 0.2, tuple(crashes)
    world.run()
    last, reason, before = [], "", schedule.begin()
    for event, state in zip(world.events, world.states):
        if isinstance(event, Reopened):
            last, reason = ([] if before.ending else last), ""
        if isinstance(event, TrialEnded) and event.trial_id in before.running:
            last += [event.kind == "system_error"] * (event.kind != "cancelled" and not event.blameless)
            errors, whole = sum(last[-window:]), len(last) >= window
            if whole and errors / window > share and not reason:
                told = f"{errors} of the last {window} trials were system errors"
                reason = f"{told}, more than max_error_share {share}"
        assert state.ending == reason
        before = state
    assert world.actions[-1][-1] == Finished(reason=reason or "all steps trained")


def test_a_bound_on_errors_is_met_exactly_and_fewer_than_the_window_are_not_judged():
    """29 of 100, where a product of floats would say that 29 is more than 0.29 * 100."""
    settings = settings_of(
        group_size=2, max_running=200, batch_groups=60, max_error_share=0.29, error_window=100
    )
    failed = [broken(i // 2, i % 2) for i in range(30)]
    solved = [end for g in range(20, 60) for end in ends(g, 0.0, 1.0)]
    state, _ = drive(settings, *failed[:29], *solved[:71])
    assert len(state.recent) == 100 and not state.ending
    state, _ = drive(settings, *failed, *solved[:69])
    assert len(state.recent) == 99 and not state.ending
    state, actions = drive(settings, *failed, *solved[:70])
    assert state.ending == "30 of the last 100 trials were system errors, more than max_error_share 0.29"
    assert set(actions[-1]) == {CancelTrial(trial_id=trial) for trial in state.running}


def broken(group, sample, attempt=0):
    return TrialEnded(
        trial_id=f"train-{group}-{sample}-{attempt}",
        kind="system_error",
        valid=False,
        reward=None,
        version_min=None,
        version_max=None,
    )


@given(world=worlds())
def test_every_start_is_unique_and_ends_once(world):
    world.run()
    started = [start.trial_id for start in world.said(StartTrial)]
    ended = [event.trial_id for event in world.events if isinstance(event, TrialEnded)]
    assert len(set(started)) == len(started) and sorted(started) == sorted(ended)


@given(world=worlds(requeue_stale=False))
def test_each_task_is_drawn_once_an_epoch(world):
    world.run()
    task = {s.group_id: s.task for s in world.said(StartTrial) if s.purpose == "train"}
    drawn, count = [task[g] for g in sorted(task)], world.settings.task_count
    for epoch in range(0, len(drawn), count):
        part = drawn[epoch : epoch + count]
        assert len(set(part)) == len(part)
    assert drawn == [schedule.task_at(world.settings, i) for i in range(len(drawn))]


def test_every_epoch_of_every_seed_has_an_order_of_its_own():
    def order(seed, epoch):
        settings = settings_of(task_count=20, seed=seed)
        return tuple(schedule.task_at(settings, 20 * epoch + i) for i in range(20))

    orders = {order(seed, epoch) for seed in (7, 8) for epoch in range(3)}
    assert len(orders) == 6 and all(sorted(each) == list(range(20)) for each in orders)


@given(world=worlds(late_group="drop", requeue_stale=True, max_staleness=1))
def test_a_task_dropped_as_too_old_is_drawn_again_first(world):
    world.run()
    stale = [drop.task for drop in world.said(DropGroup) if drop.reason == "stale"]
    first = {s.group_id: s.task for s in reversed(world.said(StartTrial)) if s.purpose == "train"}
    drawn = [first[g] for g in sorted(first)]
    fresh = [schedule.task_at(world.settings, i) for i in range(world.states[-1].drawn)]
    expected = Counter(fresh) + Counter(stale) - Counter(world.states[-1].requeued)
    assert Counter(drawn) == expected


@given(world=worlds(evaluate_at=(0, 1, 2, 3, 4, 5)))
def test_an_evaluation_sees_one_version_and_no_weights_move_meanwhile(world):
    world.run()
    labels = [ended.version for ended in world.said(EvaluationEnded)]
    assert labels == list(range(world.settings.steps + 1))
    evaluating = None
    for actions, state in zip(world.actions, world.states):
        for action in actions:
            if isinstance(action, StartTrial) and action.purpose == "eval":
                assert evaluating in (None, action.policy_version)
                evaluating = action.policy_version
            elif isinstance(action, EvaluationEnded):
                assert action.version == evaluating and state.applied == evaluating
                assert not [g for g in state.groups.values() if g.purpose == "eval"]
                evaluating = None
            elif isinstance(action, SyncWeights):
                assert evaluating is None
    per_version = Counter(
        s.policy_version for s in world.said(StartTrial) if s.purpose == "eval" and not s.attempt
    )
    assert set(per_version.values()) == {world.settings.evaluation_tasks * world.settings.evaluation_samples}


@given(world=worlds(evaluate_at=(0, 1, 2, 3, 4, 5)))
def test_training_trials_start_only_when_no_evaluation_trial_waits(world):
    world.run()
    for actions, state in zip(world.actions, world.states):
        if any(isinstance(a, StartTrial) and a.purpose == "train" for a in actions):
            evaluation = [g for g in state.groups.values() if g.purpose == "eval"]
            assert not any(s.status == "waiting" for g in evaluation for s in g.samples)


@given(world=worlds(), stop=st.integers(0, 60))
def test_a_stop_drains_and_finishes(world, stop):
    """Training is cancelled, an evaluation under way comes to its end, nothing waits for a version."""
    world.stop_after = stop
    world.run()
    assert world.states[-1].finished and not world.states[-1].running and not world.states[-1].training
    asked = next((i for i, e in enumerate(world.events) if isinstance(e, StopAsked)), len(world.events))
    after = [a for actions in world.actions[asked:] for a in actions]
    assert not [a for a in after if isinstance(a, Train | SyncWeights | DropGroup)]
    assert not [a for a in after if isinstance(a, StartTrial) and a.purpose == "train"]
    before = world.states[asked - 1] if asked else schedule.begin()
    if asked < len(world.events) and not before.finished:
        assert world.said(Finished) == [Finished(reason="stop asked")]
        training = [
            trial
            for trial, (group, _) in before.running.items()
            if group in before.groups and before.groups[group].purpose == "train"
        ]
        assert [a.trial_id for a in world.actions[asked] if isinstance(a, CancelTrial)] == training


@given(world=worlds(), stop=st.none() | st.integers(0, 60))
def test_the_same_events_give_the_same_actions(world, stop):
    world.stop_after = stop
    world.run()
    state, actions = schedule.replay(world.settings, world.events)
    assert actions == world.actions and state == world.states[-1]


@given(world=worlds(), where=st.integers(0, 10**6), stop=st.none() | st.integers(0, 60))
def test_an_end_that_comes_twice_or_from_nowhere_changes_nothing(world, where, stop):
    world.stop_after = stop
    world.run()
    ends = [i for i, e in enumerate(world.events) if isinstance(e, TrialEnded)]
    if ends:
        index = ends[where % len(ends)]
        state = world.states[index]
        assert schedule.react(world.settings, state, world.events[index]) == (state, ())


@given(world=worlds(), where=st.integers(0, 10**6))
def test_a_reaction_leaves_the_state_it_was_given_alone(world, where):
    world.run()
    index = where % len(world.events)
    state = world.states[index - 1] if index else schedule.begin()
    before = copy.deepcopy(state)
    schedule.react(world.settings, state, world.events[index])
    assert state == before


@given(world=worlds(), version=st.integers(0, 5))
def test_a_resumed_run_goes_on_to_the_last_step(world, version):
    """It admits what a run that got there admits; weights first."""
    version = min(version, world.settings.steps)
    world.run(version=version)
    assert [train.version for train in world.said(Train)] == list(range(version, world.settings.steps))
    assert world.actions[0] == (SyncWeights(version=version),)
    assert world.states[0].drawn == version * world.settings.batch_groups
    assert world.states[-1].finished


@given(
    world=worlds(save_every=2),
    crashes=st.lists(st.integers(1, 60), max_size=4, unique=True),
    stop=st.booleans(),
    older=st.booleans(),
)
def test_a_run_that_is_killed_goes_on_and_loses_nothing_that_ended(world, crashes, stop, older):
    """Whenever it is killed, and however often: the last line of weights has every step once, and no group twice.

    Also where the newest version on disk is damaged.
    """
    world.crashes, world.older = tuple(crashes), older
    world.stop_after = min(crashes, default=None) if stop else None
    world.run()
    line: dict[int, Train] = {}
    trained_before: dict[int, Train] = {}
    for event, actions in zip(world.events, world.actions):
        if isinstance(event, Reopened):
            trained_before |= {v: t for v, t in line.items() if v >= event.version}
            line = {version: train for version, train in line.items() if version < event.version}
        for train in (a for a in actions if isinstance(a, Train)):
            assert train.version == len(line) and trained_before.get(train.version, train) == train
            line[train.version] = train
    assert world.states[-1].finished
    assert len(line) == world.settings.steps or world.actions[-1][-1] != Finished(reason="all steps trained")
    trained = [group for train in line.values() for group in train.group_ids]
    assert len(set(trained)) == len(trained)
    assert not set(trained) & {drop.group_id for drop in world.said(DropGroup)}


@given(
    world=worlds(save_every=1, requeue_stale=True),
    crashes=st.lists(st.integers(1, 60), max_size=4, unique=True),
)
def test_the_ledger_of_tasks_balances(world, crashes):
    """Every task that was drawn is trained, dropped with a reason, or pending; one that got too old is drawn again."""
    world.crashes = tuple(crashes)
    world.run()
    state = world.states[-1]
    task = {s.group_id: s.task for s in world.said(StartTrial) if s.purpose == "train"}
    trained = {group for train in world.said(Train) for group in train.group_ids}
    dropped = {drop.group_id: drop for drop in world.said(DropGroup)}
    pending = {g.group_id for g in state.groups.values()} | set(state.training)
    assert not trained & set(dropped) and not pending & (trained | set(dropped))
    assert set(task) <= trained | set(dropped) | pending
    again = [drop.task for drop in dropped.values() if drop.reason == "stale"]
    opened = Counter(task.values()) + Counter(state.requeued)
    fresh = Counter(schedule.task_at(world.settings, i) for i in range(state.drawn))
    assert opened + Counter(state.groups[g].task for g in pending if g not in task) == fresh + Counter(again)


@given(world=worlds(save_every=1))
def test_a_save_comes_after_its_step_and_before_the_next(world):
    world.run()
    saved = [save.version for save in world.said(Save)]
    assert saved == list(range(1, world.settings.steps + 1))
    for state in world.states:
        assert not (state.saving and state.training)
        assert len(state.unsaved) == state.trained - state.saved[0] + bool(state.training)
        assert state.saved == tuple(range(max(0, state.saved[-1] - 1), state.saved[-1] + 1))


@given(world=worlds(save_every=1), crashes=st.lists(st.integers(1, 60), max_size=3, unique=True))
def test_a_killed_trial_is_tried_again_and_is_nobodys_error(world, crashes):
    world.lost_rate, world.crashes = 0.0, tuple(crashes)
    world.run()
    assert not [drop for drop in world.said(DropGroup) if drop.reason == "lost"]
    assert all(s.errors == 0 for state in world.states for g in state.groups.values() for s in g.samples)
    started = [start.trial_id for start in world.said(StartTrial)]
    assert len(set(started)) == len(started)


@given(world=worlds(), when=st.integers(2, 40), room=st.integers(1, 20))
def test_the_cap_may_change_and_ends_no_trial(world, when, room):
    world.run()
    state, _ = schedule.replay(world.settings, world.events[:when])
    changed, actions = schedule.react(world.settings, state, CapacityChanged(max_running=room))
    assert not [a for a in actions if isinstance(a, CancelTrial)]
    assert len(changed.running) <= max(room, len(state.running))


def drive(settings, *events):
    return schedule.replay(settings, [Opened(version=0), WeightsApplied(version=0), *events])


def ends(group, *rewards, version=0):
    return [
        TrialEnded(
            trial_id=f"train-{group}-{i}-0",
            kind="solved",
            valid=True,
            reward=reward,
            version_min=version,
            version_max=version,
        )
        for i, reward in enumerate(rewards)
    ]


def test_more_room_starts_more_at_once_and_less_starts_none_until_it_is_kept():
    settings = settings_of(group_size=2, batch_groups=3, max_running=2)
    state, actions = drive(settings, CapacityChanged(max_running=5))
    assert len([a for a in actions[-1] if isinstance(a, StartTrial)]) == 3 and len(state.running) == 5
    state, actions = drive(
        settings, CapacityChanged(max_running=5), CapacityChanged(max_running=4), *ends(0, 1.0)
    )
    assert actions[-1] == () and len(state.running) == 4


def test_a_group_whose_tokens_are_all_too_old_is_dropped_where_old_ones_are_masked():
    """One group a step, bound 1: at version 2 a token of version 0 is too old, and group 0 has no other."""
    settings = settings_of(steps=9, batch_groups=1, group_size=2, late_group="mask", max_running=9)
    later = [StepTrained(version=2), WeightsApplied(version=2)]
    for newest, dropped in ((0, [0]), (1, [])):
        old = [replace(end, version_max=newest) for end in ends(0, 1.0, 0.0)]
        _, actions = drive(settings, *OVERTAKING, *later, *old)
        assert [a.group_id for a in actions[-1] if isinstance(a, DropGroup)] == dropped
        steps = [a for a in actions[-1] if isinstance(a, Train)]
        assert [(a.group_ids, a.min_version) for a in steps] == ([] if dropped else [((0,), 1)])


TWO_STEPS = [
    *ends(0, 0.0, 1.0),
    StepTrained(version=1),
    WeightsApplied(version=1),
    *ends(1, 0.0, 1.0, version=1),
    StepTrained(version=2),
    WeightsApplied(version=2),
]


def test_a_run_that_is_killed_while_it_takes_steps_again_takes_them_again():
    settings = settings_of(steps=9, batch_groups=1, group_size=2, save_every=5)
    again = [Reopened(version=0), WeightsApplied(version=0)]
    _, actions = drive(
        settings, *TWO_STEPS, *again, *again, StepTrained(version=1), WeightsApplied(version=1)
    )
    steps = [(a.version, a.group_ids) for step in actions for a in step if isinstance(a, Train)]
    assert steps == [(0, (0,)), (1, (1,)), (0, (0,)), (0, (0,)), (1, (1,))]


def test_while_steps_are_taken_again_no_training_trial_starts_from_weights_that_are_too_old():
    base = {"steps": 9, "batch_groups": 1, "group_size": 2, "save_every": 5}
    again = [
        Reopened(version=0),
        WeightsApplied(version=0),
        StepTrained(version=1),
        WeightsApplied(version=1),
    ]
    # Groups that are there wait; with a larger bound and little room until now, others are not drawn beside them.
    settings = settings_of(**base, max_running=9)
    for each in (settings, settings_of(**base, max_running=2, max_staleness=3)):
        _, actions = drive(each, *TWO_STEPS, *again[:2], CapacityChanged(max_running=9), *again[2:])
        assert not [a for step in actions[-5:] for a in step if isinstance(a, StartTrial)]
    _, actions = drive(settings, *TWO_STEPS, *again, StepTrained(version=2), WeightsApplied(version=2))
    started = [a for a in actions[-1] if isinstance(a, StartTrial)]
    assert started and {a.policy_version for a in started} == {2}
    assert {a.attempt for a in started if a.group_id == 2} == {1}


def test_a_run_that_was_asked_to_stop_keeps_what_is_ready_and_draws_the_other_tasks_first():
    settings = settings_of(steps=9, batch_groups=2, group_size=2, save_every=1, max_running=9)
    finished = [
        TrialEnded(**{**CANCELLED, "trial_id": f"train-{g}-{i}-0"}) for g in (1, 2, 3) for i in (0, 1)
    ]
    state, _ = drive(settings, *ends(0, 0.0, 1.0), StopAsked(), *finished)
    assert state.finished and [g.group_id for g in state.groups.values()] == [0]
    let_go = [schedule.task_at(settings, i) for i in (1, 2, 3)]
    assert state.requeued == tuple(let_go)
    events = [*ends(0, 0.0, 1.0), StopAsked(), *finished, Reopened(version=0), WeightsApplied(version=0)]
    state, actions = drive(settings, *events)
    assert not state.ending and not state.finished
    tasks = [a.task for a in actions[-1] if isinstance(a, StartTrial) and a.sample == 0]
    assert tasks == let_go


@pytest.mark.parametrize(
    "event, text",
    [
        (CapacityChanged(max_running=0), "max_running must be positive, got 0"),
        (Saved(version=0), "Saved must follow Save of 0, got version 0"),
        (Reopened(version=1), "Reopened must be of a version that is on disk, 0, got 1"),
    ],
)
def test_news_that_cannot_be_is_refused(event, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        drive(settings_of(save_every=1), event)
    with pytest.raises(ValueError, match="save_every must be positive for a run to be reopened, got 0"):
        drive(settings_of(), Reopened(version=0))


@given(world=worlds(max_staleness=2, max_running=20, steps=5, batch_groups=1, group_size=2))
def test_rollouts_go_on_while_the_trainer_trains(world):
    world.slow_rate, world.solved_rate, world.lost_rate = 0.0, 0.5, 0.0
    world.run()
    assert any(
        state.training and any(g.purpose == "train" for g in state.groups.values()) for state in world.states
    )


def test_nothing_but_lost_groups_ends_the_run():
    world = World(settings_of(max_lost=2), seed=1, lost_rate=1.0).run()
    assert world.actions[-1][-1] == Finished(reason="too many lost groups")
    assert len([d for d in world.said(DropGroup) if d.reason == "lost"]) == 3


def test_a_policy_that_solves_everything_still_comes_to_its_end():
    """Groups without a signal leave the batch, up to a bound a step; then they fill it."""
    world = World(settings_of(max_zero_variance=2), seed=1, solved_rate=1.0, lost_rate=0.0).run()
    assert len(world.said(Train)) == 3
    drops = [sum(isinstance(a, DropGroup) for a in actions) for actions in world.actions]
    trains = [any(isinstance(a, Train) for a in actions) for actions in world.actions]
    since = [0]
    for dropped, trained in zip(drops, trains):
        since.append(0 if trained else since[-1] + dropped)
    assert max(since) == 2


def test_one_lost_trial_among_many_costs_nothing_else():
    world = World(settings_of(max_retries=0, max_zero_variance=0), seed=3, lost_rate=0.0)
    world.fixed["train-0-0-0"] = "system_error"
    world.run()
    assert not [d for d in world.said(DropGroup) if d.reason == "lost"]
    trials = {t for train in world.said(Train) for t in train.trial_ids}
    assert "train-0-0-0" not in trials and {"train-0-1-0", "train-0-2-0"} <= trials


CANCELLED = {"kind": "cancelled", "valid": False, "reward": None, "version_min": None, "version_max": None}

OVERTAKING = [
    *ends(1, 0.0, 1.0),
    StepTrained(version=1),
    WeightsApplied(version=1),
    *ends(2, 0.0, 1.0, version=1),
]


def test_a_second_stop_changes_nothing():
    first, _ = schedule.react(settings_of(), schedule.begin(), Opened(version=0))
    stopped, _ = schedule.react(settings_of(), first, StopAsked())
    again, actions = schedule.react(settings_of(), stopped, StopAsked())
    assert again == stopped and actions == () and again.ending == "stop asked"


def test_overtaken_groups_are_waited_for():
    """One group a step, bound 1; group 0 is slow. Group 2 may not be trained before it."""
    settings = settings_of(steps=9, batch_groups=1, group_size=2, late_group="wait")
    _, actions = drive(settings, *OVERTAKING)
    trained = [a.group_ids for step in actions for a in step if isinstance(a, Train)]
    assert trained == [(1,)]
    _, actions = drive(settings, *OVERTAKING, *ends(0, 1.0, 0.0))
    assert [a.group_ids for a in actions[-1] if isinstance(a, Train)] == [(0,)]


@pytest.mark.parametrize(("most", "steps"), [(0, []), (1, [((2,), 0)])])
def test_so_many_overtaken_groups_are_not_waited_for(most, steps):
    """One group a step, bound 1: the step on group 2 leaves group 0 too old."""
    settings = settings_of(steps=9, batch_groups=1, group_size=2, late_group="mask", max_late=most)
    _, actions = drive(settings, *OVERTAKING)
    trained = [(a.group_ids, a.min_version) for a in actions[-1] if isinstance(a, Train)]
    assert trained == steps


def test_overtaken_groups_are_dropped_where_asked():
    """Never trained at age 3 in silence."""
    settings = settings_of(steps=9, batch_groups=1, group_size=2, late_group="drop", max_running=9)
    more = [StepTrained(version=2), WeightsApplied(version=2), *ends(0, 1.0, 0.0)]
    _, actions = drive(settings, *OVERTAKING, *more)
    dropped = [a for step in actions for a in step if isinstance(a, DropGroup)]
    assert [(d.group_id, d.reason) for d in dropped] == [(0, "stale")]


def test_one_stale_member_cancels_the_rest_of_its_group_as_soon_as_the_next_step_begins():
    settings = settings_of(steps=9, batch_groups=1, group_size=2, late_group="drop", max_running=9)
    half = ends(0, 1.0)
    _, actions = drive(settings, *half, *OVERTAKING)
    assert actions[-1][:3] == (
        Train(version=1, group_ids=(2,), trial_ids=("train-2-0-0", "train-2-1-0"), min_version=0),
        DropGroup(group_id=0, task=schedule.task_at(settings, 0), reason="stale"),
        CancelTrial(trial_id="train-0-1-0"),
    )


@pytest.mark.parametrize("oldest, fate", [(0, "dropped"), (1, "trained"), (2, "trained")])
def test_age_counts_from_the_oldest_token_that_was_sampled(oldest, fate):
    """Group 0 was started at version 0 and ends at version 2 with bound 1; its tokens decide."""
    settings = settings_of(steps=9, batch_groups=1, group_size=2, late_group="drop", max_running=9)
    one, other = ends(0, 1.0, version=2)[0], ends(0, 1.0, 0.0, version=oldest)[1]
    _, actions = drive(settings, *OVERTAKING, StepTrained(version=2), WeightsApplied(version=2), one, other)
    dropped = [a.group_id for a in actions[-1] if isinstance(a, DropGroup)]
    trained = [a.group_ids for a in actions[-1] if isinstance(a, Train)]
    assert (dropped, trained) == (([0], []) if fate == "dropped" else ([], [(0,)]))


def test_a_surplus_of_finished_groups_stays_in_order():
    """Five are finished, three are needed."""
    settings = settings_of(batch_groups=3, group_size=2, max_running=99, max_staleness=3)
    finished = [event for group in (4, 1, 3, 0) for event in ends(group, 0.0, 1.0)]
    state, actions = drive(settings, *finished, *ends(2, 0.0, 1.0))
    assert [a.group_ids for step in actions for a in step if isinstance(a, Train)] == [(1, 3, 4)]
    assert [g.group_id for g in state.groups.values() if g.ready] == [0, 2]


@pytest.mark.parametrize(("tolerance", "dropped"), [(0.5, True), (0.25, False)])
def test_a_spread_of_the_tolerance_is_no_signal(tolerance, dropped):
    state, actions = drive(settings_of(group_size=2, tolerance=tolerance), *ends(0, 0.0, 0.5))
    drops = [a for step in actions for a in step if isinstance(a, DropGroup)]
    assert [drop.reason for drop in drops] == ["zero_variance"] * dropped
    assert state.zero_variance == len(drops)


def test_a_lost_trial_is_no_reward_that_differs():
    """Two of three solved it and one was lost: no signal, where a zero for the lost would be one."""
    settings = settings_of(min_valid=2, max_retries=0)
    _, actions = drive(settings, *ends(0, 1.0, 1.0), broken(0, 2))
    assert [a.reason for a in actions[-1] if isinstance(a, DropGroup)] == ["zero_variance"]


def test_a_trial_of_no_told_version_is_as_old_as_its_start():
    end = replace(ends(0, 1.0)[0], version_min=None, version_max=None)
    state, _ = drive(settings_of(), end)
    assert state.groups[0].samples[0] == Sample(status="valid", reward=1.0)
    assert state.syncing is False


@pytest.mark.parametrize(
    "event, text",
    [
        (StepTrained(version=1), "StepTrained must follow Train from 0, got version 1"),
        (WeightsApplied(version=0), "WeightsApplied must follow SyncWeights of 0, got version 0"),
        (Opened(version=0), "Opened must come once, got it again with version 0"),
        (ends(0, float("nan"))[0], "a valid reward must be finite, got nan"),
        (ends(0, float("-inf"))[0], "a valid reward must be finite, got -inf"),
        (
            TrialEnded(
                trial_id="train-0-0-0", kind="solved", valid=True, reward=None, version_min=0, version_max=0
            ),
            "a valid reward must be finite, got None",
        ),
    ],
)
def test_events_that_cannot_follow_are_refused(event, text):
    with pytest.raises(ValueError, match=text):
        drive(settings_of(), event)


def test_opening_past_the_last_step_is_refused():
    with pytest.raises(ValueError, match="version must lie between 0 and 3 steps, got 4"):
        schedule.replay(settings_of(), [Opened(version=4)])


@pytest.mark.parametrize(
    "change, text",
    [
        *(
            ({name: 0}, f"{name} must be positive, got 0")
            for name in (
                "batch_groups",
                "group_size",
                "max_running",
                "task_count",
                "evaluation_samples",
                "error_window",
            )
        ),
        *(
            ({name: -1}, f"{name} must not be negative, got -1")
            for name in (
                "steps",
                "max_staleness",
                "max_retries",
                "max_zero_variance",
                "max_lost",
                "evaluation_tasks",
                "in_order_steps",
            )
        ),
        *(
            ({name: value}, f"{name} must be a whole number, got {value}")
            for name in Settings.__annotations__
            if Settings.__annotations__[name] == "int"
            for value in (2.0, 1.5, math.inf, math.nan, True)
        ),
        *(
            ({"evaluate_at": (0, value)}, f"every version of evaluate_at must {text}, got {value}")
            for value, text in (
                (-1, "not be negative"),
                (1.0, "be a whole number"),
                (True, "be a whole number"),
            )
        ),
        *(
            ({"tolerance": value}, f"tolerance must not be negative and must be finite, got {value}")
            for value in (math.nan, -1e-9, math.inf)
        ),
        *(
            ({"max_error_share": value}, f"max_error_share must lie between 0 and 1, got {value}")
            for value in (math.nan, -0.1, 1.1)
        ),
        ({"min_valid": 1}, "min_valid must lie between 2 and group_size 3, got 1"),
        ({"min_valid": 4}, "min_valid must lie between 2 and group_size 3, got 4"),
        ({"group_size": 1}, "min_valid must lie between 2 and group_size 1, got 2"),
        ({"late_group": "hope"}, "late_group must be wait, drop, mask or train, got 'hope'"),
        ({"late_group": "mask", "max_late": -1}, "max_late must not be negative, got -1"),
        ({"late_group": "mask", "max_late": 1.0}, "max_late must be a whole number, got 1.0"),
        ({"max_late": 1}, "max_late must be None unless late_group is mask, got 1 with 'wait'"),
        ({"order": "any"}, "order must be oldest, completion or admission, got 'any'"),
    ],
)
def test_settings_that_cannot_run_are_refused(change, text):
    """Among them a group of one, which would train nothing."""
    with pytest.raises(ValueError, match=f"^{text}$"):
        settings_of(**change)


class AnyRun(RuleBasedStateMachine):
    """A run to which anything may happen next; whatever did, the auditor sees no promise broken, and it ends."""

    @initialize(seed=st.integers(0, 10**6))
    def opened(self, seed):
        self.played = Played(policy_of(random.Random(seed)), random.Random(seed), Odds())
        self.played.hear(self.played.answered(0))

    @precondition(lambda self: self.played.running)
    @rule(which=st.integers(0, 99), score=st.sampled_from([0.0, 1.0, None]), blameless=st.booleans())
    def a_trial_ends(self, which, score, blameless):
        which %= len(self.played.running)
        self.played.hear(self.played.ended(which, score, blameless=blameless and score is None))

    @precondition(lambda self: self.played.waiting)
    @rule(which=st.integers(0, 2))
    def an_answer_comes(self, which):
        self.played.hear(self.played.answered(which % len(self.played.waiting)))

    @rule()
    def the_run_is_killed_and_goes_on(self):
        self.played.auditor.finished = False
        self.played.hear(self.played.killed())

    @rule()
    def its_room_changes(self):
        self.played.hear(self.played.other_room())

    @precondition(lambda self: self.played.running)
    @rule()
    def a_stop_is_asked_for(self):
        self.played.hear(StopAsked())

    @rule(which=st.integers(0, 99))
    def an_event_comes_again(self, which):
        events = self.played.events[self.played.reopened :]
        self.played.once_more(events[which % len(events)])

    @precondition(lambda self: self.played.running)
    @rule()
    def an_end_is_not_heard(self):
        name, start = self.played.running.popitem()
        self.played.unheard[name] = start

    def teardown(self):
        if hasattr(self, "played"):
            self.played.run()


test_whatever_happens_next_no_promise_is_broken_and_the_run_ends = AnyRun.TestCase


SEQUENCES = 10_000
CHUNKS = 10


def played(seed):
    """A run of a kind, with faults and in an order that all follow from the seed."""
    draw = random.Random(seed)
    odds = Odds(
        broken=draw.choice((0.0, 0.1, 0.5)),
        stop=draw.choice((0.0, 0.0, 0.0, 0.02)),
        killed=draw.choice((0.0, 0.01, 0.05)),
        doubled=draw.choice((0.0, 0.1)),
        unheard=draw.choice((0.0, 0.0, 0.05, 0.3)),
        overtaken=draw.choice((0.0, 0.5, 0.9)),
    )
    return Played(policy_of(draw), draw, odds).run()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_law_holds_in_ten_thousand_random_runs(chunk):
    """An auditor counts along: admission, versions, ages, orders, attempts, reasons, the ledger, no deadlock.

    Trials end in any order, more than once, or are not heard of; the run is killed, its room changes, it is stopped.
    """
    seen = Counter()
    for seed in range(chunk, SEQUENCES, CHUNKS):
        seen += played(seed).seen
    assert seen["Opened"] == SEQUENCES // CHUNKS
    assert not {law: seen[law] for law, least in PUT_TO_THE_TEST.items() if seen[law] < least}


PUT_TO_THE_TEST = {
    "Reopened": 200,
    "CapacityChanged": 200,
    "StopAsked": 60,
    "EvaluationEnded": 500,
    "another attempt": 3000,
    "a blameless error": 1500,
    "an end came twice": 600,
    "an answer that came twice was refused": 300,
    "an end was not heard": 1000,
    "a standstill with a place free": 700,
    "waited": 1500,
    "masked": 5,
    "a step taken again": 100,
    "dropped: zero_variance": 600,
    "dropped: lost": 400,
    "dropped: stale": 5,
    "too many errors": 100,
    "too many lost groups": 60,
    "stop asked": 40,
    "all steps trained": 400,
}
"""How often a thousand runs must have met what the laws speak of."""
