"""What a simulated run leaves behind, fitted, gives the machines and the trials that it was simulated with."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from core.schedule import Settings
from system.simulator import Cluster, LognormalWorkload, TrialPlan, Turn, simulate
from system.simulator.fit import fitted, not_negative, predicted, trainer_rates, workload_of
from system.simulator.measured import Measured, measured_of, read_measured
from system.simulator.workload import plan_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import simulator as benchmark  # noqa: E402

SCHEDULE = Settings(
    steps=12,
    batch_groups=3,
    group_size=4,
    max_staleness=2,
    max_running=12,
    max_retries=0,
    min_valid=2,
    tolerance=1e-6,
    max_zero_variance=8,
    max_lost=3,
    order="oldest",
    in_order_steps=0,
    late_group="wait",
    requeue_stale=True,
    task_count=40,
    seed=0,
    save_every=0,
    evaluate_at=(),
    evaluation_tasks=0,
    evaluation_samples=1,
)
OTHER = replace(SCHEDULE, batch_groups=2, max_staleness=0, max_running=4)
ALONE = replace(SCHEDULE, batch_groups=1, max_staleness=0, max_running=1)
SOME = LognormalWorkload(median=600, sigma=0.6, turn_tokens=60, sampled=0.5, tool_s=0.05)
LONG_WINDED = replace(SOME, sampled=0.9, turn_tokens=90)


class Mixed:
    """Tasks in which much is said and tasks in which much is read: else an engine's work for both is one number."""

    def trial(self, *, task: int, group: int, sample: int, attempt: int) -> TrialPlan:
        kind = LONG_WINDED if task % 3 == 0 else SOME
        return kind.trial(task=task, group=group, sample=sample, attempt=attempt)


TRIALS = Mixed()
OWN = Cluster(
    decode_s=0.01,
    decode_request_s=0.002,
    decode_context_s=1e-6,
    prefill_s=4e-4,
    prefill_stops=1.0,
    step_s=0.7,
    train_token_s=1e-4,
    train_square_s=2e-7,
    sync_s=0.3,
    start_s=0.4,
    verify_s=0.2,
)
SHARED = replace(OWN, decode_s=0.004, decode_request_s=5e-4, cores=2.0, others=0.6, trial_load=0.6)


def run_on(cluster: Cluster, settings: Settings) -> Measured:
    return measured_of(simulate(settings, cluster, TRIALS), cluster)


def test_machines_of_their_own_are_found_again():
    found = fitted([run_on(OWN, SCHEDULE), run_on(OWN, OTHER)])
    for name, value in asdict(OWN).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.05), name


def test_several_engines_are_found_again():
    cluster = replace(OWN, engines=3)
    found = fitted([run_on(cluster, SCHEDULE), run_on(cluster, OTHER)])
    for name in ("decode_s", "decode_request_s", "decode_context_s", "prefill_s"):
        assert getattr(found, name) == pytest.approx(getattr(cluster, name), rel=0.1), name


def test_what_shares_two_cores_with_others_is_found_again():
    three = [replace(settings, seed=seed) for settings in (SCHEDULE, OTHER, ALONE) for seed in range(3)]
    found = fitted([run_on(SHARED, settings) for settings in three])
    for name, value in asdict(SHARED).items():
        if name not in ("sync_s", "others"):
            assert getattr(found, name) == pytest.approx(value, rel=0.1), name
    assert found.others == pytest.approx(SHARED.others, abs=0.5)


def test_a_run_with_other_settings_is_predicted_from_the_fit():
    for cluster in (OWN, SHARED):
        others = [run_on(cluster, settings) for settings in (OTHER, ALONE)]
        told = run_on(cluster, SCHEDULE).figures()
        found = predicted(SCHEDULE, fitted(others), others)
        assert found.steps_per_minute == pytest.approx(told.steps_per_minute, rel=0.15)
        assert found.trainer_idle == pytest.approx(told.trainer_idle, abs=0.1)
        assert found.mean_age == pytest.approx(told.mean_age, abs=0.25)


def test_an_engine_that_tells_nothing_still_has_a_speed():
    run = run_on(OWN, SCHEDULE)
    silent = replace(run, steps=[step._replace(engine={}) for step in run.steps])
    found = fitted([silent])
    assert found.decode_request_s == found.prefill_s == 0
    assert 0.01 < found.decode_s < 0.06  # of a token beside up to eleven others
    assert found.step_s == pytest.approx(0.7, rel=0.05)


def test_weights_are_found_again_and_none_is_below_nothing():
    rows = [[1.0, 2.0, 0.5], [2.0, 1.0, 4.0], [3.0, 5.0, 1.0], [1.0, 7.0, 2.0]]
    assert not_negative(rows, [2 * a + 0.1 * c for a, _, c in rows]) == pytest.approx([2, 0, 0.1], abs=1e-9)
    assert min(not_negative(rows, [3 * a - 0.2 * b for a, b, _ in rows])) >= 0


def test_a_run_is_the_same_after_it_was_written():
    run = run_on(SHARED, SCHEDULE)
    assert Measured.of(json.loads(json.dumps(run.record()))) == run
    assert Measured.of(json.loads(json.dumps(run_on(OWN, OTHER).record()))).cores == float("inf")


def test_a_group_is_drawn_again_as_a_whole():
    run = run_on(OWN, SCHEDULE)
    drawn = workload_of([run], load=1.0)
    groups = {trial.group for trial in run.trials}
    own = {tuple(sorted(t.plan for t in run.trials if t.group == group)) for group in groups}
    again = {
        tuple(sorted(drawn.trial(task=0, group=group, sample=sample, attempt=0) for sample in range(4)))
        for group in range(len(groups))
    }
    assert again == {plans for plans in own if len(plans) == 4}


def test_rows_that_begin_anew_are_all_trained_and_forget_what_the_template_left_out():
    """A row of 10 + 5; then one that keeps 8 of those 15 and has 4 others, 3 sampled and 2 observed tokens."""
    first = list(range(15))
    record: dict[str, Any] = {
        "outcome": {"kind": "failed"},
        "reward": 0.5,
        "rows": [{"token_ids": first}, {"token_ids": [*first[:8], 90, 91, 92, 93, 70, 71, 72, 60, 61]}],
        "turns": [
            {"row": 0, "start": 10, "end": 15, "seconds": 0.25},
            {"row": 1, "start": 12, "end": 15, "seconds": 0.0},
        ],
    }
    plan = plan_of(record)
    assert plan == TrialPlan(10, (Turn(5, 4, 0.25, 7), Turn(3, 2, 0.0, 0)), 0.5)
    assert plan is not None and plan.rows == [15, 17] and plan.length == 32


def test_prompts_that_stop_the_engine_take_their_time_from_the_others():
    """Two trials of 10 tokens at 0.1 s; each prompt of 20 tokens stops both for a second."""

    class Two:
        def trial(self, *, task: int, group: int, sample: int, attempt: int) -> TrialPlan:
            return TrialPlan(20, (Turn(10, 0, 0.0),), float(sample))

    settings = replace(SCHEDULE, steps=1, batch_groups=1, group_size=2, max_staleness=0)
    cluster = Cluster(decode_s=0.1, prefill_s=0.05, prefill_stops=1.0)
    assert simulate(settings, cluster, Two()).seconds == pytest.approx(2 + 1)
    assert simulate(settings, replace(cluster, prefill_stops=0.0), Two()).seconds == pytest.approx(1 + 1)


def test_who_shares_a_core_takes_longer():
    """Two trials, each a second of its own and ten tokens of 0.1 s: on one core their seconds add up."""

    class Two:
        def trial(self, *, task: int, group: int, sample: int, attempt: int) -> TrialPlan:
            return TrialPlan(0, (Turn(10, 0, 0.0),), float(sample))

    settings = replace(SCHEDULE, steps=1, batch_groups=1, group_size=2, max_staleness=0)
    cluster = Cluster(decode_s=0.1, start_s=1.0, cores=1.0)
    assert simulate(settings, cluster, Two()).seconds == pytest.approx(2 + 1)
    assert simulate(settings, replace(cluster, trial_load=0.5), Two()).seconds == pytest.approx(1 + 1)
    assert simulate(settings, replace(cluster, others=1.0), Two()).seconds == pytest.approx(3 + 2)


def test_the_comparison_with_reality_holds_where_reality_is_the_simulator(tmp_path: Path):
    def settings(seed: int, options: dict[str, int]) -> Settings:
        return replace(
            SCHEDULE,
            seed=seed,
            batch_groups=options["groups"],
            max_staleness=options["max_staleness"],
            max_running=options["max_running"],
        )

    runs = {
        name: [run_on(SHARED, settings(seed, options)) for seed in range(2 if name != "alone" else 1)]
        for name, options in benchmark.SETTINGS.items()
    }
    with (tmp_path / "raw.jsonl").open("w") as file:
        for name, some in runs.items():
            for run in some:
                file.write(json.dumps({"setting": name, **run.record()}) + "\n")
    lines, clusters = benchmark.compare(benchmark.read(tmp_path / "raw.jsonl"))
    told = benchmark.report(lines, clusters, runs)
    assert len(lines) == 9 and sum(line.holds for line in lines) >= 8, told


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path):
    with pytest.raises(ValueError, match=f"^a run's folder must hold .*, got {tmp_path}: FileNotFoundError"):
        read_measured(tmp_path)


def test_a_counter_that_began_again_where_a_run_was_resumed_is_no_work():
    run = run_on(SHARED, SCHEDULE)
    middle = len(run.steps) // 2
    before = run.steps[middle - 1].cpu_s
    steps = [s._replace(cpu_s=s.cpu_s - before) if i >= middle else s for i, s in enumerate(run.steps)]
    resumed = trainer_rates([replace(run, steps=steps)], shared=True)[0]
    whole = trainer_rates([run], shared=True)[0]
    assert resumed["step_s"] == pytest.approx(whole["step_s"], rel=0.3) and resumed["step_s"] > 0
