"""A row as a plain list of tokens, and the moves on it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

Token = tuple[int, bool, float, int]
"""id, sampled, logprob, version"""


class Refused(Exception):
    """The move does not follow."""


class Row(NamedTuple):
    """Tokens, and how the last completion ended."""

    tokens: tuple[Token, ...]
    reason: str


def seen(ids: Sequence[int]) -> tuple[Token, ...]:
    """Tokens that nobody sampled."""
    return tuple((one, False, 0.0, -1) for one in ids)


def opened(prompt: Sequence[int]) -> Row:
    """A prompt."""
    return Row(seen(prompt), "")


def completed(
    row: Row, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], reason: str
) -> Row:
    """A completion after a prompt, an observation, or a chunk that was aborted."""
    if row.reason not in ("", "abort"):
        raise Refused
    new = tuple((one, True, lp, v) for one, lp, v in zip(ids, logprobs, versions))
    return Row(row.tokens + new, reason)


def closed(row: Row, ids: Sequence[int]) -> Row:
    """An end of turn after one that has none."""
    if row.reason not in ("length", "abort"):
        raise Refused
    return Row(row.tokens + seen(ids), "stop")


def observed(row: Row, ids: Sequence[int]) -> Row:
    """An observation after a turn that ended."""
    if row.reason != "stop":
        raise Refused
    return Row(row.tokens + seen(ids), "")


def continued(rows: tuple[Row, ...], prompt: Sequence[int]) -> tuple[Row, ...]:
    """The last row grows if its turn ended and the prompt begins with it; else a row more."""
    if rows and rows[-1].reason == "stop":
        have = [token[0] for token in rows[-1].tokens]
        if list(prompt[: len(have)]) == have:
            return (*rows[:-1], observed(rows[-1], prompt[len(have) :]))
    return (*rows, opened(prompt))


def truncated(row: Row, length: int) -> Row:
    """The first tokens."""
    return row if length >= len(row.tokens) else Row(row.tokens[:length], "length")


def sampled_runs(row: Row) -> list[tuple[int, int]]:
    """Maximal stretches of sampled tokens."""
    runs: list[tuple[int, int]] = []
    for t, token in enumerate(row.tokens):
        if token[1]:
            runs.append((runs.pop()[0] if runs and runs[-1][1] == t else t, t + 1))
    return runs


def trained_once(rows: Sequence[Row]) -> list[Row]:
    """What a row shares with an earlier one, as it was, counts as given."""
    result = []
    for k, row in enumerate(rows):
        shared = 0
        for earlier in rows[:k]:
            n = 0
            while n < min(len(row.tokens), len(earlier.tokens)) and row.tokens[n] == earlier.tokens[n]:
                n += 1
            shared = max(shared, n)
        result.append(
            Row(seen([token[0] for token in row.tokens[:shared]]) + row.tokens[shared:], row.reason)
        )
    return result


def observation_delta(
    prefix: Sequence[int],
    full: Sequence[int],
    stop_ids: Collection[int],
    last_token: int,
    separator: Sequence[int],
) -> list[int] | None:
    """What must follow the sampled stop token in the full rendering, if its place there is certain."""
    if list(full[: len(prefix)]) != list(prefix) or last_token not in stop_ids:
        return None
    end = len(prefix) - len(separator)
    if end >= 1 and prefix[end - 1] == last_token and list(prefix[end:]) == list(separator):
        return list(full[end:])
    if len(full) > len(prefix) and full[len(prefix)] == last_token:
        return list(full[len(prefix) + 1 :])
    return None


def agreed_delta(
    renderings: Sequence[tuple[Sequence[int], Sequence[int]]],
    stop_ids: Collection[int],
    last_token: int,
    separator: Sequence[int],
) -> list[int] | None:
    """The one delta that all give."""
    deltas = [observation_delta(*pair, stop_ids, last_token, separator) for pair in renderings]
    return deltas[0] if all(delta == deltas[0] for delta in deltas) else None
