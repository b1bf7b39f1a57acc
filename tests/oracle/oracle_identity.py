"""Whether a row is what the engine emitted: rebuild the row from the emissions and compare."""

from __future__ import annotations

from collections.abc import Sequence

Emitted = tuple[Sequence[int], Sequence[int], Sequence[float], Sequence[int]]
"""prompt ids, token ids, logprobs, versions"""


def is_identical(
    token_ids: Sequence[int],
    loss_mask: Sequence[bool],
    rollout_logprob: Sequence[float],
    policy_version: Sequence[int],
    spans: Sequence[tuple[int, int, Emitted]],
) -> bool:
    """Every span holds its completion, in the context of its prompt, and nothing else is trained."""
    trained = [False] * len(token_ids)
    for start, end, (prompt, tokens, logprobs, versions) in spans:
        where = list(range(start, end))
        if len(where) != len(tokens) or end > len(token_ids):
            return False
        if list(token_ids[:start]) != list(prompt):
            return False
        for k, t in enumerate(where):
            if token_ids[t] != tokens[k] or policy_version[t] != versions[k]:
                return False
            if rollout_logprob[t] != logprobs[k]:
                return False
            trained[t] = True
    return trained == list(loss_mask)
