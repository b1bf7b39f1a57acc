"""Laws of core.capacity: what memory holds and what staleness admits, with the article's two policies as cases."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import capacity

SMALL = {"attention_layers": 10, "kv_heads": 2, "head_dim": 256, "bytes_per_value": 2}
"""35B: one layer of four of forty has attention."""

LARGE = SMALL | {"attention_layers": 15}
"""397B: one layer of four of sixty."""

FREE = {"gpu_bytes": 100, "utilization": 0.9, "weight_bytes": 40, "other_bytes": 5, "token_bytes": 2}


def token_bytes(geometry, *, gpus):
    return capacity.kv_bytes_per_token(**geometry, tensor_parallel=gpus)


def test_a_token_takes_20480_bytes_of_the_35b_policy_and_30720_of_the_397b():
    assert token_bytes(SMALL, gpus=1) == 20_480
    assert token_bytes(LARGE, gpus=1) == 30_720


def test_a_trajectory_of_160000_tokens_takes_3_05_and_4_58_gib():
    assert token_bytes(SMALL, gpus=1) * 160_000 / 2**30 == pytest.approx(3.05, abs=0.005)
    assert token_bytes(LARGE, gpus=1) * 160_000 / 2**30 == pytest.approx(4.58, abs=0.005)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_two_heads_on_eight_gpus_lie_four_times_each(gpus):
    """10,240 and 15,360 bytes on every GPU, no fewer than on two."""
    assert token_bytes(SMALL, gpus=gpus) == 10_240 and isinstance(token_bytes(SMALL, gpus=1), int)
    assert token_bytes(LARGE, gpus=gpus) == 15_360


@given(
    layers=st.integers(1, 90),
    heads=st.sampled_from([1, 2, 4, 8]),
    dim=st.integers(1, 256),
    size=st.integers(1, 4),
    gpus=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_all_gpus_together_hold_one_full_copy_or_as_many_as_there_are_gpus_a_head(
    layers, heads, dim, size, gpus
):
    geometry = {"attention_layers": layers, "kv_heads": heads, "head_dim": dim, "bytes_per_value": size}
    copies = max(1, gpus // heads)
    assert token_bytes(geometry, gpus=1) == 2 * layers * heads * dim * size
    assert gpus * token_bytes(geometry, gpus=gpus) == copies * token_bytes(geometry, gpus=1)


def test_550_trajectories_of_the_35b_policy_run_on_ten_engines():
    """Eight H100 each: 0.85 of 80 GB without 8.75 of weights and 5 of the rest; 96,000 tokens on average."""
    tokens = capacity.kv_tokens(
        gpu_bytes=80e9, utilization=0.85, weight_bytes=8.75e9, other_bytes=5e9, token_bytes=10_240
    )
    assert tokens == pytest.approx(5.3e6, rel=0.01)
    runnable = capacity.runnable_trajectories(engines=10, tokens=tokens, mean_length=96_000)
    assert runnable == pytest.approx(550, rel=0.01)


def test_300_trajectories_of_the_397b_policy_run_on_twelve_engines():
    """Eight H200 each: 0.93 of 141 GB without 99 of weights and 5 of the rest; 70,000 tokens on average."""
    tokens = capacity.kv_tokens(
        gpu_bytes=141e9, utilization=0.93, weight_bytes=99e9, other_bytes=5e9, token_bytes=15_360
    )
    assert tokens == pytest.approx(1.76e6, rel=0.01)
    runnable = capacity.runnable_trajectories(engines=12, tokens=tokens, mean_length=70_000)
    assert runnable == pytest.approx(300, rel=0.01)


def test_1024_trajectories_are_admitted_so_474_and_724_of_them_wait():
    """Bound 3, sixteen groups of sixteen."""
    admitted = capacity.admitted_trajectories(max_staleness=3, batch_groups=16, group_size=16)
    assert admitted == 1024 and (admitted - 550, admitted - 300) == (474, 724)


def test_synchronous_training_admits_one_batch():
    assert capacity.admitted_trajectories(max_staleness=0, batch_groups=4, group_size=8) == 32


@given(engines=st.integers(0, 20), tokens=st.integers(0, 10**7), mean=st.floats(1, 1e6))
def test_what_runs_fits_and_one_more_would_not(engines, tokens, mean):
    running = capacity.runnable_trajectories(engines=engines, tokens=tokens, mean_length=mean)
    assert running * mean <= engines * tokens * (1 + 1e-12)
    assert (running + 1) * mean > engines * tokens * (1 - 1e-12)


@given(free=st.integers(0, 10**6), size=st.integers(1, 999))
def test_tokens_that_fit_fill_the_memory_to_the_last_whole_one(free, size):
    found = capacity.kv_tokens(
        gpu_bytes=free + 30, utilization=1.0, weight_bytes=20, other_bytes=10, token_bytes=size
    )
    assert found * size <= free < (found + 1) * size


def test_weights_that_do_not_fit_leave_no_token():
    assert capacity.kv_tokens(**(FREE | {"weight_bytes": 90})) == 0
    assert capacity.kv_tokens(**FREE) == 22
    assert capacity.kv_tokens(**(FREE | {"weight_bytes": 0, "other_bytes": 0})) == 45


@pytest.mark.parametrize("name", [*SMALL, "tensor_parallel"])
@pytest.mark.parametrize(
    "value, text",
    [(0, "positive, got 0"), (2.0, r"a whole number, got 2\.0"), (True, "a whole number, got True")],
)
def test_a_geometry_of_no_whole_numbers_is_refused(name, value, text):
    with pytest.raises(ValueError, match=f"^{name} must be {text}$"):
        capacity.kv_bytes_per_token(**(SMALL | {"tensor_parallel": 1} | {name: value}))


def test_heads_that_cannot_be_shared_out_are_refused():
    with pytest.raises(
        ValueError, match="tensor_parallel must divide 4 kv_heads or be a multiple of them, got 3"
    ):
        token_bytes(SMALL | {"kv_heads": 4}, gpus=3)
    with pytest.raises(
        ValueError, match="tensor_parallel must divide 4 kv_heads or be a multiple of them, got 6"
    ):
        token_bytes(SMALL | {"kv_heads": 4}, gpus=6)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"token_bytes": 0}, "token_bytes must be positive, got 0"),
        ({"utilization": 0.0}, r"utilization must lie between 0 and 1, got 0\.0"),
        ({"utilization": 1.1}, r"utilization must lie between 0 and 1, got 1\.1"),
        ({"utilization": math.nan}, "utilization must lie between 0 and 1, got nan"),
        ({"gpu_bytes": math.inf}, "gpu_bytes must be finite and not negative, got inf"),
        ({"weight_bytes": -1}, "weight_bytes must be finite and not negative, got -1"),
        ({"other_bytes": math.nan}, "other_bytes must be finite and not negative, got nan"),
    ],
)
def test_memory_that_is_none_is_refused(change, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        capacity.kv_tokens(**(FREE | change))


@pytest.mark.parametrize(
    "change, text",
    [
        ({"engines": -1}, "engines must not be negative, got -1"),
        ({"tokens": -1}, "tokens must not be negative, got -1"),
        ({"tokens": 1.5}, r"tokens must be a whole number, got 1\.5"),
        ({"mean_length": 0}, "mean_length must be finite and positive, got 0"),
        ({"mean_length": math.nan}, "mean_length must be finite and positive, got nan"),
        ({"mean_length": math.inf}, "mean_length must be finite and positive, got inf"),
    ],
)
def test_engines_that_are_none_are_refused(change, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        capacity.runnable_trajectories(**({"engines": 1, "tokens": 1, "mean_length": 1} | change))


@pytest.mark.parametrize(
    "change, text",
    [
        ({"max_staleness": -1}, "max_staleness must not be negative, got -1"),
        ({"batch_groups": 0}, "batch_groups must be positive, got 0"),
        ({"group_size": 0}, "group_size must be positive, got 0"),
        ({"group_size": math.nan}, "group_size must be a whole number, got nan"),
    ],
)
def test_batches_that_are_none_are_refused(change, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        capacity.admitted_trajectories(**({"max_staleness": 1, "batch_groups": 1, "group_size": 1} | change))
