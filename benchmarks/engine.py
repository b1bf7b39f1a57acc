"""How fast does the embedded engine sample, and how near is that to what its operations cost?

One command: `OMP_NUM_THREADS=1 python -m benchmarks.engine`. By batch and context it prints the engine, the
model alone, as many of the smallest torch calls (the floor of an engine made of torch calls), and
transformers' generate on the same weights. On CPU the times are CPU seconds of this process, so that
neighbours on the machine count less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from system.engine import GenerateRequest
from system.engine.batch import Batch
from system.engine.cached import CachedModel
from system.model import ModelConfig, huggingface_config, parameter_count, random_state

CONFIG = ModelConfig(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
    token_count=512,
    max_position_embeddings=1024,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)


def seconds(work: Callable[[], object], repeats: int, device: str) -> float:
    """Least of five means: CPU seconds of this process on CPU, wall seconds on a GPU."""
    clock, best = (time.perf_counter if device == "cuda" else time.process_time), float("inf")
    for _ in range(5):
        start = clock()
        for _ in range(repeats):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, (clock() - start) / repeats)
    return best


def request(i: int, context: int) -> GenerateRequest:
    """A prompt of its own for each session, so that no prefix is shared."""
    return GenerateRequest(
        request_id=str(i),
        session_id=str(i),
        token_ids=[(i * 7 + j * 13) % CONFIG.token_count for j in range(context)],
        max_tokens=CONFIG.max_position_embeddings,
        stop_token_ids=[],
        seed=i,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        repetition_penalty=1.0,
    )


class CallCount(TorchDispatchMode):
    """Counts operations that compute something; views are free."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def hugging_face(state: dict[str, torch.Tensor], batch: int, context: int, device: str) -> float:
    """Sampled tokens per second of transformers' generate, prefill taken off."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**huggingface_config(CONFIG, dtype=torch.float32))).eval()
    torch.nn.Module.to(model, device)  # their own `to` is wrapped beyond what type checkers follow
    model.load_state_dict(state, strict=False)
    ids = torch.tensor([request(i, context).token_ids for i in range(batch)], device=device)

    def generate(count: int) -> object:
        plain = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "eos_token_id": None}
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=count, pad_token_id=0, **plain)  # pyright: ignore

    generate(2)
    more = seconds(lambda: generate(34), 1, device) - seconds(lambda: generate(4), 1, device)
    return batch * 30 / more


def line(state: dict[str, torch.Tensor], size: int, context: int, options: argparse.Namespace) -> str:
    """One row of the table."""
    model = CachedModel(CONFIG, state, max_context=1024, slots=size, device=options.device)
    batch = Batch(model, version=0)
    for i in range(size):
        batch.submit(request(i, context), None)
    while batch.waiting:
        batch.step()
    step = seconds(batch.step, options.steps, options.device)
    alone = seconds(lambda: model.decode([1] * size, [context] * size), options.steps, options.device)
    with CallCount() as counted:
        model.decode([1] * size, [context] * size)
    small = torch.ones(size, CONFIG.hidden_size, device=options.device)
    with torch.inference_mode():
        floor = counted.count * seconds(lambda: torch.add(small, small), 2000, options.device)
    told = f"{size:5} {context:7} | {size / step:12,.0f} {step * 1e3:8.2f} | {alone * 1e3:14.2f}"
    told += f" {counted.count:5} {floor * 1e3:9.2f} {alone / floor:12.1f} |"
    if options.no_transformers:
        return told
    theirs = hugging_face(state, size, context, options.device)
    return told + f" {theirs:8,.0f} {size / step / theirs:9.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-transformers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    state = random_state(CONFIG, seed=0)
    print(f"{parameter_count(state):,} parameters, {options.threads} thread(s), {options.device}, float32")
    heads = "batch context | engine tok/s  ms/step | model alone ms calls  floor ms  model/floor |"
    print(heads if options.no_transformers else f"{heads} HF tok/s engine/HF")
    for size in (1, 16, 64):
        for context in (100, 300, 700):
            print(line(state, size, context, options), flush=True)
    model = CachedModel(CONFIG, state, max_context=1024, slots=1, device=options.device)
    for count, start in ((30, 300), (300, 0), (1000, 0)):
        row = [1] * count
        spent = seconds(lambda: model.prefill([row], [0], [start]), 3, options.device)  # noqa: B023 (called at once)
        print(f"prefill of {count} tokens behind {start}: {spent * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
