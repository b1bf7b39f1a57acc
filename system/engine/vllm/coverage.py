"""Weights that come against those that a policy's folder has: names, shapes and dtypes, both ways, by headers alone.

Neither torch nor safetensors is needed: a safetensors file begins with the length of its header, and its header.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LARGEST_HEADER = 100_000_000
"""Of a safetensors file, by its format."""

FLOATS = {"F32": 4, "BF16": 2, "F16": 2}
"""Dtypes of weights that an engine takes, and bytes of a value."""

TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The same as torch calls them."""

NAMED = 8
"""So many names of each fault are told."""


class Weight(NamedTuple):
    """What is known of a weight before it is read. Example: Weight(dtype="BF16", shape=(640, 128))."""

    dtype: str
    shape: tuple[int, ...]


def header_of(path: Path) -> dict[str, Weight]:
    """The weights of a safetensors file, and whether all of them are there.

    Raises:
        ValueError: it is no whole safetensors file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else LARGEST_HEADER + 1
        if length > LARGEST_HEADER:
            raise ValueError(f"weights must be a safetensors file, got {path}")
        try:
            record = json.loads(file.read(length))
            record.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in record.values()), default=0)
            found = {name: Weight(entry["dtype"], tuple(entry["shape"])) for name, entry in record.items()}
        except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
            raise ValueError(f"weights must be a safetensors file, got {path}: {error}") from None
    if (size := path.stat().st_size) != end:
        raise ValueError(f"weights must be a whole file of {end} bytes, got {size} in {path}")
    return found


def weights_of(folder: Path) -> dict[str, Weight]:
    """The weights of a policy's folder, of all its files; a tied head that is stored as well is left out.

    Raises:
        ValueError: there is none, or a file is none.
    """
    found: dict[str, Weight] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= header_of(path)
    if not found:
        raise ValueError(f"policy must be a folder with a safetensors file, got {folder}")
    if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    return found


def check_weights(come: Mapping[str, Weight], expected: Mapping[str, Weight], *, source: str) -> None:
    """Refuse weights that do not cover the policy's exactly, in both directions.

    Args:
        come: what is to be sent.
        expected: what the engine began with. Dtypes may differ, as long as they are floating ones.
        source: where they come from, for the message.

    Raises:
        ValueError: one line with what is missing, unexpected, misshapen or mistyped.
    """
    both = [name for name in come if name in expected]
    wrong = {
        "missing": [name for name in expected if name not in come],
        "unexpected": [name for name in come if name not in expected],
        "shape": [
            f"{name} {list(come[name].shape)} not {list(expected[name].shape)}"
            for name in both
            if come[name].shape != expected[name].shape
        ],
        "dtype": [f"{name} {weight.dtype}" for name, weight in come.items() if weight.dtype not in FLOATS],
    }
    if any(wrong.values()):
        told = "; ".join(f"{kind}: {_some(names)}" for kind, names in wrong.items() if names)
        raise ValueError(f"weights of {source} must cover the policy exactly, got {told}")


def bytes_of(weight: Weight) -> int:
    """Bytes of its values."""
    return math.prod(weight.shape) * FLOATS[weight.dtype]


def buckets(weights: Mapping[str, Weight], *, most_bytes: int) -> list[list[str]]:
    """Names in their order, in pieces of so many bytes at most; a weight that is larger is a piece of its own."""
    found: list[list[str]] = []
    room = -1
    for name, weight in weights.items():
        size = bytes_of(weight)
        if size > room:
            found.append([])
            room = most_bytes
        found[-1].append(name)
        room -= size
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
