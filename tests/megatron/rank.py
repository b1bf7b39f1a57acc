"""One rank of a test: `python -m tests.megatron.rank RANK RANKS STORE JOBS OUT`; jobs and results are pickled."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron.cuda_on_cpu import install, install_after_import

install()


def answer(job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Gradient, step and logprobs of one case, whole, as rank 0 sees them."""
    from megatron.core import parallel_state

    from system.trainer.megatron.network import join
    from system.trainer.megatron.trainer import MegatronTrainer
    from tests.megatron.policies import RULES, SHAPES, rows, weights

    shape, parallel = SHAPES[job["shape"]], job["parallel"]
    join(parallel)
    state = weights(shape)
    trainer = MegatronTrainer(
        shape, state.__getitem__, parallel=parallel, token_budget=job["budget"], **RULES
    )
    told: dict[str, Any] = {"exact": True}
    for name, value in trainer.weights():
        told["exact"] &= bool(torch.equal(value, state[name]))
    told["logprob"] = trainer.logprob(rows())
    if not parallel.distributed_optimizer:
        trainer.gradient(rows())
        told["gradient"] = {name: value.clone() for name, value in trainer.gradients()}
    told["metrics"] = trainer.step(rows(), version=0)
    told["weights"] = {name: value.clone() for name, value in trainer.weights()}
    if name := job.get("saves"):
        trainer.save(out / name)
    if name := job.get("loads"):
        trainer.load(out / name)
    if job.get("saves") or job.get("loads"):
        trainer.step(rows(1), version=1)
        told["second"] = {name: value.clone() for name, value in trainer.weights()}
    parallel_state.destroy_model_parallel()
    return told


def main() -> None:
    rank, ranks, store, jobs, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=300),
    )
    import megatron.core.models.gpt  # noqa: F401

    install_after_import()
    for index, job in enumerate(pickle.loads(Path(jobs).read_bytes())):
        told = answer(job, Path(out))
        if rank == "0":
            torch.save(told, Path(out) / str(index))
    dist.barrier()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)  # torch's own threads may abort the interpreter's end


if __name__ == "__main__":
    main()
