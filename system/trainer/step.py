"""The trainer's records and its protocol. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One row of a step batch, as the ledger holds it; every list has one entry per token.

    Example: StepRow(row_id="t1/0", trial_id="t1", group_id=4, token_ids=[7, 8, 9],
    loss_mask=[False, True, True], rollout_logprob=[0.0, -0.5, -0.25], policy_version=[-1, 3, 3],
    advantage=0.5)
    """

    row_id: str
    trial_id: str
    group_id: int
    token_ids: list[int]
    loss_mask: list[bool]
    """True: the policy sampled this token and it is trained. Never at the first token."""
    rollout_logprob: list[float]
    """As the engine reported it; not read where loss_mask is False."""
    policy_version: list[int]
    advantage: float
    requests: tuple[tuple[str, int, int], ...] = ()
    """Engine request of each sampled span: request_id, start, end. Only written to the input log."""

    def __post_init__(self) -> None:
        for name in ("loss_mask", "rollout_logprob", "policy_version"):
            if len(getattr(self, name)) != len(self.token_ids):
                raise ValueError(
                    f"{name} must have {len(self.token_ids)} entries, one per token, "
                    f"got {len(getattr(self, name))} in row {self.row_id}"
                )
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError(f"loss_mask must be False at the first token, got True in row {self.row_id}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What one optimizer step did.

    Example: StepMetrics(policy_version=4, loss=0.1, grad_norm=0.7, rows=64, trained_tokens=9_600,
    forward_tokens=30_000, masked_share=0.01, unusable=0, mismatch=2e-6, entropy=0.4, seconds=4.0, cpu_s=31.0,
    weights_path="/dev/shm/run/weights-4.safetensors")
    """

    policy_version: int
    """Version of the weights after the step."""
    loss: float
    """Of the surrogate; in score form only its gradient means something."""
    grad_norm: float
    """Before clipping."""
    rows: int
    trained_tokens: int
    forward_tokens: int
    masked_share: float
    """Share of trained tokens that the loss's trust region left without gradient."""
    unusable: int
    """Trained tokens whose rollout_logprob gave no usable ratio."""
    mismatch: float
    """Mean |logprob - rollout_logprob| over trained tokens, before the update."""
    entropy: float
    """Mean over trained tokens of the entropy in nats."""
    seconds: float
    cpu_s: float
    """CPU seconds of the trainer so far, all its processes."""
    weights_path: str
    """File of the weights after the step for the engine; empty where none is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and the bound on the gradient.

    Example: OptimizerSettings(learning_rate=3e-4, beta1=0.9, beta2=0.98, epsilon=1e-8, weight_decay=0.01,
    max_grad_norm=1.0)
    """

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float


class Trainer(Protocol):
    """Takes optimizer steps on step batches."""

    weights_path: str
    """File of the newest weights."""

    def step(self, rows: Sequence[StepRow], *, version: int) -> StepMetrics:
        """One optimizer step from weights `version`; without a trained token the weights stay as they are."""
        ...

    def logprob(self, rows: Sequence[StepRow]) -> list[list[float]]:
        """Log-probability of every trained token under the present weights; 0.0 elsewhere."""
        ...

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write weights and optimizer state."""
        ...
