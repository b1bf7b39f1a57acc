"""Weights between Hugging Face's names and the parts of them that Megatron ranks hold: exact in both directions.

A rank holds of q, k and v the groups of heads that are its own, each group's queries before its key and value;
of a gated feed-forward part its share of the gate and its share of the rest, one below the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn

from system.trainer.megatron.network import padded_vocabulary
from system.trainer.megatron.ranks import expert_group, stage_group, tensor_group
from system.trainer.megatron.shape import Shape, weight_shapes
from system.trainer.parallel import Parallel

Kind = Literal["whole", "vocabulary", "columns", "heads", "gated"]


class Part(NamedTuple):
    """One parameter of a stage.

    Args:
        name: as Megatron has it.
        kind: how it is made of the weights of `sources`, and which axis the tensor ranks share.
        sources: Hugging Face's names, for the expert rank asked about.
        expert: one that only some expert ranks have, and those whole.
    """

    name: str
    kind: Kind
    sources: tuple[str, ...]
    expert: bool = False


def parts(shape: Shape, parallel: Parallel, *, stage: int, expert_rank: int) -> list[Part]:
    """The parameters of a pipeline stage on one expert rank, in one order for all ranks."""
    found: list[Part] = []
    if stage == 0:
        found.append(Part("embedding.word_embeddings.weight", "vocabulary", ("model.embed_tokens.weight",)))
    layers = shape.base.num_hidden_layers // parallel.pipeline
    for layer in range(layers):
        found += _layer(shape, parallel, f"decoder.layers.{layer}.", stage * layers + layer, expert_rank)
    if stage == parallel.pipeline - 1:
        found.append(Part("decoder.final_layernorm.weight", "whole", ("model.norm.weight",)))
        if not shape.base.tie_word_embeddings:
            found.append(Part("output_layer.weight", "vocabulary", ("lm_head.weight",)))
        elif parallel.pipeline > 1:
            found.append(Part("output_layer.weight", "vocabulary", ("model.embed_tokens.weight",)))
    return found


def _layer(shape: Shape, parallel: Parallel, here: str, layer: int, expert_rank: int) -> Iterator[Part]:
    there = f"model.layers.{layer}."
    attention = f"{there}self_attn."
    yield Part(f"{here}input_layernorm.weight", "whole", (f"{there}input_layernorm.weight",))
    heads = tuple(f"{attention}{name}_proj.weight" for name in "qkv")
    yield Part(f"{here}self_attention.linear_qkv.weight", "heads", heads)
    yield Part(f"{here}self_attention.linear_proj.weight", "columns", (f"{attention}o_proj.weight",))
    for name in "qk":
        yield Part(
            f"{here}self_attention.{name}_layernorm.weight", "whole", (f"{attention}{name}_norm.weight",)
        )
    yield Part(f"{here}pre_mlp_layernorm.weight", "whole", (f"{there}post_attention_layernorm.weight",))
    if not shape.experts:
        yield from _gated(f"{here}mlp.", f"{there}mlp.")
        return
    yield Part(f"{here}mlp.router.weight", "whole", (f"{there}mlp.gate.weight",))
    local = shape.experts // parallel.expert
    for expert in range(local):
        source = f"{there}mlp.experts.{expert_rank * local + expert}."
        yield from _gated(f"{here}mlp.experts.local_experts.{expert}.", source, expert=True)


def _gated(here: str, there: str, *, expert: bool = False) -> Iterator[Part]:
    both = (f"{there}gate_proj.weight", f"{there}up_proj.weight")
    yield Part(f"{here}linear_fc1.weight", "gated", both, expert)
    yield Part(f"{here}linear_fc2.weight", "columns", (f"{there}down_proj.weight",), expert)


def share_of(
    kind: Kind, weights: Sequence[Tensor], *, rank: int, ranks: int, shape: Shape, vocabulary: int
) -> Tensor:
    """What one tensor rank holds of whole weights.

    Args:
        vocabulary: rows of the embedding with its padding.
    """
    match kind:
        case "whole":
            return weights[0]
        case "vocabulary":
            missing = vocabulary - len(weights[0])
            padding = weights[0].new_zeros(missing, weights[0].shape[1])
            return torch.cat((weights[0], padding)).chunk(ranks)[rank]
        case "columns":
            return weights[0].chunk(ranks, dim=1)[rank]
        case "gated":
            return torch.cat([weight.chunk(ranks)[rank] for weight in weights])
        case "heads":
            size = shape.base.head_dim
            groups = [
                rearrange(weight, "(g r d) h -> g r d h", g=shape.base.num_key_value_heads, d=size)
                for weight in weights
            ]
            return rearrange(torch.cat(groups, dim=1), "g r d h -> (g r d) h").chunk(ranks)[rank]


def whole_of(kind: Kind, shares: Sequence[Tensor], *, shape: Shape) -> tuple[Tensor, ...]:
    """The whole weights from what every tensor rank holds: the inverse of `share_of`."""
    match kind:
        case "whole":
            return (shares[0],)
        case "vocabulary":
            return (torch.cat(list(shares))[: shape.base.vocab_size],)
        case "columns":
            return (torch.cat(list(shares), dim=1),)
        case "gated":
            halves = zip(*(share.chunk(2) for share in shares), strict=True)
            return tuple(torch.cat(half) for half in halves)
        case "heads":
            base = shape.base
            queries = base.num_attention_heads // base.num_key_value_heads
            groups = rearrange(
                torch.cat(list(shares)), "(g r d) h -> g r d h", r=queries + 2, d=base.head_dim
            )
            split = groups.split((queries, 1, 1), dim=1)
            return tuple(rearrange(weight, "g r d h -> (g r d) h") for weight in split)


def take_weights(model: nn.Module, shape: Shape, parallel: Parallel, weight: Callable[[str], Tensor]) -> None:
    """Fill this rank's parameters.

    Args:
        weight: a whole weight by Hugging Face's name.
    """
    stage, expert_rank = stage_group().rank(), expert_group().rank()
    parameters, shapes = dict(model.named_parameters()), weight_shapes(shape)
    planned = parts(shape, parallel, stage=stage, expert_rank=expert_rank)
    if parameters.keys() != {part.name for part in planned}:
        odd = sorted(parameters.keys() ^ {part.name for part in planned})
        raise ValueError(f"parameters of the stage must be those planned, got a difference in {odd}")
    for part in planned:
        weights = [weight(name) for name in part.sources]
        for name, value in zip(part.sources, weights, strict=True):
            if tuple(value.shape) != shapes[name]:
                raise ValueError(f"{name} must have shape {shapes[name]}, got {tuple(value.shape)}")
        own = share_of(
            part.kind,
            weights,
            rank=0 if part.expert else tensor_group().rank(),
            ranks=1 if part.expert else parallel.tensor,
            shape=shape,
            vocabulary=padded_vocabulary(shape, parallel),
        )
        with torch.no_grad():
            parameters[part.name].copy_(own)


def whole_weights(
    local: Callable[[str], Tensor], shape: Shape, parallel: Parallel
) -> Iterator[tuple[str, Tensor]]:
    """Every whole weight under Hugging Face's name, on every rank, one after the other; all ranks must take part.

    Args:
        local: this rank's part by Megatron's name: a parameter, or its gradient.
    """
    mine = stage_group().rank()
    for stage in range(parallel.pipeline):
        by_expert = [
            parts(shape, parallel, stage=stage, expert_rank=rank)
            for rank in range(parallel.expert if shape.experts else 1)
        ]
        for same in zip(*by_expert, strict=True):
            if stage > 0 and same[0].sources == ("model.embed_tokens.weight",):
                continue  # the last stage's copy of a tied embedding
            held = _held(same, local, shape) if stage == mine else None
            yield from _to_all_stages(same if same[0].expert else same[:1], held, shape, stage)


def _held(same: Sequence[Part], local: Callable[[str], Tensor], shape: Shape) -> list[tuple[Tensor, ...]]:
    """The whole weights of one parameter, one entry an expert rank."""
    part = same[0]
    if not part.expert:
        group = tensor_group()
        return [whole_of(part.kind, _gather(local(part.name), group), shape=shape)]
    by_rank = _gather(local(part.name), expert_group())
    return [whole_of(part.kind, (share,), shape=shape) for share in by_rank]


def _to_all_stages(
    same: Sequence[Part], held: list[tuple[Tensor, ...]] | None, shape: Shape, stage: int
) -> Iterator[tuple[str, Tensor]]:
    group, shapes = stage_group(), weight_shapes(shape)
    source = dist.get_process_group_ranks(group)[stage]
    like = _like()
    for index, part in enumerate(same):
        for place, name in enumerate(part.sources):
            if group.size() == 1:
                assert held is not None
                yield name, held[index][place]
                continue
            value = torch.empty(shapes[name], **like) if held is None else held[index][place].to(**like)
            value = value.contiguous()
            dist.broadcast(value, source, group=group)
            yield name, value


def _like() -> dict[str, Any]:
    """What is sent between stages: float32, where the ranks compute."""
    on_gpu = dist.get_backend() == "nccl"
    return {"dtype": torch.float32, "device": torch.cuda.current_device() if on_gpu else "cpu"}


def _gather(value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [value.detach()]
    value = value.detach().contiguous()
    found = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(found, value, group=group)
    return found
