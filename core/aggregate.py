"""Per-token weights from the whole step's mask: loss = sum(weight * value), and nothing else divides.

Call once per optimizer step, over all its tokens, before any split; then every split over micro-batches and
ranks adds up to the same gradient. Ids are integers in any order. Only live tokens, rows and groups count:
one with no True in the mask is as if it were not there. Weights are 0 where the mask is False.

A group is all rows of one prompt. The step has N tokens in S rows of P prompts; n_i are the tokens of a row,
N_p and G_p the tokens and rows of a prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import PerToken


def token_mean_weight(
    loss_mask: PerToken, row_id: PerToken, group_id: PerToken, *, dtype: torch.dtype
) -> PerToken:
    """1 / N: every token has one vote. Long rows and long groups speak loudest."""
    return _inverse(loss_mask.sum(), loss_mask, dtype)


def sequence_mean_weight(
    loss_mask: PerToken, row_id: PerToken, group_id: PerToken, *, dtype: torch.dtype
) -> PerToken:
    """1 / (S n_i): every row has one vote, shared by its tokens."""
    return _inverse(_distinct(loss_mask, row_id) * _tokens(loss_mask, row_id), loss_mask, dtype)


def prompt_mean_weight(
    loss_mask: PerToken, row_id: PerToken, group_id: PerToken, *, dtype: torch.dtype
) -> PerToken:
    """1 / (P N_p): every prompt has one vote, shared by all tokens of all its rows."""
    return _inverse(_distinct(loss_mask, group_id) * _tokens(loss_mask, group_id), loss_mask, dtype)


def prompt_mean_of_sequence_means_weight(
    loss_mask: PerToken, row_id: PerToken, group_id: PerToken, *, dtype: torch.dtype
) -> PerToken:
    """1 / (P G_p n_i): every prompt has one vote, shared by its rows, each row's share by its tokens."""
    rows = _tokens(_one_per_row(loss_mask, row_id), group_id)
    return _inverse(_distinct(loss_mask, group_id) * rows * _tokens(loss_mask, row_id), loss_mask, dtype)


def sequence_sum_weight(
    loss_mask: PerToken, row_id: PerToken, group_id: PerToken, *, length: float, dtype: torch.dtype
) -> PerToken:
    """1 / (S L): every row's sum over one constant length. Dr. GRPO, arXiv:2503.20783."""
    if not length > 0:
        raise ValueError(f"length must be positive, got {length}")
    return _inverse(_distinct(loss_mask, row_id) * length, loss_mask, dtype)


def _inverse(denominator: Tensor, loss_mask: PerToken, dtype: torch.dtype) -> PerToken:
    """One over the denominator at live tokens, 0 elsewhere; at least float32, or 1 / N would vanish."""
    live = torch.where(loss_mask, denominator, 1).to(torch.promote_types(dtype, torch.float32))
    return torch.where(loss_mask, live.reciprocal(), 0.0)


def _tokens(loss_mask: PerToken, index: PerToken) -> PerToken:
    """For every token, how many live tokens carry its id."""
    _, place = torch.unique(index, return_inverse=True)
    return torch.zeros_like(place).index_add(0, place, loss_mask.to(place.dtype))[place]


def _distinct(loss_mask: PerToken, index: PerToken) -> Tensor:
    """How many ids carry a live token."""
    return _one_per_row(loss_mask, index).sum()


def _one_per_row(loss_mask: PerToken, index: PerToken) -> PerToken:
    """True at the first live token of every id that has any, and nowhere else."""
    _, place = torch.unique(index, return_inverse=True)
    position = torch.where(loss_mask, torch.arange(len(index), device=index.device), len(index))
    first = torch.full_like(place, len(index)).scatter_reduce(0, place, position, "amin")
    return loss_mask & (position == first[place])
