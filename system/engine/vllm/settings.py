"""What a server is told: its command line and environment, from values that name everything that matters. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent.parent.parent

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One engine: a server of vLLM and the front before it.

    Example: Settings(python="/opt/vllm/bin/python", policy_dir="policies/clerk", socket_path="/tmp/e/engine.sock",
    log_path="/tmp/e/engine.jsonl", device="cpu", dtype="float32", max_context=2048, max_sessions=16, kv_gib=1.0)
    """

    python: str
    """Interpreter of the environment that vLLM is installed in; nothing of ours need be installed there."""
    policy_dir: str
    """Hugging Face folder to load."""
    socket_path: str
    """Unix socket that trials connect to; the server's own lies beside it."""
    log_path: str
    """JSONL file of every request and its reply."""
    device: Literal["cpu", "cuda"]
    """Of the server."""
    dtype: Literal["float32", "bfloat16"]
    """Of weights and arithmetic."""
    max_context: int
    """Window in tokens, prompt and completion together."""
    max_sessions: int
    """Requests decoded at the same time, at most; memory may allow fewer."""
    kv_gib: float
    """Memory for keys and values, on each GPU; on the CPU whole GiB."""
    tensor_parallel: int = 1
    """GPUs, or groups of cores, that share the model."""
    gpus: tuple[int, ...] = ()
    """Which ones, by number; all that are visible if empty."""
    block_tokens: int = 32
    """Tokens of a block of the cache: only whole blocks of a common beginning are shared."""
    compiled: bool = False
    """Compile the model and capture graphs: a start of minutes, for speed."""
    backend: Literal["file", "nccl", "gloo"] = "file"
    """How weights come: a file that every worker reads, or a broadcast from the trainer (gloo is for the CPU)."""
    route: Literal["direct", "standard"] = "direct"
    """How requests enter the server: by a call of our plugin's, or by vLLM's own, which is dearer by the token."""
    threads: int = 1
    """Cores of each worker, on the CPU."""
    version: int = 0
    """Policy version of the weights in policy_dir."""
    start_s: float = 600.0
    """Bound on the start."""
    call_s: float = 120.0
    """Bound on each call of an update of the weights."""
    stall_s: float = 120.0
    """An engine with requests that samples nothing for so long hangs, and is ended."""
    extra: tuple[str, ...] = ()
    """Further arguments of the server."""

    def __post_init__(self) -> None:
        for name in ("max_sessions", "tensor_parallel", "block_tokens", "threads"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.max_context >= 2:
            raise ValueError(f"max_context must be at least 2, got {self.max_context}")
        if not self.kv_gib > 0:
            raise ValueError(f"kv_gib must be positive, got {self.kv_gib}")
        if self.device == "cpu" and self.kv_gib != int(self.kv_gib):
            raise ValueError(f"kv_gib must be whole on the CPU, got {self.kv_gib}")
        if self.gpus and len(self.gpus) != self.tensor_parallel:
            raise ValueError(
                f"gpus must be {self.tensor_parallel} for tensor_parallel, got {list(self.gpus)}"
            )

    @property
    def server_socket(self) -> str:
        """Where the server itself listens."""
        return f"{self.socket_path}.vllm"

    @property
    def server_log(self) -> str:
        """What the server writes."""
        return f"{self.log_path}.server"


def command(settings: Settings) -> Sequence[str]:
    """The server's command line: nothing is left to the model's generation_config or to a default that may move."""
    served = [
        *(settings.python, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.policy_dir),
        *("--served-model-name", "policy", "--uds", settings.server_socket, "--tokens-only"),
        *("--middleware", "system.engine.vllm.inside.OwnCalls"),
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        *("--dtype", settings.dtype, "--max-model-len", str(settings.max_context)),
        *("--max-num-seqs", str(settings.max_sessions), "--block-size", str(settings.block_tokens)),
        *("--tensor-parallel-size", str(settings.tensor_parallel), "--seed", "0"),
        *("--enable-prefix-caching", "--no-enable-log-requests", "--disable-uvicorn-access-log"),
        *("--weight-transfer-config", json.dumps({"backend": settings.backend})),
    ]
    if (
        settings.device == "cpu"
    ):  # 0.32 cannot go on with half a prompt there where requests have seeds, and dies
        most = max(2048, settings.max_context)
        served += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(most)]
    if settings.device == "cuda":
        served += ["--kv-cache-memory-bytes", str(int(settings.kv_gib * GIB))]
    if not settings.compiled:
        served.append("--enforce-eager")
    return [*served, *settings.extra]


def environment(settings: Settings, plugins: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The server's environment.

    Args:
        plugins: folder that names our entry point, see `name_plugin`.
        inherited: of the process that starts it.
    """
    path = [plugins, str(ROOT), *filter(None, [inherited.get("PYTHONPATH", "")])]
    told = {
        **inherited,
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes of pausing and of weight transfer
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "bartleby",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if settings.gpus:
        told["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.gpus))
    if settings.device == "cpu":
        told |= {
            "VLLM_CPU_KVCACHE_SPACE": str(int(settings.kv_gib)),
            "OMP_NUM_THREADS": str(settings.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of a machine begins at its first core
        }
    if not settings.compiled:
        told["TORCHDYNAMO_DISABLE"] = "1"  # the sampler would be compiled at the first request even so
    return told


def name_plugin(folder: Path) -> str:
    """Makes a folder that, on a Python path, brings `inside.register` into every process of vLLM, and no other's."""
    info = folder / "bartleby_vllm-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bartleby-vllm\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nbartleby = system.engine.vllm.inside:register\n"
    )
    return str(folder)
