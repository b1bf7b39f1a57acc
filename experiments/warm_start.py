"""Makes the embedded policy from nothing: imitation of scripted demonstrations, in minutes on a GPU.

A model of a million parameters cannot be trained by reinforcement learning from random weights, so this is where the
project departs from the recipe that it follows. The demonstrations are those of a careless clerk, who sometimes skips
an item, guesses instead of computing, or copies a digit wrong: what the policy learns from them leaves room to improve.

    python experiments/warm_start.py --out policies/clerk
"""

import asyncio
import json
import math
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mcp
import torch
import tyro
from torch import Tensor
from torch.nn.functional import cross_entropy

from system.harness.chat import Chat, function_schema
from system.harness.office import NUDGE, observation_ids
from system.model import ModelConfig, Qwen3, parameter_count, random_state
from system.policy import save_policy
from system.tokenizer import save_tokenizer, train_tokenizer
from system.tools.server import build_server
from system.world.demonstration import draw_demonstration
from system.world.expert import SLIPS
from system.world.names import Split


@dataclass(frozen=True, kw_only=True)
class Config:
    out: Path = Path("policies/clerk")
    """Folder of the policy: an ordinary Hugging Face folder."""
    seed: int = 0
    """Seed of companies, slips, weights and batches."""
    demonstrations: int = 60_000
    """Scripted demonstrations to make; each is seen several times."""
    steps: int = 2_500
    """Optimizer steps."""
    tokens_per_step: int = 65_536
    """Tokens in one batch, prompts and tool results included."""
    learning_rate: float = 2e-3
    """Peak of a cosine with 100 steps of warm-up."""
    slip: float = 0.1
    """How often the clerk errs where an error is possible."""
    vocab_size: int = 640
    """Entries of the tokenizer."""
    width: int = 128
    """Hidden size; heads of 32, half as many key heads as query heads, three times the width inside the MLP."""
    layers: int = 4
    """Decoder layers."""
    context: int = 2048
    """Longest trajectory the policy is made for."""
    workers: int = multiprocessing.cpu_count()
    """Processes that make demonstrations."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where to train."""

    def __post_init__(self) -> None:
        if not 0 <= self.slip < 1:
            raise ValueError(f"slip must be in [0, 1), got {self.slip}")


STAGES = ((0.1, {1: 1.0}), (0.25, {1: 0.5, 2: 0.5}), (1.0, {1: 0.25, 2: 0.3, 3: 0.25, 4: 0.2}))
"""Up to which share of the steps, which mixture of levels: from one call to many, or nothing is learnt in minutes."""


NUDGED = 0.2
"""Share of demonstrations in which the harness's reminder occurs, so that the policy has seen it."""


class Row(NamedTuple):
    """One demonstration as the policy would have produced it: ids, and which of them are its own."""

    token_ids: list[int]
    own: list[bool]


def conversation(split: Split, shares: dict[int, float], slip: float, seed: int) -> list[dict[str, str]]:
    """The messages of one demonstration."""
    messages = draw_demonstration(
        seed, split=split, level_shares=shares, slip_rates=dict.fromkeys(SLIPS, slip)
    )[2]
    rng = random.Random(f"nudge:{seed}")
    results = [message for message in messages if message["role"] == "tool"]
    if results and rng.random() < NUDGED:
        rng.choice(results)["content"] += f"\n{NUDGE}"
    return messages


def demonstration_row(chat: Chat, tools: list[dict[str, Any]], messages: list[dict[str, str]]) -> Row:
    """Ids as a trajectory has them: prompt, completion, observation, completion, ..."""
    token_ids = chat.render(messages[:1], tools, add_generation_prompt=True)
    own = [False] * len(token_ids)
    for message in messages[1:]:
        if message["role"] == "assistant":
            new = chat.completion(message["content"])
        else:
            new = observation_ids(chat, message["content"], token_ids[-1])
        token_ids += new
        own += [message["role"] == "assistant"] * len(new)
    return Row(token_ids, own)


def some_rows(
    folder: Path,
    tools: list[dict[str, Any]],
    split: Split,
    shares: dict[int, float],
    slip: float,
    context: int,
    seeds: range,
) -> list[Row]:
    """The work of one process: some demonstrations."""
    chat = Chat(folder)
    rows = [demonstration_row(chat, tools, conversation(split, shares, slip, seed)) for seed in seeds]
    return [row for row in rows if len(row.token_ids) <= context]


def make_rows(
    config: Config,
    tools: list[dict[str, Any]],
    split: Split,
    shares: dict[int, float],
    slip: float,
    start: int,
    count: int,
) -> list[Row]:
    """`count` demonstrations by all workers, in order of their seeds."""
    chunks = [range(s, min(s + 250, start + count)) for s in range(start, start + count, 250)]
    work = partial(some_rows, config.out, tools, split, shares, slip, config.context)
    with multiprocessing.get_context("fork").Pool(config.workers) as pool:
        return [row for rows in pool.imap(work, chunks) for row in rows]


def batches(rows: list[Row], tokens: int, rng: random.Random) -> Iterator[list[Row]]:
    """Endless batches of rows of similar length, at most `tokens` each with the longest as measure."""
    while True:
        rng.shuffle(rows)
        ordered = sorted(rows, key=lambda row: len(row.token_ids) + rng.random() * 64)
        grouped: list[list[Row]] = [[]]
        for row in ordered:
            if (len(grouped[-1]) + 1) * len(row.token_ids) > tokens:
                grouped.append([])
            grouped[-1].append(row)
        rng.shuffle(grouped)
        yield from grouped


def forward(model: Qwen3, rows: list[Row], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and labels at the policy's own tokens, and the row each belongs to."""
    token_ids = torch.tensor([t for row in rows for t in row.token_ids], device=device)
    own = torch.tensor([o for row in rows for o in row.own], device=device)
    row_id = torch.repeat_interleave(
        torch.arange(len(rows)), torch.tensor([len(r.token_ids) for r in rows])
    ).to(device)
    place = own.nonzero()[:, 0]
    hidden = model(token_ids, [len(row.token_ids) for row in rows])
    return model.logits(hidden[place - 1]), token_ids[place], row_id[place]


@torch.no_grad()
def exactness(model: Qwen3, rows: list[Row], config: Config) -> dict[str, float]:
    """Share of own tokens, and of whole demonstrations, that the likeliest token gets right."""
    right_tokens, tokens, right_rows = 0, 0, 0
    for start in range(0, len(rows), 32):
        part = rows[start : start + 32]
        logits, label, row_id = forward(model, part, config.device)
        wrong = logits.argmax(-1) != label
        right_tokens, tokens = right_tokens + int((~wrong).sum()), tokens + len(label)
        right_rows += len(part) - len(row_id[wrong].unique())
    return {"tokens": right_tokens / tokens, "demonstrations": right_rows / len(rows)}


def server_tools() -> list[dict[str, Any]]:
    """The schemas of the office tools, asked of the real server."""

    async def ask() -> list[dict[str, Any]]:
        async with mcp.Client(build_server(Path("."))) as client:
            listed = await client.list_tools()
            return [function_schema(t.name, t.description or "", t.input_schema) for t in listed.tools]

    return asyncio.run(ask())


def train(config: Config, model: Qwen3, tools: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The stages, one after the other; returns the record, a line every hundred steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    rng = random.Random(config.seed)
    record: list[dict[str, float]] = []
    step, begun, first_seed = 0, time.monotonic(), config.seed * 100_000_000
    for until, shares in STAGES:
        count = config.demonstrations // (4 if until < 1 else 1)
        rows = make_rows(config, tools, "train", shares, config.slip, first_seed, count)
        first_seed += count
        for batch in batches(rows, config.tokens_per_step, rng):
            progress = step / config.steps
            rate = (
                config.learning_rate
                * min(1, (step + 1) / 100)
                * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            logits, label, _ = forward(model, batch, config.device)
            loss = cross_entropy(logits, label)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 100 == 0 or step == config.steps:
                record.append(
                    {
                        "step": step,
                        "loss": round(loss.item(), 4),
                        "seconds": round(time.monotonic() - begun, 1),
                    }
                )
                print(
                    f"step {step:5d}  loss {record[-1]['loss']:.4f}  {record[-1]['seconds']:.0f} s",
                    flush=True,
                )
            if step >= until * config.steps:
                break
    return record


def main(config: Config) -> dict[str, Any]:
    """Tokenizer, weights, record: everything in `config.out`."""
    torch.manual_seed(config.seed)
    mixture = STAGES[-1][1]
    texts = [
        "\n".join(m["content"] for m in conversation("train", mixture, config.slip, -1 - i))
        for i in range(2_000)
    ]
    tools = server_tools()
    listed = "\n".join(
        f"{t['function']['name']}({', '.join(t['function']['parameters']['properties'])})" for t in tools
    )
    texts += [f"system\n{listed}\nuser\nassistant\n{NUDGE}"] * 2_000
    tokenizer = train_tokenizer(texts, vocab_size=config.vocab_size)
    save_tokenizer(tokenizer, config.out, context=config.context)
    shape = ModelConfig(
        hidden_size=config.width,
        intermediate_size=3 * config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.width // 32,
        num_key_value_heads=config.width // 64,
        head_dim=32,
        vocab_size=config.vocab_size,
        token_count=tokenizer.get_vocab_size(),
        max_position_embeddings=config.context,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    )
    model = Qwen3.from_state(shape, random_state(shape, seed=config.seed), device=config.device)
    record = train(config, model, tools)
    save_policy(config.out, shape, model.state_dict())
    held_out = {
        f"level {level}": exactness(
            model, make_rows(config, tools, "heldout", {level: 1.0}, 0.0, 0, 200), config
        )
        for level in (1, 2, 3, 4)
    }
    result = {
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()},
        "parameters": parameter_count(model.state_dict()),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if config.device == "cuda" else "cpu",
        "training": record,
        "held_out_imitation": held_out,
    }
    (config.out / "record.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(held_out, indent=1))
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
