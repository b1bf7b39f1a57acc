"""The trainer's side of a broadcast: it offers weights, engines come and get them. Runs in the trainer's first rank.

An engine's front connects, asks what there is, meets the trainer in a group of its own, and asks for the weights when
its requests stand still. "nccl" goes by vLLM's packed buckets, so vLLM must be installed beside the trainer; "gloo" by
ours, between processors.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from typing import Any, Literal

import torch

from system.engine.client import HEADER, frame
from system.engine.vllm import gloo
from system.engine.vllm.coverage import TORCH_NAMES, Weight, buckets
from system.engine.vllm.getting import PACKED

KEPT = 2
"""Versions: an engine that is started again while a step is trained gets the one before."""

CODES = {getattr(torch, name): code for code, name in TORCH_NAMES.items()}


class Sender:
    """Offers weights to engines; each is served in a thread of its own.

    Args:
        kind: of the broadcast.
        device: that the weights lie on, as torch names it.
        dtype: in which they are sent.
        host: of this machine, as engines reach it.

    Example: `Sender("nccl", device="cuda:0", dtype=torch.bfloat16).offer(1, model.state_dict())` gives what
    `RunningEngine.update_weights` takes for weights.
    """

    def __init__(
        self, kind: Literal["nccl", "gloo"], *, device: str, dtype: torch.dtype, host: str = "127.0.0.1"
    ) -> None:
        self.kind, self.device, self.dtype, self.host = kind, torch.device(device), dtype, host
        self._offered: dict[int, dict[str, torch.Tensor]] = {}
        self._held = threading.Lock()
        self._listener = socket.create_server((host, 0))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="sender", daemon=True).start()

    def offer(self, version: int, state: Mapping[str, torch.Tensor]) -> str:
        """Keep a copy of weights until KEPT newer ones are there; what an engine is told to get them."""
        with self._held:
            self._offered.pop(version, None)
            for old in list(self._offered)[: 1 - KEPT or None]:
                del self._offered[old]
            self._offered[version] = {
                name: value.detach().to(self.device, self.dtype, copy=True).contiguous()
                for name, value in state.items()
            }
        return f"{self.kind}://{self.host}:{self._port}/{version}"

    def close(self) -> None:
        """Take no more engines."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        members: Any = None
        with stream, stream.makefile("rb") as incoming:
            while header := incoming.read(HEADER.size):
                asked = json.loads(incoming.read(HEADER.unpack(header)[0]))
                try:
                    if asked["op"] == "meet":
                        with socket.create_server((self.host, 0)) as free:
                            port = free.getsockname()[1]
                        stream.sendall(frame({"master_address": self.host, "master_port": port}))
                        members = self._group(port, asked["world_size"])
                        told: dict[str, Any] = {}
                    elif asked["op"] == "describe":
                        told = self._described(asked["version"])
                    else:
                        told = self._sent(members, asked["version"])
                except Exception as error:  # noqa: BLE001 - told to the engine, which ends over it
                    told = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
                stream.sendall(frame(told))

    def _described(self, version: int) -> dict[str, Any]:
        weights = self._of(version).items()
        return {"weights": [[name, CODES[value.dtype], list(value.shape)] for name, value in weights]}

    def _of(self, version: int) -> dict[str, torch.Tensor]:
        if version not in self._offered:
            raise ValueError(f"version of the weights must be of {sorted(self._offered)}, got {version}")
        return self._offered[version]

    def _group(self, port: int, world_size: int) -> Any:
        if self.kind == "gloo":
            return gloo.group(self.host, port, rank=0, world_size=world_size)
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # pyright: ignore[reportMissingImports]
        from vllm.distributed.utils import StatelessProcessGroup  # pyright: ignore[reportMissingImports]

        torch.cuda.set_device(self.device)
        met = StatelessProcessGroup.create(host=self.host, port=port, rank=0, world_size=world_size)
        return PyNcclCommunicator(met, device=self.device)

    def _sent(self, members: Any, version: int) -> dict[str, Any]:
        with self._held:
            weights = self._of(version)
            if self.kind == "gloo":
                described = {n: Weight(CODES[v.dtype], tuple(v.shape)) for n, v in weights.items()}
                for names in buckets(described, most_bytes=gloo.BUCKET_BYTES):
                    parts = [weights[name].view(-1).view(torch.uint8) for name in names]
                    gloo.broadcast(members, torch.cat(parts))
                return {}
            from vllm.distributed.weight_transfer import packed_tensor  # pyright: ignore[reportMissingImports]

            torch.cuda.set_device(self.device)
            packed_tensor.packed_nccl_broadcast_producer(
                iterator=iter(weights.items()),
                group=members,
                src=0,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=PACKED["packed_buffer_size_bytes"],
                num_buffers=PACKED["packed_num_buffers"],
            )
            torch.cuda.synchronize(self.device)
        return {}
