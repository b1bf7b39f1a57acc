"""Every public tensor function of core with an example of its arguments, found by the arguments' names.

A name means one thing in all of core, so the examples are a table of names; a function whose argument is not in
it cannot be tried, and the tests that go through all functions fail.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core import cause, loss, mismatch, shard

CORE = Path(__file__).resolve().parents[1] / "core"

PARTS = {
    "footprint": "attribution",
    "locate": "attribution",
    "rescore": "attribution",
    "shapes": "everything",
    "shard": "logprob",
    "surrogate": "loss",
}
"""Files whose functions are parts of another file's: they are tried through it."""

NO_TENSOR = {"attribution.rounding_noise", "logprob.chunk_within"}
"""Functions of tensor files that take numbers and give numbers."""


def _public(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not any(isinstance(node, ast.Import) and node.names[0].name == "torch" for node in tree.body):
        return []
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    # A copy that is being mutated holds every function many times over.
    return [name for name in functions if not name.startswith(("_", "check_")) and "__mutmut" not in name]


def all_functions() -> list[str]:
    """`file.function` of every public tensor function of core; checks, which return nothing, left out."""
    files = [path for path in sorted(CORE.glob("*.py")) if path.stem not in PARTS]
    names = [f"{path.stem}.{function}" for path in files for function in _public(path)]
    return [name for name in names if name not in NO_TENSOR]


def function(name: str) -> Callable[..., Any]:
    """The function of that name."""
    file, own = name.split(".")
    return getattr(importlib.import_module(f"core.{file}"), own)


def arguments(name: str, *, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """Examples of all arguments of a function, made anew: one by one and in nothing random."""
    names = inspect.signature(function(name)).parameters
    return {argument: moved(example(argument, dtype=dtype), device) for argument in names}


def moved(value: Any, device: str) -> Any:
    """The value with every tensor in it on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(part, device) for part in value))
    return [moved(part, device) for part in value] if isinstance(value, list) else value


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [one for part in value for one in tensors(part)] if isinstance(value, tuple | list) else []


T, K, V, H = 12, 3, 64, 5
"""Tokens (rows and rollouts as many), tokens of a head, vocabulary, width."""

KNOBS = {
    "bound": 0.1,
    "boundary": 2,
    "buffer": 4,
    "chunk": 5,
    "coefficient": 0.1,
    "count": 3,
    "delta_high": 0.15,
    "delta_low": 0.1,
    "dual_clip": 3.0,
    "environment_coefficient": 0.05,
    "epsilon": 1e-6,
    "epsilon_high": 0.28,
    "epsilon_low": 0.2,
    "fill": 0,
    "fuse": lambda function: function,
    "growth": 2.0,
    "length": 7.0,
    "logit_noise": 0.02,
    "max_length": 10,
    "max_ratio": 2.0,
    "max_weight": 2.0,
    "min_mass": 0.5,
    "min_ratio": 0.5,
    "min_share": 0.05,
    "min_weight": 0.5,
    "policy_coefficient": 0.1,
    "shard": shard.Shard(first_id=0, combine=lambda sums: shard.combine_sums([sums])),
    "sigmas": 4.0,
    "temperature": 0.9,
    "temperature_negative": 1.05,
    "temperature_positive": 1.0,
    "token_scale": 10.0,
    "tolerance": 1e-6,
    "trainer_version": 4,
}

IDS = {
    "group_id": [5, 5, 5, 5, -2, -2, -2, -2, 9, 9, 9, 9],
    "label": [0, 63, 7, 7, 1, 2, 3, 4, 5, 6, 8, 60],
    "environment_tokens": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    "ids": [5, 5, 5, 5, -2, -2, -2, -2, 9, 9, 9, 9],
    "place": [1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 2, 2],
    "policy_tokens": [3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    "policy_version": [-1, 3, 3, 4, -1, 2, 2, 3, -1, -1, 4, 4],
    "position": [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3],
    "rollout_id": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    "rollout_index": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    "row_id": [3, 3, 3, 3, -7, -7, -7, -7, 2, 2, 2, 2],
    "row_index": [0, 0, 0, 0, 4, 4, 4, 4, 2, 2, 2, 2],
    "token_count": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    "token_in_turn": [0, 0, 1, 2, 0, 0, 1, 2, 0, 0, 0, 1],
}

FLAGS = {
    "counted": [1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1],
    "keep": [1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1],
    "loss_mask": [0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1],
    "solved": [0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0],
    "valid": [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0],
}

LOGPROBS = {"logprob", "old_logprob", "rollout_logprob", "reference_logprob"}
MATRICES = {
    "head": (V, H),
    "head_logprob": (T, K),
    "head_rollout_logprob": (T, K),
    "hidden": (T, H),
}


def example(name: str, *, dtype: torch.dtype) -> Any:
    """The example of an argument of that name; its numbers are those of bfloat16 in every dtype."""

    def random(*shape: int) -> Tensor:
        seed = torch.Generator().manual_seed(sum(name.encode()))
        return torch.randn(shape, generator=seed, dtype=torch.float64).bfloat16().to(dtype)

    if name in KNOBS:
        return KNOBS[name]
    if name in IDS:
        return torch.tensor(IDS[name])
    if name in FLAGS:
        return torch.tensor(FLAGS[name], dtype=torch.bool)
    if name in LOGPROBS:
        return -random(T).abs() / 2
    if name in {"head_logprob", "head_rollout_logprob"}:
        return (-2 - random(T, K).abs().double()).bfloat16().to(dtype)
    if name in MATRICES:
        return random(*MATRICES[name])
    if name not in SPECIAL:
        raise LookupError(f"tests/tensor_functions.py must have an example of the argument {name}")
    return SPECIAL[name](random, dtype)


def _named(kind: Any, dtype: torch.dtype) -> Any:
    return kind(**{name: example(name, dtype=dtype) for name in kind._fields})


def _token_loss(dtype: torch.dtype) -> loss.TokenLoss:
    batch = [example(n, dtype=dtype) for n in ("logprob", "rollout_logprob", "advantage", "loss_mask")]
    return loss.importance_weighted_policy_gradient(*batch)


def _sums(dtype: torch.dtype) -> mismatch.MismatchSums:
    return mismatch.mismatch_sums(
        *(example(n, dtype=dtype) for n in ("logprob", "rollout_logprob", "loss_mask"))
    )


SPECIAL: dict[str, Callable[..., Any]] = {
    "advantage": lambda random, dtype: random(T),
    "alternative": lambda random, dtype: cause.Alternative(
        *(-random(T).abs() if name == "stale_version" else None for name in cause.Alternative._fields)
    ),
    "dtype": lambda random, dtype: dtype,
    "entropy": lambda random, dtype: random(T).abs(),
    "evidence": lambda random, dtype: cause.Evidence(*random(len(cause.Evidence._fields)).abs()),
    "fact": lambda random, dtype: _named(cause.TokenFact, dtype),
    "field": lambda random, dtype: [random(T)],
    "gap": lambda random, dtype: mismatch.mismatch(_sums(dtype)),
    "importance_weight": lambda random, dtype: random(T).abs(),
    "logit_dtype": lambda random, dtype: torch.promote_types(dtype, torch.float32),
    "loss": lambda random, dtype: _token_loss(dtype),
    "one": lambda random, dtype: _sums(dtype),
    "other": lambda random, dtype: _sums(dtype),
    "reward": lambda random, dtype: random(T).abs(),
    "slope": lambda random, dtype: lambda logprob, weight: weight * logprob.exp(),
    "sums": lambda random, dtype: _sums(dtype),
    "value": lambda random, dtype: random(T),
}
