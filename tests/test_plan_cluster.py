"""A plan follows from its inputs by formula, and a run's waiting times turn into advice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from core.schedule import Settings
from system.simulator import Cluster, LognormalWorkload, simulate
from system.simulator.advice import WAITS, advise
from system.simulator.hardware import Hardware
from system.simulator.measured import measured_of

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = str(ROOT / "experiments" / "plan_cluster.py")
sys.path.insert(0, str(ROOT / "experiments"))

import plan_cluster  # noqa: E402
from plan_cluster import HARDWARE, Config, Derived, derived, drawn, inputs_of  # noqa: E402

ARTICLE = Config(preset="397b")
INPUTS = inputs_of(ARTICLE, drawn(ARTICLE))
OWN = HARDWARE["35b"]


def numbers(config: Config = ARTICLE, *, nodes: int = 12, **hardware: float) -> Derived:
    """What follows where an input is another."""
    inputs = inputs_of(config, drawn(config))
    return derived(
        config, replace(inputs, hardware=replace(inputs.hardware, **hardware)), inference_nodes=nodes
    )


def moved(name: str) -> Derived:
    """With a field of the hardware 10 % larger."""
    return numbers(**{name: getattr(INPUTS.hardware, name) * 1.1})


def test_the_articles_cluster_admits_and_runs_what_its_formulas_say():
    """1,024 from staleness and batch; 300 and 550 from a mean context that is assumed."""
    found = numbers()
    assert (found.admitted, found.runnable) == ((3 + 1) * 16 * 16, 300)
    smaller = Config(preset="35b")
    assert derived(smaller, inputs_of(smaller, drawn(smaller)), inference_nodes=10).runnable == 550


def test_admission_moves_with_staleness_and_batch_and_with_nothing_else():
    assert numbers(replace(ARTICLE, max_staleness=4)).admitted == 5 * 16 * 16
    assert numbers(replace(ARTICLE, batch_groups=17)).admitted == 4 * 17 * 16
    assert numbers(replace(ARTICLE, group_size=8)).admitted == 4 * 16 * 8
    assert numbers(replace(ARTICLE, mean_context=77_000)).admitted == numbers(nodes=6).admitted == 1_024


def test_a_mean_context_ten_percent_longer_lets_a_tenth_fewer_run():
    longer = numbers(replace(ARTICLE, mean_context=INPUTS.mean_context * 1.1))
    assert longer.runnable == int(12 * numbers().engine_tokens / (70_000 * 1.1)) == 272
    assert longer.engine_tokens == numbers().engine_tokens


def context_bytes(h: Hardware) -> float:
    """Of a GPU, what weights and the rest leave."""
    return h.gpu_bytes * h.kv_utilization - h.weight_bytes / h.tensor_parallel - h.other_bytes


@pytest.mark.parametrize("name", ["gpu_bytes", "weight_bytes", "other_bytes"])
def test_memory_ten_percent_larger_moves_the_context_that_an_engine_holds(name: str):
    before, after = INPUTS.hardware, replace(INPUTS.hardware, **{name: getattr(INPUTS.hardware, name) * 1.1})
    tokens = context_bytes(after) / before.token_bytes
    assert moved(name).engine_tokens == int(tokens)
    assert moved(name).runnable == int(12 * int(tokens) / 70_000)
    assert (moved(name).runnable > numbers().runnable) is (name == "gpu_bytes")


def test_a_tenth_more_layers_make_every_token_a_tenth_larger():
    more = numbers(attention_layers=30, nodes=12)
    assert more.token_bytes == 2 * numbers().token_bytes
    assert more.engine_tokens == pytest.approx(numbers().engine_tokens / 2, abs=1)


def test_a_node_ten_percent_dearer_makes_the_hour_so_much_dearer():
    assert moved("node_hour").node_hours_price == pytest.approx(1.1 * numbers().node_hours_price)


RATES: dict[str, Callable[[Cluster, Cluster], bool]] = {
    "gpu_bandwidth": lambda a, b: (
        b.decode_s == pytest.approx(a.decode_s / 1.1)
        and b.decode_context_s == pytest.approx(a.decode_context_s / 1.1)
    ),
    "decode_efficiency": lambda a, b: b.decode_s == pytest.approx(a.decode_s / 1.1),
    "weight_bytes": lambda a, b: (
        b.decode_s == pytest.approx(a.decode_s * 1.1) and b.decode_context_s == a.decode_context_s
    ),
    "gpu_flops": lambda a, b: b.train_token_s == pytest.approx(a.train_token_s / 1.1),
    "train_efficiency": lambda a, b: b.train_square_s == pytest.approx(a.train_square_s / 1.1),
    "active_parameters": lambda a, b: (
        b.train_token_s == pytest.approx(a.train_token_s * 1.1) and b.train_square_s == a.train_square_s
    ),
    "prefill_tokens_per_s": lambda a, b: b.prefill_s == pytest.approx(a.prefill_s / 1.1),
}


@pytest.mark.parametrize("name", RATES)
def test_an_input_ten_percent_larger_moves_the_rates_as_the_formula_says(name: str):
    def rates(hardware: Hardware) -> Cluster:
        return hardware.cluster(inference_nodes=12, training_nodes=8, sync_s=30, start_s=10, verify_s=20)

    before = INPUTS.hardware
    after = replace(before, **{name: getattr(before, name) * 1.1})
    assert RATES[name](rates(before), rates(after))


def test_where_training_is_all_that_takes_time_ten_percent_more_operations_make_ten_percent_more_steps():
    """Engines that give a token in no time: an hour has as many steps as the trainer can take."""
    config = replace(
        ARTICLE, steps=6, batch_groups=2, group_size=4, tool_s=0.0, start_s=0.0, verify_s=0.0, sync_s=0.0
    )
    quick = replace(INPUTS.hardware, gpu_bandwidth=1e18, prefill_tokens_per_s=1e15, weight_bytes=1e9)
    slow, fast = (
        plan_cluster.tried(config, replace(quick, gpu_flops=flops), drawn(config), 12, 1, 32)
        for flops in (1e12, 1.1e12)
    )
    assert slow.trainer_idle < 0.01
    assert fast.steps_per_hour == pytest.approx(1.1 * slow.steps_per_hour, rel=0.01)
    assert fast.step_cost == pytest.approx(slow.step_cost / 1.1, rel=0.01)


def planned(*options: str, out: Path) -> subprocess.CompletedProcess[str]:
    """The script, run."""
    command = [sys.executable, SCRIPT, "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_a_plan_states_what_it_rests_on_and_draws_it(tmp_path: Path):
    done = planned(
        "--steps", "2", "--nodes", "4", "--batch-groups", "2", "--group-size", "4", out=tmp_path / "a"
    )
    assert done.returncode == 0, done.stderr
    assert "(3 + 1) * 2 * 4 = 32 trajectories" in done.stdout
    assert "follows only from an assumed mean context of 70,000 tokens" in " ".join(done.stdout.split())
    assert (tmp_path / "a" / "figure.png").read_bytes().startswith(b"\x89PNG")
    plan = json.loads((tmp_path / "a" / "plan.json").read_text())
    assert plan["derived"]["admitted"] == 32 and len(plan["splits"]) == 3
    assert all(sum(split["ages"].values()) == pytest.approx(1) for split in plan["splits"])
    again = planned(out=tmp_path / "a")
    assert again.returncode == 2 and "out must be a new folder" in again.stderr


def test_a_plan_for_hardware_of_ones_own_reads_its_fields(tmp_path: Path):
    (tmp_path / "mine.json").write_text(json.dumps(asdict(OWN)))
    small = ("--steps", "2", "--nodes", "3", "--batch-groups", "2", "--group-size", "4")
    done = planned("--hardware", str(tmp_path / "mine.json"), *small, out=tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert "follows only from the lengths of the trials" in " ".join(done.stdout.split())
    assert json.loads((tmp_path / "a" / "plan.json").read_text())["hardware"] == asdict(OWN)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--hardware", "{folder}/none.json", "--nodes", "4"],
            "hardware must be a file with the fields of Hardware",
        ),
        (["--hardware", "{folder}/wrong.json", "--nodes", "4"], "unknown field 'gpu'"),
        (["--hardware", "{folder}/few.json", "--nodes", "4"], "missing"),
        (["--hardware", "{folder}/full.json", "--nodes", "4"], "no memory beside the weights"),
        (["--hardware", "{folder}/good.json"], "nodes must be given with hardware, got none"),
        (["--nodes", "1"], "nodes must be at least 2, one of each kind, got 1"),
        (["--cores", "2"], "cores must go with the folder of a run in from, got 2.0"),
        (["--from", "{folder}"], "a run's folder must hold what it did in two steps or more, got {folder}"),
        (["--from", "{folder}/none.jsonl"], "from must hold recorded trials, got {folder}/none.jsonl"),
        (["--preset", "12b"], "invalid choice '12b'"),
    ],
)
def test_bad_input_is_told_in_one_line(tmp_path: Path, options: list[str], told: str):
    good = asdict(OWN)
    for name, fields in {
        "wrong": good | {"gpu": 1},
        "few": {"gpu_bytes": 8e10},
        "full": good | {"weight_bytes": 1e13},
        "good": good,
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(fields))
    done = planned(*(word.format(folder=tmp_path) for word in options), out=tmp_path / "out")
    assert done.returncode == 2 and told.format(folder=tmp_path) in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


# Advice to a run.

SCHEDULE = Settings(
    steps=12,
    batch_groups=2,
    group_size=4,
    max_staleness=2,
    max_running=8,
    max_retries=0,
    min_valid=2,
    tolerance=1e-6,
    max_zero_variance=0,
    max_lost=0,
    order="oldest",
    in_order_steps=0,
    late_group="wait",
    requeue_stale=False,
    task_count=100,
    seed=0,
    save_every=0,
    evaluate_at=(),
    evaluation_tasks=0,
    evaluation_samples=1,
)
TRIALS = LognormalWorkload(median=400, sigma=0.4, turn_tokens=100, sampled=0.5, tool_s=0.1)


def run_on(cluster: Cluster, **settings: Any) -> Any:
    """A run, as its files would tell of it."""
    return measured_of(simulate(replace(SCHEDULE, **settings), cluster, TRIALS), cluster)


def test_a_run_whose_trainer_waits_is_told_to_add_engines_until_it_does_not():
    cluster = Cluster(decode_s=0.02, decode_request_s=0.02, step_s=10.0)
    advice = advise(run_on(cluster))
    assert advice.limit == "inference" and advice.simulated.figures.trainer_idle > 0.3
    assert advice.best.engines > 1
    rates = [tried.figures.steps_per_minute for tried in (advice.simulated, *advice.tried)]
    assert rates == sorted(rates)
    assert all(tried.figures.trainer_idle > WAITS for tried in (advice.simulated, *advice.tried[:-1]))
    assert f"add {advice.best.engines - 1} engine" in advice.told()
    # What it says of them holds of a run that has them.
    there = run_on(replace(cluster, engines=advice.best.engines), max_running=advice.best.max_running)
    assert there.figures().steps_per_minute == pytest.approx(advice.best.figures.steps_per_minute, rel=0.1)


def test_a_run_whose_trainer_never_waits_is_told_that_training_is_the_limit():
    advice = advise(run_on(Cluster(decode_s=0.001, step_s=30.0)))
    assert advice.limit == "training" and not advice.tried
    assert advice.told().startswith("training is the limit")
    faster, now = advice.faster_trainer.steps_per_minute, advice.measured.steps_per_minute
    assert faster == pytest.approx(2 * now, rel=0.1)


def test_a_run_that_waits_for_its_tools_is_told_that_no_machine_helps():
    advice = advise(run_on(Cluster(decode_s=1e-4, step_s=0.01, start_s=60.0), max_staleness=0))
    assert advice.limit == "neither" and not advice.tried
