"""What does a broadcast of weights from a trainer's GPU into a serving vLLM on another one cost, beside NCCL alone?

    python -m benchmarks.gpu.vllm_broadcast --out $OUT

On two GPUs with vLLM on the path: a server with a random Qwen3 of 4 GB in bfloat16 on the second, a `Sender` on the
first, 256 requests that run through three updates. Then the same bytes by bare broadcasts on the same pair.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import vllm_engine as one_gpu
from system.engine.vllm import Settings, start_vllm_engine
from system.engine.vllm.getting import PACKED
from system.engine.vllm.sending import Sender

WIDE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""2.0 billion parameters with the vocabulary of Qwen3."""

UPDATES, TOKENS = 3, 1500


def in_flight(engine: Any, sender: Sender, states: dict[int, dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Updates while requests run; seconds of each in its parts."""
    asked = [
        one_gpu.request(f"b{n}", one_gpu.ids_of(f"b{n}", 200), max_tokens=TOKENS, seed=n)
        for n in range(one_gpu.TRIALS)
    ]
    done: list[Any] = []
    running = threading.Thread(target=lambda: done.extend(one_gpu.all_of(engine, asked)))
    running.start()
    rows = []
    for version, state in states.items():
        before = engine.stats()
        while (
            engine.stats()["sampled_tokens"] < before["sampled_tokens"] + one_gpu.TRIALS * 100
            and running.is_alive()
        ):
            time.sleep(0.05)
        address = sender.offer(version, state)
        torch.cuda.synchronize()
        before = engine.stats()
        begun = time.perf_counter()
        engine.update_weights(version, address, reset_kv=False)
        whole, after = time.perf_counter() - begun, engine.stats()
        rows.append({"whole_s": whole, **{n: after[n] - before[n] for n in ("transfer_s", "pause_s")}})
    running.join()
    versions = [one.policy_version for one in done]
    return {
        "updates": rows,
        "dropped": sum(len(one.token_ids) != TOKENS for one in done),
        "changed_inside": sum(len(set(one)) > 1 for one in versions),
        "in_order": all(one == sorted(one) for one in versions),
    }


def peer(address: str, port: int, size: int, count: int) -> None:
    """The receiving end of the bare broadcasts, in a process of its own on the second GPU."""
    members = met(address, port, 1)
    flat = torch.empty(size, dtype=torch.uint8, device="cuda:1")
    for _ in range(count):
        members.broadcast(flat, src=0)
        torch.cuda.synchronize()


def met(address: str, port: int, rank: int) -> Any:
    """A communicator of both."""
    from vllm.distributed.device_communicators.pynccl import (  # pyright: ignore[reportMissingImports]
        PyNcclCommunicator,
    )
    from vllm.distributed.utils import StatelessProcessGroup  # pyright: ignore[reportMissingImports]

    torch.cuda.set_device(rank)
    group = StatelessProcessGroup.create(host=address, port=port, rank=rank, world_size=2)
    return PyNcclCommunicator(group, device=torch.device(f"cuda:{rank}"))


def bare(total: int) -> dict[str, Any]:
    """Seconds of all the bytes in the same buckets, by NCCL alone; the least of three rounds."""
    size = min(total, PACKED["packed_buffer_size_bytes"])
    count = -(-total // size)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = ["--peer", json.dumps(["127.0.0.1", port, size, 3 * count + 1])]
    other = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.vllm_broadcast", *told])
    members = met("127.0.0.1", port, 0)
    flat = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    members.broadcast(flat, src=0)
    torch.cuda.synchronize()
    rounds = []
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(count):
            members.broadcast(flat, src=0)
            torch.cuda.synchronize()
        rounds.append(time.perf_counter() - begun)
    other.wait(60)
    return {"bare_s": min(rounds) * total / (size * count)}


def main(out: Path) -> None:
    """One JSON line and a table."""
    out.mkdir(parents=True, exist_ok=True)
    one_gpu.CONFIG |= WIDE
    shared = Path("/dev/shm") / f"bartleby-{os.getpid()}"
    state = one_gpu.make_policy(shared / "policy")
    total = sum(value.numel() * value.element_size() for value in state.values())
    settings = Settings(
        python=sys.executable,
        policy_dir=str(shared / "policy"),
        socket_path=str(shared / "s"),
        log_path=str(out / "engine.jsonl"),
        device="cuda",
        dtype="bfloat16",
        max_context=4096,
        max_sessions=one_gpu.TRIALS,
        kv_gib=60.0,
        gpus=(1,),
        backend="nccl",
        start_s=240.0,
    )
    found: dict[str, Any] = {"bytes": total, "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    sender = Sender("nccl", device="cuda:0", dtype=torch.bfloat16)
    engine = start_vllm_engine(settings)
    try:
        states = {version: {n: v.cuda() for n, v in state.items()} for version in range(1, UPDATES + 1)}
        with one_gpu.limit(240):
            found |= in_flight(engine, sender, states)
        found |= bare(total)
    finally:
        engine.close()
        subprocess.run(["rm", "-rf", str(shared), str(out / "engine.jsonl")], check=False)
        (out / "vllm_broadcast.jsonl").write_text(json.dumps(found) + "\n")
        print(json.dumps(found))
    best = min(row["transfer_s"] for row in found["updates"][1:])  # the first meets the trainer
    print(
        f"{total / 1e9:.2f} GB: transfer {best:.3f} s, bare broadcast {found['bare_s']:.3f} s, "
        f"{found['bare_s'] / best:.0%} of it; target 80 %"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default=os.environ.get("OUT", "out/vllm_broadcast"))
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer(*json.loads(options.peer))
    else:
        main(Path(options.out))
