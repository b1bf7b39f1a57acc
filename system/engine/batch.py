"""Continuous batching over cached slots: which request is decoded where, and the sampling of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core.counter import counter_uniform
from system.engine.asked import check_plain_sampling, check_request
from system.engine.cached import CachedModel
from system.engine.request import Completion, FinishReason, GenerateRequest

PREFILL_TOKENS = 2048
"""New prompt tokens taken in one pass, so that running requests do not wait long for newcomers."""
SHORTEST_SHARED_PREFIX = 16
"""A prefix found in another session's slot is copied from this length on."""

LARGEST_DRAW = 1 - 2.0**-49
"""A draw is at most this, so that its product with the total stays below the total after rounding."""


def sample(logits: Tensor, temperature: Tensor | None, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens by inverse CDF in float64 over the float32 softmax, and their log-probabilities in float32.

    Args:
        logits: [B, token_count] float32.
        temperature: [B, 1], or None where all are 1.
        draw: [B, 1] float64 in (0, 1).
    """
    logprob = (logits if temperature is None else logits / temperature).log_softmax(-1)
    cumulative = logprob.exp().cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)
    return token[:, 0], logprob.gather(-1, token)[:, 0]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Number of equal first tokens."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True)
class Slot:
    """What lies in one slot of the cache; changed in place by the batch that owns it."""

    session_id: str | None = None
    tokens: list[int] = field(default_factory=list)
    """Tokens whose keys and values are cached."""
    fresh_length: int = 0
    """So many first tokens were cached under weights number `fresh_weights`; other sessions may copy them."""
    fresh_weights: int = -1
    used: int = 0
    run: Run | None = None

    def clear(self) -> None:
        """Forget the session."""
        self.session_id, self.tokens, self.fresh_length, self.run = None, [], 0, None


@dataclass(slots=True)
class Run:
    """A request between arrival and reply."""

    request: GenerateRequest
    owner: Any
    """Whoever asked: the connection of the reply."""
    limit: int
    stop: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    policy_version: list[int] = field(default_factory=list)

    def completion(self, reason: FinishReason) -> Completion:
        """The reply as far as it got."""
        return Completion(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            logprob=self.logprob,
            policy_version=self.policy_version,
            finish_reason=reason,
        )


class Batch:
    """Requests in any state over one cached model; `step` does one round for all of them."""

    def __init__(self, model: CachedModel, *, version: int) -> None:
        self.model, self.version = model, version
        self.weights = 0
        """Counts the swaps: two swaps may carry the same version."""
        self.slots = [Slot() for _ in range(model.slots)]
        self.running = 0
        """Slots 0..running-1 are being decoded."""
        self.waiting: list[Run] = []
        self.clock = 0
        self.counters: dict[str, int | float] = dict.fromkeys(
            (
                "requests",
                "aborted",
                "steps",
                "sampled_tokens",
                "context_tokens",
                "prefill_tokens",
                "reused_tokens",
                "shared_tokens",
            ),
            0,
        )

    def submit(self, request: GenerateRequest, owner: Any) -> None:
        """Queue a request. Raises ValueError on a request that `check_request` refuses."""
        context = self.model.max_context
        check_request(request, max_context=context, token_count=self.model.config.token_count)
        check_plain_sampling(request)
        if any(run.request.session_id == request.session_id for run in self.runs()):
            raise ValueError(
                f"session_id must have one request at a time, got a second one for {request.session_id}"
            )
        limit = min(request.max_tokens, context - len(request.token_ids))
        self.waiting.append(Run(request, owner, limit, frozenset(request.stop_token_ids)))
        self.counters["requests"] += 1

    def step(self) -> list[tuple[Run, Completion]]:
        """Admit what waits, then decode one token for everything that runs; what got finished."""
        admitted = self._admit()
        if admitted:
            slots = [self.slots[i] for i in admitted]
            rows = [self._run(slot).request.token_ids[len(slot.tokens) :] for slot in slots]
            logits = self.model.prefill(rows, admitted, [len(slot.tokens) for slot in slots])
            self.counters["prefill_tokens"] += sum(len(row) for row in rows)
            for slot, row in zip(slots, rows, strict=True):
                if slot.fresh_length == len(slot.tokens) and slot.fresh_weights in (-1, self.weights):
                    slot.fresh_length, slot.fresh_weights = len(slot.tokens) + len(row), self.weights
                slot.tokens.extend(row)
            self._sample(slots, logits)
        finished = self._finish()
        if self.running:
            slots = self.slots[: self.running]
            tokens = [self._run(slot).token_ids[-1] for slot in slots]
            lengths = [len(slot.tokens) for slot in slots]
            self.counters["context_tokens"] += sum(lengths)
            logits = self.model.decode(tokens, lengths)
            for slot, token in zip(slots, tokens, strict=True):
                slot.tokens.append(token)
            self._sample(slots, logits)
            finished += self._finish()
        self.counters["steps"] += 1
        return finished

    def release(self, session_id: str) -> list[tuple[Run, Completion]]:
        """Forget a session; its request, if any, comes back as aborted."""
        dropped = [run for run in self.waiting if run.request.session_id == session_id]
        self.waiting = [run for run in self.waiting if run.request.session_id != session_id]
        for index, slot in enumerate(self.slots):
            if slot.session_id == session_id:
                if slot.run is not None:
                    dropped.append(slot.run)
                    index = self._stop(index)
                self.slots[index].clear()
                break
        self.counters["aborted"] += len(dropped)
        return [(run, run.completion("abort")) for run in dropped]

    def update(self, version: int, state: Mapping[str, Tensor], *, reset_kv: bool) -> None:
        """Take other weights; with reset_kv recompute the caches of running requests, drop the rest."""
        self.model.load(state)
        self.version = version
        self.weights += 1
        if not reset_kv:
            return
        for slot in self.slots[self.running :]:
            slot.clear()
        for index, slot in enumerate(self.slots[: self.running]):
            self.model.prefill([slot.tokens], [index], [0])
            slot.fresh_length, slot.fresh_weights = len(slot.tokens), self.weights

    def runs(self) -> list[Run]:
        """Everything that waits or runs."""
        return self.waiting + [self._run(slot) for slot in self.slots[: self.running]]

    @staticmethod
    def _run(slot: Slot) -> Run:
        assert slot.run is not None
        return slot.run

    def _admit(self) -> list[int]:
        """Give slots to waiting requests, in order, and move them to the end of the running ones."""
        admitted: list[int] = []
        left, room = [], PREFILL_TOKENS
        for at, run in enumerate(self.waiting):
            if self.running == len(self.slots) or room <= 0:
                left += self.waiting[at:]
                break
            prompt = run.request.token_ids
            index = next(
                (i for i, s in enumerate(self.slots) if s.session_id == run.request.session_id), None
            )
            kept, source = 0, None
            if index is not None:
                kept = min(common_prefix(self.slots[index].tokens, prompt), len(prompt) - 1)
            if kept < SHORTEST_SHARED_PREFIX:
                shared, source = self._shared_prefix(prompt, admitted)
                if source in admitted:
                    left.append(run)  # its prefix is computed in this pass: copy it in the next
                    continue
                kept, source = (shared, source) if source is not None else (kept, None)
            if admitted and len(prompt) - kept > room:
                left.append(run)
                continue
            room -= len(prompt) - kept
            admitted.append(self._start(run, index, kept, source))
        self.waiting = left
        return admitted

    def _shared_prefix(self, prompt: list[int], pending: list[int]) -> tuple[int, int | None]:
        """Longest usable prefix of a prompt in another slot, cached under the present weights."""
        best, source = SHORTEST_SHARED_PREFIX - 1, None
        for i, slot in enumerate(self.slots):
            if i in pending:
                tokens = self._run(slot).request.token_ids
            elif slot.fresh_weights == self.weights:
                tokens = slot.tokens[: slot.fresh_length]
            else:
                continue
            if len(tokens) > best and tokens[: best + 1] == prompt[: best + 1]:
                length = min(common_prefix(tokens, prompt), len(prompt) - 1)
                if length > best:
                    best, source = length, i
        return best, source

    def _start(self, run: Run, index: int | None, kept: int, source: int | None) -> int:
        """Seat a request behind the running ones with `kept` tokens cached; return its slot."""
        if index is None:
            idle = range(self.running, len(self.slots))
            free = [i for i in idle if self.slots[i].session_id is None]
            others = [i for i in idle if i != source] or list(idle)
            index = free[0] if free else min(others, key=lambda i: self.slots[i].used)
        slot = self.slots[index]
        if source is not None and source != index:
            self.model.copy(source, index, kept)
            slot.fresh_length, slot.fresh_weights = kept, self.weights
            slot.tokens = run.request.token_ids[:kept]
            self.counters["shared_tokens"] += kept
        else:
            slot.tokens = slot.tokens[:kept]
            slot.fresh_length = min(slot.fresh_length, kept)
            self.counters["reused_tokens"] += kept
        if not slot.tokens:
            slot.fresh_length, slot.fresh_weights = 0, -1
        slot.session_id, slot.run = run.request.session_id, run
        self._exchange(index, self.running)
        self.running += 1
        return self.running - 1

    def _stop(self, index: int) -> int:
        """Take a running slot out of the batch; return where it lies now."""
        self.running -= 1
        self.clock += 1
        self.slots[index].run, self.slots[index].used = None, self.clock
        self._exchange(index, self.running)
        return self.running

    def _exchange(self, a: int, b: int) -> None:
        if a == b:
            return
        self.model.swap(a, b, len(self.slots[a].tokens), len(self.slots[b].tokens))
        self.slots[a], self.slots[b] = self.slots[b], self.slots[a]

    def _sample(self, slots: list[Slot], logits: Tensor) -> None:
        runs = [self._run(slot) for slot in slots]
        warm = [run.request.temperature for run in runs]
        temperature = None if all(t == 1 for t in warm) else torch.tensor(warm, device=logits.device)[:, None]
        draws = [
            min(counter_uniform(run.request.seed, len(slot.tokens)), LARGEST_DRAW)
            for run, slot in zip(runs, slots, strict=True)
        ]
        draw = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None]
        token, logprob = sample(logits, temperature, draw)
        for run, t, lp in zip(runs, token.tolist(), logprob.tolist(), strict=True):
            run.token_ids.append(t)
            run.logprob.append(lp)
            run.policy_version.append(self.version)
        self.counters["sampled_tokens"] += len(runs)

    def _finish(self) -> list[tuple[Run, Completion]]:
        finished = []
        for index in reversed(range(self.running)):
            run = self._run(self.slots[index])
            reason: FinishReason | None = None
            if run.token_ids[-1] in run.stop:
                reason = "stop"
            elif len(run.token_ids) >= run.limit:
                reason = "length"
            if reason is not None:
                self._stop(index)
                finished.append((run, run.completion(reason)))
        return finished
