"""Every adapter of docs/porting.md, on the step recorded in its host's layout, after what its host does to a loss."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from readme import ROOT, blocks
from torch import Tensor

HERE = Path(__file__).parent
PAGE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
BEGIN, VERL, SKYRL, TRL, TRL_TOKEN_MEAN, PACKED, PRIME_RL, SLIME, STILL_MINE = blocks(PAGE, "python")
Rows = list[list[float]]


def record(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


STEP = record("step")


def adapter(block: str) -> SimpleNamespace:
    """The functions of a block, after the lines that every block begins with."""
    names: dict[str, Any] = {}
    exec(compile(BEGIN + block, "docs/porting.md", "exec"), names)
    return SimpleNamespace(**names)


def tensor(written: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """A recorded tensor; floats in `dtype`, null as NaN."""

    def number(value: Any) -> Any:
        return (
            [number(one) for one in value]
            if isinstance(value, list)
            else math.nan
            if value is None
            else value
        )

    recorded = torch.tensor(number(written["data"]), dtype=getattr(torch, written["dtype"]))
    return recorded.to(dtype) if recorded.is_floating_point() else recorded


def tensors(field: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: [tensor(one, dtype) for one in value] if isinstance(value, list) else tensor(value, dtype)
        for name, value in field.items()
    }


def by_loops(aggregation: str) -> Rows:
    """The gradient of the step by the logprob of every token, in plain Python."""
    trained = [sum(row["loss_mask"]) for row in STEP]
    live = {row["prompt"] for row, count in zip(STEP, trained) if count}
    gradient = []
    for row in STEP:
        tokens = sum(count for other, count in zip(STEP, trained) if other["prompt"] == row["prompt"])
        weight = {"prompt mean": 1 / max(1, len(live) * tokens), "token mean": 1 / sum(trained)}[aggregation]
        columns = zip(row["loss_mask"], row["logprob"], row["rollout_logprob"])
        gradient.append([weight * slope(*column, row["advantage"]) for column in columns])
    return gradient


def slope(trained: int, logprob: float, rollout_logprob: float, advantage: float) -> float:
    pi, mu = math.exp(logprob), math.exp(rollout_logprob)
    outside = (advantage > 0 and pi - mu > 0.15) or (advantage < 0 and mu - pi > 0.15)
    return 0.0 if outside or not trained else -min(math.exp(logprob - rollout_logprob), 20.0) * advantage


def split(count: int, ranks: int, micro_batches: int) -> list[list[list[int]]]:
    """Numbers below `count`, dealt to ranks and micro-batches in uneven shares."""
    return [
        [list(range(count))[rank + ranks * part :: ranks * micro_batches] for part in range(micro_batches)]
        for rank in range(ranks)
    ]


def in_order(rows: list[int], gradient: list[Tensor]) -> Rows:
    """Gradients of rows that were recorded in the order `rows`, in the order of the step."""
    placed = dict(zip(rows, gradient, strict=True))
    return [placed[index].tolist() for index in range(len(STEP))]


def chosen(batch: dict[str, Tensor], rows: list[int]) -> dict[str, Any]:
    return {name: value[rows] for name, value in batch.items()}


def verl(ranks: int, micro_batches: int, dtype: torch.dtype) -> Rows:
    """Adds micro-batches up, averages over ranks."""
    host, written = adapter(VERL), record("verl")
    batch = tensors(written["field"], dtype)
    host.weigh(batch, np.array(written["uid"], dtype=object))
    logprob = batch.pop("log_prob").requires_grad_()
    for share in split(len(logprob), ranks, micro_batches):
        for rows in share:
            loss = host.policy_loss(logprob[rows], chosen(batch, rows) | {"dp_size": ranks})
            (loss / ranks).backward()
    lengths = [len(STEP[index]["loss_mask"]) for index in written["row"]]
    return in_order(written["row"], [g[:n] for g, n in zip(gradient_of(logprob), lengths)])


def skyrl(ranks: int, micro_batches: int, dtype: torch.dtype) -> Rows:
    """Multiplies by the number of ranks, adds micro-batches up, averages over ranks."""
    host, written = adapter(SKYRL), record("skyrl")
    batch = tensors(written["field"], dtype)
    host.weigh(batch, written["uids"])
    logprob = batch.pop("log_probs").requires_grad_()
    for share in split(len(logprob), ranks, micro_batches):
        for rows in share:
            own = chosen(batch, rows)
            loss, metrics = host.policy_loss(
                logprob[rows],
                own["action_log_probs"],
                own["advantages"],
                None,
                loss_mask=own["loss_mask"],
                rollout_logprobs=own["rollout_logprobs"],
            )
            (loss * ranks / ranks).backward()
            assert 0 <= metrics["outside"] <= own["loss_mask"].sum()
    lengths = [len(STEP[index]["loss_mask"]) for index in written["row"]]
    return in_order(written["row"], [g[len(g) - n :] for g, n in zip(gradient_of(logprob), lengths)])


def trl_weights(
    weigh: Callable[..., Tensor], shares: list[dict[str, Any]], group_size: int, dtype: torch.dtype
) -> None:
    """Masks of all processes padded to one width and gathered; each takes its own rows and columns back."""
    masks = [(share["completion_mask"] * share["tool_mask"]).bool() for share in shares]
    width = max(mask.shape[1] for mask in masks)
    gathered = torch.cat([torch.nn.functional.pad(mask, (0, width - mask.shape[1])) for mask in masks])
    weight = weigh(gathered, group_size, dtype)
    for share, own in zip(shares, weight.split([len(mask) for mask in masks])):
        share["weight"] = own[:, : share["completion_mask"].shape[1]]


def trl(ranks: int, micro_batches: int, dtype: torch.dtype) -> Rows:
    """Adds micro-batches up, averages over the two processes of the record."""
    host, written = adapter(TRL), record("trl")
    shares = [tensors(share["field"], dtype) for share in written["process"]]
    trl_weights(host.weigh, shares, written["num_generations"], dtype)
    return of_processes(host.policy_loss, shares, written["row"], micro_batches)


def of_processes(
    policy_loss: Callable[..., Tensor], shares: list[dict[str, Any]], order: list[int], micro_batches: int
) -> Rows:
    gradient: list[Tensor] = []
    for share in shares:
        logprob = share.pop("per_token_logps").requires_grad_()
        per_row = {name: value for name, value in share.items() if value.ndim}
        for (rows,) in split(len(logprob), micro_batches, 1):
            inputs = chosen(per_row, rows) | {"num_items_in_batch": share["num_items_in_batch"]}
            (policy_loss(logprob[rows], inputs, len(shares)) / len(shares)).backward()
        gradient += gradient_of(logprob)
    lengths = [len(STEP[index]["loss_mask"]) for index in order]
    return in_order(order, [g[:n] for g, n in zip(gradient, lengths)])


def packed(ranks: int, micro_batches: int, dtype: torch.dtype) -> Rows:
    """Adds up over packs, whatever ranks they are on."""
    host, written = adapter(PACKED), record("packed")
    packs = [tensors(pack["field"], dtype) for pack in written["pack"]]
    gradient: list[Tensor] = []
    for pack, weight, of_pack in zip(packs, host.weigh(packs, dtype), written["pack"]):
        logprob = pack.pop("policy_logprobs").requires_grad_()
        host.policy_loss(logprob, pack | {"weight": weight}).backward()
        whole = torch.stack(gradient_of(logprob))
        gradient += whole.split(pack["cu_seqlens"].diff().tolist())[: len(of_pack["row"])]
    order = [index for pack in written["pack"] for index in pack["row"]]
    return in_order(order, [g[STEP[index]["prompt_tokens"] :] for g, index in zip(gradient, order)])


def prime_rl(ranks: int, micro_batches: int, dtype: torch.dtype) -> Rows:
    """One sample at a time; divides the sum by the step's trained tokens."""
    host, written = adapter(PRIME_RL), record("prime_rl")
    samples = [SimpleNamespace(**tensors(sample["field"], dtype)) for sample in written["sample"]]
    masks = [sample.loss_mask for sample in samples]
    count = sum(int(mask.sum()) for mask in masks)
    gradient: list[Tensor] = []
    for sample, weight in zip(samples, host.weigh(masks, tensor(written["group_id"], dtype), dtype)):
        sample.loss_weights = weight
        sample.trainer_logprobs.requires_grad_()
        (host.policy_loss(sample) / count).backward()
        gradient.append(sample.trainer_logprobs.grad)
    return in_order(written["row"], [g[n:] for g, n in zip(gradient, written["prompt_tokens"])])


def slime(ranks: int, micro_batches: int, dtype: torch.dtype) -> Rows:
    """Multiplies by micro-batches and ranks over the batch size; Megatron averages over micro-batches and ranks."""
    host, written = adapter(SLIME), record("slime")
    batch, size = tensors(written["field"], dtype), written["global_batch_size"]
    batch["weights"] = list(host.weigh(batch["loss_masks"], written["group_index"], dtype))
    logprob = [one.requires_grad_() for one in batch.pop("log_probs")]
    for share in split(len(logprob), ranks, micro_batches):
        for rows in share:
            own = {name: [value[row] for row in rows] for name, value in batch.items()}
            loss = host.policy_loss([logprob[row] for row in rows], own, size)
            scaled = loss * micro_batches / size * ranks
            (scaled / micro_batches / ranks).backward()
    gradient = [one.grad for one in logprob if one.grad is not None]
    return in_order(written["row"], gradient)


def gradient_of(logprob: Tensor) -> list[Tensor]:
    assert logprob.grad is not None
    return list(logprob.grad)


HOSTS = (verl, skyrl, trl, packed, prime_rl, slime)
SPLITS = [
    (host, *split) for host in (verl, skyrl, slime) for split in ((1, 1), (1, 3), (2, 1), (2, 2), (3, 2))
]
SPLITS += [(trl, 2, 1), (trl, 2, 2), (trl, 2, 4), (packed, 1, 1), (prime_rl, 1, 1)]
"""Host, ranks, and micro-batches of each; packs and samples are recorded as they are split."""


def differences(one: Rows, other: Rows) -> Iterator[float]:
    for row, expected in zip(one, other, strict=True):
        yield from (abs(a - b) for a, b in zip(row, expected, strict=True))


@pytest.mark.parametrize(("host", "ranks", "micro_batches"), SPLITS)
def test_an_adapter_gives_the_gradient_of_the_loops_however_the_host_splits(host, ranks, micro_batches):
    gradient = host(ranks, micro_batches, torch.float64)
    assert max(differences(gradient, by_loops("prompt mean"))) < 1e-12


@pytest.mark.parametrize("host", HOSTS[1:], ids=lambda host: host.__name__)
def test_the_same_step_has_the_same_gradient_in_every_layout(host):
    assert max(differences(host(2, 2, torch.float64), verl(1, 1, torch.float64))) < 1e-12


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
def test_an_adapter_takes_the_dtypes_that_its_host_keeps(host):
    gradient = host(2, 2, torch.float32)
    assert max(differences(gradient, by_loops("prompt mean"))) < 1e-6


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_trl_counts_the_tokens_of_a_token_mean_itself(micro_batches):
    host, written = adapter(TRL_TOKEN_MEAN), record("trl")
    shares = [tensors(share["field"], torch.float64) for share in written["process"]]
    gradient = of_processes(host.token_mean_loss, shares, written["row"], micro_batches)
    assert max(differences(gradient, by_loops("token mean"))) < 1e-12


def test_a_micro_batch_with_nothing_to_train_has_a_loss_of_zero_that_is_still_attached():
    host, written = adapter(VERL), record("verl")
    batch = tensors(written["field"], torch.float64)
    host.weigh(batch, np.array(written["uid"], dtype=object))
    rows = [at for at, index in enumerate(written["row"]) if not any(STEP[index]["loss_mask"])]
    logprob = batch.pop("log_prob").requires_grad_()
    loss = host.policy_loss(logprob[rows], chosen(batch, rows) | {"dp_size": 2})
    loss.backward()
    assert len(rows) == 4 and loss == 0 and not any(one.any() for one in gradient_of(logprob))


def test_positions_name_the_rows_that_cu_seqlens_name():
    (line,) = re.findall(r"`row = (\(position.*?)`", PAGE)
    packs = [tensors(pack["field"], torch.float64) for pack in record("packed")["pack"]]
    lengths = torch.cat([pack["cu_seqlens"].diff() for pack in packs])
    position = torch.cat([torch.arange(int(length)) for length in lengths])
    named = eval(line, {"position": position})
    assert torch.equal(named, torch.arange(len(lengths)).repeat_interleave(lengths))


def test_an_adapter_has_at_most_ten_lines():
    for block in (VERL, SKYRL, TRL, TRL_TOKEN_MEAN, PACKED, PRIME_RL, SLIME):
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) <= 10 and max(map(len, lines)) <= 110
        assert "import" not in block


def test_the_record_is_what_its_script_writes():
    names: dict[str, Any] = {"__name__": "record", "__file__": str(HERE / "record.py")}
    exec(compile((HERE / "record.py").read_text(encoding="utf-8"), "record.py", "exec"), names)
    for name, text in names["files"]().items():
        assert (HERE / name).read_text(encoding="utf-8") == text


def test_the_recorded_step_has_what_an_adapter_can_get_wrong():
    """Both sides of the region, the cap, a row and a prompt without a trained token, turns, rows of one token."""
    seen = set()
    for row in STEP:
        for column in zip(row["loss_mask"], row["logprob"], row["rollout_logprob"], strict=True):
            trained, logprob, mu = column
            if trained and slope(*column, row["advantage"]) == 0:
                seen.add("above" if row["advantage"] > 0 else "below")
            elif trained and logprob - mu > math.log(20):
                seen.add("capped")
    prompts = {row["prompt"] for row in STEP}
    live = {row["prompt"] for row in STEP if any(row["loss_mask"])}
    assert seen == {"above", "below", "capped"}
    assert len(prompts - live) == 1 and any(not any(r["loss_mask"]) for r in STEP if r["prompt"] in live)
    assert any(0 in row["loss_mask"] and 1 in row["loss_mask"] for row in STEP)
    assert any(sum(row["loss_mask"]) == 1 for row in STEP)


def verl_step() -> dict[str, Tensor]:
    """The recorded step in float64, with the weights of its prompts, and NaN where nothing is trained."""
    host, written = adapter(VERL), record("verl")
    batch = tensors(written["field"], torch.float64)
    host.weigh(batch, np.array(written["uid"], dtype=object))
    batch["mask"] = batch["response_mask"].bool()
    batch["row"] = torch.arange(len(batch["mask"]))[:, None].expand_as(batch["mask"])
    return batch


def my_loss(batch: dict[str, Tensor], logprob: Tensor, **change: Any) -> Tensor:
    """DPPO as a host might have written it, in ratio form; `change` is what went wrong."""
    a, weight = batch["advantages"], change.get("weight", batch["weight"])
    mu = torch.where(batch["mask"], batch["rollout_log_probs"], 0.0)
    pi = torch.where(batch["mask"], logprob, 0.0)
    moved = (pi.exp() - mu.exp()).detach()
    region = change.get("region", 0.15)
    outside = ((a > 0) & (moved > region)) | ((a < 0) & (-moved > region))
    ratio = (pi - mu).exp()
    if "cap" not in change:
        ratio = torch.where(ratio > 20, 20 * (pi - pi.detach() + 1), ratio)
    term = torch.where(outside, 0.0, -ratio * a) * weight
    return torch.where(batch["mask"], term, 0.0).sum()


def looked_at(**change: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    batch = verl_step()
    if "weight" in change:
        change["weight"] = change["weight"](batch)
    host = adapter(STILL_MINE)

    def ours(logprob: Tensor) -> Tensor:
        mu, a = batch["rollout_log_probs"], batch["advantages"]
        return (
            batch["weight"] * host.dppo_binary_tv(logprob, mu, a, batch["mask"], **host.BOUNDS).value
        ).sum()

    return batch, host.still_mine(lambda lp: my_loss(batch, lp, **change), ours, batch["log_prob"])


def test_a_loss_in_ratio_form_is_still_mine_though_its_value_is_another():
    batch, found = looked_at()
    assert found["difference"] < 1e-10 and torch.allclose(found["factor"], torch.ones(()).double())


def test_a_denominator_shows_as_one_factor_everywhere():
    batch, found = looked_at(weight=lambda batch: batch["weight"] / 3)
    trained = found["factor"][found["factor"] != 1]
    assert len(trained) > 9 and torch.allclose(trained, torch.tensor(1 / 3).double())


def test_an_aggregation_shows_as_one_factor_for_each_row():
    def of_sequences(batch: dict[str, Tensor]) -> Tensor:
        length = batch["mask"].sum(1, keepdim=True)
        return (batch["mask"] / length.clamp(min=1) / (length > 0).sum()).double()

    batch, found = looked_at(weight=of_sequences)
    rows = [set(one[one != 1].mul(1e9).round().tolist()) for one in found["factor"]]
    assert max(map(len, rows)) == 1 and len(set.union(*rows)) > 3


def test_a_region_shows_at_its_tokens_alone_and_a_cap_at_those_with_a_large_ratio():
    batch, found = looked_at(region=0.3)
    off = found["factor"] != 1
    assert found["factor"][off].isinf().any() and off.sum() < batch["mask"].sum() / 2
    assert (
        found["difference"] == pytest.approx(float(found["difference"])) and not found["factor"].isnan().any()
    )
    batch, found = looked_at(cap=False)
    off = (found["factor"] - 1).abs() > 1e-12
    ratio = (batch["log_prob"] - batch["rollout_log_probs"]).exp()
    assert (
        off.any()
        and torch.equal(off, batch["mask"] & (ratio > 20) & off)
        and (found["factor"][off] > 1).all()
    )
    assert off.flatten()[found["where"]]


def test_a_mask_that_is_off_by_one_shows_as_zeros_inside_it():
    batch = verl_step()
    shifted = {**batch, "mask": batch["mask"].roll(1, dims=1)}
    found = adapter(STILL_MINE).still_mine(
        lambda logprob: my_loss(shifted, logprob),
        lambda logprob: my_loss(batch, logprob),
        batch["log_prob"],
    )
    first = batch["mask"] & ~shifted["mask"]
    assert first.any() and set(found["factor"][first].tolist()) <= {0.0, 1.0} and (found["factor"] == 0).any()
