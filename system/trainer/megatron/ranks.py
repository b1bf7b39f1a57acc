"""This rank's groups, as the process groups that they are."""

from __future__ import annotations

from typing import cast

from megatron.core import parallel_state
from torch.distributed import ProcessGroup


def tensor_group() -> ProcessGroup:
    """Those that share each matrix."""
    return cast(ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def context_group() -> ProcessGroup:
    """Those that share each row."""
    return cast(ProcessGroup, parallel_state.get_context_parallel_group())


def expert_group() -> ProcessGroup:
    """Those that share the experts."""
    return cast(ProcessGroup, parallel_state.get_expert_model_parallel_group())


def stage_group() -> ProcessGroup:
    """Those that have some layers each."""
    return cast(ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def data_group() -> ProcessGroup:
    """Those that compute other rows with the same weights."""
    return cast(ProcessGroup, parallel_state.get_data_parallel_group())
