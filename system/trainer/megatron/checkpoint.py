"""Weights and optimizer state through Megatron's distributed checkpoints: every rank writes its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import nn

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""So that other sizes may read a checkpoint than wrote it; experts on one rank and on several are two formats."""


def save(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Write into a folder; done on all ranks when this returns."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_state(model, optimizer, is_loading=False), str(folder))
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Take what `save` wrote."""
    found: Any = dist_checkpointing.load(_state(model, optimizer, is_loading=True), str(folder))
    model.load_state_dict(found["model"])
    for one in optimizer.chained_optimizers:
        _leave_step(one)
    optimizer.load_state_dict(found["optimizer"])
    for one in optimizer.chained_optimizers:
        _own_steps(one)


def _leave_step(optimizer: Any) -> None:
    """Torch's AdamW keeps its step as a tensor, which Megatron has loaded elsewhere but then misses here."""
    if not hasattr(optimizer, "_set_main_param_and_optimizer_states"):
        return
    inner = type(optimizer)._set_main_param_and_optimizer_states
    optimizer._set_main_param_and_optimizer_states = lambda param, tensors: inner(
        optimizer, param, {"step": None, **tensors}
    )


def _own_steps(optimizer: Any) -> None:
    """Megatron gives all parameters one tensor as their step, which each of them then would count up."""
    for state in optimizer.optimizer.state.values() if optimizer.optimizer is not None else ():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _state(model: nn.Module, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    metadata: dict[str, Any] = {**METADATA}  # Megatron writes its groups into it
    sharded = model.sharded_state_dict(metadata=metadata)  # pyright: ignore[reportCallIssue]
    return {
        "model": sharded,
        "optimizer": optimizer.sharded_state_dict(sharded, is_loading=is_loading, metadata=metadata),
    }
