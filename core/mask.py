"""Which packed tokens are trained: sampled ones, aligned with their label, of rows that count."""

from __future__ import annotations

import torch

from .shapes import PerRow, PerToken


def next_in_row(value: PerToken, row_id: PerToken, *, fill: int | float | bool) -> PerToken:
    """For every token the value of the next token of its row; `fill` at the last token of a row.

    The hidden state at a token predicts the next one, so `next_in_row` of the token ids is the label, of
    `loss_mask` the label's mask, of `rollout_logprob` the label's logprob. Rows lie end to end; labels never
    cross from one into the next.

    Args:
        value: any per-token field.
        row_id: equal within a row, different in neighbouring rows.
    """
    if not (value.ndim == 1 and value.shape == row_id.shape):
        raise ValueError(
            f"value and row_id must have one shape [T], got {[tuple(value.shape), tuple(row_id.shape)]}"
        )
    shifted = torch.full_like(value, fill)
    shifted[:-1] = torch.where(row_id[1:] == row_id[:-1], value[1:], shifted[:-1])
    return shifted


def sampled_only(loss_mask: PerToken, policy_version: PerToken) -> PerToken:
    """The mask without tokens that no policy sampled: prompt, observation, an end of turn that was added."""
    return loss_mask & (policy_version >= 0)


def rows_kept(loss_mask: PerToken, row_index: PerToken, keep: PerRow) -> PerToken:
    """The mask without the rows that are not kept: overlong, without a signal, of a trial that went wrong.

    A row is overlong by its finish reason and never by its last token: a stop token at the limit is still a
    stop, and a row that was cut may end with any token.

    Args:
        row_index: for every token the position of its row in `keep`.
        keep: bool per row.
    """
    if keep.dtype != torch.bool:
        raise ValueError(f"keep must be bool, got {keep.dtype}")
    return loss_mask & keep[row_index]
