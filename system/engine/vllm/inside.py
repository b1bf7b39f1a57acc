"""What runs inside the server's own processes: counting of tokens there, and taking weights from a file.

`register` is an entry point of the group `vllm.general_plugins`: the API's process, the engine's and every worker's
call it as they start. `OwnCalls` is a middleware of the API's. Nothing here is imported by Bartleby's processes.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
from collections.abc import Awaitable, Callable
from typing import Any

COUNTS = "/bartleby/counts"
GENERATE = "/bartleby/generate"
STILL = 5
"""Turns of the event loop without a new token, after which none is on its way any more."""

PR_SET_PDEATHSIG = 1

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def register() -> None:
    """The backends "file" and "gloo" of weight transfer; and no process outlives the one that started it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    known = WeightTransferEngineFactory._registry
    for name, backend in (("file", "FileTransfer"), ("gloo", "GlooTransfer")):
        if name not in known:  # a process may load its plugins twice
            WeightTransferEngineFactory.register_engine(name, "system.engine.vllm.receiving", backend)


class OwnCalls:
    """A middleware of the API's that answers two calls of ours, next to vLLM's own."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in (COUNTS, GENERATE):
            await self._app(scope, receive, send)
            return
        client, status = scope["app"].state.engine_client, 200
        try:
            if scope["path"] == COUNTS:
                told = await counts(client)
            else:
                told = await generated(client, json.loads(await body_of(receive)))
        except Exception as error:  # noqa: BLE001 - told to the front, which tells the trial
            status, told = 500, {"error": f"{type(error).__name__}: {error}"}
        body = json.dumps(told, separators=(",", ":")).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def body_of(receive: Receive) -> bytes:
    """The whole body of a call."""
    parts, more = [], True
    while more:
        part = await receive()
        parts.append(part.get("body", b""))
        more = part.get("more_body", False)
    return b"".join(parts)


async def generated(client: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What /inference/v1/generate does, with a tenth of its cost: no objects for each token on the way out.

    At tens of thousands of tokens a second the API's process, which also takes them from the engine, has no time for
    those.
    """
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    final = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**asked["sampling_params"], output_kind=final, flat_logprobs=True)
    prompt = tokens_input(asked["token_ids"], cache_salt=asked["cache_salt"])
    last: Any = None
    async for told in client.generate(prompt, params, asked["request_id"]):
        last = told
    output = last.outputs[0]
    flat, spans = output.logprobs, getattr(output, "weight_versions", None)
    # The sampled token is the first of its position.
    logprob = [flat.logprobs[start] for start in flat.start_indices] if flat is not None else []
    if spans is not None:
        spans = [{"version": span.version, "start": span.start, "end": span.end} for span in spans]
    return {
        "token_ids": list(output.token_ids),
        "logprob": logprob,
        "finish_reason": output.finish_reason,
        "weight_versions": spans,
    }


async def counts(client: Any) -> dict[str, int]:
    """How many tokens each request has so far, by the request's own id.

    Asked while the engine is paused, it says which tokens the weights before the pause have sampled. The engine's last
    outputs may still be on their way to the API's process when a pause returns: it waits for those.
    """
    found, still = tokens_of(client), 0
    while still < STILL:
        await asyncio.sleep(0)
        fresh = tokens_of(client)
        still = still + 1 if fresh == found and client.engine_core.outputs_queue.empty() else 0
        found = fresh
    return found


def tokens_of(client: Any) -> dict[str, int]:
    """Tokens sampled so far for each request that is not finished."""
    states = client.output_processor.request_states.values()
    return {s.external_req_id: s.detokenizer.num_output_tokens() for s in states if s.detokenizer}
