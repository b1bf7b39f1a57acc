"""Records one step in the layouts of six hosts: `python tests/porting/record.py` writes the json files beside it.

The step is the same in all of them: four prompts of three rollouts with turns, tool output, a rollout that a system
error took, and a prompt of which nothing is left. What a host keeps where nothing is trained (zeros, -1, NaN, a
padded edge on the right or on the left) is kept as that host keeps it. Numbers are multiples of 1/256, so that
float32 holds them exactly and every layout says the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.counter import counter_hash, counter_uniform, permutation
from core.pack import first_fit_decreasing

HERE = Path(__file__).parent
PROMPTS = ("book-travel", "close-month", "order-chairs", "reply-legal")
GROUP_SIZE = 3
DEAD = (4, 9, 10, 11)
"""Rows that are not trained: one of the second prompt, and all of the last."""

Row = dict[str, Any]


def step(seed: int) -> list[Row]:
    """The rows, prompt by prompt: what was sampled, by whom, and what the trainer says of it."""
    return [row_of(seed, index) for index in range(len(PROMPTS) * GROUP_SIZE)]


def row_of(seed: int, index: int) -> Row:
    """One rollout: turns of the policy with what the tools answered between them."""
    turns = 1 + counter_hash(seed, index, 0) % 3
    mask: list[int] = []
    for turn in range(turns):
        mask += [1] * (1 + counter_hash(seed, index, 1, turn) % 4)
        mask += [0] * (1 + counter_hash(seed, index, 2, turn) % 3) if turn < turns - 1 else []
    rollout = [-exactly(0.05 + 3 * counter_uniform(seed, index, 3, at)) for at in range(len(mask))]
    moved = [exactly(1.6 * counter_uniform(seed, index, 4, at) - 0.8) for at in range(len(mask))]
    rollout[0] -= 6.0 if index % 4 == 0 else 0.0
    moved[0] += 5.0 if index % 4 == 0 else 0.0
    advantage = exactly(3 * counter_uniform(seed, index, 5) - 1.5)
    return {
        "prompt": PROMPTS[index // GROUP_SIZE],
        "prompt_tokens": 1 + counter_hash(seed, index, 6) % 3,
        "loss_mask": [0] * len(mask) if index in DEAD else mask,
        "rollout_logprob": rollout,
        "logprob": [min(-1 / 256, mu + d) for mu, d in zip(rollout, moved, strict=True)],
        "advantage": advantage,
    }


def exactly(value: float) -> float:
    """The nearest multiple of 1/256."""
    return round(value * 256) / 256


def tensor(dtype: str, data: Any) -> dict[str, Any]:
    """A tensor on paper; null is NaN."""
    return {"dtype": dtype, "data": data}


def padded(rows: list[Row], width: int, name: str, fill: float, *, left: bool) -> list[list[float]]:
    """A field of every row in one rectangle; a row may hold one number for all its tokens."""
    table = []
    for row in rows:
        field = row[name] if isinstance(row[name], list) else [row[name]] * len(row["loss_mask"])
        rest = [fill] * (width - len(field))
        table.append(rest + field if left else field + rest)
    return table


def width_of(rows: list[Row]) -> int:
    """Tokens of the longest row."""
    return max(len(row["loss_mask"]) for row in rows)


def where_trained(row: Row, name: str, other: float | None) -> list[float | None]:
    """A field of a row with `other` where nothing is trained."""
    field = row[name] if isinstance(row[name], list) else [row[name]] * len(row["loss_mask"])
    return [value if trained else other for value, trained in zip(field, row["loss_mask"], strict=True)]


def verl(rows: list[Row]) -> dict[str, Any]:
    """Padded on the right, rows reordered to balance the ranks, prompts by uid."""
    order = list(permutation(len(rows), 7))
    mine = [rows[index] | {"advantage": where_trained(rows[index], "advantage", 0.0)} for index in order]
    width = width_of(mine)
    field = {
        "response_mask": tensor("int64", padded(mine, width, "loss_mask", 0, left=False)),
        "old_log_probs": tensor("float32", padded(mine, width, "logprob", 0.0, left=False)),
        "rollout_log_probs": tensor("float32", padded(mine, width, "rollout_logprob", -1.0, left=False)),
        "advantages": tensor("float32", padded(mine, width, "advantage", 0.0, left=False)),
        "log_prob": tensor("float32", padded(mine, width, "logprob", 0.0, left=False)),
    }
    return {"row": order, "uid": [row["prompt"] for row in mine], "field": field}


def skyrl(rows: list[Row]) -> dict[str, Any]:
    """Padded on the left, a mask of floats, rows of a prompt side by side."""
    width = width_of(rows)
    field = {
        "loss_mask": tensor("float32", padded(rows, width, "loss_mask", 0.0, left=True)),
        "action_log_probs": tensor("float32", padded(rows, width, "logprob", 0.0, left=True)),
        "rollout_logprobs": tensor("float32", padded(rows, width, "rollout_logprob", 0.0, left=True)),
        "advantages": tensor("float32", padded(rows, width, "advantage", 0.0, left=True)),
        "log_probs": tensor("float32", padded(rows, width, "logprob", 0.0, left=True)),
    }
    return {"row": list(range(len(rows))), "uids": [row["prompt"] for row in rows], "field": field}


def trl(rows: list[Row]) -> dict[str, Any]:
    """Padded on the right by every process for itself; one advantage a row; tool output is masked apart."""
    count = sum(sum(row["loss_mask"]) for row in rows)
    shares = []
    for share in (rows[:6], rows[6:]):
        width = width_of(share)
        wrote = [row | {"completion": [1] * len(row["loss_mask"])} for row in share]
        field = {
            "completion_mask": tensor("int64", padded(wrote, width, "completion", 0, left=False)),
            "tool_mask": tensor("int64", padded(share, width, "loss_mask", 1, left=False)),
            "advantages": tensor("float32", [row["advantage"] for row in share]),
            "sampling_per_token_logps": tensor(
                "float32", padded(share, width, "rollout_logprob", 0.0, left=False)
            ),
            "num_items_in_batch": tensor("int64", count),
            "per_token_logps": tensor("float32", padded(share, width, "logprob", 0.0, left=False)),
        }
        shares.append({"field": field})
    return {"row": list(range(len(rows))), "num_generations": GROUP_SIZE, "process": shares}


def packed(rows: list[Row]) -> dict[str, Any]:
    """Rows end to end with their prompts, cu_seqlens between them, and a tail of padding as a row of its own."""
    lengths = [row["prompt_tokens"] + len(row["loss_mask"]) for row in rows]
    budget = 32
    packs = []
    for members in first_fit_decreasing(lengths, token_budget=budget):
        ends = [0]
        column: dict[str, list[Any]] = {"mask": [], "mu": [], "advantage": [], "logprob": []}
        for index in members:
            row = rows[index]
            given = [None] * row["prompt_tokens"]
            column["mask"] += [False] * len(given) + [bool(m) for m in row["loss_mask"]]
            column["mu"] += given + where_trained(row, "rollout_logprob", None)
            column["advantage"] += [0.0] * len(given) + where_trained(row, "advantage", 0.0)
            column["logprob"] += [-1.0] * len(given) + row["logprob"]
            ends.append(ends[-1] + lengths[index])
        tail = budget - ends[-1]
        rest = {"mask": False, "mu": None, "advantage": 0.0, "logprob": -12.0}
        column = {name: values + [rest[name]] * tail for name, values in column.items()}
        group = [PROMPTS.index(rows[index]["prompt"]) for index in members]
        field = {
            "cu_seqlens": tensor("int32", [*ends, budget] if tail else ends),
            "group_id": tensor("int64", [*group, -1] if tail else group),
            "loss_mask": tensor("bool", column["mask"]),
            "generator_logprobs": tensor("float32", column["mu"]),
            "advantages": tensor("float32", column["advantage"]),
            "policy_logprobs": tensor("float32", column["logprob"]),
        }
        packs.append({"row": list(members), "field": field})
    return {"pack": packs}


def prime_rl(rows: list[Row]) -> dict[str, Any]:
    """One sample at a time, its prompt in front; a mask of bools over the whole sequence."""
    samples = []
    for row in rows:
        given = row["prompt_tokens"]
        field = {
            "trainer_logprobs": tensor("float32", [-1.0] * given + row["logprob"]),
            "inference_logprobs": tensor("float32", [0.0] * given + row["rollout_logprob"]),
            "advantages": tensor("float32", [row["advantage"]] * (given + len(row["logprob"]))),
            "loss_mask": tensor("bool", [False] * given + [bool(m) for m in row["loss_mask"]]),
        }
        samples.append({"field": field})
    group = [PROMPTS.index(row["prompt"]) for row in rows]
    return {
        "row": list(range(len(rows))),
        "group_id": tensor("int64", group),
        "prompt_tokens": [row["prompt_tokens"] for row in rows],
        "sample": samples,
    }


def slime(rows: list[Row]) -> dict[str, Any]:
    """Lists of responses as long as they are, in the order in which they were done."""
    order = list(permutation(len(rows), 11))
    mine = [rows[index] for index in order]
    field = {
        "loss_masks": [tensor("int32", row["loss_mask"]) for row in mine],
        "rollout_log_probs": [tensor("float32", row["rollout_logprob"]) for row in mine],
        "advantages": [tensor("float32", [row["advantage"]] * len(row["logprob"])) for row in mine],
        "log_probs": [tensor("float32", row["logprob"]) for row in mine],
    }
    return {
        "row": order,
        "group_index": [PROMPTS.index(row["prompt"]) for row in mine],
        "global_batch_size": len(rows),
        "field": field,
    }


def files() -> dict[str, str]:
    """The text of every file by its name."""
    rows = step(seed=43)
    layout = (verl, skyrl, trl, packed, prime_rl, slime)
    record: dict[str, Any] = {"step": rows} | {made.__name__: made(rows) for made in layout}
    return {f"{name}.json": json.dumps(value) + "\n" for name, value in record.items()}


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8")
