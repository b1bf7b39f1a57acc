"""The front of a vLLM server: the embedded engine's socket before it, so that a trial need not know which one it has.

One thread and no torch: it forwards requests by token id, keeps which version sampled which token, lets in as many
requests as their keys and values have room, brings weights, and notices when the server ends or hangs.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from core.staleness import token_versions
from system.engine.asked import check_request, parse_request
from system.engine.client import HEADER, LARGEST_MESSAGE, frame
from system.engine.request import Completion, EngineError, FinishReason, GenerateRequest
from system.engine.vllm.coverage import Weight, check_weights, header_of
from system.engine.vllm.getting import PACKED, Getting, broadcast_info
from system.engine.vllm.room import Room
from system.engine.vllm.server import Server, read_metrics
from system.engine.vllm.settings import Settings
from system.engine.vllm.wire import Refused

FINAL_ONLY = 2
"""vllm.sampling_params.RequestOutputKind: no output before the last."""

GRACE_S = 4.0
AGAIN_S = 0.02
WATCH_S = 1.0
STATS_S = 20.0


@dataclass(slots=True, eq=False)
class Session:
    """A trial as the front knows it."""

    salt: str
    flight: Flight | None = None


@dataclass(slots=True, eq=False)
class Flight:
    """A request between arrival and reply."""

    request: GenerateRequest
    name: str
    limit: int
    sent: bool = False
    cancelled: bool = False
    swaps: list[tuple[int, int]] = field(default_factory=list)
    """Before which of its tokens the weights became which version."""

    @property
    def tokens(self) -> int:
        """Keys and values that it may come to need."""
        return len(self.request.token_ids) + self.limit


class Front:
    """Moves requests from trials to the server, and weights into it.

    Args:
        settings: of the engine.
        server: that answers.
        expected: the weights that the policy has.
        log: gets a line for each reply.
        kv_tokens: that the server's cache holds.
        labels: the server tells which weights sampled a token.
        direct: requests enter by the call of our plugin's.
    """

    def __init__(
        self,
        settings: Settings,
        server: Server,
        expected: dict[str, Weight],
        log: FileIO,
        *,
        kv_tokens: int,
        labels: bool,
        direct: bool,
    ) -> None:
        self.settings, self.server, self.expected, self.log = settings, server, expected, log
        self.version, self.kv_tokens = settings.version, kv_tokens
        record = json.loads((Path(settings.policy_dir) / "config.json").read_text())
        self.vocabulary = int(record["vocab_size"])
        self.sessions: dict[str, Session] = {}
        self.flights: dict[str, Flight] = {}
        self.room = Room(kv_tokens, settings.max_sessions)
        self.updating = asyncio.Lock()
        self.labels, self.direct = labels, direct
        self.target = "/bartleby/generate" if direct else "/inference/v1/generate"
        self.prefix = "" if direct else "generate-tokens-"
        """What the server puts before the id of a request."""
        self.trainer: Getting | None = None
        self.epoch = 0
        """Counts the resets of the cache: what was cached before one is never used after."""
        self.numbers = 0
        self.fault: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.counters: dict[str, float] = dict.fromkeys(
            (
                *("requests", "aborted", "version_disagreements"),
                *("updates", "update_s", "pause_s", "transfer_s"),
            ),
            0,
        )
        self.busy_s, self.busy_since = 0.0, 0.0

    # Requests

    async def generate(self, message: dict[str, Any], sessions: set[str]) -> dict[str, Any]:
        """Sample one turn."""
        request = parse_request(message)
        context = self.settings.max_context
        check_request(request, max_context=context, token_count=self.vocabulary)
        session = self.sessions.setdefault(request.session_id, Session(f"{self.epoch}-{self.version}"))
        if session.flight is not None:
            name = request.session_id
            raise ValueError(f"session_id must have one request at a time, got a second one for {name}")
        sessions.add(request.session_id)
        self.numbers += 1
        limit = min(request.max_tokens, context - len(request.token_ids))
        flight = session.flight = Flight(request, f"{self.numbers}", limit)
        self.counters["requests"] += 1
        try:
            completion = await self._flown(flight, session)
        finally:
            session.flight = None
        self._log(request, completion)
        return asdict(completion)

    async def _flown(self, flight: Flight, session: Session) -> Completion:
        """Its completion, once it has been let in."""
        await self.room.enter(flight.tokens)
        if not self.flights:
            self.busy_since = time.monotonic()
        self.flights[flight.name] = flight
        try:
            flight.swaps.append((0, self.version))
            if flight.cancelled:
                return self._completion(flight, list[int](), list[float](), "abort")
            flight.sent = True
            told = await self.server.post(self.target, self._asked(flight, session), timeout_s=None)
        finally:
            del self.flights[flight.name]
            self.room.leave(flight.tokens)
            if not self.flights:
                self.busy_s += time.monotonic() - self.busy_since
        return self._told(flight, told if self.direct else standard_answer(told))

    def _asked(self, flight: Flight, session: Session) -> dict[str, Any]:
        """The request as the server takes it; nothing is left to a default."""
        request = flight.request
        return {
            "request_id": flight.name,
            "model": "policy",
            "token_ids": request.token_ids,
            "cache_salt": session.salt,
            "stream": False,
            "sampling_params": {
                "n": 1,
                "max_tokens": flight.limit,
                "min_tokens": 0,
                "stop_token_ids": request.stop_token_ids,
                "ignore_eos": True,
                "seed": request.seed % (1 << 63),
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
                "min_p": request.min_p,
                "repetition_penalty": request.repetition_penalty,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "logprobs": 0,
                "detokenize": False,
                **({} if self.direct else {"output_kind": FINAL_ONLY}),
            },
        }

    def _told(self, flight: Flight, choice: dict[str, Any]) -> Completion:
        """The server's answer as ours."""
        ids, logprob = choice["token_ids"], choice["logprob"]
        if len(logprob) != len(ids):
            raise EngineError(f"vllm must give each of {len(ids)} tokens its logprob, got {len(logprob)}")
        reason = choice["finish_reason"]
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"finish_reason of vllm must be stop, length or abort, got {reason}")
        completion = self._completion(flight, ids, logprob, reason)
        spans = choice.get("weight_versions")
        if spans is not None:
            theirs = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
            self.counters["version_disagreements"] += theirs != completion.policy_version
        return completion

    def _completion(
        self, flight: Flight, ids: list[int], logprob: list[float], reason: FinishReason
    ) -> Completion:
        self.counters["aborted"] += reason == "abort"
        return Completion(
            request_id=flight.request.request_id,
            token_ids=ids,
            logprob=logprob,
            policy_version=token_versions(flight.swaps, count=len(ids)),
            finish_reason=reason,
        )

    async def release(self, session_id: str) -> dict[str, Any]:
        """Forget a session; what it has running ends."""
        session = self.sessions.pop(session_id, None)
        if session is not None and (flight := session.flight) is not None:
            flight.cancelled = True
            while flight.sent and flight.name in self.flights:  # it may not have arrived there yet
                name = {"request_ids": [self.prefix + flight.name]}
                await self.server.post("/abort_requests", name, timeout_s=self.settings.call_s)
                await asyncio.sleep(AGAIN_S)
        return {}

    async def abort_all(self) -> None:
        """End all requests, each with what it has."""
        names = [self.prefix + name for name, flight in self.flights.items() if flight.sent]
        if names:
            with suppress(OSError, Refused):  # it is about to be ended anyway
                await self.server.post("/abort_requests", {"request_ids": names}, timeout_s=GRACE_S)
            end = time.monotonic() + GRACE_S / 4
            while self.flights and time.monotonic() < end:
                await asyncio.sleep(AGAIN_S)

    def _log(self, request: GenerateRequest, completion: Completion) -> None:
        line = {"session_id": request.session_id, "prompt_ids": request.token_ids, "seed": request.seed}
        told = {**line, "temperature": request.temperature, **asdict(completion)}
        self.log.write(json.dumps(told, separators=(",", ":")).encode() + b"\n")

    async def score(self, token_ids: list[int]) -> dict[str, Any]:
        """Log-probability of every token but the first under the weights that are there now, at temperature 1."""
        self.numbers += 1
        body = {
            "request_id": f"{self.numbers}",
            "model": "policy",
            "token_ids": token_ids,
            "cache_salt": f"score-{self.numbers}",
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
                "detokenize": False,
            },
        }
        told = await self.server.post("/inference/v1/generate", body, timeout_s=self.settings.call_s)
        rows = told["prompt_logprobs"][1:]
        found = [row[str(token)]["logprob"] for row, token in zip(rows, token_ids[1:], strict=True)]
        return {"logprob": found, "policy_version": self.version}

    # Weights

    async def update(self, version: int, path: str, *, reset_kv: bool) -> dict[str, Any]:
        """Swap the weights while all requests stand still, and keep between which tokens that was.

        Weights that do not cover the policy are refused before anything is sent. Beyond that a fault leaves the
        server with half of them: it is the engine's end.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise ValueError(f"version must be a whole number from 0, got {version!r}")
        async with self.updating:
            source = await self._source(path)
            come = header_of(Path(path)) if source is None else await source.describe(version)
            check_weights(come, self.expected, source=path)
            begun = time.monotonic()
            self.room.close()
            try:
                if source is not None and not source.met:
                    await self._meet(source)
                told = {"path": path} if source is None else self._broadcast(come)
                await self._swap(version, told, source, reset_kv=reset_kv)
            except (OSError, Refused, EngineError) as error:
                told = f"vllm must take the weights of {path}, got {type(error).__name__}: {error}"
                self.end(told)
                raise EngineError(told) from error
            finally:
                self.room.open()
            self.counters["updates"] += 1
            self.counters["update_s"] += time.monotonic() - begun
        return {"policy_version": version}

    async def _source(self, path: str) -> Getting | None:
        """The trainer that broadcasts; None where the weights are in a file."""
        kind, split, _ = path.partition("://")
        if (kind if split else "file") != self.settings.backend:
            raise ValueError(
                f"weights must come by {self.settings.backend}, the engine's backend, got {path}"
            )
        if not split:
            return None
        address = path.rpartition("/")[0]
        if self.trainer is None or self.trainer.address != address:
            self.trainer = await Getting.open(address)
        return self.trainer

    async def _meet(self, source: Getting) -> None:
        """Make a group of the trainer and the server's workers."""
        async with asyncio.timeout(self.settings.call_s):
            world_size = 1 + self.settings.tensor_parallel
            told = await source.ask({"op": "meet", "world_size": world_size})
            told |= {"world_size": world_size, "rank_offset": 1}
            if self.settings.backend == "nccl" and self.labels:  # 0.24 is told at each update
                told |= PACKED
            meeting = self.server.post(
                "/init_weight_transfer_engine", {"init_info": told}, timeout_s=self.settings.call_s
            )
            await asyncio.gather(meeting, source.ask(None))
        source.met = True

    def _broadcast(self, come: dict[str, Weight]) -> dict[str, Any]:
        packed = PACKED if self.settings.backend == "nccl" and not self.labels else {}
        return broadcast_info(come) | packed

    async def _swap(
        self, version: int, info: dict[str, Any], source: Getting | None, *, reset_kv: bool
    ) -> None:
        post, call_s = self.server.post, self.settings.call_s
        await self._all_arrived()
        paused = time.monotonic()
        await post("/pause?mode=keep&clear_cache=false", timeout_s=call_s)
        counts = await self.server.get("/bartleby/counts", timeout_s=call_s)
        if reset_kv:
            await post("/reset_prefix_cache?reset_running_requests=true", timeout_s=call_s)
            self.epoch += 1
            for session in self.sessions.values():
                session.salt = f"{self.epoch}-{version}"
        await post("/start_weight_update", {}, timeout_s=call_s)
        taken = time.monotonic()
        sent = [] if source is None else [source.ask({"op": "send", "version": version})]
        async with asyncio.timeout(call_s):
            await asyncio.gather(post("/update_weights", {"update_info": info}, timeout_s=call_s), *sent)
        self.counters["transfer_s"] += time.monotonic() - taken
        await post("/finish_weight_update", {"weight_version": str(version)}, timeout_s=call_s)
        for name, flight in self.flights.items():
            if (
                count := counts.get(self.prefix + name)
            ) is not None:  # else it had all its tokens before the pause
                flight.swaps.append((count, version))
        self.version = version
        await post("/resume", timeout_s=call_s)
        self.counters["pause_s"] += time.monotonic() - paused

    async def _all_arrived(self) -> None:
        """Wait until each request that was sent is known to the server or done."""
        async with asyncio.timeout(self.settings.call_s):
            while True:
                sent = [name for name, flight in self.flights.items() if flight.sent]
                known = await self.server.get("/bartleby/counts", timeout_s=self.settings.call_s)
                if all(self.prefix + name in known or name not in self.flights for name in sent):
                    return
                await asyncio.sleep(AGAIN_S)

    # Watching

    async def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        told = read_metrics(await self.server.get("/metrics", timeout_s=STATS_S))
        busy_s = self.busy_s + (time.monotonic() - self.busy_since if self.flights else 0.0)
        return {
            **self.counters,
            **told,
            "waiting": told["waiting"] + self.room.waiting,
            "sessions": len(self.sessions),
            "policy_version": self.version,
            "busy_s": busy_s,
            "cpu_s": group_cpu_s(),
            "kv_tokens": self.kv_tokens,
            "kv_reserved_tokens": self.room.taken,
        }

    async def watch(self) -> None:
        """Ends the engine when its server ends, or does nothing although it has requests."""
        ended = asyncio.create_task(self.server.ended())
        before, since = -1.0, time.monotonic()
        while not ended.done():
            await asyncio.wait([ended], timeout=WATCH_S)
            if ended.done() or not self.flights or self.updating.locked():
                since = time.monotonic()
                continue
            try:
                told = read_metrics(await self.server.get("/metrics", timeout_s=self.settings.stall_s))
                done = told["sampled_tokens"] + told["prompt_tokens"] + self.counters["requests"]
            except (OSError, Refused):
                done = before
            if done != before:
                before, since = done, time.monotonic()
            elif time.monotonic() - since > self.settings.stall_s:
                self.end(f"vllm must sample within {self.settings.stall_s:g} s, got nothing: it hangs")
                return
        self.end(ended.result())

    def end(self, fault: str) -> None:
        """This engine is of no more use; the first cause counts."""
        if not self.fault.done():
            self.fault.set_result(fault)

    # Clients

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client: frames in, frames out, its sessions forgotten when it goes."""
        sessions: set[str] = set()
        at_work: set[asyncio.Task[None]] = set()
        try:
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                if length > LARGEST_MESSAGE:
                    told = f"message must be at most {LARGEST_MESSAGE} bytes, got {length}"
                    writer.write(frame({"error": told}))
                    return
                body = await reader.readexactly(length)
                task = asyncio.create_task(self._served(body, writer, sessions))
                at_work.add(task)
                task.add_done_callback(at_work.discard)
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            for session_id in sessions:
                try:
                    await self.release(session_id)
                except (OSError, Refused):  # a server that is gone runs nothing for it either: `watch` tells
                    continue
            writer.close()

    async def _served(self, body: bytes, writer: asyncio.StreamWriter, sessions: set[str]) -> None:
        try:
            reply = await self._answer(json.loads(body), sessions)
        except Exception as error:  # noqa: BLE001 (told to the client in one line; the engine must live on)
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
            if isinstance(error, OSError):  # the server is going: what ends it is the better line
                await asyncio.wait([self.fault], timeout=GRACE_S)
                reply = {"error": self.fault.result()} if self.fault.done() else reply
        if not writer.is_closing():
            writer.write(frame(reply))

    async def _answer(self, message: Any, sessions: set[str]) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise ValueError(f"message must be an object, got {type(message).__name__}")
        match message.get("op"):
            case "generate":
                return await self.generate(message, sessions)
            case "release":
                return await self.release(message["session_id"])
            case "update_weights":
                kept = bool(message.get("reset_kv", False))
                return await self.update(message["version"], message["path"], reset_kv=kept)
            case "score":
                return await self.score(message["token_ids"])
            case "stats":
                return {"stats": await self.stats()}
            case other:
                raise ValueError(
                    f"op must be generate, release, update_weights, score or stats, got {other!r}"
                )


def standard_answer(told: dict[str, Any]) -> dict[str, Any]:
    """An answer of vLLM's own call in the form of our plugin's."""
    choice = told["choices"][0]
    content = (choice["logprobs"] or {}).get("content") or []
    logprob = [entry["logprob"] for entry in content]
    return {**choice, "token_ids": list(choice["token_ids"] or ()), "logprob": logprob}


def group_cpu_s() -> float:
    """Seconds that the processes of this group have computed, those that live."""
    ticks = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == os.getpgrp():
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
