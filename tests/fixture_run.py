"""A run that never ran: the files of a run folder with invented numbers, to look at the report and test it.

`python tests/fixture_run.py DIR` writes one and renders it.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from system.record.metrics import JsonLines, write_json

ARMS = ("prompt_mean", "sequence_mean", "token_mean")
_PIECE = re.compile(r"<\|\w+\|>|</?tool_call>|\s?[A-Za-z]{1,5}|\d{1,2}|\s|[^\w\s]|_", re.UNICODE)


class Vocabulary:
    """Token ids for pieces of text, in the order in which they are first seen."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        found = []
        for piece in _PIECE.findall(text):
            if piece not in self._ids:
                self._ids[piece] = len(self.pieces)
                self.pieces.append(piece)
            found.append(self._ids[piece])
        return found

    def decode(self, token_ids: Sequence[int]) -> list[str]:
        """One piece of text a token."""
        return [self.pieces[token] for token in token_ids]


def write_run(
    run: Path,
    *,
    arms: Sequence[str] = ARMS,
    seeds: int = 3,
    steps: int = 19,
    winner: str | None = None,
    finished: bool = True,
) -> Callable[[Sequence[int]], list[str]]:
    """Writes the files of a run into a folder; returns the decode function of its trajectories.

    Args:
        winner: an arm that beats the others in the comparisons; None: they tie.
        finished: False leaves out summary.json and the evaluations, as Ctrl-C would.
    """
    random.seed(7)
    vocabulary = Vocabulary()
    write_json(
        run / "config.json",
        {"steps": steps, "seeds": seeds, "arms": list(arms), "policy": "policy", "seed": 0},
    )
    with JsonLines(run / "metrics.jsonl") as metrics:
        for arm in arms:
            for seed in range(seeds):
                for step in range(1, steps + 1):
                    metrics.write(_step_line(arm, seed, step, steps, bonus=0.14 if arm == winner else 0.0))
                if finished:
                    metrics.write(_eval_line(arm, seed, steps, bonus=0.14 if arm == winner else 0.0))
    with JsonLines(run / "trajectories.jsonl") as trajectories:
        for number in range(len(arms) * 60):
            trajectories.write(_trajectory(number, arms[number % len(arms)], vocabulary))
    if finished:
        write_json(run / "summary.json", _summary(arms, seeds, steps, winner))
    return vocabulary.decode


def _step_line(arm: str, seed: int, step: int, steps: int, *, bonus: float) -> dict[str, Any]:
    grown = 1 - math.exp(-2.2 * step / steps)
    reward = min(1.0, max(0.0, 0.36 + (0.26 + bonus) * grown + random.gauss(0, 0.035)))
    return {
        "arm": arm,
        "seed": seed,
        "step": step,
        "seconds": 6.3 * step + random.random(),
        "reward": reward,
        "passed": reward * 0.8,
        "turns": 4.1 + 0.3 * grown,
        "tokens_per_turn": 26 - 3 * grown,
        "tool_success": 0.93 + 0.05 * grown,
        "context_exhausted": 0.02,
        "staleness": {"0": 30, "1": 28, "2": 6},
        "versions_in_trajectory_max": 3,
        "trainer_idle": 0.35 + random.random() * 0.2,
        "grad_norm": 0.4,
        "masked_share": 0.01,
        "mismatch": 2e-6,
        "entropy": 0.5,
        "groups": 8,
        "zero_variance": 3,
        "trained_tokens": 9120,
        "system_errors": int(random.random() < 0.05),
        "sampled_tokens_min": 21,
        "sampled_tokens_max": 330,
    }


def _eval_line(arm: str, seed: int, steps: int, *, bonus: float) -> dict[str, Any]:
    rate = 0.49 + bonus + random.gauss(0, 0.02)
    tasks = [
        {
            "task": f"h{index}",
            "level": 1 + index % 4,
            "family": ("find", "sum", "edit", "write")[index % 4],
            "domain": ("law", "consulting", "banking")[index % 3],
            "rewards": [rate, rate],
            "passed": [index % 2 == 0, False],
        }
        for index in range(96)
    ]
    return {
        "arm": arm,
        "seed": seed,
        "eval": True,
        "version": steps,
        "reward": rate + 0.08,
        "passed": rate,
        "tasks": tasks,
        "turns": 4.4,
        "tokens_per_turn": 23.1,
        "tool_success": 0.98,
        "context_exhausted": 0.01,
    }


def _summary(arms: Sequence[str], seeds: int, steps: int, winner: str | None) -> dict[str, Any]:
    def arm_numbers(arm: str, base: float) -> dict[str, Any]:
        rate = base + (0.14 if arm == winner else 0.0) + (len(arm) % 3) * 0.011
        return {
            "reward": {"mean": rate + 0.081, "se": 0.019},
            "pass_at_1": {"mean": rate, "se": 0.022},
            "turns": 4.4,
            "tokens_per_turn": 23.1,
            "tool_success": 0.981,
            "context_exhaustion": 0.012,
            "staleness": {"0": 1710, "1": 1590, "2": 310, "3": 38},
            "seconds": 231.0 + len(arm),
            "trainer_idle": 0.43,
        }

    comparisons = []
    for first, a in enumerate(arms):
        for b in arms[first + 1 :]:
            gap = -0.14 if a == winner else 0.14 if b == winner else (len(b) - len(a)) * 0.004
            verdict = "a better" if a == winner else "b better" if b == winner else "tie"
            item = {
                "a": a,
                "b": b,
                "difference": gap,
                "low": gap - 0.061,
                "high": gap + 0.061,
                "verdict": verdict,
            }
            comparisons.append(item | ({"seeds_needed": 14} if verdict == "tie" else {}))
    warm = arm_numbers("warm", 0.31) | {"staleness": {}, "seconds": None, "trainer_idle": None}
    return {
        "config": {"steps": steps, "seeds": seeds, "tasks_held_out": 96, "attempts": 2},
        "commit": "0123456789",
        "seconds": 707.3,
        "arms": {arm: arm_numbers(arm, 0.49) for arm in arms},
        "warm_start": warm,
        "comparisons": comparisons,
        "throughput": {
            "trials_per_minute": 318.0,
            "first_step_seconds": 11.2,
            "cpu_seconds_per_trial": {"tools": 0.118, "engine": 0.061, "trainer": 0.083, "driver": 0.031},
        },
    }


def _trajectory(number: int, arm: str, vocabulary: Vocabulary) -> dict[str, Any]:
    kind = ("solved", "solved", "failed", "truncated", "failed", "system_error")[number // 3 % 6]
    level = 1 + number % 4
    count = (1, 2, 3, 5)[level - 1]
    facts = [(f"{name} {what}", random.randint(100, 9999)) for name, what in random.sample(_LABELS, count)]
    tools = ", ".join(f"{label} (fees.xlsx)" for label, _ in facts)
    instruction = (
        f"Find {tools}. Answer with the number." if count == 1 else f"Add {tools}. Answer with the total."
    )
    prompt = "<|im_start|>system\nTools: read_sheet, search_mail, run_code …<|im_end|>\n"
    prompt += f"<|im_start|>user\n{instruction}<|im_end|>\n"
    row: dict[str, list[Any]] = {
        "token_ids": [],
        "loss_mask": [],
        "rollout_logprob": [],
        "policy_version": [],
    }
    version = random.randint(0, 17)

    def extend(text: str, *, sampled: bool) -> tuple[int, int]:
        nonlocal version
        start = len(row["token_ids"])
        for token in vocabulary.encode(text):
            if sampled and random.random() < 0.012:
                version += 1
            row["token_ids"].append(token)
            row["loss_mask"].append(sampled and kind != "system_error")
            row["rollout_logprob"].append(-(random.expovariate(3.0) ** 2) if sampled else 0.0)
            row["policy_version"].append(version if sampled else -1)
        return start, len(row["token_ids"])

    extend(prompt + "<|im_start|>assistant\n", sampled=False)
    turns, messages = [], [{"role": "user", "content": instruction}]
    for index, (label, value) in enumerate(facts):
        arguments = {"path": "fees.xlsx", "find": label}
        call = json.dumps({"name": "read_sheet", "arguments": arguments})
        start, end = extend(f"<tool_call>\n{call}\n</tool_call><|im_end|>", sampled=True)
        wrong = kind == "failed" and index == count - 1
        result = "no match" if wrong else f"A{index + 2}: {label} | B{index + 2}: {value}"
        extend(f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n", sampled=False)
        turns.append(
            {
                "request_id": f"r{number}-{index}",
                "start": start,
                "end": end,
                "tool": "read_sheet",
                "arguments": arguments,
                "result": result,
                "error": False,
            }
        )
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": result}]
    total = sum(value for _, value in facts)
    outcome: dict[str, Any] = {"kind": kind}
    if kind in ("solved", "failed"):
        answer = str(total if kind == "solved" else total - 7)
        start, end = extend(f"{answer}<|im_end|>", sampled=True)
        turns.append(
            {
                "request_id": f"r{number}-end",
                "start": start,
                "end": end,
                "tool": "",
                "arguments": {},
                "result": "",
                "error": False,
            }
        )
        messages.append({"role": "assistant", "content": answer})
    elif kind == "truncated":
        outcome["reason"] = "context"
    else:
        outcome |= {"phase": "run", "cause": "the tool server did not answer for 10 s"}
    reward = {"solved": 1.0, "failed": 0.0, "truncated": 0.0}.get(kind)
    return {
        "trial_id": f"t{number:04d}",
        "arm": arm,
        "seed": number % 3,
        "purpose": "eval" if number % 2 else "train",
        "task": f"law-{number:03d}",
        "level": level,
        "family": "find" if count == 1 else "sum",
        "domain": "law",
        "instruction": instruction,
        "group_id": number // 8,
        "version_started": version,
        "outcome": outcome,
        "reward": reward,
        "passed": kind == "solved",
        "rows": [row],
        "turns": turns,
        "messages": messages,
        "criteria": []
        if reward is None
        else [
            {"name": "answer_number", "met": kind == "solved", "detail": f"expected {total}"},
            {"name": "gate unchanged", "met": True, "detail": ""},
        ],
        "seconds": {"sandbox": 0.11, "run": 1.9, "verify": 0.02},
        "cpu_seconds": {"tools": 0.12},
    }


_LABELS = [
    (a + b, what)
    for a in ("Nor", "Bal", "Quin")
    for b in ("vik", "den", "<tag>")
    for what in ("fee", "hours", "claim")
]


if __name__ == "__main__":
    from system.record.report import write_report

    target = Path(sys.argv[1])
    print(write_report(target, decode=write_run(target, winner=sys.argv[2] if len(sys.argv) > 2 else None)))
