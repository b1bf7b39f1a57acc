"""A policy is an ordinary Hugging Face folder; this file reads and writes its config and weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from system.model import ModelConfig, config_from_huggingface, huggingface_config, weight_shapes
from system.weights import check_coverage

POLICY_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def load_policy(folder: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and float32 weights of a policy folder.

    Raises:
        FileNotFoundError: a file of POLICY_FILES is missing; the line names it.
        ValueError: the config asks for something else than Qwen3, or the weights do not cover it.
    """
    root = Path(folder)
    for name in POLICY_FILES:
        if not (root / name).is_file():
            raise FileNotFoundError(f"policy folder must have {name}, got {root} without it")
    config = config_from_huggingface(
        json.loads((root / "config.json").read_text()), token_count=token_count(root)
    )
    state = {name: value.float() for name, value in load_file(root / "model.safetensors").items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)  # some writers store the tied copy as well
    check_coverage(state, weight_shapes(config), source=str(root / "model.safetensors"))
    return config, state


def token_count(folder: str | os.PathLike[str]) -> int:
    """Number of ids the tokenizer of a policy folder has: its largest id plus one."""
    record = json.loads((Path(folder) / "tokenizer.json").read_text())
    vocab = record["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return (
        max(max(ids, default=-1), max((added["id"] for added in record.get("added_tokens", [])), default=-1))
        + 1
    )


def save_policy(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json and model.safetensors into a folder; the tokenizer's files are left as they are.

    The weights are replaced by a rename, so a reader never sees half a file.
    """
    check_coverage(state, weight_shapes(config), source="state")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(huggingface_config(config, dtype=dtype), indent=2) + "\n")
    save_weights(root / "model.safetensors", {name: value.to(dtype) for name, value in state.items()})


def save_weights(path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> None:
    """Write a safetensors file under a temporary name in the same folder, then rename it."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    tensors = {name: value.detach().to("cpu").contiguous() for name, value in state.items()}
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, target)
