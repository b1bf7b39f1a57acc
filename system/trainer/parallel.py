"""How the ranks of a trainer share a model and a step. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes of the Megatron trainer; ranks / (tensor * pipeline * context) is what is left for data.

    Example: Parallel(tensor=8, expert=8, sequence=True, offload=1.0, recompute=True, dtype="bfloat16")
    """

    tensor: int = 1
    """Ranks that share each matrix and the vocabulary."""
    pipeline: int = 1
    """Ranks that have some of the layers each."""
    context: int = 1
    """Ranks that share each row."""
    expert: int = 1
    """Ranks that share the experts, out of those of one pipeline stage; an expert is whole on its rank."""
    sequence: bool = False
    """Share norms and residual stream as well among the tensor ranks; experts with tensor > 1 need it."""
    distributed_optimizer: bool = True
    """Share the state of the optimizer among the data-parallel ranks."""
    offload: float = 0.0
    """Share of the optimizer's state that lives and is stepped on the CPU."""
    recompute: bool = False
    """Keep one activation a layer and compute the rest again in the backward pass."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; gradients and the optimizer are float32 in any case."""
    timeout_s: float = 600.0
    """How long a collective may take: a rank that hangs ends the trainer after that."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.offload <= 1:
            raise ValueError(f"offload must be from 0 to 1, got {self.offload}")
        if self.offload and not self.distributed_optimizer:
            raise ValueError("distributed_optimizer must be True with offload, got False")
        if self.sequence and self.tensor == 1:
            raise ValueError("tensor must be at least 2 with sequence, got 1")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model together and share its rows."""
        return self.tensor * self.pipeline * self.context

    def data(self, ranks: int) -> int:
        """Copies of the model; refuses a number of ranks that the sizes do not divide."""
        if ranks % self.model_ranks:
            raise ValueError(
                f"ranks must be a multiple of tensor * pipeline * context = {self.model_ranks}, got {ranks}"
            )
        if (ranks // self.pipeline) % self.expert:
            raise ValueError(
                f"expert must divide the ranks of a pipeline stage, {ranks // self.pipeline}, got {self.expert}"
            )
        return ranks // self.model_ranks
