"""What a row of a trajectory is: spans of tokens, each sampled by the policy or given to it.

A row is a value. Growing it copies references to its spans and none of its tokens, so a move costs what it adds;
rows that grew from one row share the spans of their common past. Read as columns, a row is laid flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NOT_SAMPLED = -1
"""The policy version of a token that no policy sampled."""


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens of one origin.

    Example: `Span((8, 2), (-0.3, -0.1), (4, 4))` was sampled; `Span((7, 8), (), ())` was given.

    Args:
        token_ids: in order.
        rollout_logprob: one a token as the engine reported it; empty if the span was given.
        policy_version: the weights that sampled each token; empty if the span was given.
    """

    token_ids: tuple[int, ...]
    rollout_logprob: tuple[float, ...]
    policy_version: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> bool:
        """Whether the policy wrote it."""
        return bool(self.policy_version)

    def part(self, start: int, end: int) -> Span:
        """The tokens from start up to end with all that belongs to them."""
        return Span(
            self.token_ids[start:end], self.rollout_logprob[start:end], self.policy_version[start:end]
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ledger:
    """One row: four columns with an entry per token, and how the last completion ended.

    Rows are equal when their columns and endings are, however the tokens came. Reading a column costs the whole
    row: read it once. What a turn needs, the length and the last token, does not.

    Example: a prompt of two tokens and a completion of one are `Ledger(spans=(Span((7, 8), (), ()),
    Span((2,), (-0.3,), (4,))), finish_reason="stop")`; its `loss_mask` is (False, False, True).

    Args:
        spans: in order, none empty.
        finish_reason: how the last completion ended; empty where the row ends with a prompt or an observation.
    """

    spans: tuple[Span, ...]
    finish_reason: str

    def __len__(self) -> int:
        return sum(map(len, self.spans))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    @property
    def _value(self) -> tuple[object, ...]:
        columns = (self.token_ids, self.loss_mask, self.rollout_logprob, self.policy_version)
        return (*columns, self.finish_reason)

    @property
    def last_token(self) -> int:
        """The token that the row ends with."""
        return self.spans[-1].token_ids[-1]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What the policy saw and wrote, in order."""
        return tuple([token for span in self.spans for token in span.token_ids])

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """True where the policy sampled the token."""
        return tuple([span.sampled for span in self.spans for _ in span.token_ids])

    @property
    def rollout_logprob(self) -> tuple[float, ...]:
        """As the engine reported it; 0.0, never NaN, where `loss_mask` is False."""
        return tuple([v for span in self.spans for v in span.rollout_logprob or (0.0,) * len(span)])

    @property
    def policy_version(self) -> tuple[int, ...]:
        """The weights that sampled the token; `NOT_SAMPLED` where `loss_mask` is False."""
        return tuple([v for span in self.spans for v in span.policy_version or (NOT_SAMPLED,) * len(span)])


def given(token_ids: Sequence[int]) -> Span:
    """A span that the policy did not write."""
    return Span(_checked(token_ids), (), ())


def sampled(token_ids: Sequence[int], logprob: Sequence[float], policy_version: Sequence[int]) -> Span:
    """A span that the policy wrote."""
    return Span(_checked(token_ids), tuple(logprob), tuple(policy_version))


def split(row: Ledger, at: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The spans before the token `at` and those from it on; a span on both sides is cut in two."""
    head: list[Span] = []
    tail: list[Span] = []
    start = 0
    for span in row.spans:
        cut = min(max(at - start, 0), len(span))
        head += [span.part(0, cut)] if cut > 0 else []
        tail += [span.part(cut, len(span))] if cut < len(span) else []
        start += len(span)
    return tuple(head), tuple(tail)


def _checked(token_ids: Sequence[int]) -> tuple[int, ...]:
    ids = tuple(token_ids)
    if ids and min(ids) < 0:
        raise ValueError(f"token_ids must not be negative, got {min(ids)}")
    return ids
