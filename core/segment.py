"""Sums over what belongs together, by shapes that do not depend on the data.

Ids are integers in any order and with any gaps. `dense` gives every id a place 0, 1, ..., K - 1; a table over
places has T entries, of which the last T - K stay 0. So every function here runs under torch.compile without
a break, which torch.unique does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .shapes import PerToken, check_bool, check_float, check_integer, check_one_axis


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
        ValueError: if the two are not tensors of one shape [T], or place is not integer.
    """
    check_integer(place=place)
    check_one_axis("T", value=value, place=place)
    floats = value.is_floating_point()
    wide = value.to(torch.promote_types(value.dtype, torch.float32) if floats else torch.int64)
    return torch.zeros_like(wide).index_add(0, place.long(), wide)


def per_segment(value: PerToken, place: PerToken) -> PerToken:
    """For every token the sum over all tokens that share its place."""
    return segment_sum(value, place)[place.long()]


class Moment(NamedTuple):
    """What every token sees of the counted tokens of its segment.

    Args:
        size: how many there are.
        mean: 0 where there is none.
        spread: the largest minus the smallest, 0 where there is none.
        centred: the token's own value minus the mean, 0 where it is not counted.
        square: the sum of (centred / spread)^2; the spread is taken out so that no square vanishes.
    """

    size: PerToken
    mean: PerToken
    spread: PerToken
    centred: PerToken
    square: PerToken

    def deviation(self, *, lost: int) -> PerToken:
        """The standard deviation, sqrt(sum of squares / (size - lost)); exactly 0 where all values are equal."""
        return self.spread * (self.square / (self.size - lost).clamp(min=1)).sqrt()


def moment(value: PerToken, counted: PerToken, place: PerToken) -> Moment:
    """Mean and spread of every segment over its counted tokens, the same bit for bit in any order of the tokens.

    Args:
        value: may be garbage where `counted` is False; NaN where it is True makes its segment NaN.
        counted: bool.
        place: of every token, from `dense`.
    """
    check_float(value=value)
    check_bool(counted=counted)
    check_integer(place=place)
    check_one_axis("T", value=value, counted=counted, place=place)
    place = place.long()
    value = torch.where(counted, value, 0).to(torch.promote_types(value.dtype, torch.float32))
    size = per_segment(counted, place)
    empty = value.new_full(value.shape, torch.inf)
    highest = (-empty).scatter_reduce(0, place, torch.where(counted, value, -torch.inf), "amax")[place]
    lowest = empty.scatter_reduce(0, place, torch.where(counted, value, torch.inf), "amin")[place]
    # Rounding may push a mean of equal values off them; the clamp puts it back.
    mean = (_rising_sum(value, place) / size.clamp(min=1)).clamp(lowest, highest)
    spread = torch.where(size > 0, highest - lowest, 0.0)
    centred = torch.where(counted, value - mean, 0.0)
    unit = centred / torch.where(spread == 0, 1.0, spread)
    square = _rising_sum(unit.square(), place)
    return Moment(size, torch.where(size > 0, mean, 0.0), spread, centred, square)


def _rising_sum(value: PerToken, place: PerToken) -> PerToken:
    """`per_segment` from the smallest value up, so that the order of the tokens does not show in the rounding."""
    order = value.argsort()
    # One value after another: in float32 a sum of millions would stall.
    return segment_sum(value[order].double(), place[order])[place].to(value.dtype)
