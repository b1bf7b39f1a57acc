"""The front's process: starts the server, listens, and ends with the server or with its parent, telling why.

`python -m system.engine.vllm.process '{"policy_dir": ...}'`; the values are those of `Settings` and `parent`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from core.capacity import kv_bytes_per_token, runnable_trajectories
from system.engine.request import EngineError
from system.engine.vllm.coverage import weights_of
from system.engine.vllm.front import GRACE_S, WATCH_S, Front
from system.engine.vllm.server import Server, kv_tokens_of
from system.engine.vllm.settings import GIB, Settings
from system.engine.vllm.wire import Refused
from system.parent import die_with_parent
from system.record.metrics import drop_torn_tail


def check_room(settings: Settings) -> None:
    """Refuse before anything is started what memory cannot hold: the keys and values of one trial.

    Raises:
        ValueError: one line with name, rule and value.
    """
    record = json.loads((Path(settings.policy_dir) / "config.json").read_text())
    if not all(name in record for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")):
        return  # another family: the server says what it needs
    token_bytes = kv_bytes_per_token(
        attention_layers=record["num_hidden_layers"],
        kv_heads=record["num_key_value_heads"],
        head_dim=record["head_dim"],
        bytes_per_value=4 if settings.dtype == "float32" else 2,
        tensor_parallel=settings.tensor_parallel,
    )
    if (tokens := int(settings.kv_gib * GIB) // token_bytes) < settings.max_context:
        raise ValueError(
            f"kv_gib must hold the {settings.max_context} tokens of max_context, "
            f"got {settings.kv_gib:g} for {tokens}"
        )


async def serve(settings: Settings) -> NoReturn:
    """Start the server, listen, say so in one JSON line on stdout, serve to the end of the server or of the parent."""
    scratch = Path(f"{settings.socket_path}.d")
    scratch.mkdir(parents=True, exist_ok=True)
    expected = weights_of(Path(settings.policy_dir))
    check_room(settings)
    server = Server(settings, scratch)
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _parent_gone, gone)
    starting = asyncio.create_task(server.start())
    left = asyncio.create_task(gone.wait())
    await asyncio.wait([starting, left], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        leave("")
    starting.result()
    kv_tokens = kv_tokens_of(await server.get("/metrics", timeout_s=settings.call_s))
    if kv_tokens < settings.max_context:
        raise EngineError(
            f"kv_gib must hold {settings.max_context} tokens of a trial, got room for {kv_tokens}"
        )
    if settings.backend == "file":  # a broadcast begins when the trainer is known
        await server.post("/init_weight_transfer_engine", {"init_info": {}}, timeout_s=settings.call_s)
    labels = await labelled(server, settings)
    fault = "" if settings.route == "standard" else await direct_fault(server, settings)
    direct = settings.route == "direct" and not fault
    drop_torn_tail(Path(settings.log_path))
    with open(settings.log_path, "ab", buffering=0) as log:
        front = Front(settings, server, expected, log, kv_tokens=kv_tokens, labels=labels, direct=direct)
        Path(settings.socket_path).unlink(missing_ok=True)
        listener = await asyncio.start_unix_server(front.talk, settings.socket_path, backlog=1024)
        described = {"ready": True, "pid": os.getpid(), "token_count": front.vocabulary}
        longest = runnable_trajectories(engines=1, tokens=kv_tokens, mean_length=settings.max_context)
        described |= {"kv_tokens": kv_tokens, "longest_trials": longest, "policy_version": settings.version}
        described |= {"route": "direct" if direct else "standard", "route_fault": fault}
        print(json.dumps({**described, "max_context": settings.max_context}), flush=True)
        watching = asyncio.create_task(front.watch())
        await asyncio.wait([front.fault, left], return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        listener.close()
        if front.fault.done():
            await asyncio.sleep(WATCH_S / 4)  # for the replies that tell of it
            leave(front.fault.result())
        await front.abort_all()
        await server.end(GRACE_S)
        leave("")


async def labelled(server: Server, settings: Settings) -> bool:
    """Whether the server labels tokens with their weights itself, as 0.32 does; it is told the first label."""
    label = {"new_version": str(settings.version)}
    try:
        await server.post("/update_weight_version", label, timeout_s=settings.call_s)
    except Refused as error:
        if error.status != 404:
            raise
        return False
    return True


async def direct_fault(server: Server, settings: Settings) -> str:
    """Why the call of our plugin's does not serve with this version of vLLM, or ""."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0, "detokenize": False, "seed": 0}
    asked = {"request_id": "first", "token_ids": [0] * 8, "cache_salt": "first", "sampling_params": sampling}
    try:
        told = await server.post("/bartleby/generate", asked, timeout_s=settings.call_s)
    except Refused as error:
        return str(error)
    fits = len(told["token_ids"]) == len(told["logprob"]) == 1
    return "" if fits else f"a token must come with its logprob, got {told}"


def _parent_gone(gone: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 1 << 16):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        gone.set()


def leave(fault: str) -> NoReturn:
    """Say in a last line why, where there is a fault, and end the whole group."""
    if fault:
        print(json.dumps({"error": fault}), flush=True)
    sys.stdout.flush()
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("a group that is killed ends")


def main(values: dict[str, Any]) -> NoReturn:
    """Serve until there is a reason to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(values.pop("parent"))
    settings: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
    try:
        asyncio.run(serve(Settings(**settings)))
    except Exception as error:  # noqa: BLE001 - the process's last words
        told = f"{error}" if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        leave(" ".join(told.split()))
    leave("")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
