"""How near is `core.logprob.head_gradient` to the three matrix products that it cannot do without?

One command on a GPU: `python -m benchmarks.logprob_head --out FILE`. Side by side in one run: the bare products
(the limit), ours with bfloat16 and float32 logits, autograd over the whole logits (in parts, or they do not
fit), chunks with checkpointing, Liger's fused linear losses. The arms take turns, each after a call of its own so
that the card is as warm as the arm makes it; the median of the rounds counts. Gradients are compared with
float64.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from core.logprob import chunk_within, head_gradient
from core.loss import dppo_binary_tv
from core.shard import WHOLE

VOCABULARY = 248_320
EXTRA_BYTES = 3e9
"""What may be used beside the head's gradient in float32."""


SLOW = {"Liger, linear GRPO"}
"""Measured in three rounds only."""


class Problem(NamedTuple):
    hidden: Tensor
    head: Tensor
    label: Tensor
    rollout_logprob: Tensor
    advantage: Tensor
    mask: Tensor
    weight: Tensor


def slope(logprob: Tensor, mu: Tensor, advantage: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    loss = dppo_binary_tv(logprob, mu, advantage, mask, delta_low=0.15, delta_high=0.15, max_ratio=5.0)
    return weight * loss.slope


def problem(tokens: int, width: int, device: str) -> Problem:
    """Logits of spread 3, labels drawn from their softmax, a sampler a little off, one token in five not trained."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    head = (torch.randn(VOCABULARY, width, device=device) * (3 / width**0.5)).bfloat16()
    label, logprob = [], []
    for part in hidden.split(1024):
        table = (part @ head.T).float().log_softmax(1)
        drawn = torch.multinomial(table.exp(), 1)
        label.append(drawn.squeeze(1))
        logprob.append(table.gather(1, drawn).squeeze(1))
    mask = torch.rand(tokens, device=device) < 0.8
    return Problem(
        hidden,
        head,
        torch.cat(label),
        torch.cat(logprob) + 0.01 * torch.randn(tokens, device=device),
        torch.randn(tokens, device=device),
        mask,
        mask / mask.sum(),
    )


def products(p: Problem) -> tuple[Tensor, Tensor]:
    logits = p.hidden @ p.head.T
    return logits @ p.head, logits.T @ p.hidden


def ours(p: Problem, logit_dtype: torch.dtype, memory: float = EXTRA_BYTES) -> tuple[Tensor, Tensor]:
    """The budget holds the gradient of the hidden states and what is kept per token, too."""
    memory -= p.hidden.nbytes + 0.05e9
    chunk = chunk_within(
        memory_bytes=memory, vocabulary=VOCABULARY, logit_dtype=logit_dtype, hidden_dtype=torch.bfloat16
    )
    found = head_gradient(
        p.hidden,
        p.head,
        p.label,
        p[3:],
        slope=slope,
        temperature=1.0,
        chunk=chunk,
        logit_dtype=logit_dtype,
        fuse=torch.compile,
        shard=WHOLE,
    )
    return found.hidden, found.head


def loss_of_logits(hidden: Tensor, head: Tensor, label: Tensor, *field: Tensor) -> Tensor:
    logprob = (hidden @ head.T).float().log_softmax(1).gather(1, label[:, None]).squeeze(1)
    return (slope(logprob.detach(), *field) * logprob).sum()


def autograd(p: Problem, parts: int, again: bool) -> tuple[Tensor, Tensor]:
    """Every part's logits kept whole for its backward pass, or computed again in it."""
    hidden, head = p.hidden.detach().requires_grad_(), p.head.detach().requires_grad_()
    for piece in zip(*(x.chunk(parts) for x in (hidden, *p[2:]))):
        args = (piece[0], head, *piece[1:])
        (
            checkpoint(loss_of_logits, *args, use_reentrant=False) if again else loss_of_logits(*args)
        ).backward()
    assert hidden.grad is not None and head.grad is not None
    return hidden.grad, head.grad


def liger_cross_entropy(p: Problem) -> tuple[Tensor, Tensor]:
    from liger_kernel.transformers.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyLoss,
    )

    hidden, head = p.hidden.detach().requires_grad_(), p.head.detach().requires_grad_()
    LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)(head, hidden, p.label).backward()
    assert hidden.grad is not None and head.grad is not None
    return hidden.grad, head.grad


def liger_grpo(p: Problem) -> tuple[Tensor, Tensor]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    hidden, head = p.hidden.detach().requires_grad_(), p.head.detach().requires_grad_()
    rows = 8
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=True)
    value, _ = loss(
        hidden.view(rows, -1, hidden.shape[1]),
        head,
        p.label.view(rows, -1),
        p.mask.view(rows, -1),
        p.advantage[:rows],
        old_per_token_logps=p.rollout_logprob.view(rows, -1),
    )
    value.backward()
    assert hidden.grad is not None and head.grad is not None
    return hidden.grad, head.grad


def exact(p: Problem) -> tuple[Tensor, Tensor]:
    """Both gradients in float64."""
    head = p.head.double()
    grad_head, grad_hidden = torch.zeros_like(head), []
    for hidden, label, *field in zip(*(x.split(1024) for x in (p.hidden, *p[2:]))):
        state = hidden.double()
        table = (state @ head.T).log_softmax(1)
        told = slope(
            table.gather(1, label[:, None]).squeeze(1),
            *(f if f.dtype == torch.bool else f.double() for f in field),
        )
        table.exp_().mul_(-told[:, None]).scatter_add_(1, label[:, None], told[:, None])
        grad_hidden.append(table @ head)
        grad_head.addmm_(table.T, state)
    return torch.cat(grad_hidden), grad_head


def off(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def norm_off(found: Tensor, truth: Tensor) -> float:
    return abs(float(found.double().norm() / truth.norm()) - 1)


def milliseconds(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def extra_bytes(work: Callable[[], object]) -> int:
    """The peak of a call beside what was there before it, what it returns included."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() - before


def arms(p: Problem, parts: int) -> dict[str, Callable[[], Any]]:
    return {
        "three products": lambda: products(p),
        "ours, bfloat16 logits": lambda: ours(p, torch.bfloat16),
        "ours, float32 logits": lambda: ours(p, torch.float32),
        f"autograd, whole logits, {parts} parts": lambda: autograd(p, parts, again=False),
        "autograd, checkpointed chunks": lambda: autograd(p, -(-len(p.label) // 2048), again=True),
        "Liger, linear cross-entropy": lambda: liger_cross_entropy(p),
        "Liger, linear GRPO": lambda: liger_grpo(p),
    }


def table(tokens: int, width: int, rounds: int) -> list[dict[str, Any]]:
    p = problem(tokens, width, "cuda")
    truth = exact(p)
    lines: list[dict[str, Any]] = []
    running = {}
    for name, work in arms(p, parts=4).items():
        line: dict[str, Any] = {"arm": name, "tokens": tokens, "width": width}
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - an arm that cannot run is a line of the table
            line["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            lines.append(line)
            continue
        if name.startswith(("ours", "autograd")):
            line["hidden_off"], line["head_off"] = (off(a, b) for a, b in zip(found, truth))
            line["hidden_norm_off"], line["head_norm_off"] = (norm_off(a, b) for a, b in zip(found, truth))
        del found
        lines.append(line)
        running[name] = (line, work, [])
    del truth
    for index in range(rounds):
        for line, work, times in running.values():
            if index < (3 if line["arm"] in SLOW else rounds):
                work()
                times.append(milliseconds(work))
    for line, work, times in running.values():
        line["ms"], line["extra_gb"] = round(median(times), 2), round(extra_bytes(work) / 1e9, 3)
        line["all_ms"] = [round(t, 2) for t in times]
    limit = running["three products"][0]["ms"]
    for line, _, _ in running.values():
        line["of_limit"] = round(limit / line["ms"], 4)
        line["over_gradient_gb"] = round(line["extra_gb"] - 4 * VOCABULARY * width / 1e9, 3)
    return lines


def length_line(tokens: int, width: int) -> dict[str, Any]:
    """Ours alone at a length whose logits could not exist."""
    p = problem(tokens, width, "cuda")
    ours(p, torch.bfloat16)
    extra = extra_bytes(lambda: ours(p, torch.bfloat16)) / 1e9
    return {
        "arm": "ours, bfloat16 logits",
        "tokens": tokens,
        "width": width,
        "ms": round(milliseconds(lambda: ours(p, torch.bfloat16)), 2),
        "extra_gb": round(extra, 3),
        "over_gradient_gb": round(extra - 4 * VOCABULARY * width / 1e9, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the lines go")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--long", type=int, default=160_000, help="tokens at which ours alone is run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", default="", help="where git is not at hand")
    args = parser.parse_args()
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    about = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": args.commit or told.stdout.strip(),
        "vocabulary": VOCABULARY,
    }
    print(json.dumps(about))
    lines: list[dict[str, Any]] = [about]
    for width in (2048, 4096):
        lines += table(args.tokens, width, args.rounds)
        torch.cuda.empty_cache()
        lines.append(length_line(args.long, width))
        torch.cuda.empty_cache()
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines[1:]:
        print(
            f"{line['width']:5d} {line['tokens']:7d}  {line['arm']:40s}"
            + (
                line["error"]
                if "error" in line
                else f"{line['ms']:9.1f} ms  {line.get('of_limit', float('nan')):6.1%} of the limit  "
                f"{line['over_gradient_gb']:7.2f} GB over the gradient  "
                f"off {line.get('hidden_off', float('nan')):.1e} {line.get('head_off', float('nan')):.1e} "
                f"norm {line.get('hidden_norm_off', float('nan')):.0e} {line.get('head_norm_off', float('nan')):.0e}"
            )
        )


if __name__ == "__main__":
    main()
