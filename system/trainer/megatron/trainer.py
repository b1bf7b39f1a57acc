"""The trainer on Megatron-Core: a step of rows in, its metrics out, whole weights under Hugging Face's names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from system.policy import save_weights
from system.trainer.megatron import checkpoint
from system.trainer.megatron.batch import Batches, LiveRow, MicroBatch, tensor_of
from system.trainer.megatron.convert import take_weights, whole_weights
from system.trainer.megatron.head import Head, chosen_states, logprob_of, loss_of, no_fusion
from system.trainer.megatron.network import DTYPES, build
from system.trainer.megatron.ranks import context_group, data_group, stage_group, tensor_group
from system.trainer.megatron.shape import Shape
from system.trainer.parallel import Parallel
from system.trainer.step import OptimizerSettings, StepMetrics, StepRow

LOGIT_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}
"""Bound on the logits that exist at once."""


class MegatronTrainer:
    """AdamW on a Megatron-Core GPT whose loss is sum(weight * value) over the whole step.

    The weights come from the whole step's mask and nothing else divides, so the gradient is that of the torch
    trainer for every budget and every way of sharing. `network.join` has been called before.

    Args:
        shape: of the policy.
        weight: a whole weight by Hugging Face's name.
        weight_function: one of core.aggregate.
        loss_function: one of core.loss with its thresholds bound.
        optimizer: settings of AdamW.
        token_budget: tokens of one micro-batch over all ranks that share it; a longer row has one to itself.
        temperature: at which the rollouts were sampled; the same is applied here.
        parallel: how the ranks share model and step.
        fuse: `torch.compile` for the head on a GPU, or `no_fusion`.
    """

    def __init__(
        self,
        shape: Shape,
        weight: Callable[[str], Tensor],
        *,
        weight_function: Callable[..., Tensor],
        loss_function: Callable[..., Any],
        optimizer: OptimizerSettings,
        token_budget: int,
        temperature: float,
        parallel: Parallel,
        fuse: Callable[[Any], Any] = no_fusion,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        on_gpu = dist.get_backend() == "nccl"
        self.shape, self.parallel, self.weights_path = shape, parallel, ""
        self.weight_function, self.loss_function = weight_function, loss_function
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.model = build(shape, parallel, on_gpu=on_gpu)
        take_weights(self.model.module, shape, parallel, weight)
        self.optimizer = get_megatron_optimizer(
            optimizer_config(optimizer, parallel), [self.model], config_overrides={}
        )
        self.head = Head(
            slope=self._slope,
            temperature=temperature,
            memory_bytes=LOGIT_BYTES[self.device.type],
            logit_dtype=DTYPES[parallel.dtype],
            fuse=fuse,
        )
        self.batches = Batches(shape, parallel, token_budget=token_budget, device=self.device)

    def step(self, rows: Sequence[StepRow], *, version: int) -> StepMetrics:
        """One optimizer step from weights `version`; without a trained token the weights stay as they are.

        Raises:
            FloatingPointError: the gradient is not finite; weights and optimizer are as before.
        """
        start = time.perf_counter()
        sums = self.gradient(rows)
        norm = self._apply() if sums["trained_tokens"] else 0.0
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
        """Leave this rank's part of the gradient of the whole step in `.main_grad`; sums over its trained tokens."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        names = ("trained_tokens", "loss", "out_of_region", "unusable", "entropy", "mismatch")
        told = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        forward = self._run(rows, partial(self._loss, told))
        last, first = stage_group().rank() == stage_group().size() - 1, context_group().rank() == 0
        speaks = last and tensor_group().rank() == 0
        own = [*told.tolist(), float(forward if first else 0)] if speaks else [0.0] * (len(names) + 1)
        total = torch.tensor([*own, time.process_time()], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return dict(zip((*names, "forward_tokens", "cpu_s"), total.tolist(), strict=True))

    @torch.no_grad()
    def logprob(self, rows: Sequence[StepRow]) -> list[list[float]]:
        """Log-probability of every trained token under the present weights; 0.0 elsewhere."""
        told = [[0.0] * len(row.token_ids) for row in rows]
        found: list[tuple[int, int, float]] = []
        self._run(rows, partial(self._logprob, found), forward_only=True)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        for row, t, value in (one for part in everywhere for one in part):
            told[row][t] = value
        return told

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every whole weight, on every rank, one after the other; all ranks must take part."""
        parameters = dict(self.model.module.named_parameters())
        return whole_weights(parameters.__getitem__, self.shape, self.parallel)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradient of every whole weight after `gradient`, in the same way; without a shared optimizer only."""
        parameters: dict[str, Any] = dict(self.model.module.named_parameters())
        return whole_weights(lambda name: parameters[name].main_grad, self.shape, self.parallel)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the weights for the engine, by the first rank: float32 safetensors, in place at once."""
        self.weights_path = str(path)
        first = dist.get_rank() == 0
        whole = {name: value.float().cpu() if first else None for name, value in self.weights()}
        if first:
            save_weights(path, {name: value for name, value in whole.items() if value is not None})

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write weights and optimizer state; every rank its part."""
        checkpoint.save(Path(folder), self.model.module, self.optimizer)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Take weights and optimizer state that `save` wrote, by other sizes as well."""
        checkpoint.load(Path(folder), self.model.module, self.optimizer)

    def _live(self, rows: Sequence[StepRow]) -> list[LiveRow]:
        """The rows that have a trained token, with the weights of all of them."""
        trained = [tensor_of(row.loss_mask, np.bool_).nonzero().squeeze(1) for row in rows]
        live = [index for index, own in enumerate(trained) if len(own)]
        if not live:
            return []
        repeats = torch.tensor([len(trained[index]) for index in live])
        row_id = torch.arange(len(live)).repeat_interleave(repeats)
        group_id = torch.tensor([rows[index].group_id for index in live]).repeat_interleave(repeats)
        mask = torch.ones_like(row_id, dtype=torch.bool)
        weight = self.weight_function(mask, row_id, group_id, dtype=torch.float32).split(repeats.tolist())
        return [
            LiveRow(row=rows[i], index=i, trained=trained[i], length=int(trained[i][-1]), weight=own)
            for i, own in zip(live, weight, strict=True)
        ]

    def micro_batches(self, rows: Sequence[StepRow]) -> tuple[int, Iterator[MicroBatch]]:
        """How many micro-batches this rank has of a step, and each when it is asked for."""
        live = self._live(rows)
        planned = self.batches.planned(
            live,
            data_rank=data_group().rank(),
            data_ranks=data_group().size(),
        )
        return len(planned), self.batches.made(live, planned)

    def _run(self, rows: Sequence[StepRow], end: Callable[..., Tensor], *, forward_only: bool = False) -> int:
        """All micro-batches forward and, unless told otherwise, backward, in the order of Megatron's schedule.

        The tokens of this rank's micro-batches.
        """
        count, batches = self.micro_batches(rows)
        tokens = 0
        if count == 0:
            return tokens

        def forward(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            nonlocal tokens
            batch = next(iterator)
            tokens += batch.tokens
            output = model(
                input_ids=batch.token_ids,
                position_ids=None,
                attention_mask=None,
                packed_seq_params=batch.segments,
                output_processor=partial(_end, end),
                output_processor_context=batch,
            )
            return output, _as_it_is

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches,
            model=[self.model],
            num_microbatches=count,
            seq_length=1,  # not read: lengths vary
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return tokens

    def _loss(self, told: Tensor, hidden: Tensor, weight: Tensor, batch: MicroBatch) -> Tensor:
        """0 with the gradient of the micro-batch's loss; its sums are added to `told`."""
        labels = batch.labels
        chosen = chosen_states(hidden, labels, sequence=self.parallel.sequence)
        add = partial(self._add_sums, told, labels.field)
        return loss_of(chosen, weight, self.shape.base.token_count, labels, self.head, add)

    def _logprob(
        self, found: list[tuple[int, int, float]], hidden: Tensor, weight: Tensor, batch: MicroBatch
    ) -> Tensor:
        chosen = chosen_states(hidden, batch.labels, sequence=self.parallel.sequence)
        told = logprob_of(chosen, weight, self.shape.base.token_count, batch.labels, self.head).logprob
        found += zip(batch.row.tolist(), batch.place.tolist(), told.tolist(), strict=True)
        return hidden.new_zeros(())

    def _slope(self, logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
        mask = torch.ones_like(logprob, dtype=torch.bool)
        return weight * self.loss_function(logprob, rollout_logprob, advantage, mask).slope

    def _add_sums(
        self, told: Tensor, field: tuple[Tensor, Tensor, Tensor], logprob: Tensor, entropy: Tensor
    ) -> None:
        rollout_logprob, advantage, weight = field
        mask = torch.ones_like(logprob, dtype=torch.bool)
        loss = self.loss_function(logprob, rollout_logprob, advantage, mask)
        gap = torch.where(loss.unusable, 0.0, (logprob - rollout_logprob).abs())
        values = (mask, weight * loss.value, loss.out_of_region, loss.unusable, entropy, gap)
        told += torch.stack([value.sum().double() for value in values])

    def _apply(self) -> float:
        """Clip the gradient over all ranks and step; its norm before clipping."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not norm < float("inf"):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            raise FloatingPointError(f"grad_norm must be finite, got {norm}")
        self.optimizer.step()
        return norm


def _end(end: Callable[..., Tensor], **given: Any) -> Tensor:
    """What comes after the last layer: our own head in the place of Megatron's logits."""
    weight = given["output_weight"] if given["output_weight"] is not None else given["output_layer"].weight
    return end(given["hidden_states"], weight, given["context"])


def _as_it_is(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}


def optimizer_config(settings: OptimizerSettings, parallel: Parallel) -> OptimizerConfig:
    """AdamW as the torch trainer has it: weight decay on every weight."""
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.max_grad_norm,
        bf16=parallel.dtype == "bfloat16",
        params_dtype=DTYPES[parallel.dtype],
        use_distributed_optimizer=parallel.distributed_optimizer,
        optimizer_cpu_offload=parallel.offload > 0,
        optimizer_offload_fraction=parallel.offload,
        overlap_cpu_optimizer_d2h_h2d=parallel.offload > 0,
    )
