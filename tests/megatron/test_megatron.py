"""The Megatron trainer gives the torch trainer's gradient and step, however ranks share model and rows."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from system.trainer.parallel import Parallel
from tests.megatron.policies import SHAPES, fused, named, rows, torch_trainer, weights

ROOT = Path(__file__).resolve().parent.parent.parent
NEAR = 1e-4
DEADLINE_S = 900.0


def job(shape: str, *, budget: int = 64, **sizes: Any) -> dict[str, Any]:
    """A case whose gradient is looked at."""
    return {
        "shape": shape,
        "budget": budget,
        "parallel": Parallel(**{"distributed_optimizer": False, **sizes}),
    }


ONE = {
    "alone": job("tied"),
    "one row a micro-batch": job("tied", budget=1),
    "all rows in one": job("tied", budget=10_000),
    "recomputed": job("tied", recompute=True),
    "untied": job("untied"),
    "experts": job("experts"),
    "experts, plain, recomputed": job("experts, plain", recompute=True),
}
TWO = {
    "data": job("tied"),
    "data, one row a micro-batch": job("untied", budget=1),
    "tensor": job("tied", tensor=2),
    "tensor, untied": job("untied", tensor=2),
    "tensor, one key head": job("one key head", tensor=2),
    "sequence": job("tied", tensor=2, sequence=True),
    "sequence, recomputed": job("untied", tensor=2, sequence=True, recompute=True),
    "pipeline": job("tied", pipeline=2),
    "pipeline, untied": job("untied", pipeline=2),
    "context": job("tied", context=2),
    "context, recomputed": job("tied", context=2, recompute=True),
    "experts over data": job("experts", expert=2),
    "experts over context": job("experts", expert=2, context=2),
    "experts, tensor": job("experts", tensor=2, sequence=True),
    "experts over tensor": job("experts", expert=2, tensor=2, sequence=True),
    "experts, pipeline": job("experts, plain", pipeline=2),
    "data, shared optimizer": {**job("tied", distributed_optimizer=True), "saves": "dense"},
    "tensor, from data": {
        **job("tied", tensor=2, sequence=True, distributed_optimizer=True),
        "loads": "dense",
    },
    "pipeline, from data": {**job("tied", pipeline=2, distributed_optimizer=True), "loads": "dense"},
    "experts, shared optimizer": {**job("experts", expert=2, distributed_optimizer=True), "saves": "experts"},
    "experts, from shared": {
        **job("experts", expert=2, tensor=2, sequence=True, distributed_optimizer=True),
        "loads": "experts",
    },
    "context, shared optimizer": job("untied", context=2, distributed_optimizer=True, recompute=True),
}
FOUR = {
    "tensor, pipeline": job("tied", tensor=2, pipeline=2, sequence=True),
    "tensor, context": job("tied", tensor=2, context=2, sequence=True),
    "experts, tensor, data": job("experts", tensor=2, expert=2, sequence=True),
    "pipeline, data, experts": job("experts", pipeline=2, expert=2, distributed_optimizer=True),
}
CASES = {1: ONE, 2: TWO, 4: FOUR}


def ran(ranks: int, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Every job by so many ranks; what rank 0 saw."""
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    (folder / "out").mkdir()
    places = [str(folder / name) for name in ("store", "jobs", "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    started = []
    for rank in range(ranks):
        command = [sys.executable, "-m", "tests.megatron.rank", str(rank), str(ranks), *places]
        with open(folder / f"log{rank}", "w") as log:
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        ended = [process.wait(DEADLINE_S) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = "\n".join((folder / f"log{rank}").read_text()[-2000:] for rank in range(ranks))
    assert ended == [0] * ranks, logs
    return [torch.load(folder / "out" / str(index), weights_only=False) for index in range(len(jobs))]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answers of the cases of so many ranks; the processes of each number start once."""

    @cache
    def of(ranks: int) -> dict[str, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        try:
            return dict(zip(CASES[ranks], ran(ranks, list(CASES[ranks].values()), folder), strict=True))
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return {"error": {"error": str(error)}}  # told once for each case, not made again

    def case(ranks: int, name: str) -> dict[str, Any]:
        found = of(ranks)
        assert name in found, found["error"]["error"]
        return found[name]

    return case


@cache
def expected(name: str) -> dict[str, Any]:
    """What the torch trainer says."""
    trainer = torch_trainer(SHAPES[name])
    logprob = trainer.logprob(rows())
    trainer.gradient(rows())
    gradient = named(trainer, lambda p: p.grad.clone())
    metrics = trainer.step(rows(), version=0)
    return {
        "logprob": logprob,
        "gradient": gradient,
        "metrics": metrics,
        "weights": named(trainer, lambda p: p.detach().clone()),
    }


def gap(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], shape: str) -> dict[str, float]:
    """Relative distance of every weight's value."""
    joined = fused(found, SHAPES[shape]) if SHAPES[shape].experts else found
    assert joined.keys() == truth.keys()
    return {name: float((joined[name] - truth[name]).norm() / truth[name].norm()) for name in truth}


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in CASES for name in CASES[ranks]])
def test_gradient_step_and_logprobs_are_those_of_the_torch_trainer(ranks: int, name: str, told: Any) -> None:
    case, shape = told(ranks, name), CASES[ranks][name]["shape"]
    truth = expected(shape)
    assert case["exact"], "weights must come back as they went in"
    for found, wanted in zip(case["logprob"], truth["logprob"], strict=True):
        assert found == pytest.approx(wanted, abs=2e-5)
    if "gradient" in case:
        gaps = gap(case["gradient"], truth["gradient"], shape)
        assert max(gaps.values()) < NEAR, gaps
    for field in ("loss", "grad_norm", "entropy", "mismatch", "masked_share"):
        wanted = getattr(truth["metrics"], field)
        assert getattr(case["metrics"], field) == pytest.approx(wanted, rel=NEAR, abs=1e-6), field
    for field in ("trained_tokens", "forward_tokens", "rows", "unusable", "policy_version"):
        assert getattr(case["metrics"], field) == getattr(truth["metrics"], field), field
    moved = {n: value - weights(SHAPES[shape])[n] for n, value in case["weights"].items()}
    start = weights(SHAPES[shape])
    start = fused(start, SHAPES[shape]) if SHAPES[shape].experts else start
    wanted = {n: value - start[n] for n, value in truth["weights"].items()}
    gaps = gap(moved, wanted, shape)
    assert max(gaps.values()) < 1e-2, gaps


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("tensor, from data", "data, shared optimizer"),
        ("pipeline, from data", "data, shared optimizer"),
        ("experts, from shared", "experts, shared optimizer"),
    ],
)
def test_a_checkpoint_goes_on_under_other_sizes(name: str, saved: str, told: Any) -> None:
    first, second, other = told(2, saved)["weights"], told(2, saved)["second"], told(2, name)["second"]
    for weight, value in second.items():
        moved = float((value - first[weight]).norm())
        assert float((other[weight] - value).norm()) < 1e-2 * moved, weight
