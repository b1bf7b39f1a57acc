"""Sums over what belongs together, by shapes that do not depend on the data.

Ids are integers in any order and with any gaps. `dense` gives every id a place 0, 1, ..., K - 1; a table over
places has T entries, of which the last T - K stay 0. So every function here runs under torch.compile without
a break, which torch.unique does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import PerToken, check_integer, check_one_axis


def dense(ids: PerToken) -> PerToken:
    """The place of every id among the distinct ids in rising order, from 0.

        [30, 10, 30, 20] -> [2, 0, 2, 1]

    Args:
        ids: integers; equal ones belong together, wherever they stand.

    Raises:
        ValueError: if ids is not an integer tensor of one axis.
    """
    check_integer(ids=ids)
    check_one_axis("T", ids=ids)
    order = ids.argsort(stable=True)
    ordered = ids[order]
    changed = ordered != torch.cat([ordered[:1], ordered[:-1]])
    return torch.zeros_like(order).scatter(0, order, changed.cumsum(0))


def segment_sum(value: PerToken, place: PerToken) -> Tensor:
    """A table of sums: entry k is the sum of the values whose place is k, 0 where there is none.

    Bool is counted and integers add up in int64, floats in float32 at least. Carries the gradient of `value`.

    Args:
        value: of every token; one that must not count is 0, and none may be NaN by accident.
        place: of every token, from `dense`.

    Raises:
        ValueError: if the two are not tensors of one shape [T].
    """
    check_one_axis("T", value=value, place=place)
    floats = value.is_floating_point()
    wide = value.to(torch.promote_types(value.dtype, torch.float32) if floats else torch.int64)
    return torch.zeros_like(wide).index_add(0, place, wide)


def per_segment(value: PerToken, place: PerToken) -> PerToken:
    """For every token the sum over all tokens that share its place."""
    return segment_sum(value, place)[place]
