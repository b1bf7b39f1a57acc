"""What a host calls a loss, held against the two names of core that docs/porting.md gives for it.

Formulas are written as the host writes them, in its ratio form where it has one; compared is the gradient.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from readme import ROOT
from torch import Tensor

from core import aggregate, importance, kl, loss, loss_old
from core.surrogate import TokenLoss

PAGE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
LOW, HIGH, DELTA, C = 0.2, 0.28, 0.15, 1.5


def table(head: str) -> list[list[str]]:
    """The rows below a heading, without backticks."""
    lines = PAGE[PAGE.index(head) :].splitlines()[2:]
    end = next(i for i, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[:end]]


def batch() -> SimpleNamespace:
    """Forty tokens in eight rows of three prompts, on both sides of every bound."""
    draw = torch.Generator().manual_seed(0)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(40, generator=draw, dtype=torch.float64)

    mu = -normal(1.0).abs() - 0.05
    old = (mu + normal(0.3)).clamp(max=-0.01)
    pi = (old + normal(0.9)).clamp(max=-0.01)
    row = torch.arange(40) // 5
    mask = torch.rand(40, generator=draw) < 0.8
    return SimpleNamespace(pi=pi, mu=mu, old=old, a=normal(1.0), mask=mask, row=row, group=row // 3)


def of_rows(value: Tensor, b: SimpleNamespace, *, mean: bool) -> Tensor:
    """For every token the sum, or the mean, of its row's trained tokens."""
    total = torch.stack([(value * b.mask)[b.row == k].sum() for k in range(8)])
    count = torch.stack([b.mask[b.row == k].sum() for k in range(8)])
    return (total / count if mean else total)[b.row]


def clipped(r: Tensor, a: Tensor) -> Tensor:
    return -torch.minimum(r * a, r.clamp(1 - LOW, 1 + HIGH) * a)


def dual(b: SimpleNamespace, lp: Tensor) -> Tensor:
    plain = clipped((lp - b.old).exp(), b.a)
    return torch.where(b.a < 0, torch.minimum(plain, -C * b.a), plain)


def gspo(b: SimpleNamespace, lp: Tensor) -> Tensor:
    mean = of_rows((lp - b.old).detach(), b, mean=True)
    return clipped((lp - lp.detach() + mean).exp(), b.a)


def kept(b: SimpleNamespace, lp: Tensor, anchor: Tensor, *, kind: str) -> Tensor:
    p, q = lp.detach().exp(), anchor.exp()
    moved = p - q if kind == "tv" else q * (anchor - lp.detach()) + (1 - q) * ((1 - q) / (1 - p)).log()
    high = (moved > DELTA) & (p > q) & (b.a > 0)
    low = ((-moved if kind == "tv" else moved) > DELTA) & (p < q) & (b.a < 0)
    return ~(high | low)


def dppo(anchor: str, kind: str, cap: float = math.inf) -> Callable[..., Tensor]:
    def ratio_form(b: SimpleNamespace, lp: Tensor) -> Tensor:
        recorded = getattr(b, anchor)
        if cap == math.inf:
            return -(lp - recorded).exp() * b.a * kept(b, lp, recorded, kind=kind)
        coefficient = (lp.detach() - recorded).exp().clamp(max=cap)
        return -coefficient * kept(b, lp, recorded, kind=kind) * b.a * lp

    return ratio_form


def cispo(b: SimpleNamespace, lp: Tensor) -> Tensor:
    return -(lp.detach() - b.old).exp().clamp(1 - LOW, 1 + HIGH) * b.a * lp


def trl_cispo(b: SimpleNamespace, lp: Tensor) -> Tensor:
    return -(lp.detach() - b.old).exp().clamp(max=HIGH) * b.a * lp


def rollout_is(b: SimpleNamespace, lp: Tensor) -> Tensor:
    r = (lp.detach() - b.mu).exp()
    return -(r * ((r > 1 - LOW) & (r < 1 + HIGH))) * b.a * lp


def sapo(b: SimpleNamespace, lp: Tensor) -> Tensor:
    tau = torch.where(b.a > 0, torch.ones_like(b.a), 1.05)
    return -(4 / tau) * (tau * ((lp - b.old).exp() - 1)).sigmoid() * b.a


def decoupled(b: SimpleNamespace, lp: Tensor) -> Tensor:
    return (b.old - b.mu).exp() * clipped((lp - b.old).exp(), b.a)


def prime_rl(b: SimpleNamespace, lp: Tensor) -> Tensor:
    return dppo("mu", "tv")(b, lp) + 1e-3 * (lp - b.mu).square()


def ours(name: str, anchor: str, **knobs: float) -> Callable[[SimpleNamespace, Tensor], Tensor]:
    """The surrogate of core of that name, `file.function`."""
    file, function = name.split(".")
    call = getattr({"loss": loss, "loss_old": loss_old}[file], function)

    def value(b: SimpleNamespace, lp: Tensor) -> Tensor:
        more = (b.mu,) if function == "decoupled_ppo" else ()
        rows = (b.row,) if function == "gspo" else ()
        return call(lp, getattr(b, anchor), *more, b.a, b.mask, *rows, **knobs).value

    return value


EPSILON = {"epsilon_low": LOW, "epsilon_high": HIGH}
BOUNDS = {"min_ratio": 1 - LOW, "max_ratio": 1 + HIGH}
DELTAS = {"delta_low": DELTA, "delta_high": DELTA}
PPO = (lambda b, lp: clipped((lp - b.old).exp(), b.a), "old", {**EPSILON, "max_ratio": math.inf})
DUAL = (dual, "old", {**EPSILON, "dual_clip": C})
GSPO = (gspo, "old", EPSILON)
CISPO = (cispo, "old", BOUNDS)
SAPO = (sapo, "old", {"temperature_positive": 1.0, "temperature_negative": 1.05})
NO_CAP = {**DELTAS, "max_ratio": math.inf}

SURROGATES: dict[tuple[str, str], tuple[Callable[..., Tensor], str, dict[str, float]]] = {
    ("SkyRL", "regular"): PPO,
    ("SkyRL", "dual_clip"): DUAL,
    ("SkyRL", "gspo"): GSPO,
    ("SkyRL", "cispo"): CISPO,
    ("SkyRL", "rollout_is"): (rollout_is, "mu", BOUNDS),
    ("SkyRL", "dppo binary_tv"): (dppo("mu", "tv"), "mu", NO_CAP),
    ("SkyRL", "dppo binary_kl"): (dppo("mu", "kl"), "mu", NO_CAP),
    ("SkyRL", "sapo"): SAPO,
    ("SkyRL", "importance_sampling"): (lambda b, lp: -(lp - b.old).exp() * b.a, "old", {}),
    ("verl", "PPO"): PPO,
    ("verl", "PPO, dual clip"): DUAL,
    ("verl", "dppo_tv"): (dppo("old", "tv", C), "old", {**DELTAS, "max_ratio": C}),
    ("verl", "dppo_kl"): (dppo("old", "kl", C), "old", {**DELTAS, "max_ratio": C}),
    ("verl", "GSPO"): GSPO,
    ("verl", "CISPO"): CISPO,
    ("TRL", "PPO clip"): PPO,
    ("TRL", "CISPO"): (trl_cispo, "old", {"min_ratio": 0.0, "max_ratio": HIGH}),
    ("TRL", "GSPO"): GSPO,
    ("TRL", "SAPO"): SAPO,
    ("slime", "PPO clip"): PPO,
    ("slime", "GSPO"): GSPO,
    ("slime", "CISPO"): CISPO,
    ("AReaL", "decoupled PPO"): (decoupled, "old", {**EPSILON, "max_weight": math.inf}),
    ("prime-rl", "default"): (prime_rl, "mu", NO_CAP),
}

LOSSES = table("| host | its loss | surrogate |")
REDUCTIONS = table("| host | its reduction | weight |")
CORRECTIONS = table("| correction on top | here |")


def gradient(value: Callable[..., Tensor], b: SimpleNamespace) -> Tensor:
    leaf = b.pi.clone().requires_grad_()
    torch.where(b.mask, value(b, leaf), 0.0).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("line", LOSSES, ids=lambda line: " ".join(line[:2]))
def test_a_loss_of_a_host_has_the_gradient_of_the_surrogate_named_for_it(line: list[str]) -> None:
    host, name, surrogate, _ = line
    if surrogate == "none":
        assert (host, name) not in SURROGATES
        return
    theirs, anchor, knobs = SURROGATES[host, name]
    mine = ours(surrogate, anchor, **knobs)
    penalty = 1e-3 if "kl_tau" in line[3] else 0.0

    def value(b: SimpleNamespace, lp: Tensor) -> Tensor:
        return mine(b, lp) + 2 * penalty * kl.k2(lp, b.mu, b.mask)

    torch.testing.assert_close(gradient(value, batch()), gradient(theirs, batch()), rtol=1e-12, atol=1e-14)


def test_every_formula_stands_in_the_page() -> None:
    assert {(host, name) for host, name, surrogate, _ in LOSSES if surrogate != "none"} == SURROGATES.keys()


def test_the_bounds_bite_in_the_batch_that_the_formulas_are_held_to() -> None:
    """Else all rules would be one."""
    b = batch()
    found = [gradient(value, b) for value in {id(s[0]): s[0] for s in SURROGATES.values()}.values()]
    assert all(not torch.allclose(x, y) for i, x in enumerate(found) for y in found[:i])


def corrected(name: str, b: SimpleNamespace, lp: Tensor) -> TokenLoss:
    plain = loss_old.ppo_clip(lp, b.old, b.a, b.mask, **EPSILON, max_ratio=math.inf)
    rows = (b.row,) if name.startswith("sequence") else ()
    knobs = {"max_weight": 2.0} | ({"min_weight": 0.5} if "masked" in name else {})
    return importance.reweighted(plain, getattr(importance, name)(b.old, b.mu, b.mask, *rows, **knobs))


CORRECTION: dict[str, Callable[[SimpleNamespace], Tensor]] = {
    "token TIS": lambda b: (b.old - b.mu).exp().clamp(max=2.0),
    "sequence TIS": lambda b: of_rows(b.old - b.mu, b, mean=False).exp().clamp(max=2.0),
    "geometric sequence mask": lambda b: inside(of_rows(b.old - b.mu, b, mean=True).exp()).double(),
    "IcePop": lambda b: (b.old - b.mu).exp() * inside((b.old - b.mu).exp()),
}


def inside(ratio: Tensor) -> Tensor:
    return (ratio >= 0.5) & (ratio <= 2.0)


@pytest.mark.parametrize("line", CORRECTIONS, ids=lambda line: line[0].split(":")[0])
def test_a_correction_has_the_gradient_of_the_weight_named_for_it(line: list[str]) -> None:
    (name,) = re.findall(r"importance\.(\w+_weight)", line[1])
    weight = CORRECTION[line[0].split(":")[0]]
    theirs = gradient(lambda b, lp: weight(b) * clipped((lp - b.old).exp(), b.a), batch())
    found = gradient(lambda b, lp: corrected(name, b, lp).value, batch())
    torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-14)


def by_hand(b: SimpleNamespace, reduction: str) -> Tensor:
    """1 / N, 1 / (S n), 1 / (S L), 1 / (P N_p) from counts."""
    n = of_rows(torch.ones(40, dtype=torch.float64), b, mean=False)
    rows = int(b.row.max()) + 1
    of_prompt = torch.stack([b.mask[b.group == k].sum() for k in range(3)])[b.group]
    named: dict[str, Any] = {
        "token_mean_weight": 1 / b.mask.sum(),
        "sequence_mean_weight": 1 / (rows * n),
        "sequence_sum_weight": torch.tensor(1 / (rows * 16.0)),
        "prompt_mean_weight": 1 / (3 * of_prompt),
    }
    return torch.where(b.mask, named[reduction], 0.0).double()


THEIRS = {
    "token_mean": "token_mean_weight",
    "token-mean": "token_mean_weight",
    "token": "token_mean_weight",
    "per token": "token_mean_weight",
    "dapo, cispo": "token_mean_weight",
    "sequence_mean": "sequence_mean_weight",
    "seq-mean-token-mean": "sequence_mean_weight",
    "grpo, sapo": "sequence_mean_weight",
    "sample mean": "sequence_mean_weight",
    "seq_mean_token_sum_norm": "sequence_sum_weight",
    "seq-mean-token-sum": "sequence_sum_weight",
    "seq-mean-token-sum-norm": "sequence_sum_weight",
    "dr_grpo": "sequence_sum_weight",
    "prompt_mean": "prompt_mean_weight",
}


@pytest.mark.parametrize("line", REDUCTIONS, ids=lambda line: " ".join(line[:2]))
def test_a_reduction_is_the_weight_named_for_it_where_every_row_has_a_trained_token(line: list[str]) -> None:
    _, name, weight, _ = line
    if weight == "none":
        assert name not in THEIRS
        return
    b = batch()
    assert min(int(b.mask[b.row == k].sum()) for k in range(8)) > 0
    length = {"length": 16.0} if weight == "sequence_sum_weight" else {}
    found = getattr(aggregate, weight)(b.mask, b.row, b.group, dtype=torch.float64, **length)
    torch.testing.assert_close(found, by_hand(b, THEIRS[name]), rtol=1e-6, atol=0)


def test_every_name_in_the_tables_is_a_function_of_core() -> None:
    named = [line[2] for line in LOSSES] + re.findall(r"importance\.\w+", " ".join(c[1] for c in CORRECTIONS))
    for name in {name for name in named if name != "none"}:
        file, function = name.split(".")
        assert callable(getattr(importlib.import_module(f"core.{file}"), function))
