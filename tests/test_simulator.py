"""The simulator against arithmetic by hand, and the planner against the article's figures."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from core.schedule import Settings
from system.simulator import Cluster, LognormalWorkload, Recorded, TrialPlan, Turn, report_of, simulate

ROOT = Path(__file__).resolve().parent.parent

SYNCHRONOUS = Settings(
    steps=3,
    batch_groups=1,
    group_size=2,
    max_staleness=0,
    max_running=2,
    max_retries=0,
    min_valid=2,
    tolerance=0.0,
    max_zero_variance=0,
    max_lost=0,
    order="oldest",
    in_order_steps=0,
    late_group="wait",
    requeue_stale=False,
    task_count=9,
    seed=0,
    save_every=0,
    evaluate_at=(),
    evaluation_tasks=0,
    evaluation_samples=1,
)
LARGE = replace(
    SYNCHRONOUS, steps=30, batch_groups=8, group_size=8, max_staleness=2, max_running=100, task_count=500
)
SPREAD = LognormalWorkload(median=1_000, sigma=1.0, shared=1.0)


class Fixed:
    """Both trials of a group: two turns of 10 tokens and a tool of 3 s between, or one turn of 40 tokens."""

    def trial(self, *, task: int, group: int, sample: int, attempt: int) -> TrialPlan:
        turns = (Turn(10, 5, 3.0), Turn(10, 0, 0.0)) if sample == 0 else (Turn(40, 0, 0.0),)
        return TrialPlan(7, turns, float(sample))


def test_a_synchronous_run_takes_the_time_that_one_adds_up_by_hand():
    """A token takes 0.1 s, however many are sampled; 1 s to start, 2 to verify, 5 to train, 0.5 to move weights."""
    cluster = Cluster(decode_s=0.1, start_s=1.0, verify_s=2.0, step_s=5.0, sync_s=0.5)
    record = simulate(SYNCHRONOUS, cluster, Fixed())
    step = 1.0 + max(10 * 0.1 + 3.0 + 10 * 0.1, 40 * 0.1) + 2.0 + 5.0
    assert record.seconds == pytest.approx(0.5 + 3 * (step + 0.5)) and record.reason == "all steps trained"
    assert [s.ages for s in record.steps] == [{0: 60.0}] * 3
    assert record.sampled == pytest.approx(180) and record.wasted == 0
    assert [sorted(s.lengths) for s in record.steps] == [[7 + 25, 7 + 40]] * 3


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_saves_takes_the_same_steps(every: int):
    cluster = Cluster(decode_s=0.1, step_s=5.0, sync_s=0.5)
    plain, saving = (simulate(replace(LARGE, save_every=n), cluster, SPREAD) for n in (0, every))
    assert saving.reason == "all steps trained" and len(saving.steps) == LARGE.steps
    assert saving.seconds == pytest.approx(plain.seconds, rel=0.05)


def test_requests_share_the_engine():
    """Beside another request a token takes 0.2 s, alone 0.1: 10 together, 30 s of tool, 30 alone."""
    cluster = Cluster(decode_s=0.0, decode_request_s=0.1)
    record = simulate(replace(SYNCHRONOUS, steps=1), cluster, Fixed())
    # 10 tokens together 2 s; then alone for the 3 s of the tool: 30 tokens; nothing is left but the last 10.
    assert record.seconds == pytest.approx(2 + 3 + 1)


def test_a_trajectory_waits_until_there_is_room_for_its_context():
    cluster = Cluster(decode_s=0.1, kv_tokens=50)
    record = simulate(replace(SYNCHRONOUS, steps=1), cluster, Fixed())
    # 7 + 10 fit, 7 + 40 more do not: they wait for the tool call, run for 4 s, and the second turn waits for them.
    assert record.seconds == pytest.approx(1 + 4 + 1)


def test_the_same_seed_gives_the_same_run():
    cluster = Cluster(decode_s=0.02, train_token_s=1e-4, sync_s=1.0)
    one, other = (simulate(LARGE, cluster, SPREAD) for _ in range(2))
    assert one.steps == other.steps and one.seconds == other.seconds


@pytest.mark.parametrize("late", ["wait", "drop", "mask", "train"])
def test_no_token_beyond_the_bound_is_trained_unless_one_says_so(late: Any):
    cluster = Cluster(decode_s=0.02, train_token_s=1e-5, sync_s=1.0)
    settings = replace(LARGE, order="completion", late_group=late)
    report = report_of(simulate(settings, cluster, SPREAD), mean_length=1_650)
    assert (report.stale_share > 0) is (late == "train")
    assert (report.masked_share > 0) is (late == "mask")
    assert (report.wasted_share > 0) is (late == "drop")


def test_in_the_order_of_completion_the_first_steps_are_short_and_in_order_they_are_not():
    """The article's early dip."""
    cluster = Cluster(decode_s=0.02, train_token_s=1e-5)
    drawn = fmean(SPREAD.trial(task=t, group=t, sample=0, attempt=0).length for t in range(LARGE.task_count))
    early = {
        order: report_of(
            simulate(replace(LARGE, order=order, late_group=late), cluster, SPREAD),
            mean_length=drawn,
            first=2,
        ).first_length
        for order, late in (("completion", "train"), ("admission", "wait"))
    }
    assert early["completion"] < 0.85 * early["admission"]


def test_trials_are_drawn_again_from_what_was_recorded():
    record = {
        "outcome": {"kind": "solved"},
        "task": "b2f1",
        "reward": 1.0,
        "rows": [{"token_ids": list(range(50))}],
        "turns": [{"start": 20, "end": 30, "seconds": 0.5}, {"start": 38, "end": 50, "seconds": 0.0}],
    }
    drawn = Recorded.of([json.dumps(record)])
    plan = drawn.trial(task=3, group=1, sample=0, attempt=0)
    assert plan == TrialPlan(20, (Turn(10, 8, 0.5), Turn(12, 0, 0.0)), 1.0)
    assert plan.length == 50
    with pytest.raises(ValueError, match="trials must hold at least one, got none"):
        Recorded.of([json.dumps(record | {"outcome": {"kind": "system_error"}})])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"engines": 0}, "engines must be positive, got 0"),
        ({"cores": 0.0}, "cores must be positive, got 0.0"),
        ({"trial_load": 1.5}, "trial_load must lie between 0 and 1, got 1.5"),
        ({"sync_s": -1.0}, "sync_s must not be negative, got -1.0"),
        ({"decode_s": 0.0}, "decode_s or decode_request_s must be positive, got 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(changes: dict[str, float], told: str):
    with pytest.raises(ValueError, match=f"^{told}$"):
        Cluster(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--turn-tokens", "0"], "turn_tokens must be positive and finite, got 0.0"),
        (["--sigma", "nan"], "sigma must be finite and not negative, got nan"),
        (["--sync-s", "inf"], "sync_s must be finite and not negative, got inf"),
        (["--sampled-share", "2"], "sampled_share must lie above 0 and at most at 1, got 2.0"),
        (["--from", "{file}"], "from must hold recorded trials, got {file}: KeyError: 'outcome'"),
        (["--out", "{file}"], "out must be a new folder, got {file} with a file there"),
    ],
)
def test_a_plan_refuses_bad_options_in_one_line(tmp_path: Path, options: list[str], told: str):
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    script = [sys.executable, str(ROOT / "experiments" / "plan_cluster.py"), "--out", str(tmp_path)]
    words = [word.format(file=file) for word in options]
    done = subprocess.run([*script, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and told.format(file=file) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_torn_last_line_of_recorded_trials_is_left_out(tmp_path: Path):
    record = {
        "outcome": {"kind": "solved"},
        "task": "b2f1",
        "rows": [{"token_ids": [1, 2, 3]}],
        "turns": [{"start": 1, "end": 3}],
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record)[:20])
    plan = Recorded.read(tmp_path / "a.jsonl").trial(task=0, group=0, sample=0, attempt=0)
    assert plan == TrialPlan(1, (Turn(2, 0, 0.0),), None)


def test_the_plan_of_the_articles_cluster_derives_its_figures(tmp_path: Path):
    """1,024 admitted, 300 that can run on its twelve nodes; the second from an assumed mean context of 70,000."""
    script = [
        sys.executable,
        str(ROOT / "experiments" / "plan_cluster.py"),
        "--preset",
        "397b",
        "--steps",
        "3",
    ]
    done = subprocess.run([*script, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "1,024 trajectories" in done.stdout and "300 trajectories" in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    (article,) = [s for s in plan["splits"] if (s["inference_nodes"], s["training_nodes"]) == (12, 8)]
    assert article["runnable"] == 300
