"""What runs inside the server's own processes: counting of tokens there, and taking weights from a file.

`register` is an entry point of the group `vllm.general_plugins`: the API's process, the engine's and every worker's
call it as they start. `CountTokens` is a middleware of the API's. Nothing here is imported by Bartleby's processes.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
from collections.abc import Awaitable, Callable
from typing import Any

COUNTS = "/bartleby/counts"
STILL = 5
"""Turns of the event loop without a new token, after which none is on its way any more."""

PR_SET_PDEATHSIG = 1

Send = Callable[[dict[str, Any]], Awaitable[None]]


def register() -> None:
    """The backends "file" and "gloo" of weight transfer; and no process outlives the one that started it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    known = WeightTransferEngineFactory._registry
    for name, backend in (("file", "FileTransfer"), ("gloo", "GlooTransfer")):
        if name not in known:  # a process may load its plugins twice
            WeightTransferEngineFactory.register_engine(name, "system.engine.vllm.receiving", backend)


class CountTokens:
    """Answers how many tokens each request has so far, by the request's own id.

    Asked while the engine is paused, the answer says which tokens the weights before the pause have sampled. The
    engine's last outputs may still be on their way to the API's process when a pause returns: it waits for those.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != COUNTS:
            await self._app(scope, receive, send)
            return
        client = scope["app"].state.engine_client
        counts, still = tokens_of(client), 0
        while still < STILL:
            await asyncio.sleep(0)
            fresh = tokens_of(client)
            still = still + 1 if fresh == counts and client.engine_core.outputs_queue.empty() else 0
            counts = fresh
        body = json.dumps(counts).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def tokens_of(client: Any) -> dict[str, int]:
    """Tokens sampled so far for each request that is not finished."""
    states = client.output_processor.request_states.values()
    return {s.external_req_id: s.detokenizer.num_output_tokens() for s in states if s.detokenizer}
