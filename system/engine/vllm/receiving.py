"""Weights of a safetensors file, taken by each worker of the server through vLLM's own weight-transfer interface.

Runs inside the workers, on 0.24, where a worker opens and ends a reload itself, and on 0.32, where the backend does.
On the CPU two of vLLM's layers would go on computing with what they packed of the old weights, in silence:

    tied    a head that is the embedding keeps the packed copy of the old embedding
    moe     the experts are not packed again, since their kernel is there already
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

LEFT_OUT = frozenset(filter(None, os.environ.get("BARTLEBY_VLLM_WITHOUT", "").split(",")))
"""Repairs that are not made: for the tests that show what they are for."""

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass
class Nothing(WeightTransferInitInfo):
    """A file needs no meeting."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Where the weights are."""

    path: str


class FileTransfer(WeightTransferEngine):
    """The backend "file"."""

    init_info_cls = Nothing
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Open a reload (0.32)."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.device.type == "cpu" and "moe" not in LEFT_OUT:
            for module in self.model.modules():
                method = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take all weights of a file (0.32)."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate, load_weights: Load | None = None) -> None:
        """Take all weights of a file; 0.24 says how to load them."""
        load = self.model.load_weights if load_weights is None else load_weights
        with safe_open(update_info.path, framework="pt") as file:
            loaded = load((name, file.get_tensor(name)) for name in sorted(file.keys()))
        if isinstance(loaded, set):
            own = {name for name, _ in self.model.named_parameters()}
            if missing := sorted(own - loaded - {"lm_head.weight"}):
                raise ValueError(f"a file of weights must fill the model, got none for {missing[:8]}")

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
        """A trainer writes a file instead (0.24 wants the method)."""
        raise NotImplementedError("the backend file must be given a file, got tensors")
