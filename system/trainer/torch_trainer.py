"""The trainer in plain torch: packed micro-batches, global weights, AdamW, ranks of torch.distributed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from core.logprob import TokenLogprob, token_logprob
from core.loss import TokenLoss
from core.pack import plan
from core.shard import WHOLE
from system.model import Qwen3, weight_shapes
from system.policy import save_weights
from system.record.metrics import drop_torn_tail
from system.trainer.step import OptimizerSettings, StepMetrics, StepRow
from system.weights import check_coverage

LOGITS_AT_ONCE = 1 << 24
"""Bound on what the head computes in one piece."""


class WeightFunction(Protocol):
    """A rule of `core.aggregate`."""

    def __call__(
        self, loss_mask: Tensor, row_id: Tensor, group_id: Tensor, /, *, dtype: torch.dtype
    ) -> Tensor: ...


class LossFunction(Protocol):
    """A surrogate of `core.loss` with its thresholds bound."""

    def __call__(
        self, logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, loss_mask: Tensor, /
    ) -> TokenLoss: ...


class MicroBatch(NamedTuple):
    """Rows of one forward, and the tokens in them that are trained."""

    rows: tuple[int, ...]
    token_ids: Tensor
    """Inputs of all rows, each only as far as its last trained token needs."""
    lengths: list[int]
    before: Tensor
    """Where in token_ids the hidden state lies that predicts each trained token."""
    label: Tensor
    rollout_logprob: Tensor
    advantage: Tensor
    weight: Tensor


class TorchTrainer:
    """AdamW on a Qwen3 whose loss is sum(weight * value) over the whole step.

    The weights come from the whole step's mask, so the gradient is the same for every token budget and every
    number of ranks.

    Args:
        model: trained in place; its dtype is the dtype of the arithmetic.
        weight_function: one of core.aggregate.
        loss_function: one of core.loss with its thresholds bound.
        optimizer: settings of AdamW.
        token_budget: tokens of one forward; a longer row has one to itself.
        temperature: at which the rollouts were sampled; the same is applied here.
        group: ranks that share a step; every rank is given the same rows. None for one process.
    """

    def __init__(
        self,
        model: Qwen3,
        *,
        weight_function: WeightFunction,
        loss_function: LossFunction,
        optimizer: OptimizerSettings,
        token_budget: int,
        temperature: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.model, self.token_budget, self.temperature, self.group = model, token_budget, temperature, group
        self.weight_function, self.loss_function = weight_function, loss_function
        self.settings = optimizer
        self.weights_path = ""
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            foreach=True,
        )

    def step(self, rows: Sequence[StepRow], *, version: int) -> StepMetrics:
        """One optimizer step from weights `version`; without a trained token the weights stay as they are.

        Raises:
            FloatingPointError: the gradient is not finite; weights and optimizer are as before.
        """
        start = time.perf_counter()
        sums = self.gradient(rows)
        norm = 0.0
        if sums["trained_tokens"]:
            bound = self.settings.max_grad_norm
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), bound, foreach=True).item()
            if not norm < float("inf"):
                self.optimizer.zero_grad()
                raise FloatingPointError(f"grad_norm must be finite, got {norm}")
            self.optimizer.step()
            self.optimizer.zero_grad()
        count = max(sums["trained_tokens"], 1)
        return StepMetrics(
            policy_version=version + 1,
            loss=sums["loss"],
            grad_norm=norm,
            rows=len(rows),
            trained_tokens=int(sums["trained_tokens"]),
            forward_tokens=int(sums["forward_tokens"]),
            masked_share=sums["out_of_region"] / count,
            unusable=int(sums["unusable"]),
            mismatch=sums["mismatch"] / count,
            entropy=sums["entropy"] / count,
            seconds=time.perf_counter() - start,
            cpu_s=sums["cpu_s"],
            weights_path="",
        )

    def gradient(self, rows: Sequence[StepRow]) -> dict[str, float]:
        """Leave the gradient of the whole step in `.grad` on every rank; sums over its trained tokens."""
        self.optimizer.zero_grad()
        counted = ("trained_tokens", "forward_tokens", "cpu_s")
        summed = ("loss", "out_of_region", "unusable", "entropy", "mismatch")
        sums: dict[str, float] = dict.fromkeys(counted + summed, 0.0)
        for batch in self._micro_batches(rows):
            logprob, entropy = self._logprob(batch)
            mask = torch.ones_like(batch.label, dtype=torch.bool)
            told = self.loss_function(logprob, batch.rollout_logprob, batch.advantage, mask)
            loss = (batch.weight * told.value).sum()
            loss.backward()
            gap = (logprob.detach() - batch.rollout_logprob).abs()
            parts = torch.stack(
                [x.sum().double() for x in (loss.detach(), told.out_of_region, told.unusable, entropy)]
                + [torch.where(told.unusable, 0.0, gap).sum().double()]
            ).tolist()
            for name, part in zip(summed, parts, strict=True):
                sums[name] += part
            sums["trained_tokens"] += len(batch.label)
            sums["forward_tokens"] += len(batch.token_ids)
        sums["cpu_s"] = time.process_time()
        return self._add_over_ranks(sums)

    @torch.no_grad()
    def logprob(self, rows: Sequence[StepRow]) -> list[list[float]]:
        """Log-probability of every trained token under the present weights; 0.0 elsewhere."""
        told = [[0.0] * len(row.token_ids) for row in rows]
        for batch in self._micro_batches(rows, alone=True):
            values = iter(self._logprob(batch).logprob.tolist())
            for index in batch.rows:
                for t, trained in enumerate(rows[index].loss_mask):
                    if trained:
                        told[index][t] = next(values)
        return told

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the weights for the engine: float32 safetensors, in place at once."""
        self.weights_path = str(path)
        save_weights(path, {name: value.float() for name, value in self.model.state_dict().items()})

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write weights and optimizer state."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        save_weights(root / "model.safetensors", self.model.state_dict())
        torch.save(self.optimizer.state_dict(), root / "optimizer.pt")

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Take weights and optimizer state that `save` wrote."""
        root = Path(folder)
        state = load_file(root / "model.safetensors")
        check_coverage(state, weight_shapes(self.model.config), source=str(root / "model.safetensors"))
        self.model.load_state_dict(state)
        self.optimizer.load_state_dict(torch.load(root / "optimizer.pt", weights_only=True))

    def _logprob(self, batch: MicroBatch) -> TokenLogprob:
        """Log-probability of the trained tokens with gradient, and the entropy there without."""
        hidden = self.model(batch.token_ids, batch.lengths)[batch.before]
        head = self.model.head
        chunk = max(1, LOGITS_AT_ONCE // head.shape[0])
        return token_logprob(
            hidden, head, batch.label, temperature=self.temperature, chunk=chunk, shard=WHOLE
        )

    def _micro_batches(self, rows: Sequence[StepRow], *, alone: bool = False) -> Iterator[MicroBatch]:
        """This rank's share of the rows that have a trained token; with `alone`, all of them."""
        device = self.model.head.device
        dtype = torch.promote_types(self.model.head.dtype, torch.float32)
        live = [i for i, row in enumerate(rows) if any(row.loss_mask)]
        if not live:
            return
        trained = {i: [t for t, on in enumerate(rows[i].loss_mask) if on] for i in live}
        weight = self._weights([rows[i] for i in live], [len(trained[i]) for i in live], dtype)
        ranks = 1 if alone or self.group is None else dist.get_world_size(self.group)
        rank = 0 if alone or self.group is None else dist.get_rank(self.group)
        config = self.model.config
        lengths = [trained[i][-1] for i in live]
        planned = plan(
            lengths,
            token_budget=self.token_budget,
            ranks=ranks,
            per_token=2.0 * sum(p.numel() for p in self.model.parameters()),
            per_square=2.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim,
        )
        for places in planned[rank]:
            if not places:
                continue  # a dummy: no collective inside a forward here, so nothing waits for it
            start, before = 0, []
            for place in places:
                before += [start + t - 1 for t in trained[live[place]]]
                start += lengths[place]
            chosen = [(rows[live[place]], trained[live[place]], lengths[place]) for place in places]

            def tensor(values: list, kind: torch.dtype) -> Tensor:
                return torch.tensor(values, dtype=kind, device=device)

            yield MicroBatch(
                rows=tuple(live[place] for place in places),
                token_ids=tensor(
                    [i for row, _, length in chosen for i in row.token_ids[:length]], torch.long
                ),
                lengths=[length for _, _, length in chosen],
                before=tensor(before, torch.long),
                label=tensor([row.token_ids[t] for row, at, _ in chosen for t in at], torch.long),
                rollout_logprob=tensor([row.rollout_logprob[t] for row, at, _ in chosen for t in at], dtype),
                advantage=tensor([row.advantage for row, at, _ in chosen for _ in at], dtype),
                weight=torch.cat([weight[place] for place in places]).to(device),
            )

    def _weights(self, rows: list[StepRow], counts: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Weights of the trained tokens by row; tokens outside the mask would not change them."""
        repeats = torch.tensor(counts)
        row_id = torch.arange(len(rows)).repeat_interleave(repeats)
        group_id = torch.tensor([row.group_id for row in rows]).repeat_interleave(repeats)
        mask = torch.ones_like(row_id, dtype=torch.bool)
        return self.weight_function(mask, row_id, group_id, dtype=dtype).split(counts)

    def _add_over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        parameters = list(self.model.parameters())
        if self.group is None:
            return sums
        told = torch.tensor(list(sums.values()), dtype=torch.float64, device=parameters[0].device)
        dist.all_reduce(told, group=self.group)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        dist.all_reduce(flat, group=self.group)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        return dict(zip(sums, told.tolist(), strict=True))


def write_input(path: str | os.PathLike[str], rows: Sequence[StepRow], *, version: int) -> None:
    """Append the rows of a step to trainer_input.jsonl, one a line, as the trainer uses them."""
    drop_torn_tail(Path(path))
    try:
        _append_rows(path, rows, version)
    except OSError as error:
        told = f"rows could not be written: {error.strerror}"
        raise OSError(error.errno, told, os.fspath(path)) from error


def _append_rows(path: str | os.PathLike[str], rows: Sequence[StepRow], version: int) -> None:
    with open(path, "a", encoding="utf-8") as log:
        for row in rows:
            line = {
                "version": version,
                "row_id": row.row_id,
                "trial_id": row.trial_id,
                "group_id": row.group_id,
                "requests": [list(span) for span in row.requests],
                "advantage": row.advantage,
                "token_ids": row.token_ids,
                "loss_mask": [int(on) for on in row.loss_mask],
                "rollout_logprob": row.rollout_logprob,
                "policy_version": row.policy_version,
            }
            log.write(json.dumps(line, separators=(",", ":")) + "\n")
