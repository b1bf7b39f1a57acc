"""The benchmark of the schedule runs and has its rows; each peer's rule does on a tiny case what its source says."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import (
    CountRule,
    DropByVersion,
    OldestFirst,
    OneStepOff,
    Oversampled,
    Pool,
    SplitAtTheBound,
    Synchronous,
)
from benchmarks.schedule import CASES, FRONTIER, TOY, Alike, figures, main, unbeaten
from core.advantage import leave_one_out_advantage
from core.schedule import DropGroup, Train, task_at
from system.simulator import Cluster, LognormalWorkload, Reducer, TrialPlan, Turn, simulate

ROOT = Path(__file__).resolve().parent.parent
TINY = replace(
    TOY, batch_groups=1, group_size=2, max_staleness=1, max_running=4, min_valid=2, late_group="train"
)
SECOND = Cluster(decode_s=1.0, step_s=10.0)
"""A token a second, ten seconds a step."""


class Lengths:
    """Both trials of the group that is drawn as number i take `lengths[i]` seconds; or the second so many more."""

    def __init__(self, *lengths: int, more: int = 0) -> None:
        self.lengths, self.more = lengths, more

    def trial(self, *, task: int, group: int, sample: int, attempt: int) -> TrialPlan:
        tokens = self.lengths[group % len(self.lengths)] + self.more * sample
        return TrialPlan(0, (Turn(tokens, 0, 0.0),), float(sample % 2))


class Watched:
    """A policy whose steps and drops are kept."""

    def __init__(self, policy: Pool | Reducer) -> None:
        self.policy, self.steps, self.dropped = policy, list[Train](), list[int]()

    @property
    def finished(self) -> bool:
        return self.policy.finished

    def tell(self, event: Any) -> Any:
        actions = self.policy.tell(event)
        self.steps += [action for action in actions if isinstance(action, Train)]
        self.dropped += [action.group_id for action in actions if isinstance(action, DropGroup)]
        return actions

    @property
    def trained(self) -> list[int]:
        return [group for step in self.steps for group in step.group_ids]


def watched(policy: Pool, lengths: Lengths, *, steps: int, cluster: Cluster = SECOND) -> tuple[Watched, Any]:
    seen = Watched(policy)
    return seen, simulate(policy.settings, cluster, lengths, policy=seen, stop_after=steps)


def test_a_synchronous_loop_samples_then_trains():
    """Each step 7 s of sampling and 10 of training, nothing older than its version."""
    seen, record = watched(Synchronous(TINY), Lengths(7), steps=3)
    assert [(s.begun_s, s.ended_s) for s in record.steps] == [(7, 17), (24, 34), (41, 51)]
    assert seen.trained == [0, 1, 2] and all(set(s.ages) == {0} for s in record.steps)


def test_one_step_off_samples_the_next_batch_while_it_trains_this_one():
    """7 s of sampling once, then a step after the other: the longer of 7 and 10; each one version old but the first."""
    _, record = watched(OneStepOff(TINY), Lengths(7), steps=4)
    assert [(s.begun_s, s.ended_s) for s in record.steps] == [(7, 17), (17, 27), (27, 37), (37, 47)]
    assert [set(s.ages) for s in record.steps] == [{0}, {1}, {1}, {1}]


def test_one_step_off_moves_no_weights_before_both_have_ended():
    """The step is over at 30, the next batch at 40: all of that batch is of one version."""
    _, record = watched(OneStepOff(TINY), Lengths(20), steps=3)
    assert [(s.begun_s, s.ended_s) for s in record.steps] == [(20, 30), (40, 50), (60, 70)]
    assert [s.ages for s in record.steps] == [{0: 40.0}, {1: 40.0}, {1: 40.0}]


def test_the_count_rule_lets_a_slow_group_be_overtaken_and_trains_it_however_old():
    """Two groups may be under way: the first takes 45 s, the others 5; three are trained before it."""
    seen, record = watched(CountRule(TINY), Lengths(45, 5, 5, 5, 5, 5), steps=5)
    at = seen.trained.index(0)
    assert at >= 3 and max(record.steps[at].ages) == at > TINY.max_staleness
    assert not seen.dropped


def test_oldest_first_takes_the_slow_group_as_soon_as_it_is_complete():
    """It ends while others wait; in the order of completion those would come first."""
    lengths = Lengths(12, 5, 5, 5, 5, 5, 5, 5)
    wide = replace(TINY, max_staleness=3, max_running=8)
    places = [watched(rule(wide), lengths, steps=6)[0].trained.index(0) for rule in (OldestFirst, CountRule)]
    assert places[0] < places[1]


def test_dropping_by_version_loses_what_is_long():
    """A group of 45 s has begun two versions ago at the second step's end: it is cancelled, its tokens are wasted."""
    seen, record = watched(DropByVersion(TINY), Lengths(45, 5, 5, 5, 5, 5), steps=4)
    assert seen.dropped[0] == 0 and 0 not in seen.trained
    assert record.wasted > 0 and max(age for s in record.steps for age in s.ages) <= TINY.max_staleness


def test_oversampling_cancels_the_slowest_of_each_group():
    """Of three trials of 5, 8 and 11 s the first two count."""
    settings = replace(TINY, max_running=3)
    seen, record = watched(Oversampled(settings, spare=1), Lengths(5, more=3), steps=2)
    assert sorted(record.steps[0].lengths) == [5, 8] and record.steps[0].begun_s == 8
    assert record.wasted > 0 and all(len(step.trial_ids) == 2 for step in seen.steps)


def test_a_group_that_is_split_is_trained_whole_once_and_nothing_of_it_is_too_old():
    settings = replace(TINY, batch_groups=2, group_size=4, max_running=16)
    spread = LognormalWorkload(median=8, sigma=1.2, shared=0.3)
    seen, _ = watched(SplitAtTheBound(settings), spread, steps=30)  # type: ignore[arg-type]
    trials = [trial for step in seen.steps for trial in step.trial_ids]
    assert len(trials) == len(set(trials)) == 30 * 8
    assert all(step.min_version == max(0, step.version - 1) for step in seen.steps)
    groups = [trial.split("-")[1] for trial in trials]
    assert max(groups.count(group) for group in set(groups)) == 4
    assert any(len({t for t in step.group_ids}) > settings.batch_groups for step in seen.steps)


def test_the_count_rule_takes_the_steps_of_core_in_the_order_of_completion():
    """Written apart from one another."""
    settings = replace(
        TOY, batch_groups=4, group_size=4, max_running=30, order="completion", late_group="train"
    )
    spread = LognormalWorkload(median=100, sigma=1.0, shared=0.5)
    cluster = Cluster(decode_s=1.0, train_token_s=1 / 27, sync_s=3.0)
    ours, theirs = Watched(Reducer(settings)), Watched(CountRule(settings))
    for policy in (ours, theirs):
        simulate(settings, cluster, spread, policy=policy, stop_after=25)
    assert [s.group_ids for s in ours.steps] == [s.group_ids for s in theirs.steps]
    assert [set(s.trial_ids) for s in ours.steps] == [set(s.trial_ids) for s in theirs.steps]


ACTIONS = ((1, 1.0), (2, 0.0), (5, 1.0))
"""Of a policy of three actions: how long each takes, and its reward."""
PROBABILITY = (0.5, 0.3, 0.2)


def expected_gradient(baseline: Any) -> list[float]:
    """Of a group of three, by enumeration: the mean of (reward - baseline) times the score of the action."""
    total = [0.0] * 3
    for group in itertools.product(range(3), repeat=3):
        weight = 1.0
        for action in group:
            weight *= PROBABILITY[action]
        for i, action in enumerate(group):
            advantage = ACTIONS[action][1] - baseline([ACTIONS[a] for a in group], i)
            for k in range(3):
                total[k] += weight * advantage * ((k == action) - PROBABILITY[k]) / 3
    return total


def mean_of_others(group: list[tuple[int, float]], i: int, *, until: float) -> float:
    """The mean reward of the others that had ended by then; 0 if none had."""
    others = [reward for j, (length, reward) in enumerate(group) if j != i and length <= until]
    return sum(others) / len(others) if others else 0.0


def test_a_baseline_that_is_fixed_at_the_cut_leaves_the_gradient_unbiased():
    """Every cut, also one at which nothing has ended; a baseline that waits for the trial itself is biased."""
    true = expected_gradient(lambda group, i: 0.0)
    for cut in (0, 1, 2, 4, 5):
        assert expected_gradient(partial(mean_of_others, until=cut)) == pytest.approx(true)
    growing = expected_gradient(lambda group, i: mean_of_others(group, i, until=group[i][0]))
    assert growing != pytest.approx(true, rel=0.05)


def test_with_everybody_ended_the_fixed_baseline_is_leave_one_out():
    rewards = [1.0, 0.0, 1.0]
    group = [(1, reward) for reward in rewards]
    ours = [reward - mean_of_others(group, i, until=9) for i, reward in enumerate(rewards)]
    reward, group_id = torch.tensor(rewards, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    of_core = leave_one_out_advantage(reward, torch.ones(3, dtype=torch.bool), group_id, tolerance=0.0)
    assert ours == pytest.approx(of_core.advantage.tolist())


def test_tasks_of_like_length_are_drawn_together_each_once():
    settings = replace(TOY, task_count=40)
    alike = Alike(LognormalWorkload(median=100, sigma=1.0, shared=1.0), settings, block=20)
    lengths = [alike.trial(task=0, group=group, sample=0, attempt=0).length for group in range(40)]
    assert lengths[:20] == sorted(lengths[:20]) and lengths[20:] == sorted(lengths[20:])
    assert sorted(alike.order) == list(range(40))


def test_figures_of_a_run_add_up():
    """In the order of admission the first steps are of the groups that are drawn first, all of each."""
    settings = replace(TOY, order="admission", late_group="wait")
    spread = LognormalWorkload(median=100, sigma=0.5, shared=1.0)
    record = simulate(settings, Cluster(decode_s=1.0, train_token_s=1 / 270), spread, stop_after=8)
    plans = [
        spread.trial(task=task_at(settings, group), group=group, sample=sample, attempt=0).length
        for group in range(8 * 16)
        for sample in range(16)
    ]
    row = figures(record, [(n, n) for n in plans], 5)
    assert row["early"] == row["ever"] == pytest.approx(1.0)
    assert row["stale"] == row["masked"] == row["wasted"] == 0 and 0 <= row["idle"] < 1
    assert row["longest"] == pytest.approx(1.0, abs=0.5) and row["fresh"] > 0


def test_the_command_prints_its_tables_and_keeps_them(tmp_path: Path):
    rules = ["oldest, mask", "not built: split at the bound"]
    options = [
        "--parts",
        "cost",
        "frontier",
        "--seeds",
        "2",
        "--steps",
        "7",
        "--skip",
        "6",
        "--rules",
        *rules,
    ]
    small = ["--running", "32", "64", "--events", "300", "--out", str(tmp_path / "kept" / "schedule")]
    script = [sys.executable, "benchmarks/schedule.py"]
    done = subprocess.run([*script, *options, *small], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "kept" / "schedule.md").read_text()
    assert told.strip() in done.stdout and (tmp_path / "kept" / "schedule.png").stat().st_size > 10_000
    for rule in rules:
        assert told.count(f"| {rule} |") == len(CASES["frontier"])
    assert "| 32 |" in told and "| 64 |" in told
    rows = [json.loads(line) for line in (tmp_path / "kept" / "schedule.jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows].count("frontier") == 2 * 2 * 3
    assert "commit" in rows[0]["told"]


def test_a_part_that_is_run_again_replaces_itself_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = ["--out", str(tmp_path / "schedule")]
    main(["--parts", "cost", "--running", "32", "--events", "50", *out])
    small = ["--seeds", "1", "--steps", "6", "--skip", "5"]
    main(["--parts", "peers", *small, "--rules", "synchronous", *out])
    main(["--parts", "cost", "--running", "64", "--events", "50", *out])
    told = capsys.readouterr().out.rsplit("## cost", 1)[1]
    assert "| 64 |" in told and "| 32 |" not in told and told.count("| synchronous |") == len(CASES["peers"])
    main(["--parts", *out])
    assert capsys.readouterr().out.strip().endswith(told.strip())


def test_a_rule_is_beaten_by_one_that_is_as_good_in_all_and_better_in_one():
    def row(rule: str, idle: float, stale: float, early: float) -> dict[str, Any]:
        return {"rule": rule, "idle": idle, "stale": stale, "early": early}

    rows = [
        row("a", 0.1, 0.0, 0.9),
        row("b", 0.1, 0.0, 1.2),
        row("c", 0.0, 0.3, 0.7),
        row("d", 0.2, 0.3, 0.7),
    ]
    assert unbeaten(rows) == ["a", "c"]
    assert unbeaten([*rows, row("a", 0.3, 0.0, 0.9)]) == ["a", "b", "c"]


def test_the_benchmark_runs_as_a_module_too():
    script = [sys.executable, "-m", "benchmarks.schedule", "--help"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--parts" in done.stdout


def test_the_frontier_has_every_order_with_every_way_to_treat_the_late():
    names = {rule.name for rule in FRONTIER}
    lates = ("train", "drop", "mask", "wait")
    for order, late in itertools.product(("completion", "oldest", "admission"), lates):
        assert f"{order}, {late}" in names


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--skip", "4"], "skip must lie between 5 and steps 50, got 4"),
        (["--running", "8"], "running must be at least 32, got 8"),
    ],
)
def test_bad_options_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(words)
    assert told in capsys.readouterr().err
