"""The Megatron trainer behind the pipes of TrainerProcess: one process a rank, and what happens when one is lost."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from system.policy import save_policy
from system.trainer import TrainerError, TrainerProcess
from system.trainer.parallel import Parallel
from tests.megatron.policies import RULES, SHAPES, named, rows, torch_trainer, weights
from tests.test_model import write_tokenizer

SITE = Path(__file__).parent / "site"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts trainers of two ranks that are closed at the end."""
    monkeypatch.setenv("PYTHONPATH", str(SITE))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    shape, started = SHAPES["tied"], []
    policy = tmp_path / "policy"
    write_tokenizer(policy, shape.base.token_count)
    save_policy(policy, shape.base, weights(shape), dtype=torch.float32)

    def begin(**sizes: Any) -> TrainerProcess:
        made = TrainerProcess(
            policy,
            **RULES,
            token_budget=64,
            weights_dir=tmp_path / "weights",
            input_path="",
            ranks=2,
            parallel=Parallel(timeout_s=60, **sizes),
            timeout_s=200,
        )
        started.append(made)
        return made

    yield begin
    for process in started:
        process.close()


def test_two_ranks_take_the_step_of_the_torch_trainer_and_go_on_from_a_checkpoint(start, tmp_path):
    truth = torch_trainer(SHAPES["tied"])
    truth.step(rows(), version=0)
    process = start(tensor=2, sequence=True)
    first = load_file(process.weights_path)
    assert all(torch.equal(value, first[name]) for name, value in weights(SHAPES["tied"]).items())
    metrics = process.step(rows(), version=0)
    found = load_file(metrics.weights_path)
    for name, value in named(truth, lambda p: p.detach()).items():
        assert torch.allclose(found[name], value, atol=2e-5), name
    with pytest.raises(TrainerError, match="FloatingPointError: grad_norm must be finite, got nan"):
        process.step([replace(row, advantage=float("nan")) for row in rows()], version=1)
    process.save(tmp_path / "saved")
    after = load_file(process.step(rows(1), version=1).weights_path)
    process.load(tmp_path / "saved", version=1)
    again = load_file(process.step(rows(1), version=1).weights_path)
    assert all(torch.equal(again[name], value) for name, value in after.items())


def test_a_killed_rank_is_one_line_that_names_it_and_no_wait(start):
    process = start()
    os.kill(process._workers[1].pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(TrainerError, match="rank 1 of the trainer must be running, got exit code -9"):
        process.step(rows(), version=0)
    assert time.monotonic() - begun < 50


def test_sizes_that_do_not_fit_are_refused_before_anything_starts(start):
    for sizes, told in (
        ({"tensor": 3}, r"ranks must be a multiple of tensor \* pipeline \* context = 3, got 2"),
        ({"expert": 4}, "expert must divide the ranks of a pipeline stage, 2, got 4"),
        ({"sequence": True}, "tensor must be at least 2 with sequence, got 1"),
        ({"offload": 1.5}, "offload must be from 0 to 1, got 1.5"),
        ({"offload": 0.5, "distributed_optimizer": False}, "distributed_optimizer must be True with offload"),
        ({"context": 0}, "context must be positive, got 0"),
    ):
        with pytest.raises(ValueError, match=told):
            start(**sizes)
