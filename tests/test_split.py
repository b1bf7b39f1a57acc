"""The kept policy itself, on rows as trials make them: one gradient, however the step is split."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from core.aggregate import prompt_mean_weight, sequence_mean_weight, token_mean_weight
from core.loss import dppo_binary_tv
from system.harness.chat import Chat, function_schema
from system.harness.office import observation_ids
from system.model import Qwen3
from system.policy import load_policy
from system.tools.server import TOOL_LINES
from system.trainer import OptimizerSettings, StepRow
from system.trainer.torch_trainer import TorchTrainer
from system.world.demonstration import draw_demonstration

ROOT = Path(__file__).resolve().parent.parent
CLERK = ROOT / "policies" / "clerk"
RULES = {"token": token_mean_weight, "sequence": sequence_mean_weight, "prompt": prompt_mean_weight}


def rows() -> list[StepRow]:
    """Six trajectories of three groups, one call to seven, with rollout logprobs of another policy."""
    chat, found = Chat(CLERK), []
    generator = torch.Generator().manual_seed(0)
    tools = [function_schema(line.split("(")[0], "", {"properties": {}}) for line in TOOL_LINES]
    for index in range(6):
        level = 1 + index // 2
        _, _, messages = draw_demonstration(index, split="train", level_shares={level: 1.0}, slip_rates={})
        ids = chat.render(messages[:1], tools, add_generation_prompt=True)
        mask = [False] * len(ids)
        for message in messages[1:]:
            own = message["role"] == "assistant"
            new = (
                chat.completion(message["content"])
                if own
                else observation_ids(chat, message["content"], ids[-1])
            )
            ids, mask = [*ids, *new], mask + [own] * len(new)
        found.append(
            StepRow(
                row_id=f"t{index}#0",
                trial_id=f"t{index}",
                group_id=level,
                token_ids=ids,
                loss_mask=mask,
                rollout_logprob=(-torch.rand(len(ids), generator=generator)).tolist(),
                policy_version=[0 if own else -1 for own in mask],
                advantage=(-1.0) ** index * 0.5,
            )
        )
    return found


def gradient(rule: str, budget: int, group: object = None) -> torch.Tensor:
    """The step's gradient in float64."""
    config, state = load_policy(CLERK)
    trainer = TorchTrainer(
        Qwen3.from_state(config, state, dtype=torch.float64),
        weight_function=RULES[rule],
        loss_function=partial(dppo_binary_tv, delta_low=0.15, delta_high=0.15, max_ratio=5.0),
        optimizer=OptimizerSettings(
            learning_rate=1e-4, beta1=0.9, beta2=0.98, epsilon=1e-8, weight_decay=0.0, max_grad_norm=1.0
        ),
        token_budget=budget,
        temperature=1.0,
        group=group,  # type: ignore[arg-type]
    )
    trainer.gradient(rows())
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("rule", RULES)
def test_the_policy_has_one_gradient_for_every_micro_batch_budget(rule):
    whole = gradient(rule, 1_000_000)
    assert whole.norm() > 0
    for budget in (1, 1000):
        assert gap(gradient(rule, budget), whole) < 1e-10


RANK = """
import sys, torch, torch.distributed as dist
from tests.test_split import RULES, gradient
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
torch.save({rule: gradient(rule, 1000, dist.group.WORLD) for rule in RULES}, sys.argv[3] + sys.argv[1])
dist.destroy_process_group()
"""


def test_the_policy_has_one_gradient_on_one_rank_and_on_two(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RANK]
    places = [str(tmp_path / "store"), str(tmp_path / "out")]
    ranks = [subprocess.Popen([*command, str(r), *places], cwd=ROOT, env=environment) for r in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    for rule in RULES:
        alone = gradient(rule, 1000)
        for rank in range(2):
            assert gap(torch.load(tmp_path / f"out{rank}")[rule], alone) < 1e-10
