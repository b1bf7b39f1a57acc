"""The ledger of a trajectory: tokens in, tokens out, and never a tokenizer in between.

What the engine sampled is the only source. An observation is appended only when the template provably left
everything before it alone; otherwise the trajectory forks into a new row. A trajectory is a tuple of rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from .outcome import FINISH_REASONS

NOT_SAMPLED = -1
"""The policy version of a token that no policy sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One row: four entries per token, and how the last completion ended.

    Example: a prompt of two tokens, a completion of one, is
    `Ledger(token_ids=(7, 8, 2), loss_mask=(False, False, True), rollout_logprob=(0.0, 0.0, -0.3),
    policy_version=(-1, -1, 4), finish_reason="stop")`.

    Args:
        token_ids: what the policy saw and wrote, in order.
        loss_mask: True where the policy sampled the token.
        rollout_logprob: as the engine reported it; 0.0, never NaN, where `loss_mask` is False.
        policy_version: the weights that sampled the token; `NOT_SAMPLED` where `loss_mask` is False.
        finish_reason: how the last completion ended; empty where the row ends with a prompt or an
            observation.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    rollout_logprob: tuple[float, ...]
    policy_version: tuple[int, ...]
    finish_reason: str

    def __len__(self) -> int:
        return len(self.token_ids)


def open_ledger(prompt_ids: Sequence[int]) -> Ledger:
    """A row that so far is only prompt; assistant turns inside it are prompt too: not sampled here."""
    if not prompt_ids:
        raise ValueError("prompt_ids must not be empty")
    nothing = Ledger(token_ids=(), loss_mask=(), rollout_logprob=(), policy_version=(), finish_reason="")
    return _append_given(nothing, prompt_ids, finish_reason="")


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
        ValueError: if the lists differ in length, a logprob is not finite, a version is negative, or the row
            already ends with a finished completion.
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
    return Ledger(
        token_ids=row.token_ids + tuple(token_ids),
        loss_mask=row.loss_mask + (True,) * len(token_ids),
        rollout_logprob=row.rollout_logprob + tuple(logprob),
        policy_version=row.policy_version + tuple(policy_version),
        finish_reason=finish_reason,
    )


def close(row: Ledger, token_ids: Sequence[int]) -> Ledger:
    """The row with an end of turn that the policy did not write: in the context, never trained.

    Needed before an observation may follow a turn that hit its token limit or was aborted.
    """
    if row.finish_reason not in ("length", "abort"):
        raise ValueError(f"only a turn cut by length or abort can be closed, got {row.finish_reason!r}")
    return _append_given(row, token_ids, finish_reason="stop")


def observation_delta(
    rendered_prefix: Sequence[int],
    rendered_full: Sequence[int],
    *,
    stop_ids: Collection[int],
    last_token: int,
    separator: Sequence[int],
) -> tuple[int, ...] | None:
    """What an observation adds to a row that ends with `last_token`, or None where that cannot be proved.

    The template is rendered twice, without and with the observation. The delta is accepted when the first
    is a prefix of the second and the place of the sampled stop token in it is certain:

    * the prefix ends with the stop token and then `separator` (ChatML: a newline): the delta begins with the
      separator, which the template wrote and the policy did not;
    * the new part begins with the stop token (GLM: it opens the observation): the row has it already.

    Anything else is None, and the caller forks: always well-formed, only less is trained in one row.

    Args:
        rendered_prefix: the conversation up to and with the assistant's turn; its wording may be
            re-tokenised.
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


def append_observation(row: Ledger, token_ids: Sequence[int]) -> Ledger:
    """The row with what the world said, and the prompt of the next turn: seen, never trained.

    Raises:
        ValueError: if the row does not end with a completed turn; `close` it, or end the trial as truncated.
    """
    if row.finish_reason != "stop":
        raise ValueError(f"an observation must follow a completed turn, got {row.finish_reason!r}")
    return _append_given(row, token_ids, finish_reason="")


def continue_rows(rows: tuple[Ledger, ...], prompt_ids: Sequence[int]) -> tuple[Ledger, ...]:
    """The trajectory ready for a turn whose whole prompt is `prompt_ids`.

    If the prompt extends the last row token for token, that row grows; otherwise it is left as it is and a
    new row begins (a fork), in which everything before the coming completion is prompt.
    """
    if not rows:
        return (open_ledger(prompt_ids),)
    last, prompt = rows[-1], tuple(prompt_ids)
    if last.finish_reason == "stop" and prompt[: len(last)] == last.token_ids:
        return (*rows[:-1], append_observation(last, prompt[len(last) :]))
    return (*rows, open_ledger(prompt))


def truncate(row: Ledger, length: int) -> Ledger:
    """The first `length` tokens of a row with all that belongs to them; a row that was cut ends by length."""
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}")
    if length >= len(row):
        return row
    return Ledger(
        token_ids=row.token_ids[:length],
        loss_mask=row.loss_mask[:length],
        rollout_logprob=row.rollout_logprob[:length],
        policy_version=row.policy_version[:length],
        finish_reason="length",
    )


def sampled_runs(row: Ledger) -> tuple[tuple[int, int], ...]:
    """Where the policy spoke: (start, end) of every maximal run of sampled tokens."""
    edges = [False, *row.loss_mask, False]
    starts = [i for i in range(len(row)) if edges[i + 1] and not edges[i]]
    ends = [i + 1 for i in range(len(row)) if edges[i + 1] and not edges[i + 2]]
    return tuple(zip(starts, ends, strict=True))


def _append_given(row: Ledger, token_ids: Sequence[int], *, finish_reason: str) -> Ledger:
    count = len(token_ids)
    return replace(
        row,
        token_ids=row.token_ids + tuple(token_ids),
        loss_mask=row.loss_mask + (False,) * count,
        rollout_logprob=row.rollout_logprob + (0.0,) * count,
        policy_version=row.policy_version + (NOT_SAMPLED,) * count,
        finish_reason=finish_reason,
    )
