"""A small softmax policy with a memory, and an engine and a trainer that score it with one thing wrong.

Every cause is produced, not imitated: the engine samples at another temperature, from a filtered distribution,
from older weights, on a state that older weights or another row left behind; the trainer reads other token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from core.cause import Alternative, TokenFact

F64 = torch.float64
VOCABULARY, STATE, PROMPT, LENGTH = 64, 48, 12, 110
TEMPERATURE, TOP_P = 0.7, 0.9


class Weights(NamedTuple):
    """Embedding and head of one version."""

    embedding: Tensor
    head: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What one step holds, and the same tokens scored under other hypotheses.

    Example: `scene({"temperature"}, seed=0, rows=32)`.
    """

    fact: TokenFact
    alternative: Alternative


def scene(causes: set[str], *, seed: int, rows: int, drift: float = 0.25, switched: float = 0.5) -> Scene:
    """One packed step of `rows` rows of a few turns each, about 65 sampled tokens a row.

    Args:
        causes: what is wrong; empty for a healthy pair, which differs by the rounding of bfloat16.
        drift: how far the weights move from version 0 to 1, where a cause needs them to move.
        switched: share of rows that begin at version 0 and end at 1; the trainer is at 1.
    """
    world = _World(causes, seed, rows, drift, switched)
    world.sample()
    return world.scored()


class _World:
    def __init__(self, causes: set[str], seed: int, rows: int, drift: float, switched: float) -> None:
        self.causes, self.rows = causes, rows
        self.random = torch.Generator().manual_seed(seed)
        moved = drift if causes & {"stale_version", "stale_cache"} else 0.0
        base = Weights(self.normal(VOCABULARY, STATE), 0.5 * self.normal(VOCABULARY, STATE))
        step = Weights(self.normal(VOCABULARY, STATE), 0.5 * self.normal(VOCABULARY, STATE))
        self.versions = (base, Weights(*(w + moved * s for w, s in zip(base, step))))
        self.keep = torch.tensor([0.4, 0.9, 0.99], dtype=F64).repeat_interleave(STATE // 3)
        self.wave = self.normal(STATE) * 0.5
        self.frequency = 0.3 * torch.rand(STATE, generator=self.random, dtype=F64)
        order = torch.arange(STATE)
        order[: STATE // 4] = order[: STATE // 4].roll(1)
        self.shuffled = order
        self.turn = torch.stack([self.turns() for _ in range(rows)])
        self.loss_mask = self.turn >= 0
        place = torch.arange(LENGTH)
        sampled = self.loss_mask.to(F64)
        switch = torch.multinomial(sampled[:, PROMPT + 15 :], 1, generator=self.random) + PROMPT + 15
        spans = torch.rand(rows, 1, generator=self.random) < switched
        self.version = torch.where(spans & (place < switch), 0, 1)
        self.token = torch.randint(VOCABULARY, (rows, LENGTH), generator=self.random)
        self.rollout_logprob = torch.zeros(rows, LENGTH, dtype=F64)
        hit = torch.rand(rows, 1, generator=self.random) < 0.5
        self.left_behind = torch.where(hit, 1.0, 0.0) * self.normal(rows, STATE)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=F64)

    def whole(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=self.random))

    def turns(self) -> Tensor:
        """For every token of a row the index of its turn, -1 where nobody sampled."""
        turn = torch.full((LENGTH,), -1)
        at, index = PROMPT, 0
        while at < LENGTH:
            end = at + self.whole(10, 26)
            turn[at:end] = index
            at, index = end + self.whole(5, 9), index + 1
        return turn

    def fed(self, weights: Weights, state: Tensor, token: Tensor) -> Tensor:
        return self.keep * state + (1 - self.keep.square()).sqrt() * weights.embedding[token]

    def logits(self, weights: Weights, state: Tensor, place: int, *, off: bool, rounded: bool) -> Tensor:
        frequency = self.frequency * (1.02 if off else 1.0)
        seen = state + self.wave * (frequency * place).sin()
        head = weights.head
        if rounded:
            return (seen.bfloat16() @ head.bfloat16().T).to(F64)
        return seen @ head.T

    def sample(self) -> None:
        """The engine: samples every token of a turn, and says with which logprob."""
        clean = [torch.zeros(self.rows, STATE, dtype=F64) for _ in self.versions]
        mixed, leaked = clean[0], self.left_behind
        before = clean
        for t in range(LENGTH):
            version = self.version[:, t, None]
            state = torch.where(version == 0, clean[0], clean[1])
            if "stale_cache" in self.causes:
                state = torch.where(version == 0, clean[0], mixed)
            if "leaked_state" in self.causes:
                state = state + leaked
            if "turn_boundary" in self.causes and t > 1:
                opening = (self.turn[:, t] >= 0) & (self.turn[:, t - 2] < 0)
                lost = torch.where(
                    self.version[:, t - 1, None] == 0, clean[0] - before[0], clean[1] - before[1]
                )
                state = torch.where(opening[:, None], state - lost, state)
            logprob = self.engine(state, version, t)
            drawn = torch.multinomial(logprob.exp(), 1, generator=self.random).squeeze(1)
            sampled = self.loss_mask[:, t]
            self.token[:, t] = torch.where(sampled, drawn, self.token[:, t])
            said = logprob.gather(1, self.token[:, t, None]).squeeze(1)
            self.rollout_logprob[:, t] = torch.where(sampled, said, 0.0)
            token, before = self.token[:, t], clean
            clean = [self.fed(w, s, token) for w, s in zip(self.versions, clean)]
            old, new = (self.fed(w, mixed, token) for w in self.versions)
            mixed = torch.where(version == 0, old, new)
            leaked = self.keep * leaked

    def engine(self, state: Tensor, version: Tensor, place: int) -> Tensor:
        """Logprobs of the distribution that the engine samples from, bfloat16 inside."""
        by_version = []
        for weights in self.versions:
            if "weights" in self.causes:
                weights = Weights(weights.embedding, weights.head[:, self.shuffled])
            by_version.append(self.logits(weights, state, place, off="position" in self.causes, rounded=True))
        logits = torch.where(version == 0, *by_version)
        if "temperature" in self.causes:
            logits = logits / TEMPERATURE
        return filtered(logits.log_softmax(1)) if "filtered_support" in self.causes else logits.log_softmax(1)

    def score(
        self, weights: Weights, read: Tensor, *, temperature: float = 1.0, top_p: bool = False
    ) -> tuple:
        """The trainer: logprob of every label and entropy, having read these token ids."""
        state, logprob, entropy = torch.zeros(self.rows, STATE, dtype=F64), [], []
        for t in range(LENGTH):
            all_ = (self.logits(weights, state, t, off=False, rounded=False) / temperature).log_softmax(1)
            all_ = filtered(all_) if top_p else all_
            logprob.append(all_.gather(1, read[:, t, None]).squeeze(1))
            entropy.append(-torch.special.xlogy(all_.exp(), all_.exp()).sum(1))
            state = self.fed(weights, state, read[:, t])
        return torch.stack(logprob, 1), torch.stack(entropy, 1)

    def retokenised(self) -> Tensor:
        """In a third of the rows, three tokens inside a turn are read as others."""
        read = self.token.clone()
        for row in range(self.rows):
            if self.whole(0, 3) == 0:
                place = self.loss_mask[row, PROMPT + 4 : LENGTH - 20].nonzero().squeeze(1) + PROMPT + 4
                start = int(place[self.whole(0, len(place))])
                read[row, start : start + 3] = torch.randint(VOCABULARY, (3,), generator=self.random)
        return read

    def scored(self) -> Scene:
        read = self.retokenised() if "retokenised" in self.causes else self.token
        old, new = self.versions
        logprob, entropy = self.score(new, read)
        own = torch.where(self.version == 0, self.score(old, read)[0], logprob)
        alternative = Alternative(
            temperature=self.score(new, read, temperature=TEMPERATURE)[0].flatten(),
            filtered_support=self.score(new, read, top_p=True)[0].flatten(),
            retokenised=self.score(new, self.token)[0].flatten(),
            stale_version=own.flatten(),
            stale_cache=None,
            leaked_state=None,
        )
        start = torch.where(self.loss_mask & (self.turn != self.turn.roll(1, 1)), torch.arange(LENGTH), 0)
        fact = TokenFact(
            logprob=logprob.flatten(),
            rollout_logprob=self.rollout_logprob.flatten(),
            loss_mask=self.loss_mask.flatten(),
            entropy=entropy.flatten(),
            row_id=torch.arange(self.rows).repeat_interleave(LENGTH),
            position=torch.arange(LENGTH).repeat(self.rows),
            token_in_turn=(torch.arange(LENGTH) - start.cummax(1).values).flatten(),
            policy_version=torch.where(self.loss_mask, self.version, -1).flatten(),
        )
        return Scene(fact=fact, alternative=alternative)


def filtered(logprob: Tensor) -> Tensor:
    """The smallest set of tokens that holds TOP_P, renormalised."""
    ordered, order = logprob.sort(descending=True, dim=1)
    outside = ordered.exp().cumsum(1) - ordered.exp() >= TOP_P
    dropped = torch.zeros_like(outside).scatter(1, order, outside)
    return logprob.masked_fill(dropped, -torch.inf).log_softmax(1)
