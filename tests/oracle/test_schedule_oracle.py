"""core/schedule against an auditor that counts for itself, and its parts against loops over groups."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_schedule as oracle
from oracle.played_schedule import Odds, Played, policy_of

from core.schedule import (
    CancelTrial,
    DropGroup,
    EvaluationEnded,
    Event,
    Finished,
    Group,
    Opened,
    Sample,
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
    replay,
    task_at,
    trial_id,
)
from core.schedule.admission import fill
from core.schedule.evaluation import end_evaluation, start_evaluation
from core.schedule.order import drop_stale, train
from core.schedule.report import take
from core.schedule.state import drop, put

policies = st.randoms(use_true_random=False).map(policy_of)
worlds = st.tuples(policies, st.integers(0, 10**6).map(random.Random), st.sampled_from([0.0, 0.1, 0.5]))
World = tuple[Settings, random.Random, float]


@settings(max_examples=120)
@given(worlds)
def test_react_keeps_every_promise_whatever_the_world_answers(world: World) -> None:
    policy, draw, broken = world
    played = Played(policy, draw, Odds(broken=broken, doubled=0.1, overtaken=0.5)).run()
    if not played.states[-1].ending:
        assert played.auditor.trained == policy.steps
        assert sorted(played.auditor.evaluated) == sorted(policy.evaluate_at)


@settings(max_examples=60)
@given(worlds)
def test_react_keeps_every_promise_when_asked_to_stop(world: World) -> None:
    policy, draw, broken = world
    Played(policy, draw, Odds(broken=broken, stop=0.05)).run()


@settings(max_examples=60)
@given(worlds, st.sampled_from([0.05, 0.3, 0.5]))
def test_react_keeps_every_promise_when_ends_are_not_heard(world: World, unheard: float) -> None:
    policy, draw, broken = world
    Played(policy, draw, Odds(broken=broken, unheard=unheard)).run()


@settings(max_examples=150)
@given(worlds, st.sampled_from([0.01, 0.05]))
def test_react_keeps_every_promise_when_the_run_is_killed_and_goes_on(world: World, killed: float) -> None:
    policy, draw, broken = world
    played = Played(policy, draw, Odds(broken=broken, killed=killed, overtaken=0.5)).run()
    if not played.states[-1].ending:
        assert sorted(played.auditor.line) == list(range(policy.steps)) and not played.auditor.again


@settings(max_examples=40)
@given(worlds)
def test_replay_is_react_event_by_event(world: World) -> None:
    policy, draw, broken = world
    played = Played(policy, draw, Odds(broken=broken, stop=0.01, killed=0.01)).run()
    state, answers = replay(policy, played.events)
    assert state == played.states[-1]
    assert [tuple(one) for one in answers] == played.answers


@settings(max_examples=40)
@given(worlds)
def test_after_react_nothing_more_can_start_train_or_be_dropped(world: World) -> None:
    policy, draw, broken = world
    played = Played(policy, draw, Odds(broken=broken)).run()
    for state in played.states[1:-1]:
        for part in (fill, train, drop_stale, end_evaluation):
            after, actions = part(policy, state)
            assert not actions and after == state, part.__name__


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 99))
def test_task_at_draws_every_task_once_an_epoch(count: int, index: int, seed: int) -> None:
    policy = replace(POLICY, task_count=count, seed=seed)
    assert task_at(policy, index) == oracle.task_at(policy, index)


def test_twelve_tasks_in_three_epochs_have_three_orders_and_no_tail_is_left_out() -> None:
    policy = replace(POLICY, task_count=12)
    epochs = [tuple(task_at(policy, 12 * epoch + k) for k in range(12)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len(set(epochs)) == 3


# The parts, on states made by hand.

POLICY = Settings(
    steps=9,
    batch_groups=2,
    group_size=2,
    max_staleness=1,
    max_running=8,
    max_retries=1,
    min_valid=2,
    tolerance=0.0,
    max_zero_variance=5,
    max_lost=5,
    order="oldest",
    in_order_steps=0,
    late_group="drop",
    requeue_stale=True,
    task_count=10,
    seed=0,
    save_every=0,
    evaluate_at=(),
    evaluation_tasks=2,
    evaluation_samples=2,
)


Status = Literal["waiting", "running", "valid", "lost"]


def group(
    number: int,
    *versions: int,
    status: Status = "valid",
    purpose: Literal["train", "eval"] = "train",
    ready: bool = True,
) -> Group:
    """A group with one sample per version, rewards 0, 1, ..."""
    samples = tuple(
        Sample(attempt=0, status=status, version=v, newest=v, reward=float(k)) for k, v in enumerate(versions)
    )
    return Group(
        group_id=number,
        task=number % 10,
        purpose=purpose,
        ready=number + 1 if ready else 0,
        samples=samples,
    )


def state_of(*groups: Group, trained: int = 3, applied: int | None = 3, **rest: object) -> State:
    """A run in its middle."""
    running = {
        trial_id(one, k): (one.group_id, k)
        for one in groups
        for k, sample in enumerate(one.samples)
        if sample.status == "running"
    }
    return State(
        trained=trained,
        applied=applied,
        groups={one.group_id: one for one in groups},
        running=running,
        next_group=max((one.group_id for one in groups), default=-1) + 1,
        drawn=max((one.group_id for one in groups), default=-1) + 1,
        **rest,  # type: ignore[arg-type]
    )


def test_begin_is_a_run_of_which_nothing_is_known() -> None:
    state = begin()
    assert (state.trained, state.applied, state.syncing, state.training) == (0, None, False, ())
    assert not state.groups and not state.running and not state.finished and not state.ending


def test_trial_id_is_purpose_group_sample_attempt() -> None:
    one = Group(
        group_id=12,
        task=1,
        purpose="train",
        ready=0,
        samples=(Sample(), Sample(), Sample(), Sample(attempt=2)),
    )
    assert [trial_id(one, k) for k in range(4)] == [
        "train-12-0-0",
        "train-12-1-0",
        "train-12-2-0",
        "train-12-3-2",
    ]


@given(st.lists(st.integers(0, 6), unique=True, max_size=5), st.integers(0, 6))
def test_put_replaces_one_group_and_leaves_the_others(numbers: list[int], number: int) -> None:
    before = state_of(*(group(n, 1, 1) for n in numbers))
    after = put(before, group(number, 2, 2))
    expected = {n: group(n, 1, 1) for n in numbers} | {number: group(number, 2, 2)}
    assert dict(after.groups) == expected
    assert dict(before.groups) == {n: group(n, 1, 1) for n in numbers}


@pytest.mark.parametrize("reason", ["zero_variance", "lost", "stale"])
def test_drop_cancels_what_runs_of_a_group_and_forgets_it(reason: str) -> None:
    mine, other = group(4, 1, 1, status="running", ready=False), group(5, 2, 2, status="running", ready=False)
    state, actions = drop(state_of(mine, other), mine, reason)  # type: ignore[arg-type]
    assert set(state.groups) == {5}
    assert {a.trial_id for a in actions if isinstance(a, CancelTrial)} == {"train-4-0-0", "train-4-1-0"}
    assert [a for a in actions if isinstance(a, DropGroup)] == [DropGroup(group_id=4, task=4, reason=reason)]  # type: ignore[arg-type]
    assert set(state.running) >= {"train-5-0-0", "train-5-1-0"}


ready_groups = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=5)


@given(ready_groups, st.integers(0, 3), st.integers(0, 2))
def test_drop_stale_drops_exactly_what_is_too_old_for_the_next_step(
    rows: list[tuple[int, int, bool]], trained: int, lag: int
) -> None:
    policy = replace(POLICY, max_staleness=lag)
    groups = [group(n, one, two) for n, (one, two, _) in enumerate(rows)]
    state, actions = drop_stale(policy, state_of(*groups, trained=trained, applied=trained))
    old = [n for n, (one, two, _) in enumerate(rows) if trained - min(one, two) > lag]
    assert [a.group_id for a in actions if isinstance(a, DropGroup)] == old
    assert all(a.reason == "stale" for a in actions if isinstance(a, DropGroup))
    assert sorted(state.groups) == [n for n in range(len(rows)) if n not in old]


@given(st.lists(st.booleans(), max_size=5), st.integers(1, 3))
def test_train_takes_the_oldest_ready_groups_if_they_fill_a_batch(ready: list[bool], batch: int) -> None:
    policy = replace(POLICY, batch_groups=batch)
    groups = [group(n, 3, 3, status="valid" if r else "running", ready=r) for n, r in enumerate(ready)]
    state, actions = train(policy, state_of(*groups))
    oldest = [n for n, r in enumerate(ready) if r][:batch]
    if len(oldest) < batch:
        assert not actions
        return
    trials = tuple(f"train-{n}-{k}-0" for n in oldest for k in range(2))
    step = Train(version=3, group_ids=tuple(oldest), trial_ids=trials, min_version=2)
    assert list(actions) == [step]
    assert state.training == tuple(oldest)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=7),
    st.integers(1, 2),
    st.integers(0, 3),
    st.sampled_from([None, 0, 1, 2]),
)
def test_train_waits_exactly_when_any_plan_leaves_more_groups_too_old_than_may(
    rows: list[tuple[int, bool]], batch: int, lag: int, most: int | None
) -> None:
    policy = replace(POLICY, batch_groups=batch, max_staleness=lag, late_group="mask", max_late=most)
    groups = [group(n, v, v, status="valid" if r else "running", ready=r) for n, (v, r) in enumerate(rows)]
    _, actions = train(policy, state_of(*groups))
    chosen = sorted((one for one in groups if one.ready), key=lambda one: (one.born, one.group_id))[:batch]
    places = [(version, k) for version in range(4, 8) for k in range(batch)]
    left = [[p for p in places if p[0] - one.born <= lag] for one in groups if one not in chosen]
    late = len(left) - oracle.most_matched(left)
    assert bool(actions) == (len(chosen) == batch and (most is None or late <= most))


@given(
    st.lists(st.tuples(st.sampled_from(["train", "eval"]), st.integers(0, 2)), max_size=4), st.integers(1, 12)
)
def test_fill_starts_evaluation_first_then_the_oldest_group_then_a_new_one(
    rows: list[tuple[str, int]], slots: int
) -> None:
    def samples(waiting: int) -> tuple[Sample, ...]:
        return tuple(
            Sample(attempt=0, status="waiting" if k < waiting else "running", version=3, reward=0.0)
            for k in range(2)
        )

    groups = [
        Group(group_id=n, task=n, purpose=purpose, ready=0, samples=samples(waiting))  # type: ignore[arg-type]
        for n, (purpose, waiting) in enumerate(rows)
    ]
    evaluating = 3 if any(purpose == "eval" for purpose, _ in rows) else None
    before = state_of(*groups, evaluating=evaluating)
    policy = replace(POLICY, max_running=max(slots, len(before.running)), max_staleness=0)
    _, actions = fill(policy, before)
    queue = [
        (purpose, n, sample)
        for purpose in ("eval", "train")
        for n, (mine, waiting) in enumerate(rows)
        for sample in range(waiting)
        if mine == purpose
    ]
    room = policy.max_running - len(before.running)
    alive = sum(1 for purpose, _ in rows if purpose == "train")
    allowed = max(0, 4 * policy.batch_groups - 3 * policy.batch_groups - alive)
    new = [("train", len(rows) + k, sample) for k in range(allowed) for sample in range(2)]
    expected = (queue + new)[:room]
    assert [(a.purpose, a.group_id, a.sample) for a in actions if isinstance(a, StartTrial)] == expected
    assert len(actions) == len(expected)


@given(st.sets(st.integers(0, 4)), st.integers(0, 4))
def test_start_evaluation_opens_every_task_of_a_version_that_is_asked_for(
    wanted: set[int], version: int
) -> None:
    policy = replace(POLICY, evaluate_at=tuple(sorted(wanted)))
    state, _ = start_evaluation(policy, state_of(trained=version, applied=version))
    opened = [one for one in state.groups.values() if one.purpose == "eval"]
    assert state.evaluating == (version if version in wanted else None)
    assert [one.task for one in opened] == ([0, 1] if version in wanted else [])
    assert all(len(one.samples) == policy.evaluation_samples for one in opened)


@pytest.mark.parametrize("status", ["waiting", "running", "valid", "lost"])
def test_end_evaluation_waits_for_the_last_trial(status: Status) -> None:
    one, two = group(0, 3, 3, purpose="eval"), group(1, 3, 3, purpose="eval", status=status)
    state, actions = end_evaluation(POLICY, state_of(one, two, evaluating=3))
    over = status in ("valid", "lost")
    assert [a for a in actions if isinstance(a, EvaluationEnded)] == (
        [EvaluationEnded(version=3)] if over else []
    )
    assert (state.evaluating is None) == over


def test_take_of_an_unknown_trial_changes_nothing() -> None:
    before = state_of(group(0, 3, 3, status="running", ready=False))
    unknown = TrialEnded(
        trial_id="train-9-0-0", kind="solved", valid=True, reward=1.0, version_min=3, version_max=3
    )
    state, actions = take(POLICY, before, unknown)
    assert state == before and not actions


@pytest.mark.parametrize(
    ("kind", "valid", "status", "attempt"),
    [("solved", True, "valid", 0), ("failed", True, "valid", 0), ("system_error", False, "waiting", 1)],
)
def test_take_of_a_trial_decides_its_sample_and_frees_its_slot(
    kind: str, valid: bool, status: str, attempt: int
) -> None:
    before = state_of(group(0, 3, 3, status="running", ready=False))
    event = TrialEnded(
        trial_id="train-0-0-0",
        kind=kind,
        valid=valid,
        reward=1.0 if valid else None,
        version_min=2,
        version_max=3,
    )
    state, _ = take(POLICY, before, event)
    mine, other = state.groups[0].samples
    assert (mine.status, mine.attempt, other.status) == (status, attempt, "running")
    assert set(state.running) == {"train-0-1-0"}
    if valid:
        assert (mine.version, mine.reward) == (2, 1.0)


def test_g29_surplus_groups_stay_in_order() -> None:
    groups = [group(n, 3, 3) for n in range(5)]
    state, actions = train(replace(POLICY, batch_groups=3), state_of(*groups))
    assert isinstance(actions[0], Train) and actions[0].group_ids == (0, 1, 2)
    left = [n for n in state.groups if n not in state.training]
    assert left == [3, 4]


def test_an_overtaken_group_is_never_trained_beyond_the_bound() -> None:
    # recipe.md F.6: one group a step, staleness 1, two at a time; the first group is slow.
    policy = replace(POLICY, batch_groups=1, max_staleness=1, max_running=4, steps=6)
    for late in ("wait", "drop"):
        auditor, state = oracle.Auditor(replace(policy, late_group=late)), begin()
        queue: list[Event] = [Opened(version=0)]
        running: list[StartTrial] = []
        for _ in range(400):
            if queue:
                event = queue.pop(0)
            else:
                fast = [start for start in running if start.group_id != 0] or running
                start = fast[0]
                running.remove(start)
                event = oracle.ended(start, float(start.sample), start.policy_version, start.policy_version)
            state, actions = react(auditor.settings, state, event)
            auditor.audit(event, actions)  # asserts the age of every trained group
            for action in actions:
                if isinstance(action, StartTrial):
                    running.append(action)
                elif isinstance(action, Train):
                    queue.append(StepTrained(version=action.version + 1))
                elif isinstance(action, SyncWeights):
                    queue.append(WeightsApplied(version=action.version))
                elif isinstance(action, Finished):
                    break
            if auditor.finished:
                break
        assert auditor.trained == 6
