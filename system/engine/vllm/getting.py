"""The front's side of a broadcast: asks a trainer's `Sender` what it has, meets it, asks it to send. No torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from system.engine.client import HEADER, frame
from system.engine.request import EngineError
from system.engine.vllm.coverage import TORCH_NAMES, Weight

PACKED = {"packed": True, "packed_buffer_size_bytes": 1 << 30, "packed_num_buffers": 2}
"""Buckets of a broadcast by NCCL: vLLM's own, said so that both sides have the same."""


class Getting:
    """A connection to a trainer. Example: `await Getting.open("nccl://127.0.0.1:4711/3")`."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address, self._reader, self._writer = address, reader, writer
        self.met = False

    @classmethod
    async def open(cls, address: str) -> Getting:
        """Connect.

        Args:
            address: kind://host:port, without the version.
        """
        host, _, port = address.partition("://")[2].rpartition(":")
        return cls(address, *await asyncio.open_connection(host, int(port)))

    async def describe(self, version: int) -> dict[str, Weight]:
        """The weights of a version, in the order in which they come."""
        told = await self.ask({"op": "describe", "version": version})
        return {name: Weight(dtype, tuple(shape)) for name, dtype, shape in told["weights"]}

    async def ask(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """What it answers; without a message, its next answer.

        Raises:
            EngineError: it refuses.
        """
        if message is not None:
            self._writer.write(frame(message))
        try:
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            told = json.loads(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError as error:
            raise ConnectionError(f"trainer at {self.address} closed the connection") from error
        if "error" in told:
            raise EngineError(f"trainer at {self.address} refuses: {told['error']}")
        return told

    def close(self) -> None:
        """Let go of it."""
        self._writer.close()


def broadcast_info(weights: Mapping[str, Weight]) -> dict[str, Any]:
    """What vLLM is told of a broadcast that comes."""
    return {
        "names": list(weights),
        "dtype_names": [TORCH_NAMES[weight.dtype] for weight in weights.values()],
        "shapes": [list(weight.shape) for weight in weights.values()],
    }
