"""A Megatron trainer from a policy folder; torch.distributed is already there."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from system.trainer.megatron.head import no_fusion
from system.trainer.megatron.network import join
from system.trainer.megatron.policy import open_policy
from system.trainer.megatron.trainer import MegatronTrainer
from system.trainer.parallel import Parallel


def start_trainer(
    policy_dir: str | os.PathLike[str], parallel: Parallel, *, device: str, rules: dict[str, Any]
) -> MegatronTrainer:
    """At the policy's own weights with a fresh optimizer.

    Args:
        rules: what else a MegatronTrainer is given.
    """
    shape, weight = open_policy(policy_dir)
    if not parallel_state.model_parallel_is_initialized():
        join(parallel)
    fuse = partial(torch.compile, dynamic=True) if device == "cuda" else no_fusion
    return MegatronTrainer(shape, weight, parallel=parallel, fuse=fuse, **rules)
