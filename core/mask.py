"""Which packed tokens are trained: sampled ones, aligned with their label, of rows that count."""

from __future__ import annotations

import math

import torch

from .shapes import PerRow, PerToken, check_bool, check_integer, check_one_axis, check_one_shape


def next_in_row(value: PerToken, row_id: PerToken, *, fill: int | float | bool) -> PerToken:
    """For every token the value of the next token of its row; `fill` at the last token of a row.

    The hidden state at a token predicts the next one, so `next_in_row` of the token ids is the label, of
    `loss_mask` the label's mask, of `rollout_logprob` the label's logprob. Rows lie end to end; labels never
    cross from one into the next.

    Args:
        value: any per-token field.
        row_id: equal within a row, different in neighbouring rows.
        fill: of the kind of `value`: True or False for a mask, whole for ids, any number for floats, which is
            rounded as they are.

    Raises:
        ValueError: if the shapes are not one [T], row_id is not integer, or `fill` is of another kind or out of
            the range of the dtype of `value`.
    """
    check_one_axis("T", value=value, row_id=row_id)
    check_integer(row_id=row_id)
    _check_fill(fill, value.dtype)
    position = torch.arange(len(row_id), device=row_id.device)
    follows = (row_id.roll(-1) == row_id) & (position < len(row_id) - 1)
    return torch.where(follows, value.roll(-1), torch.full_like(value, fill))


def _check_fill(fill: object, dtype: torch.dtype) -> None:
    """Refuse a fill that a field of that dtype would hold as something else."""
    whole = not (dtype.is_floating_point or dtype.is_complex)
    kinds = bool if dtype == torch.bool else int if whole else (int, float)
    if not isinstance(fill, kinds):
        raise ValueError(f"fill must be of the kind of value, {dtype}, got {fill}")
    if dtype != torch.bool and abs(fill) < math.inf:
        limits = torch.iinfo(dtype) if whole else torch.finfo(dtype)
        if not limits.min <= fill <= limits.max:
            raise ValueError(f"fill must lie in the range of {dtype}, got {fill}")


def sampled_only(loss_mask: PerToken, policy_version: PerToken) -> PerToken:
    """The mask without tokens that no policy sampled: prompt, observation, an end of turn that was added.

    Any shape. Raises ValueError if the two differ in shape, the mask is not bool or the version not integer.
    """
    check_one_shape(loss_mask=loss_mask, policy_version=policy_version)
    check_bool(loss_mask=loss_mask)
    check_integer(policy_version=policy_version)
    return loss_mask & (policy_version >= 0)


def rows_kept(loss_mask: PerToken, row_index: PerToken, keep: PerRow) -> PerToken:
    """The mask without the rows that are not kept: overlong, without a signal, of a trial that went wrong.

    A row is overlong by its finish reason and never by its last token: a stop token at the limit is still a
    stop, and a row that was cut may end with any token. A token whose index names no row of `keep` (padding,
    say at -1) is not trained; it never wraps round to another row.

    Args:
        row_index: for every token the position of its row in `keep`.
        keep: bool per row.

    Raises:
        ValueError: if the shapes are not [T], [T] and [B], a mask is not bool, or row_index is not integer.
    """
    check_one_axis("T", loss_mask=loss_mask, row_index=row_index)
    check_one_axis("B", keep=keep)
    check_bool(loss_mask=loss_mask, keep=keep)
    check_integer(row_index=row_index)
    index = row_index.long()
    known = (index >= 0) & (index < len(keep))
    table = torch.cat([keep, keep.new_zeros(1)])
    return loss_mask & table[torch.where(known, index, len(keep))]
