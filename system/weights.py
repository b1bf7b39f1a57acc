"""Trainer to engine: a weights file is taken whole or refused whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def check_coverage(
    state: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    *,
    source: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Refuse weights that do not cover the model exactly, in both directions.

    Args:
        state: what came.
        shapes: name and shape of everything the model has.
        source: file or process it came from, for the message.
        dtype: the only dtype taken; any floating one if left out.

    Raises:
        ValueError: one line with every missing, unexpected, misshapen and mistyped name.
    """
    wrong = {
        "missing": [name for name in shapes if name not in state],
        "unexpected": [name for name in state if name not in shapes],
        "shape": [
            f"{name} {tuple(value.shape)} not {tuple(shapes[name])}"
            for name, value in state.items()
            if name in shapes and tuple(value.shape) != tuple(shapes[name])
        ],
        "dtype": [
            f"{name} {value.dtype}"
            for name, value in state.items()
            if (value.dtype != dtype if dtype is not None else not value.is_floating_point())
        ],
    }
    if any(wrong.values()):
        told = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
        raise ValueError(f"weights of {source} must cover the model exactly, got {told}")
