"""Tiny policies, the rows of a step, and the torch trainer's answer to both. No megatron."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.aggregate import prompt_mean_weight
from core.loss import dppo_binary_tv
from system.model import ModelConfig, Qwen3
from system.trainer import OptimizerSettings, StepRow
from system.trainer.megatron.shape import Shape, weight_shapes
from system.trainer.torch_trainer import TorchTrainer

BASE = ModelConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=41,
    token_count=37,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)
MOE: dict[str, Any] = {"experts": 4, "active_experts": 2, "expert_size": 12}
SHAPES = {
    "tied": Shape(base=BASE),
    "untied": Shape(base=replace(BASE, tie_word_embeddings=False)),
    "one key head": Shape(base=replace(BASE, num_key_value_heads=1)),
    "experts": Shape(base=replace(BASE, tie_word_embeddings=False), **MOE),
    "experts, plain": Shape(base=BASE, renormalise=False, **MOE),
}
OPTIMIZER = OptimizerSettings(
    learning_rate=1e-2, beta1=0.9, beta2=0.98, epsilon=1e-8, weight_decay=0.01, max_grad_norm=0.5
)
RULES: dict[str, Any] = {
    "weight_function": prompt_mean_weight,
    "loss_function": partial(dppo_binary_tv, delta_low=0.15, delta_high=0.15, max_ratio=5.0),
    "optimizer": OPTIMIZER,
    "temperature": 0.8,
}


def weights(shape: Shape) -> dict[str, Tensor]:
    """Large enough for every part to matter."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name, size in weight_shapes(shape).items():
        noise = torch.randn(size, generator=generator)
        found[name] = 1 + 0.2 * noise if len(size) == 1 else 0.3 * noise
    return found


def rows(seed: int = 0) -> list[StepRow]:
    """Nine ragged rows of three groups, one of them without a trained token."""
    generator, found = torch.Generator().manual_seed(seed), []
    for index, length in enumerate([5, 30, 12, 2, 61, 17, 33, 8, 21]):
        mask = (torch.rand(length, generator=generator) < 0.6).tolist()
        mask[0], mask[-1] = False, index % 2 == 0
        logprob = (-3 - torch.rand(length, generator=generator)).tolist()
        found.append(
            StepRow(
                row_id=f"t{index}/0",
                trial_id=f"t{index}",
                group_id=(5, 2, 9)[index % 3],
                token_ids=torch.randint(0, BASE.token_count, (length,), generator=generator).tolist(),
                loss_mask=[False] * length if index == 7 else mask,
                rollout_logprob=[lp if on else math.nan for lp, on in zip(logprob, mask, strict=True)],
                policy_version=[3 if on else -1 for on in mask],
                advantage=(-1.0) ** index * (0.3 + 0.1 * index),
            )
        )
    return found


class Experts(nn.Module):
    """Hugging Face's Qwen3-MoE in the place of the torch trainer's model, one row at a time."""

    def __init__(self, shape: Shape, state: dict[str, Tensor]) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        super().__init__()
        base = shape.base
        self.config = base
        fields = (
            "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
            "vocab_size max_position_embeddings rms_norm_eps tie_word_embeddings"
        ).split()
        self.inner = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **{name: getattr(base, name) for name in fields},
                rope_theta=base.rope_theta,  # pyright: ignore[reportCallIssue]
                num_experts=shape.experts,
                num_experts_per_tok=shape.active_experts,
                moe_intermediate_size=shape.expert_size,
                norm_topk_prob=shape.renormalise,
                use_cache=False,
                attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
            )
        ).float()
        self.shape = shape
        own = dict(self.inner.named_parameters())
        with torch.no_grad():
            for name, value in fused(state, shape).items():
                own[name].copy_(value)

    @property
    def head(self) -> Tensor:
        return self.inner.lm_head.weight[: self.config.token_count]

    def forward(self, token_ids: Tensor, row_lengths: list[int]) -> Tensor:
        rows = token_ids.split(row_lengths)
        return torch.cat([self.inner.model(row[None]).last_hidden_state[0] for row in rows])


def fused(state: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Hugging Face's names on disk to those of its module, which keeps a layer's experts in one tensor."""
    found = {name: value for name, value in state.items() if ".experts." not in name}
    for layer in range(shape.base.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        ups = [
            torch.cat([state[f"{prefix}{e}.{name}_proj.weight"] for name in ("gate", "up")])
            for e in range(shape.experts)
        ]
        downs = [state[f"{prefix}{e}.down_proj.weight"] for e in range(shape.experts)]
        found[f"{prefix}gate_up_proj"], found[f"{prefix}down_proj"] = torch.stack(ups), torch.stack(downs)
    return found


def torch_trainer(shape: Shape) -> TorchTrainer:
    """The answer to compare with."""
    state = weights(shape)
    model: Any = Experts(shape, state) if shape.experts else Qwen3.from_state(shape.base, state)
    return TorchTrainer(model, token_budget=64, **RULES)


def named(trainer: TorchTrainer, values: Any) -> dict[str, Tensor]:
    """A value of every parameter under the names that `fused` gives."""
    return {name.removeprefix("inner."): values(p) for name, p in trainer.model.named_parameters()}
