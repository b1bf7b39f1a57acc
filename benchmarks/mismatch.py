"""Is the cause of a gap found? Faults planted blind into real rows, and what `system.trainer.gap` says of each.

One command: `python -m benchmarks.mismatch --out FILE`. A short run of experiments/check_mismatch.py gives the rows;
what the engine "reported" is then computed by a model that really has the fault, in float32 and in bfloat16. A scene
has one fault, two, or none, of a strength and at places drawn at random.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.attribution import rounding_noise
from system.model import ModelConfig
from system.policy import load_policy, save_weights
from system.record.metrics import commit_hash, read_jsonl
from system.trainer.gap import Knobs, gap_of, rows_by_step
from system.trainer.rescoring import Rescorer
from system.trainer.step import StepRow

ROOT = Path(__file__).resolve().parent.parent
CLERK = ROOT / "policies" / "clerk"
FAULTS = ("temperature", "retokenised", "weights", "leaked_state", "stale_version", "stale_cache")
BITS = {"float32": 24, "bfloat16": 8}
VERSIONS = 3
TRAINED_FROM = VERSIONS - 1
ROWS = 10


class Bench(NamedTuple):
    """Rows to plant faults in, and the weights of every version; those of `broken` have a matrix permuted."""

    rows: list[StepRow]
    config: ModelConfig
    weights: dict[int, Path]
    broken: dict[int, Path]


def main(out: Path, *, of: Path | None, single: int, pairs: int, seed: int) -> None:
    """Plays all scenes and prints the table."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        bench = prepared(of or short_run(Path(folder, "run")), Path(folder))
        planted = [()] * single + [(fault,) for fault in FAULTS for _ in range(single)]
        planted += [pair for pair in combinations(FAULTS, 2) for _ in range(pairs)]
        told = []
        for arithmetic in BITS:
            for faults in planted:
                told.append(scene(bench, faults, arithmetic, rng))
    about = {"commit": commit_hash(ROOT), "seed": seed, "rows": ROWS, "torch": torch.__version__}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in [about, *told]))
    for arithmetic in BITS:
        print_matrix(arithmetic, [line for line in told if line["arithmetic"] == arithmetic])


def short_run(folder: Path) -> Path:
    """A few steps of real training, for its rows."""
    script = [sys.executable, str(ROOT / "experiments" / "check_mismatch.py")]
    subprocess.run([*script, "--out", str(folder), "--steps", "3"], check=True, stdout=subprocess.DEVNULL)
    return folder


def prepared(run: Path, folder: Path) -> Bench:
    """Rows of the run, and versions of the policy that differ as much as some steps of training make them."""
    steps = rows_by_step(read_jsonl(run / "trainer_input.jsonl"))
    rows = [row for some in steps.values() for row in some if len(row.requests) > 1]
    config, state = load_policy(CLERK)
    generator = torch.Generator().manual_seed(0)
    weights, broken = {}, {}
    for version in range(VERSIONS):
        moved = {name: value + version * 0.03 * noise(value, generator) for name, value in state.items()}
        weights[version] = save(folder / f"{version}.safetensors", moved)
        name = "model.layers.1.mlp.up_proj.weight"
        swapped = moved[name][torch.randperm(len(moved[name]), generator=generator)]
        broken[version] = save(folder / f"{version}-broken.safetensors", moved | {name: swapped})
    return Bench(rows, config, weights, broken)


def noise(value: Tensor, generator: torch.Generator) -> Tensor:
    """As large as the values themselves."""
    return value.std() * torch.randn(value.shape, generator=generator) if value.ndim > 1 else value * 0


def save(path: Path, state: dict[str, Tensor]) -> Path:
    save_weights(path, state)
    return path


def scene(bench: Bench, faults: Sequence[str], arithmetic: str, rng: random.Random) -> dict[str, Any]:
    """Rows as an engine with these faults would report them, and what is said of them."""
    aged = {"stale_version", "stale_cache"} & set(faults)
    rows = [with_versions(row, rng) if aged else with_version(row) for row in rng.sample(bench.rows, ROWS)]
    temperature = rng.choice([0.8, 1.25]) if "temperature" in faults else 1.0
    files = bench.broken if "weights" in faults else bench.weights
    engine = Rescorer(bench.config, files, temperature=temperature, dtype=getattr(torch, arithmetic))
    seen = [retokenised(row, rng) if "retokenised" in faults and rng.random() < 0.5 else row for row in rows]
    reported = [
        logprob_of(engine, row, stale="stale_cache" in faults, leak=leak)
        for row, leak in zip(seen, leaks(rows, rng) if "leaked_state" in faults else [()] * ROWS)
    ]
    trained = [replace(row, rollout_logprob=x) for row, x in zip(rows, reported, strict=True)]
    trainer = Rescorer(bench.config, bench.weights, temperature=1.0)
    bits = BITS[arithmetic]
    knobs = Knobs(logit_noise=2.5 * rounding_noise(largest_logit=30.0, significand_bits=bits))
    read = {name: row.token_ids[:end] for row in seen for name, _, end in row.requests[-1:]}
    gap = gap_of(trained, trainer, version=TRAINED_FROM, knobs=knobs, read=read)
    expected = sorted(set(faults) | ({"stale_version"} if aged else set()))
    return {
        "arithmetic": arithmetic,
        "planted": expected,
        "found": sorted(gap.found),
        "seen": gap.seen,
        "engine": gap.engine,
        "share": {name: round(share, 4) for name, share in gap.share.items()},
    }


def with_version(row: StepRow) -> StepRow:
    """All of it sampled from the weights that are trained."""
    return replace(row, policy_version=[TRAINED_FROM if v >= 0 else -1 for v in row.policy_version])


def with_versions(row: StepRow, rng: random.Random) -> StepRow:
    """Sampled while weights changed, perhaps within a turn."""
    sampled = [t for t, v in enumerate(row.policy_version) if v >= 0]
    changes = sorted(rng.sample(sampled, VERSIONS - 1))
    versions = [
        sum(t >= change for change in changes) if v >= 0 else -1 for t, v in enumerate(row.policy_version)
    ]
    return replace(row, policy_version=versions)


def retokenised(row: StepRow, rng: random.Random) -> StepRow:
    """The engine had read another token in the middle of the prompt of a later turn."""
    _, start, _ = rng.choice(row.requests[1:])
    ids = list(row.token_ids)
    ids[start - rng.randint(1, 3)] = rng.randrange(500)
    return replace(row, token_ids=ids)


def leaks(rows: Sequence[StepRow], rng: random.Random) -> list[tuple[int, ...]]:
    """Tokens that stood before a row; none before about half of them."""
    others = rng.sample(list(rows), len(rows))
    return [tuple(other.token_ids[-40:]) if rng.random() < 0.5 else () for other in others]


def logprob_of(engine: Rescorer, row: StepRow, *, stale: bool, leak: Sequence[int]) -> list[float]:
    """What the engine says of every token, on keys and values that older weights or another row have left."""
    before = len(leak)
    whole = replace(
        row,
        token_ids=[*leak, *row.token_ids],
        loss_mask=[False] * before + row.loss_mask,
        rollout_logprob=[0.0] * before + row.rollout_logprob,
        policy_version=[-1] * before + row.policy_version,
    )
    score = engine.score_as_sampled if stale else engine.score_by_own_version
    return score([whole], latest=TRAINED_FROM)[0].logprob[before:].tolist()


def print_matrix(arithmetic: str, told: Sequence[dict[str, Any]]) -> None:
    """Planted against found: how often everything, nothing less and nothing more."""
    print(
        f"\n{arithmetic}: what was planted, in how many scenes exactly that was found, and what else was said"
    )
    for planted in dict.fromkeys(tuple(line["planted"]) for line in told):
        lines = [line for line in told if tuple(line["planted"]) == planted]
        right = sum(line["found"] == list(planted) for line in lines)
        other = Counter(
            " + ".join(line["found"]) or "nothing" for line in lines if line["found"] != list(planted)
        )
        wrong = "; ".join(f"{name} {count}" for name, count in other.most_common())
        print(f"{' + '.join(planted) or 'nothing':38} {right:3} of {len(lines):3}   {wrong}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "recorded" / "mismatch.jsonl")
    parser.add_argument("--of", type=Path, help="folder of a run of check_mismatch.py, instead of a new one")
    parser.add_argument("--single", type=int, default=10, help="scenes of each fault")
    parser.add_argument("--pairs", type=int, default=4, help="scenes of each pair")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.out, of=given.of, single=given.single, pairs=given.pairs, seed=given.seed)
