"""Per-token weights from the whole step's mask: loss = sum(weight * value), and nothing else divides.

Call once per optimizer step, over all its tokens, before any split; then every split over micro-batches and
ranks adds up to the same gradient. Ids are integers in any order. Only live tokens, rows and groups count:
one with no True in the mask is as if it were not there. Weights are 0 where the mask is False.

A group is all rows of one prompt. The step has N tokens in S rows of P prompts; n_i are the tokens of a row,
N_p and G_p the tokens and rows of a prompt. All raise ValueError for a mask that is not bool, ids that are
not integers, tensors that are not of one shape [T]; those that count rows also for a row in two groups, which
is what row ids that start again in every group look like. That last one is not seen under torch.compile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .segment import dense, per_segment, segment_sum
from .shapes import PerToken, check_bool, check_integer, check_one_axis


def token_mean_weight(
    loss_mask: PerToken, row_id: PerToken, group_id: PerToken, *, dtype: torch.dtype
) -> PerToken:
    """1 / N: every token has one vote. Long rows and long groups speak loudest."""
    _check(loss_mask, row_id, group_id)
    return _inverse(loss_mask.sum(), loss_mask, dtype)


def sequence_mean_weight(
    loss_mask: PerToken, row_id: PerToken, group_id: PerToken, *, dtype: torch.dtype
) -> PerToken:
    """1 / (S n_i): every row has one vote, shared by its tokens."""
    row, _ = _rows(loss_mask, row_id, group_id)
    return _inverse(_live(loss_mask, row).sum() * per_segment(loss_mask, row), loss_mask, dtype)


def prompt_mean_weight(
    loss_mask: PerToken, row_id: PerToken, group_id: PerToken, *, dtype: torch.dtype
) -> PerToken:
    """1 / (P N_p): every prompt has one vote, shared by all tokens of all its rows."""
    _check(loss_mask, row_id, group_id)
    group = dense(group_id)
    return _inverse(_live(loss_mask, group).sum() * per_segment(loss_mask, group), loss_mask, dtype)


def prompt_mean_of_sequence_means_weight(
    loss_mask: PerToken, row_id: PerToken, group_id: PerToken, *, dtype: torch.dtype
) -> PerToken:
    """1 / (P G_p n_i): every prompt has one vote, shared by its rows, each row's share by its tokens."""
    row, group_of_row = _rows(loss_mask, row_id, group_id)
    group = dense(group_id)
    prompts, rows = _live(loss_mask, group).sum(), segment_sum(_live(loss_mask, row), group_of_row)[group]
    return _inverse(prompts * rows * per_segment(loss_mask, row), loss_mask, dtype)


def sequence_sum_weight(
    loss_mask: PerToken, row_id: PerToken, group_id: PerToken, *, length: float, dtype: torch.dtype
) -> PerToken:
    """1 / (S L): every row's sum over one constant length. Dr. GRPO, arXiv:2503.20783."""
    if not length > 0:
        raise ValueError(f"length must be positive, got {length}")
    if not length < math.inf:
        raise ValueError(f"length must be finite, got {length}")
    row, _ = _rows(loss_mask, row_id, group_id)
    return _inverse(_live(loss_mask, row).sum(), loss_mask, dtype) / length


def _inverse(denominator: Tensor, loss_mask: PerToken, dtype: torch.dtype) -> PerToken:
    """One over the denominator at live tokens, 0 elsewhere; at least float32, or 1 / N would vanish."""
    live = torch.where(loss_mask, denominator, 1).to(torch.promote_types(dtype, torch.float32))
    return torch.where(loss_mask, live.reciprocal(), 0.0)


def _live(loss_mask: PerToken, place: PerToken) -> Tensor:
    """Table: whether a place has a live token."""
    return segment_sum(loss_mask, place) > 0


def _rows(loss_mask: PerToken, row_id: PerToken, group_id: PerToken) -> tuple[PerToken, Tensor]:
    """The place of every token's row, and the table of the group of each live row."""
    _check(loss_mask, row_id, group_id)
    row, group = dense(row_id), dense(group_id)
    group_of_row = torch.zeros_like(row).scatter_reduce(0, row, torch.where(loss_mask, group, 0), "amax")
    strays = loss_mask & (group_of_row[row] != group)
    if not torch.compiler.is_compiling() and strays.any():
        raise ValueError(f"row_id must name rows of one group each, got {row_id[strays][0]} in several")
    return row, group_of_row


def _check(loss_mask: PerToken, row_id: PerToken, group_id: PerToken) -> None:
    check_bool(loss_mask=loss_mask)
    check_integer(row_id=row_id, group_id=group_id)
    check_one_axis("T", loss_mask=loss_mask, row_id=row_id, group_id=group_id)
