"""How a trajectory grows: tokens in, tokens out, and never a tokenizer in between.

What the engine sampled is the only source. An observation is appended only when the template provably left
everything before it alone; otherwise the trajectory forks into a new row. A trajectory is a tuple of rows, and each
sampled token is trained in one of them. A move costs the tokens that it adds, however long the row is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from .ledger import NOT_SAMPLED as NOT_SAMPLED
from .ledger import Ledger as Ledger
from .ledger import Span as Span
from .ledger import given, sampled, split
from .outcome import FINISH_REASONS


def open_ledger(prompt_ids: Sequence[int]) -> Ledger:
    """A row that so far is only prompt; assistant turns inside it are prompt too: not sampled here.

    Raises:
        ValueError: if the prompt is empty or holds a negative id.
    """
    if not prompt_ids:
        raise ValueError("prompt_ids must not be empty")
    return Ledger(spans=(given(prompt_ids),), finish_reason="")


def append_completion(
    row: Ledger,
    token_ids: Sequence[int],
    logprob: Sequence[float],
    policy_version: Sequence[int],
    *,
    finish_reason: str,
) -> Ledger:
    """The row with a completion, exactly as sampled, stop token included.

    After an aborted chunk the next chunk goes on with the same turn, each token with its own version.

    Raises:
        ValueError: if the lists differ in length, a logprob is not finite, an id or a version is negative, or the
            row already ends with a finished completion.
    """
    if finish_reason not in FINISH_REASONS:
        raise ValueError(f"finish_reason must be one of {', '.join(FINISH_REASONS)}, got {finish_reason!r}")
    if row.finish_reason not in ("", "abort"):
        raise ValueError(
            f"a completion must follow a prompt or an aborted chunk, got one after {row.finish_reason!r}"
        )
    if not len(token_ids) == len(logprob) == len(policy_version):
        raise ValueError(
            "token_ids, logprob and policy_version must be equally long, "
            f"got {len(token_ids)}, {len(logprob)} and {len(policy_version)}"
        )
    for value in logprob:
        if not math.isfinite(value):
            raise ValueError(f"logprob of a sampled token must be finite, got {value}")
    if policy_version and min(policy_version) < 0:
        raise ValueError(f"policy_version of a sampled token must not be negative, got {min(policy_version)}")
    return _grown(row, sampled(token_ids, logprob, policy_version), finish_reason)


def close(row: Ledger, token_ids: Sequence[int]) -> Ledger:
    """The row with an end of turn that the policy did not write: in the context, never trained.

    Needed before an observation may follow a turn that hit its token limit or was aborted.
    """
    if row.finish_reason not in ("length", "abort"):
        raise ValueError(f"only a turn cut by length or abort can be closed, got {row.finish_reason!r}")
    return _grown(row, given(token_ids), "stop")


def observation_delta(
    rendered_prefix: Sequence[int],
    rendered_full: Sequence[int],
    *,
    stop_ids: Collection[int],
    last_token: int,
    separator: Sequence[int],
) -> tuple[int, ...] | None:
    """What an observation adds to a row that ends with `last_token`, or None where that cannot be proved.

    The template is rendered twice, without and with the observation; a short conversation will do
    (`agreed_delta`). The delta is accepted when the first is a prefix of the second and the place of the sampled
    stop token in it is certain:

    * the prefix ends with the stop token and then `separator` (ChatML: a newline): the delta begins with the
      separator, which the template wrote and the policy did not;
    * the new part begins with the stop token (GLM: it opens the observation): the row has it already.

    Anything else is None, and the caller forks: always well-formed, only less is trained in one row.

    Args:
        rendered_prefix: a conversation up to and with the assistant's turn; its wording may be re-tokenised.
        rendered_full: the same with the observation and the next generation prompt.
        stop_ids: tokens that end a turn.
        last_token: the last token of the row.
        separator: what the template writes after a stop token; empty if nothing.
    """
    prefix, full, gap = tuple(rendered_prefix), tuple(rendered_full), tuple(separator)
    if last_token not in stop_ids or full[: len(prefix)] != prefix:
        return None
    closing = (last_token, *gap)
    if prefix[-len(closing) :] == closing:
        return full[len(prefix) - len(gap) :]
    if full[len(prefix) : len(prefix) + 1] == (last_token,):
        return full[len(prefix) + 1 :]
    return None


def agreed_delta(
    renderings: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    stop_ids: Collection[int],
    last_token: int,
    separator: Sequence[int],
) -> tuple[int, ...] | None:
    """The delta that several short conversations agree on, so that the long one is not rendered at all.

    Each pair is a stub without and with the observation. Stubs that differ in what a template may look back at (a
    system prompt, tools, reasoning, calls, the number of turns) and yet give one delta show that it depends on
    none of it. One None, or two deltas, is None. A stub without reasoning speaks for no turn that has some.
    """
    if not renderings:
        raise ValueError("renderings must not be empty")
    found = {
        observation_delta(prefix, full, stop_ids=stop_ids, last_token=last_token, separator=separator)
        for prefix, full in renderings
    }
    return found.pop() if len(found) == 1 else None


def append_observation(row: Ledger, token_ids: Sequence[int]) -> Ledger:
    """The row with what the world said, and the prompt of the next turn: seen, never trained.

    Raises:
        ValueError: if the row does not end with a completed turn; `close` it, or end the trial as truncated.
    """
    if row.finish_reason != "stop":
        raise ValueError(f"an observation must follow a completed turn, got {row.finish_reason!r}")
    return _grown(row, given(token_ids), "")


def continue_rows(rows: tuple[Ledger, ...], prompt_ids: Sequence[int]) -> tuple[Ledger, ...]:
    """The trajectory ready for a turn whose whole prompt is `prompt_ids`.

    If the last row ends with a completed turn and the prompt extends it token for token, that row grows;
    otherwise it is left as it is and a new row begins (a fork), in which everything before the coming completion
    is prompt.
    """
    if not rows:
        return (open_ledger(prompt_ids),)
    last, prompt = rows[-1], tuple(prompt_ids)
    if last.finish_reason == "stop" and prompt[: len(last)] == last.token_ids:
        return (*rows[:-1], append_observation(last, prompt[len(last) :]))
    return (*rows, open_ledger(prompt))


def trained_once(rows: tuple[Ledger, ...]) -> tuple[Ledger, ...]:
    """The same rows, with what a row shares with an earlier one given there, so that it is trained once.

    For rows of one trajectory that grew from a common past: a side branch, a second try. Shared is the longest
    beginning on which all four columns agree; a row that adds nothing is left without a trained token.
    """
    kept: list[Ledger] = []
    for index, row in enumerate(rows):
        past, own = split(row, max((_common(row, earlier) for earlier in rows[:index]), default=0))
        prompt = tuple(given(span.token_ids) for span in past)
        kept.append(Ledger(spans=(*prompt, *own), finish_reason=row.finish_reason))
    return tuple(kept)


def truncate(row: Ledger, length: int) -> Ledger:
    """The first `length` tokens of a row with all that belongs to them; a row that was cut ends by length."""
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}")
    if length >= len(row):
        return row
    head, _ = split(row, length)
    return Ledger(spans=head, finish_reason="length")


def sampled_runs(row: Ledger) -> tuple[tuple[int, int], ...]:
    """Where the policy spoke: (start, end) of every maximal run of sampled tokens."""
    runs: list[tuple[int, int]] = []
    end = 0
    for span in row.spans:
        start, end = end, end + len(span)
        if span.sampled and runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        elif span.sampled:
            runs.append((start, end))
    return tuple(runs)


def _grown(row: Ledger, span: Span, finish_reason: str) -> Ledger:
    return Ledger(spans=(*row.spans, span) if len(span) else row.spans, finish_reason=finish_reason)


def _common(row: Ledger, other: Ledger) -> int:
    """How many tokens of the two rows agree from the start, in all columns."""
    ours = zip(row.token_ids, row.rollout_logprob, row.policy_version)
    theirs = zip(other.token_ids, other.rollout_logprob, other.policy_version)
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(row), len(other)))
