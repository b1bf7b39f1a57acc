"""A policy folder, dense or with experts, opened so that each rank reads no more than it needs at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from system.policy import token_count
from system.trainer.megatron.shape import Shape, shape_from_huggingface, weight_shapes


def open_policy(folder: str | os.PathLike[str]) -> tuple[Shape, Callable[[str], Tensor]]:
    """Shape of a policy, and each whole weight by its name, in float32.

    Raises:
        FileNotFoundError: config, tokenizer or weights are missing; the line names the file.
        ValueError: it is no Qwen3 or Qwen3-MoE, or the weights do not cover it.
    """
    root = Path(folder)
    for name in ("config.json", "tokenizer.json"):
        if not (root / name).is_file():
            raise FileNotFoundError(f"policy folder must have {name}, got {root} without it")
    record = json.loads((root / "config.json").read_text())
    shape = shape_from_huggingface(record, token_count=token_count(root))
    places = _places(root)
    wanted = weight_shapes(shape).keys()
    spare = (
        {"lm_head.weight"} if shape.base.tie_word_embeddings else set()
    )  # some writers store the tied copy
    missing, odd = sorted(wanted - places.keys()), sorted(places.keys() - wanted - spare)
    if missing or odd:
        raise ValueError(
            f"weights of {root} must cover the model exactly, got missing: {missing}; unexpected: {odd}"
        )

    def weight(name: str) -> Tensor:
        with safe_open(places[name], framework="pt") as file:
            return file.get_tensor(name).float()

    return shape, weight


def _places(root: Path) -> dict[str, Path]:
    """The file that each weight is in."""
    index, single = root / "model.safetensors.index.json", root / "model.safetensors"
    if index.is_file():
        return {name: root / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not single.is_file():
        raise FileNotFoundError(f"policy folder must have {single.name}, got {root} without it")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)
