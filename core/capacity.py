"""How many trajectories can run at once, and how many may: what KV memory holds against what staleness admits."""

from __future__ import annotations

import math

from .check import check_count


def kv_bytes_per_token(
    *, attention_layers: int, kv_heads: int, head_dim: int, bytes_per_value: int, tensor_parallel: int
) -> int:
    """Bytes that one token of context takes on one GPU: 2 * layers * heads held there * head_dim * bytes_per_value.

    The 2 is a key and a value. Of `kv_heads` a GPU holds its share, and never less than one: with more GPUs than
    heads each head lies on several of them, so that more GPUs hold no more context.

    Args:
        attention_layers: layers that keep keys and values; linear ones keep none that grows.
        kv_heads: key-value heads of a layer.
        tensor_parallel: GPUs over which an engine splits its heads; 1 gives the bytes of a full copy.
    """
    for name, value in (
        ("attention_layers", attention_layers),
        ("kv_heads", kv_heads),
        ("head_dim", head_dim),
        ("bytes_per_value", bytes_per_value),
        ("tensor_parallel", tensor_parallel),
    ):
        check_count(name, value, least=1)
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        raise ValueError(
            f"tensor_parallel must divide {kv_heads} kv_heads or be a multiple of them, got {tensor_parallel}"
        )
    return 2 * attention_layers * max(1, kv_heads // tensor_parallel) * head_dim * bytes_per_value


def kv_tokens(
    *, gpu_bytes: float, utilization: float, weight_bytes: float, other_bytes: float, token_bytes: int
) -> int:
    """Tokens of context that an engine holds: what its GPUs have left over, in tokens, rounded down.

        (gpu_bytes * utilization - weight_bytes - other_bytes) / token_bytes, and never less than 0

    Args:
        gpu_bytes: memory of one GPU.
        utilization: the share of it that the engine may take.
        weight_bytes: of the weights, on one GPU.
        other_bytes: activations, graphs and buffers, on one GPU.
        token_bytes: `kv_bytes_per_token` at the engine's tensor parallelism.
    """
    check_count("token_bytes", token_bytes, least=1)
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization must lie between 0 and 1, got {utilization}")
    for name, value in (
        ("gpu_bytes", gpu_bytes),
        ("weight_bytes", weight_bytes),
        ("other_bytes", other_bytes),
    ):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value}")
    return max(0, math.floor((gpu_bytes * utilization - weight_bytes - other_bytes) / token_bytes))


def runnable_trajectories(*, engines: int, tokens: int, mean_length: float) -> int:
    """Trajectories that can be sampled side by side: floor(engines * tokens / mean_length).

    Args:
        engines: replicas that share the trajectories.
        tokens: `kv_tokens` of one engine.
        mean_length: tokens of a trajectory while it runs, averaged over those under way.
    """
    check_count("engines", engines, least=0)
    check_count("tokens", tokens, least=0)
    if not 0 < mean_length < math.inf:
        raise ValueError(f"mean_length must be finite and positive, got {mean_length}")
    return math.floor(engines * tokens / mean_length)


def admitted_trajectories(*, max_staleness: int, batch_groups: int, group_size: int) -> int:
    """Trajectories that staleness lets be under way or waiting: (max_staleness + 1) * batch_groups * group_size.

    Those above `runnable_trajectories` wait, and age while they wait.
    """
    check_count("max_staleness", max_staleness, least=0)
    check_count("batch_groups", batch_groups, least=1)
    check_count("group_size", group_size, least=1)
    return (max_staleness + 1) * batch_groups * group_size
