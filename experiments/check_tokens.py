"""Did the trainer use exactly what the engines sampled? Joins their own logs to the trainer's input, bit for bit.

python experiments/check_tokens.py out/ablate_aggregation/<run>
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from core.identity import Emission, Span, identity_faults
from system.record.metrics import read_jsonl


@dataclass(frozen=True, kw_only=True)
class Config:
    run: tyro.conf.Positional[Path]
    """Folder of a run, with engine.jsonl and trainer_input.jsonl."""
    mismatch: float = 1e-5
    """Bound on the mean |logprob - rollout_logprob| where engine and trainer had the same weights."""


def main(config: Config) -> dict[str, Any]:
    """Counts of what was compared, the faults found, and the gap of log-probabilities at equal weights."""
    for name in ("engine.jsonl", "trainer_input.jsonl", "metrics.jsonl"):
        if not (config.run / name).is_file():
            raise ValueError(f"run must be a folder with {name}, got {config.run}")
    emissions = {
        line["request_id"]: Emission(
            line["prompt_ids"], line["token_ids"], line["logprob"], line["policy_version"]
        )
        for log in sorted(config.run.glob("engine*.jsonl"))
        for line in read_jsonl(log)
    }
    rows, tokens, faults = 0, 0, []
    for line in read_jsonl(config.run / "trainer_input.jsonl"):
        missing = [name for name, _, _ in line["requests"] if name not in emissions]
        spans = [
            Span(start, end, emissions[name]) for name, start, end in line["requests"] if name in emissions
        ]
        row = (line["token_ids"], line["loss_mask"], line["rollout_logprob"], line["policy_version"])
        found = [f"request {name} is not in the engine's log" for name in missing] + list(
            identity_faults(*row, spans)
        )
        faults += [f"{line['row_id']}: {fault}" for fault in found]
        rows, tokens = rows + 1, tokens + sum(line["loss_mask"])
    gaps = [
        step["mismatch"]
        for step in read_jsonl(config.run / "metrics.jsonl")
        if step.get("step") and list(step["staleness"]) == ["0"] and step["versions_in_trajectory_max"] == 1
    ]
    return {
        "rows": rows,
        "trained_tokens": tokens,
        "requests": len(emissions),
        "faults": faults,
        "gaps": gaps,
    }


if __name__ == "__main__":
    settings = tyro.cli(Config)
    try:
        told = main(settings)
    except ValueError as error:
        print(f"check_tokens: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{told['rows']} rows, {told['trained_tokens']} trained tokens, {told['requests']} requests")
    print(f"{len(told['faults'])} faults", *told["faults"][:20], sep="\n")
    largest = max(told["gaps"], default=None)
    print(
        f"mean |logprob - rollout_logprob| at equal weights, largest of {len(told['gaps'])} steps: {largest}"
    )
    if told["faults"] or not told["rows"] or (largest is not None and largest > settings.mismatch):
        raise SystemExit(1)
