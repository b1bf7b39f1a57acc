"""What megatron-core asks of torch.cuda, answered by the CPU: for tests alone, before megatron is imported.

It changes torch for the whole process.
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Stream:
    """A stream where everything happens in order anyway."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass


class _OnCpu(TorchFunctionMode):
    """Tensors asked for on a GPU are made on the CPU, and none is pinned."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def install() -> None:
    """Answer for torch.cuda. Call once, before the first import of megatron."""
    # The one module of megatron-core that imports triton whether it is there or not.
    sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = _Anything("paged_stash")
    stream, cuda = _Stream(), torch.cuda
    named: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "set_device": lambda *_: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
    }
    for name, value in named.items():
        setattr(cuda, name, value)
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    Tensor.record_stream = lambda *_: None  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    plain = Tensor.type

    def type_of(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        told = plain(self, *args, **kwargs)
        if not isinstance(told, str) or told.startswith("torch.cuda."):
            return told
        return told.replace("torch.", "torch.cuda.", 1)

    Tensor.type = type_of  # type: ignore[method-assign, assignment]
    _OnCpu().__enter__()


class _Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def install_after_import() -> None:
    """What lies in megatron's own modules."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[assignment]
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[assignment]

    def to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    moe_utils.maybe_move_tensor_to_cpu = to_numpy
    token_dispatcher.maybe_move_tensor_to_cpu = to_numpy
