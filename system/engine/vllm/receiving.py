"""Weights of a file or a broadcast, taken by each worker of the server through vLLM's own weight-transfer interface.

Runs inside the workers, on 0.24, where a worker opens and ends a reload itself, and on 0.32, where the backend does.
On the CPU two of vLLM's layers would go on computing with what they packed of the old weights, in silence:

    tied    a head that is the embedding keeps the packed copy of the old embedding
    moe     the experts are not packed again, since their kernel is there already
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from system.engine.vllm import gloo
from system.engine.vllm.coverage import TORCH_NAMES, Weight, buckets, bytes_of

LEFT_OUT = frozenset(filter(None, os.environ.get("BARTLEBY_VLLM_WITHOUT", "").split(",")))
"""Repairs that are not made: for the tests that show what they are for."""

Part = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[Part], Any]


@dataclass
class Nothing(WeightTransferInitInfo):
    """A file needs no meeting."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Where the weights are."""

    path: str


@dataclass
class Meeting(WeightTransferInitInfo):
    """Where trainer and workers meet; the trainer is the first of them."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int


@dataclass
class BroadcastUpdate(WeightTransferUpdateInfo):
    """What comes, in its order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Reloading(WeightTransferEngine):
    """What both backends do before and after the weights come."""

    def start_weight_update(self) -> None:
        """Open a reload (0.32)."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.device.type == "cpu" and "moe" not in LEFT_OUT:
            for module in self.model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take all weights (0.32)."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Any, load_weights: Load | None = None) -> None:
        """Take all weights; 0.24 says how to load them."""
        own_load: Any = self.model.load_weights
        load: Load = own_load if load_weights is None else load_weights
        loaded: set[str] = set()
        for part in self.parts(update_info):
            loaded |= load(part) or set()
        own = {name for name, _ in self.model.named_parameters()}
        if loaded and (missing := sorted(own - loaded - {"lm_head.weight"})):
            raise ValueError(f"weights must fill the model, got none for {missing[:8]}")

    def parts(self, update_info: Any) -> Iterator[Part]:
        """Names and values, some at a time."""
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        """End a reload (0.32)."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and "tied" not in LEFT_OUT:
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to let go of."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """`sending.Sender` does it (0.24 wants the method)."""
        raise NotImplementedError("weights must be sent by system.engine.vllm.sending")


class FileTransfer(Reloading):
    """The backend "file": every worker reads it."""

    init_info_cls = Nothing
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to do."""

    def parts(self, update_info: FileUpdate) -> Iterator[Part]:
        """All weights at once, each read when it is asked for."""
        with safe_open(update_info.path, framework="pt") as file:
            yield ((name, file.get_tensor(name)) for name in sorted(file.keys()))


class GlooTransfer(Reloading):
    """The backend "gloo": what "nccl" is between GPUs, between processors."""

    init_info_cls = Meeting
    update_info_cls = BroadcastUpdate

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Meet the trainer."""
        rank = init_info.rank_offset + self.parallel_config.rank
        meeting = init_info.master_address, init_info.master_port
        self.group = gloo.group(*meeting, rank=rank, world_size=init_info.world_size)

    def parts(self, update_info: BroadcastUpdate) -> Iterator[Part]:
        """One bucket after the other."""
        codes = {name: code for code, name in TORCH_NAMES.items()}
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        weights = {name: Weight(codes[dtype], tuple(shape)) for name, dtype, shape in described}
        for names in buckets(weights, most_bytes=gloo.BUCKET_BYTES):
            sizes = [bytes_of(weights[name]) for name in names]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            gloo.broadcast(self.group, flat)
            yield [
                (name, part.view(getattr(torch, TORCH_NAMES[weights[name].dtype])).view(weights[name].shape))
                for name, part in zip(names, flat.split(sizes), strict=True)
            ]
