"""The Megatron trainer on one GPU: is its gradient the torch trainer's, and how near is it to a bare loop?

One command, `python -m benchmarks.gpu.megatron_trainer --out FOLDER` (torch, transformers and megatron-core there,
no Transformer Engine, no network): each phase in a process of its own with a deadline of its own, a line of
FOLDER/megatron_trainer.jsonl for each thing measured, its output in FOLDER/PHASE.log.
`--smoke` runs all of it in small on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core.aggregate import prompt_mean_weight
from core.loss import dppo_binary_tv
from system.model import ModelConfig, Qwen3
from system.trainer import OptimizerSettings, StepRow
from system.trainer.megatron.shape import Shape, weight_shapes
from system.trainer.parallel import Parallel
from system.trainer.torch_trainer import TorchTrainer

SMOKE = "--smoke" in sys.argv
DEVICE = "cpu" if SMOKE else "cuda"
OPTIMIZER = OptimizerSettings(
    learning_rate=1e-4, beta1=0.9, beta2=0.98, epsilon=1e-8, weight_decay=0.01, max_grad_norm=1.0
)
DPPO = partial(dppo_binary_tv, delta_low=0.15, delta_high=0.15, max_ratio=5.0)
RULES: dict[str, Any] = {
    "weight_function": prompt_mean_weight,
    "loss_function": DPPO,
    "optimizer": OPTIMIZER,
    "temperature": 1.0,
}
PEAK_FLOPS = 989e12
"""Of an H200 in dense bf16, by its data sheet."""

SMALL = ModelConfig(
    hidden_size=64 if SMOKE else 512,
    intermediate_size=128 if SMOKE else 1536,
    num_hidden_layers=2 if SMOKE else 6,
    num_attention_heads=4 if SMOKE else 8,
    num_key_value_heads=2 if SMOKE else 4,
    head_dim=16 if SMOKE else 64,
    vocab_size=512 if SMOKE else 8192,
    token_count=500 if SMOKE else 8000,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
)
EXPERTS = Shape(
    base=replace(SMALL, tie_word_embeddings=False),
    experts=8,
    active_experts=2,
    expert_size=32 if SMOKE else 512,
)
LARGE = (
    SMALL
    if SMOKE
    else ModelConfig(
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=65536,
        token_count=65536,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
)
BUDGET = 256 if SMOKE else 32768
MICRO_BATCHES = 2 if SMOKE else 4
ROUNDS = 2 if SMOKE else 8


def tell(**line: Any) -> None:
    """One thing measured."""
    print("RESULT " + json.dumps(line), flush=True)


def start_megatron() -> None:
    """One rank, alone."""
    from datetime import timedelta

    if SMOKE:
        from tests.megatron.cuda_on_cpu import install

        install()
    else:
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False
    store = tempfile.mktemp(prefix="store-")
    dist.init_process_group(
        "gloo" if SMOKE else "nccl",
        init_method=f"file://{store}",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=300),
    )
    import megatron.core.models.gpt  # noqa: F401

    if SMOKE:
        from tests.megatron.cuda_on_cpu import install_after_import

        install_after_import()


def megatron(shape: Shape, state: dict[str, Tensor], budget: int, kind: Any = None, **sizes: Any) -> Any:
    """A trainer of the sizes given, of a class that is one."""
    from megatron.core import parallel_state

    from system.trainer.megatron.network import join
    from system.trainer.megatron.trainer import MegatronTrainer

    fuse = sizes.pop("fuse", None)
    parallel = Parallel(**sizes)
    if not parallel_state.model_parallel_is_initialized():
        join(parallel)
    more = {} if fuse is None else {"fuse": fuse}
    return (kind or MegatronTrainer)(
        shape, state.__getitem__, parallel=parallel, token_budget=budget, **RULES, **more
    )


def random_weights(shape: Shape, *, scale: float = 0.05) -> dict[str, Tensor]:
    """Norms near one, the rest normal."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name, size in weight_shapes(shape).items():
        noise = torch.randn(size, generator=generator)
        found[name] = 1 + 0.1 * noise if len(size) == 1 else scale * noise
    return found


def some_rows(
    lengths: Sequence[int], token_count: int, *, trained: float = 0.6, seed: int = 0
) -> list[StepRow]:
    """Rows of random ids, groups of four; a share of the tokens is trained."""
    generator, found = torch.Generator().manual_seed(seed), []
    for index, length in enumerate(lengths):
        mask = (torch.rand(length, generator=generator) < trained).tolist()
        mask[0], mask[-1] = False, True
        found.append(
            StepRow(
                row_id=f"t{index}/0",
                trial_id=f"t{index}",
                group_id=index // 4,
                token_ids=torch.randint(0, token_count, (length,), generator=generator).tolist(),
                loss_mask=mask,
                rollout_logprob=(-9 - torch.rand(length, generator=generator)).tolist(),
                policy_version=[0 if on else -1 for on in mask],
                advantage=(-1.0) ** index * (0.5 + 0.1 * (index % 3)),
            )
        )
    return found


def ragged(total: int, count: int) -> list[int]:
    """So many lengths that add up to `total`, the longest about eight times the shortest."""
    wish = [math.exp(2.0 * index / max(1, count - 1)) for index in range(count)]
    lengths = [max(2, int(total * one / sum(wish))) for one in wish]
    lengths[-1] += total - sum(lengths)
    return lengths


def far(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, Any]:
    """Relative distance of the whole gradient, and of the weight that is furthest off."""
    assert found.keys() == truth.keys()
    gaps = {n: float((found[n].double() - truth[n].double()).norm()) for n in truth}
    norms = {n: float(truth[n].double().norm()) for n in truth}
    worst = max(truth, key=lambda n: gaps[n] / norms[n])
    whole = math.hypot(*gaps.values()) / math.hypot(*norms.values())
    return {"whole": whole, "worst": gaps[worst] / norms[worst], "worst_name": worst}


def torch_gradient(shape: Shape, state: dict[str, Tensor], rows: list[StepRow], dtype: torch.dtype) -> Any:
    """Of the torch trainer; for experts with Hugging Face's model in it."""
    from tests.megatron.policies import Experts, named

    if shape.experts:
        model: Any = Experts(shape, state).to(device=DEVICE, dtype=dtype)
    else:
        model = Qwen3.from_state(shape.base, state, dtype=dtype, device=DEVICE)
    trainer = TorchTrainer(model, token_budget=4096, **RULES)
    logprob = trainer.logprob(rows)
    sums = trainer.gradient(rows)
    return logprob, named(trainer, lambda p: p.grad.float().cpu()), sums


def megatron_gradient(trainer: Any, shape: Shape, rows: list[StepRow]) -> Any:
    from tests.megatron.policies import fused

    logprob = trainer.logprob(rows)
    sums = trainer.gradient(rows)
    found = {name: value.float().cpu() for name, value in trainer.gradients()}
    return logprob, fused(found, shape) if shape.experts else found, sums


def logprob_gap(a: list[list[float]], b: list[list[float]], rows: list[StepRow]) -> float:
    """Mean over the trained tokens."""
    gaps = [
        abs(x - y)
        for one, other, row in zip(a, b, rows, strict=True)
        for x, y, on in zip(one, other, row.loss_mask, strict=True)
        if on
    ]
    return sum(gaps) / len(gaps)


def attention() -> None:
    """Our attention over ragged segments, keys longer than queries included, against float64."""
    from system.trainer.megatron.attention import Segments, attend

    def segments(queries: tuple[int, ...], keys: tuple[int, ...]) -> Segments:
        ends = [torch.tensor([0, *x], device=DEVICE).cumsum(0).int() for x in (queries, keys)]
        none = torch.empty(0)
        return Segments(
            cosine=none,
            sine=none,
            query_length=queries,
            key_length=keys,
            query_end=ends[0],
            key_end=ends[1],
            key=None,
            ranks=None,
        )

    torch.manual_seed(0)
    for name, queries, keys in (
        ("rows", (100, 1, 700, 33), (100, 1, 700, 33)),
        ("shared rows", (50, 64, 300), (150, 64, 900)),
    ):
        q = torch.randn(sum(queries), 8, 64, device=DEVICE)
        k, v = torch.randn(2, sum(keys), 4, 64, device=DEVICE)
        grad = torch.randn_like(q)
        told: dict[str, list[Tensor]] = {}
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            own = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
            out = attend(own[0], own[1], own[2], segments(queries, keys))
            out.backward(grad.to(dtype))
            told[str(dtype)] = [out.detach(), *(x.grad for x in own if x.grad is not None)]
        for dtype in ("torch.float32", "torch.bfloat16"):
            gaps = [
                float((a.double() - b).norm() / b.norm())
                for a, b in zip(told[dtype], told["torch.float64"], strict=True)
            ]
            tell(phase="attention", case=name, dtype=dtype, out_q_k_v=gaps)


def gradients(name: str) -> None:
    """Gradient and logprobs against the torch trainer's, packed and not, recomputed and not, in both dtypes."""
    shape = EXPERTS if name == "experts" else Shape(base=SMALL)
    state = random_weights(shape)
    lengths = ragged(300 if SMOKE else 6000, 12)
    rows = some_rows(lengths, shape.base.token_count)
    exact_logprob, exact, exact_sums = torch_gradient(shape, state, rows, torch.float32)
    by_torch = None
    try:
        by_torch = torch_gradient(shape, state, rows, torch.bfloat16)
        tell(phase=name, case="torch trainer", dtype="bfloat16", against="float32", **far(by_torch[1], exact))
    except Exception:  # noqa: BLE001 (the other comparisons are still worth having)
        traceback.print_exc()
    for dtype in ("float32", "bfloat16"):
        for case, budget, recompute in (
            ("packed", 4096, False),
            ("one row a micro-batch", 1, False),
            ("packed, recomputed", 4096, True),
        ):
            trainer = megatron(
                shape, state, budget, dtype=dtype, recompute=recompute, distributed_optimizer=False
            )
            logprob, found, sums = megatron_gradient(trainer, shape, rows)
            line = {
                "mean_logprob_gap": logprob_gap(logprob, exact_logprob, rows),
                "loss": sums["loss"],
                "torch_loss": exact_sums["loss"],
                **far(found, exact),
            }
            tell(phase=name, case=case, dtype=dtype, against="float32", **line)
            if dtype == "bfloat16" and by_torch is not None:
                tell(phase=name, case=case, dtype=dtype, against="bfloat16", **far(found, by_torch[1]))
            del trainer


def steps() -> None:
    """A few steps: float32 and bf16, the optimizer shared or not, on the CPU or not, from a checkpoint or not."""
    from tests.megatron.policies import named

    shape = Shape(base=SMALL)
    state = random_weights(shape)
    batches = [
        some_rows(ragged(300 if SMOKE else 4000, 8), SMALL.token_count, seed=seed) for seed in range(3)
    ]
    by_torch = TorchTrainer(Qwen3.from_state(SMALL, state, device=DEVICE), token_budget=4096, **RULES)
    for version, rows in enumerate(batches):
        by_torch.step(rows, version=version)
    truth = named(by_torch, lambda p: p.detach().float().cpu())
    moved = {n: truth[n] - state[n] for n in truth}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("float32", {"distributed_optimizer": False}),
        ("float32, shared optimizer", {}),
        ("bfloat16, shared optimizer", {"dtype": "bfloat16"}),
        ("bfloat16, optimizer on the CPU", {"dtype": "bfloat16", "offload": 1.0}),
    ]
    for case, sizes in cases:
        if SMOKE and "offload" in sizes:
            continue
        try:
            trainer = megatron(shape, state, 4096, **sizes)
            norms = [trainer.step(rows, version=v).grad_norm for v, rows in enumerate(batches)]
            found = {n: value.float().cpu() for n, value in trainer.weights()}
            line = far({n: found[n] - state[n] for n in moved}, moved)
            near = far(found, truth)
            tell(phase="steps", case=case, grad_norms=norms, moved_as_torch=line, weights_as_torch=near)
            with tempfile.TemporaryDirectory() as folder:
                trainer.save(folder)
                trainer.step(batches[0], version=3)
                after = {n: value.clone() for n, value in trainer.weights()}
                trainer.load(folder)
                trainer.step(batches[0], version=3)
                same = all(bool(torch.equal(value, after[n])) for n, value in trainer.weights())
            tell(phase="steps", case=case, checkpoint_goes_on_exactly=same)
        except Exception as error:  # noqa: BLE001 (one case must not cost the others; the line records it)
            traceback.print_exc()
            tell(phase="steps", case=case, error=f"{type(error).__name__}: {error}"[:300])


def synchronize() -> None:
    if not SMOKE:
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median of some rounds, each waited for, after two that are not counted."""
    told = []
    for index in range(rounds + 2):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        if index >= 2:
            told.append(time.perf_counter() - start)
    return median(told)


def matrix_products() -> float:
    """FLOP a second of one large bf16 product, as warm as the rest."""
    size = 256 if SMOKE else 8192
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b)


def operations(shape: Shape, lengths: Sequence[int]) -> float:
    """Of forward and backward pass without what is computed twice: 6 a weight and token, and attention's share."""
    base = shape.base
    square = base.num_hidden_layers * base.num_attention_heads * base.head_dim
    return 6.0 * shape.active_parameters * sum(lengths) + 6.0 * square * sum(n * n for n in lengths)


def bare_loops(trainer: Any, rows: list[StepRow]) -> dict[str, float]:
    """Seconds of a step of loops around the same network and micro-batches, without a trainer.

    "autograd": cross-entropy of whole logits in four parts, torch's fused AdamW on the bf16 weights, clipping.
    "our head and optimizer": what the trainer itself calls, on micro-batches made beforehand.
    """
    from system.trainer.megatron.convert import take_weights
    from system.trainer.megatron.network import decoder

    batches = list(trainer.micro_batches(rows)[1])
    bare = decoder(trainer.shape, trainer.parallel, on_gpu=not SMOKE)
    own = dict(trainer.weights())
    take_weights(bare, trainer.shape, trainer.parallel, own.__getitem__)
    copies = list(bare.parameters())
    adam = torch.optim.AdamW(copies, lr=1e-6, fused=not SMOKE)
    count = sum(len(batch.labels.label) for batch in batches)
    told = torch.zeros(6, dtype=torch.float64, device=trainer.device)

    def forward(model: Any, batch: Any, end: Callable[..., Tensor]) -> Tensor:
        return model(
            input_ids=batch.token_ids,
            position_ids=None,
            attention_mask=None,
            packed_seq_params=batch.segments,
            output_processor=end,
            output_processor_context=batch,
        )

    def autograd() -> None:
        for batch in batches:
            (forward(bare, batch, plain_loss) / count).backward()
        torch.nn.utils.clip_grad_norm_(copies, 1.0, foreach=True)
        adam.step()
        adam.zero_grad()

    def ours() -> None:
        trainer.model.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        for batch in batches:
            forward(trainer.model.module, batch, partial(trainer_end, trainer, told)).backward()
        trainer.optimizer.step()

    return {"autograd": seconds(autograd), "our head and optimizer": seconds(ours)}


def plain_loss(**given: Any) -> Tensor:
    """Sum of the cross-entropy of the labels, each part's logits kept for the backward pass."""
    labels, weight = given["context"].labels, given["output_weight"]
    hidden = given["hidden_states"].squeeze(1)[labels.before]
    parts = zip(hidden.chunk(4), labels.label.chunk(4), strict=True)
    losses = [F.cross_entropy(F.linear(h, weight).float(), label, reduction="sum") for h, label in parts]
    return torch.stack(losses).sum()


def trainer_end(trainer: Any, told: Tensor, **given: Any) -> Tensor:
    return trainer._loss(told, given["hidden_states"], given["output_weight"], given["context"])


def timed_class() -> Any:
    """The trainer with a clock around what is asked about."""
    from system.trainer.megatron.trainer import MegatronTrainer

    class Timed(MegatronTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.spent: dict[str, float] = dict.fromkeys(("packing", "loss", "optimizer"), 0.0)
            self.on = False
            super().__init__(*args, **kwargs)

        def _clocked(self, name: str, work: Callable[[], Any]) -> Any:
            if not self.on:
                return work()
            synchronize()
            start = time.perf_counter()
            found = work()
            synchronize()
            self.spent[name] += time.perf_counter() - start
            return found

        def micro_batches(self, rows: Any) -> Any:
            count, batches = self._clocked("packing", partial(super().micro_batches, rows))
            return count, (self._clocked("packing", partial(next, batches)) for _ in range(count))

        def _loss(self, *args: Any) -> Any:
            return self._clocked("loss", partial(super()._loss, *args))

        def _apply(self) -> Any:
            return self._clocked("optimizer", super()._apply)

    return Timed


def throughput(recompute: bool, fused: bool) -> None:
    """Tokens a second of steps of 32K-token micro-batches, beside bare loops of the same network."""
    shape = Shape(base=LARGE)
    state = random_weights(shape, scale=0.02)
    lengths = [n for _ in range(MICRO_BATCHES) for n in ragged(BUDGET, 16)]
    rows = some_rows([n + 1 for n in lengths], LARGE.token_count, trained=1.0)
    sizes: dict[str, Any] = {"dtype": "bfloat16", "recompute": recompute}
    if fused and not SMOKE:
        sizes["fuse"] = partial(torch.compile, dynamic=True)
    trainer = megatron(shape, state, BUDGET, timed_class(), **sizes)
    versions = iter(range(10_000))

    def step() -> None:
        trainer.step(rows, version=next(versions))

    whole = seconds(step)
    trainer.on = True
    trainer.spent = dict.fromkeys(trainer.spent, 0.0)
    clocked = seconds(step)
    spent = {name: value / (ROUNDS + 2) for name, value in trainer.spent.items()}
    trainer.on = False
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "weights.safetensors"
        export = seconds(lambda: trainer.export(path), 3)
    sync = seconds(lambda: [None for _ in trainer.weights()], 3)
    bare = bare_loops(trainer, rows)
    product = matrix_products()
    work = operations(shape, lengths)
    tokens = sum(lengths)
    tell(
        phase="throughput",
        recompute=recompute,
        fused_head=fused,
        parameters=sum(math.prod(size) for size in weight_shapes(shape).values()),
        tokens_a_micro_batch=BUDGET,
        micro_batches=trainer.micro_batches(rows)[0],
        rows=len(rows),
        step_s=whole,
        tokens_per_s=tokens / whole,
        bare_step_s=bare,
        bare_tokens_per_s={name: tokens / value for name, value in bare.items()},
        share_of_best_bare=min(bare.values()) / whole,
        flop_utilisation=work / whole / PEAK_FLOPS,
        flop_utilisation_of_a_product=work / whole / product,
        product_flops=product,
        clocked_step_s=clocked,
        clocked_share={name: value / clocked for name, value in spent.items()},
        whole_weights_s=sync,
        export_to_shared_memory_s=export,
        sync_share=export / (whole + export),
        peak_bytes=0 if SMOKE else torch.cuda.max_memory_allocated(),
    )


PHASES: dict[str, tuple[Callable[[], None], float]] = {
    "attention": (attention, 90),
    "dense": (partial(gradients, "dense"), 150),
    "experts": (partial(gradients, "experts"), 180),
    "steps": (steps, 180),
    "throughput": (partial(throughput, False, False), 180),
    "throughput-fused": (partial(throughput, False, True), 240),
    "throughput-recompute": (partial(throughput, True, False), 180),
}
"""What is run, and how many seconds it may take."""


def run_phase(name: str) -> None:
    start_megatron()
    PHASES[name][0]()
    sys.stdout.flush()
    os._exit(0)  # torch's own threads may abort the interpreter's end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--only", nargs="*", default=list(PHASES), choices=list(PHASES), help="phases")
    parser.add_argument("--phase", choices=list(PHASES), help="run this one here")
    parser.add_argument("--smoke", action="store_true", help="in small, on a CPU")
    given = parser.parse_args()
    if given.phase:
        run_phase(given.phase)
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "megatron_trainer.jsonl"
    results.write_text("")
    for name in given.only:
        command = [sys.executable, "-m", "benchmarks.gpu.megatron_trainer", "--phase", name]
        command += ["--out", str(given.out), *(["--smoke"] if given.smoke else [])]
        start, log = time.monotonic(), given.out / f"{name}.log"
        with log.open("w") as file:
            try:
                ended = subprocess.run(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=PHASES[name][1] * (5 if SMOKE else 1),
                ).returncode
            except subprocess.TimeoutExpired:
                ended = "deadline"
        found = [line[7:] for line in log.read_text().splitlines() if line.startswith("RESULT ")]
        summary = {"phase": name, "ended": ended, "seconds": round(time.monotonic() - start, 1)}
        with results.open("a") as file:
            file.write("".join(line + "\n" for line in [*found, json.dumps(summary)]))
        print("\n".join([*found, json.dumps(summary)]), flush=True)


if __name__ == "__main__":
    main()
