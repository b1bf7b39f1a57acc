"""The gradient of a step batch is one number, however it is split; and the process that takes the steps."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.aggregate import prompt_mean_weight, sequence_mean_weight, token_mean_weight
from core.loss import dppo_binary_tv, importance_weighted_policy_gradient
from system.model import ModelConfig, Qwen3
from system.policy import load_policy, save_policy
from system.trainer import OptimizerSettings, StepRow, TrainerError, TrainerProcess
from system.trainer.torch_trainer import TorchTrainer
from tests.test_model import large_norms, write_tokenizer

CONFIG = ModelConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=40,
    token_count=37,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)
OPTIMIZER = OptimizerSettings(
    learning_rate=1e-2, beta1=0.9, beta2=0.98, epsilon=1e-8, weight_decay=0.01, max_grad_norm=1.0
)
RULES = {"token": token_mean_weight, "sequence": sequence_mean_weight, "prompt": prompt_mean_weight}
DPPO = partial(dppo_binary_tv, delta_low=0.15, delta_high=0.15, max_ratio=math.inf)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def some_rows(seed: int = 0) -> list[StepRow]:
    """Nine ragged rows of three groups, with observations between sampled runs and one row fully masked."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i, length in enumerate([5, 30, 12, 2, 61, 17, 33, 8, 21]):
        mask = (torch.rand(length, generator=generator) < 0.6).tolist()
        mask[0] = False
        mask[-1] = i % 2 == 0
        if i == 7:
            mask = [False] * length
        logprob = (-3 - torch.rand(length, generator=generator)).tolist()
        rows.append(
            StepRow(
                row_id=f"t{i}/0",
                trial_id=f"t{i}",
                group_id=(5, 2, 9)[i % 3],
                token_ids=torch.randint(0, CONFIG.token_count, (length,), generator=generator).tolist(),
                loss_mask=mask,
                rollout_logprob=[lp if on else math.nan for lp, on in zip(logprob, mask, strict=True)],
                policy_version=[3 if on else -1 for on in mask],
                advantage=(-1.0) ** i * (0.3 + 0.1 * i),
                requests=((f"t{i}/0", 1, length),),
            )
        )
    return rows


def trainer(rule: str = "token", budget: int = 64, dtype: torch.dtype = torch.float64) -> TorchTrainer:
    return TorchTrainer(
        Qwen3.from_state(CONFIG, large_norms(CONFIG, 4), dtype=dtype),
        weight_function=RULES[rule],
        loss_function=DPPO,
        optimizer=OPTIMIZER,
        token_budget=budget,
        temperature=1.0,
    )


def gradient_of(made: TorchTrainer, rows: list[StepRow]) -> torch.Tensor:
    made.gradient(rows)
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in made.model.parameters()]
    return torch.cat([g.flatten() for g in grads])


def oracle(rule: str, rows: list[StepRow]) -> torch.Tensor:
    """One row at a time, weights by counting, the ratio form of the surrogate."""
    model = Qwen3.from_state(CONFIG, large_norms(CONFIG, 4), dtype=torch.float64)
    count = {i: sum(row.loss_mask) for i, row in enumerate(rows)}
    live = [i for i in count if count[i]]
    groups = {rows[i].group_id for i in live}
    loss = torch.zeros((), dtype=torch.float64)
    for i in live:
        row = rows[i]
        pooled = sum(count[j] for j in live if rows[j].group_id == row.group_id)
        weight = {
            "token": 1 / sum(count.values()),
            "sequence": 1 / (len(live) * count[i]),
            "prompt": 1 / (len(groups) * pooled),
        }[rule]
        hidden = model(torch.tensor(row.token_ids), [len(row.token_ids)])
        everything = model.logits(hidden).log_softmax(-1)
        for t, on in enumerate(row.loss_mask):
            if on:
                logprob = everything[t - 1, row.token_ids[t]]
                ratio = (logprob - row.rollout_logprob[t]).exp()
                moved = logprob.detach().exp().item() - math.exp(row.rollout_logprob[t])
                if not moved * math.copysign(1, row.advantage) > 0.15:
                    loss = loss - weight * ratio * row.advantage
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() <= 1e-10 * b.norm())


@pytest.mark.parametrize("rule", RULES)
def test_gradient_equals_the_oracle_for_every_token_budget(rule: str):
    rows = some_rows()
    expected = oracle(rule, rows)
    assert expected.norm() > 1e-3
    for budget in (1, 40, 64, 10_000):
        assert close(gradient_of(trainer(rule, budget), rows), expected)


def test_gradient_does_not_depend_on_the_order_of_rows():
    rows = some_rows()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    for rule in RULES:
        made = trainer(rule)
        shuffled = gradient_of(made, [rows[i] for i in order])
        assert close(shuffled, gradient_of(made, rows))


def test_values_outside_the_mask_are_never_read():
    rows = some_rows()
    expected = gradient_of(trainer(), rows)
    for poison in (math.inf, -math.inf, 0.0, 1e30):
        changed = [
            replace(
                row,
                rollout_logprob=[
                    lp if on else poison for lp, on in zip(row.rollout_logprob, row.loss_mask, strict=True)
                ],
            )
            for row in rows
        ]
        assert torch.equal(gradient_of(trainer(), changed), expected)
    masked = replace(rows[7], advantage=math.nan)
    assert torch.equal(gradient_of(trainer(), [*rows[:7], masked, rows[8]]), expected)


def test_temperature_is_applied_to_what_is_scored():
    row = some_rows()[1]
    made = trainer()
    made.temperature = 0.5
    with torch.no_grad():
        logits = made.model.logits(made.model(torch.tensor(row.token_ids), [len(row.token_ids)]))
    everything = (logits / 0.5).log_softmax(-1)
    told = made.logprob([row])[0]
    for t, on in enumerate(row.loss_mask):
        expected = everything[t - 1, row.token_ids[t]].item() if on else 0.0
        assert told[t] == pytest.approx(expected, abs=1e-12)


def test_a_step_without_trained_tokens_changes_nothing():
    made = trainer()
    before = {n: v.clone() for n, v in made.model.state_dict().items()}
    masked = [replace(row, loss_mask=[False] * len(row.token_ids)) for row in some_rows()]
    for rows in ([], masked):
        metrics = made.step(rows, version=3)
        assert (metrics.policy_version, metrics.trained_tokens, metrics.grad_norm) == (4, 0, 0.0)
    assert all(torch.equal(v, before[n]) for n, v in made.model.state_dict().items())


def test_a_gradient_that_is_not_finite_raises_and_leaves_the_weights():
    made = trainer()
    before = {n: v.clone() for n, v in made.model.state_dict().items()}
    rows = some_rows()
    rows[1] = replace(rows[1], advantage=math.nan)
    with pytest.raises(FloatingPointError, match="grad_norm must be finite, got nan"):
        made.step(rows, version=0)
    assert all(torch.equal(v, before[n]) for n, v in made.model.state_dict().items())


def test_saved_trainer_goes_on_as_if_it_had_not_stopped(tmp_path: Path):
    made, rows = trainer(), some_rows()
    made.step(rows, version=0)
    made.save(tmp_path)
    made.step(some_rows(1), version=1)
    again = trainer()
    again.load(tmp_path)
    again.step(some_rows(1), version=1)
    for name, value in made.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])


def test_rows_of_unequal_fields_are_refused():
    row = some_rows()[0]
    with pytest.raises(
        ValueError, match="rollout_logprob must have 5 entries, one per token, got 4 in row t0/0"
    ):
        replace(row, rollout_logprob=[0.0] * 4)
    with pytest.raises(ValueError, match="loss_mask must be False at the first token, got True in row t0/0"):
        replace(row, loss_mask=[True] * 5)


RANK = """
import os, sys, torch, torch.distributed as dist
from functools import partial
sys.path.insert(0, {root!r})
from tests.test_trainer import RULES, gradient_of, some_rows, trainer
torch.set_num_threads(1)
rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
told = {{}}
for rule in RULES:
    for budget in (40, 10_000):
        made = trainer(rule, budget)
        made.group = dist.group.WORLD
        told[rule, budget] = gradient_of(made, some_rows())
made = trainer("prompt")
made.group = dist.group.WORLD
metrics = made.step(some_rows(), version=0)
told["step"] = (metrics.trained_tokens, metrics.loss, metrics.grad_norm, metrics.mismatch, metrics.entropy)
told["weights"] = torch.cat([p.detach().flatten() for p in made.model.parameters()])
torch.save(told, out + str(rank))
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # torch's own threads may abort the interpreter's end
"""


def test_two_ranks_give_the_gradient_of_one(tmp_path: Path):
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", RANK.format(root=str(root))]
    paths = [str(tmp_path / "store"), str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, str(r), *paths], cwd=root, env=environment) for r in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    told = [torch.load(tmp_path / f"out{r}", weights_only=False) for r in range(2)]
    for rule in RULES:
        expected = gradient_of(trainer(rule), some_rows())
        for budget in (40, 10_000):
            for rank in told:
                assert close(rank[rule, budget], expected)
    alone = trainer("prompt")
    metrics = alone.step(some_rows(), version=0)
    seen = (metrics.trained_tokens, metrics.loss, metrics.grad_norm, metrics.mismatch, metrics.entropy)
    weights = torch.cat([p.detach().flatten() for p in alone.model.parameters()])
    for rank in told:
        assert rank["step"] == pytest.approx(seen, rel=1e-9)
        assert torch.allclose(rank["weights"], weights, rtol=0, atol=1e-8)


def write_policy(folder: Path) -> Path:
    write_tokenizer(folder, CONFIG.token_count)
    save_policy(folder, CONFIG, large_norms(CONFIG, 4))
    return folder


def test_trainer_process_steps_without_making_the_driver_wait(tmp_path: Path):
    policy = write_policy(tmp_path / "policy")
    log = tmp_path / "trainer_input.jsonl"
    process = TrainerProcess(
        policy,
        weight_function=prompt_mean_weight,
        loss_function=DPPO,
        optimizer=OPTIMIZER,
        token_budget=64,
        temperature=1.0,
        weights_dir=tmp_path / "weights",
        input_path=log,
    )
    try:
        _, state = load_policy(policy)
        first = load_file(process.weights_path)
        assert first.keys() == state.keys() and all(torch.equal(first[n], state[n]) for n in state)
        rows = some_rows()
        start = time.monotonic()
        process.start_step(rows, version=0)
        assert time.monotonic() - start < 0.5
        with pytest.raises(TrainerError, match="logprob must wait for the step begun"):
            process.logprob(rows)
        while (metrics := process.poll(1.0)) is None:
            pass
        reference = TorchTrainer(
            Qwen3.from_state(CONFIG, state),
            weight_function=prompt_mean_weight,
            loss_function=DPPO,
            optimizer=OPTIMIZER,
            token_budget=64,
            temperature=1.0,
        )
        expected = reference.step(rows, version=0)
        assert metrics.policy_version == 1 and metrics.trained_tokens == expected.trained_tokens
        assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert (
            process.weights_path
            == metrics.weights_path
            == str(tmp_path / "weights" / "weights-1.safetensors")
        )
        second = load_file(metrics.weights_path)
        for name, value in reference.model.state_dict().items():
            assert torch.allclose(second[name], value, atol=1e-6) and second[name].dtype == torch.float32
        assert process.logprob(rows[:2])[1][-3:] == pytest.approx(
            reference.logprob(rows[:2])[1][-3:], abs=1e-5
        )
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["row_id"] for line in lines] == [row.row_id for row in rows]
        for line, row in zip(lines, rows, strict=True):
            assert line["token_ids"] == row.token_ids and line["loss_mask"] == row.loss_mask
            assert line["requests"] == [["/".join(row.row_id.split("/")), 1, len(row.token_ids)]]
            trained = [t for t, on in enumerate(row.loss_mask) if on]
            assert [line["rollout_logprob"][t] for t in trained] == [row.rollout_logprob[t] for t in trained]
        # an error is told and the trainer lives on; a step after save and load is what it would have been
        with pytest.raises(TrainerError, match="FloatingPointError: grad_norm must be finite, got nan"):
            process.step([replace(rows[1], advantage=math.nan)], version=1)
        process.save(tmp_path / "saved")
        a = process.step(rows, version=1)
        after = load_file(a.weights_path)
        process.load(tmp_path / "saved", version=1)
        process.step(rows, version=1)
        again = load_file(process.weights_path)
        assert all(torch.equal(after[n], again[n]) for n in after)
        assert sorted(p.name for p in (tmp_path / "weights").glob("weights-*")) == [
            "weights-1.safetensors",
            "weights-2.safetensors",
        ]
    finally:
        process.close()


def test_trainer_process_of_two_ranks_takes_the_step_of_one(tmp_path: Path):
    policy = write_policy(tmp_path / "policy")
    rules = {"weight_function": token_mean_weight, "loss_function": importance_weighted_policy_gradient}
    settings = {"optimizer": OPTIMIZER, "token_budget": 50, "temperature": 1.0}
    process = TrainerProcess(policy, **rules, **settings, weights_dir=tmp_path, input_path="", ranks=2)
    told = load_file(process.step(some_rows(), version=0).weights_path)
    process.close()
    alone = TorchTrainer(Qwen3.from_state(CONFIG, load_policy(policy)[1]), **rules, **settings)
    alone.step(some_rows(), version=0)
    for name, value in alone.model.state_dict().items():
        assert torch.allclose(told[name], value, atol=1e-5), name


def test_trainer_process_that_cannot_start_or_dies_is_one_line(tmp_path: Path):
    settings = {
        "weight_function": token_mean_weight,
        "loss_function": importance_weighted_policy_gradient,
        "optimizer": OPTIMIZER,
        "token_budget": 50,
        "temperature": 1.0,
        "weights_dir": tmp_path / "w",
        "input_path": "",
    }
    with pytest.raises(TrainerError, match="policy folder must have config.json"):
        TrainerProcess(tmp_path, **settings)
    process = TrainerProcess(write_policy(tmp_path / "policy"), **settings)
    process._workers[0].kill()
    with pytest.raises(TrainerError, match="trainer must be running, got exit code -9"):
        process.step(some_rows(), version=0)
    process.close()


@pytest.mark.parametrize("ask", ["save", "step"])
def test_trainer_process_that_hangs_is_one_line_in_time(tmp_path: Path, ask: str):
    settings = {
        "weight_function": token_mean_weight,
        "loss_function": importance_weighted_policy_gradient,
        "optimizer": OPTIMIZER,
        "token_budget": 50,
        "temperature": 1.0,
        "weights_dir": tmp_path / "w",
        "input_path": "",
        "answer_s": 1.0,
    }
    process = TrainerProcess(write_policy(tmp_path / "policy"), **settings)
    os.kill(process._workers[0].pid, signal.SIGSTOP)
    begun = time.monotonic()
    told = "no end of save" if ask == "save" else "one that does not read step"
    with pytest.raises(TrainerError, match=f"trainer must be done in time, got {told}"):
        if ask == "save":
            process.save(tmp_path / "saved")
        else:
            rows = [row for seed in range(100) for row in some_rows(seed)]
            process.step(rows, version=0)  # more than the pipe holds; the same rows again would be told once
    assert time.monotonic() - begun < 60
    process.close()
