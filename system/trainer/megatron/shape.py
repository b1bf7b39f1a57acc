"""The shape of a Qwen3 or Qwen3-MoE policy and the names of its weights, as Hugging Face has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from system.model import ModelConfig, config_from_huggingface


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder; without experts every layer has one dense feed-forward part.

    Example: Shape(base=ModelConfig(...), experts=128, active_experts=8, expert_size=768, renormalise=True)
    """

    base: ModelConfig
    experts: int = 0
    active_experts: int = 0
    expert_size: int = 0
    """Inner width of one expert."""
    renormalise: bool = True
    """The weights of the chosen experts add up to one."""

    def __post_init__(self) -> None:
        if self.experts and not 0 < self.active_experts <= self.experts:
            raise ValueError(f"active_experts must be in 1..{self.experts}, got {self.active_experts}")

    @property
    def active_parameters(self) -> int:
        """Weights that take part in one token's forward pass, the embedding's lookup left out."""
        base = self.base
        heads = (base.num_attention_heads * 2 + base.num_key_value_heads * 2) * base.head_dim
        inner = self.active_experts * self.expert_size if self.experts else base.intermediate_size
        layer = base.hidden_size * (heads + 3 * inner + self.experts)
        return base.num_hidden_layers * layer + base.vocab_size * base.hidden_size


def shape_from_huggingface(record: Mapping[str, Any], *, token_count: int | None = None) -> Shape:
    """Read the contents of a config.json of Qwen3 or Qwen3-MoE; refuse what is not computed here."""
    if record.get("model_type") != "qwen3_moe":
        return Shape(base=config_from_huggingface(record, token_count=token_count))
    for name, only in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if (record.get(name) or only) != only:
            raise ValueError(f"{name} must be {only}, got {record[name]}")
    dense = {"intermediate_size": record["moe_intermediate_size"], **record, "model_type": "qwen3"}
    return Shape(
        base=config_from_huggingface(dense, token_count=token_count),
        experts=record["num_experts"],
        active_experts=record["num_experts_per_tok"],
        expert_size=record["moe_intermediate_size"],
        renormalise=bool(record.get("norm_topk_prob", False)),
    )


def layer_shapes(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a layer."""
    base, prefix = shape.base, f"model.layers.{layer}."
    width, size = base.hidden_size, base.head_dim
    query, key = base.num_attention_heads * size, base.num_key_value_heads * size
    told: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (width, query),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
    }
    if shape.experts:
        told["mlp.gate.weight"] = (shape.experts, width)
        for expert in range(shape.experts):
            told |= _gated(f"mlp.experts.{expert}.", width, shape.expert_size)
    else:
        told |= _gated("mlp.", width, base.intermediate_size)
    return {prefix + name: value for name, value in told.items()}


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a policy."""
    base = shape.base
    table = (base.vocab_size, base.hidden_size)
    told: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for layer in range(base.num_hidden_layers):
        told |= layer_shapes(shape, layer)
    told["model.norm.weight"] = (base.hidden_size,)
    return told if base.tie_word_embeddings else told | {"lm_head.weight": table}


def _gated(prefix: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, width),
        f"{prefix}up_proj.weight": (inner, width),
        f"{prefix}down_proj.weight": (width, inner),
    }
