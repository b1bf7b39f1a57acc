"""core/capacity.py against counting heads and bytes, and recipe.md B.10."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.capacity import admitted_trajectories, kv_bytes_per_token, kv_tokens, runnable_trajectories


def bytes_by_counting(layers: int, heads: int, width: int, size: int, gpus: int) -> int:
    """Heads dealt to GPUs in turn, or GPUs to heads; the fullest GPU counts its keys and its values."""
    held = [0] * gpus
    for turn in range(max(heads, gpus)):
        held[turn % gpus] += 1
    total = 0
    for _ in range(layers):
        for _ in ("key", "value"):
            total += max(held) * width * size
    return total


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 8), st.integers(1, 4), st.integers(0, 4))
def test_kv_bytes_per_token_is_what_the_fullest_gpu_holds(
    layers: int, heads: int, width: int, size: int, gpus: int
) -> None:
    found = kv_bytes_per_token(
        attention_layers=layers,
        kv_heads=2**heads,
        head_dim=width,
        bytes_per_value=size,
        tensor_parallel=2**gpus,
    )
    assert found == bytes_by_counting(layers, 2**heads, width, size, 2**gpus)


@given(
    st.integers(0, 10**6), st.sampled_from([0.25, 0.5, 1.0]), st.integers(0, 10**5), st.integers(0, 10**5),
    st.integers(1, 1000),
)  # fmt: skip
def test_kv_tokens_are_the_whole_tokens_that_fit(
    memory: int, share: float, weights: int, others: int, each: int
) -> None:
    free = Fraction(memory) * Fraction(share) - weights - others
    found = kv_tokens(
        gpu_bytes=float(memory), utilization=share, weight_bytes=float(weights), other_bytes=float(others),
        token_bytes=each,
    )  # fmt: skip
    assert found == max(0, math.floor(free / each))


@given(st.integers(1, 20), st.integers(0, 10**6), st.integers(1, 10**5))
def test_runnable_trajectories_are_the_whole_ones_that_fit(engines: int, tokens: int, length: int) -> None:
    found = runnable_trajectories(engines=engines, tokens=tokens, mean_length=float(length))
    assert found == engines * tokens // length


@given(st.integers(0, 5), st.integers(1, 20), st.integers(1, 20))
def test_admitted_trajectories_are_a_batch_for_every_version_that_may_pass(
    lag: int, batch: int, size: int
) -> None:
    found = admitted_trajectories(max_staleness=lag, batch_groups=batch, group_size=size)
    assert found == sum(1 for _ in range(lag + 1) for _ in range(batch) for _ in range(size))


# recipe.md B.10.


def qwen(layers: int, gpus: int) -> int:
    """Two KV heads of 256 in bfloat16."""
    return kv_bytes_per_token(
        attention_layers=layers, kv_heads=2, head_dim=256, bytes_per_value=2, tensor_parallel=gpus
    )


@pytest.mark.parametrize(
    ("layers", "whole", "held"), [(10, 20480, 10240), (15, 30720, 15360)], ids=["35B", "397B"]
)
def test_bytes_of_a_token_of_the_recipe(layers: int, whole: int, held: int) -> None:
    assert (qwen(layers, 1), qwen(layers, 2), qwen(layers, 8)) == (whole, held, held)
    assert math.isclose(whole * 160_000 / 2**30, {10: 3.05, 15: 4.58}[layers], abs_tol=0.005)


def test_admitted_trajectories_of_the_recipe_are_1024() -> None:
    assert admitted_trajectories(max_staleness=3, batch_groups=16, group_size=16) == 1024


@pytest.mark.parametrize(
    ("layers", "memory", "share", "weights", "engines", "length", "runnable", "millions"),
    [(10, 80e9, 0.85, 8.75e9, 10, 96e3, 550, 5.3), (15, 141e9, 0.93, 99e9, 12, 70e3, 300, 1.76)],
    ids=["35B", "397B"],
)
def test_runnable_trajectories_of_the_recipe_are_about_550_and_300(
    layers: int,
    memory: float,
    share: float,
    weights: float,
    engines: int,
    length: float,
    runnable: int,
    millions: float,
) -> None:
    tokens = kv_tokens(
        gpu_bytes=memory,
        utilization=share,
        weight_bytes=weights,
        other_bytes=5e9,
        token_bytes=qwen(layers, 8),
    )
    assert math.isclose(tokens / 1e6, millions, rel_tol=0.02)
    found = runnable_trajectories(engines=engines, tokens=tokens, mean_length=length)
    assert math.isclose(found, runnable, rel_tol=0.02)
