"""Laws of core.rescore: of all sets of rescorings, the one that leaves least of the gap for its price."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.rescore import rescored, weighted_median

F64 = torch.float64
whole = st.integers(-6, 6).map(float)


def column(*values):
    return torch.tensor(values, dtype=F64)


def best(difference, shift, direction, *, fit=True, min_share=0.1):
    return rescored(difference, shift, direction, torch.tensor(fit), min_share=min_share)


@given(pairs=st.lists(st.tuples(whole, whole), min_size=1, max_size=7))
def test_weighted_median_is_the_slope_of_least_absolute_residual(pairs):
    y, x = column(*(p[0] for p in pairs)), column(*(p[1] for p in pairs))
    slope = weighted_median(y[None], x)
    assert slope.shape == (1,)
    left = float((y - slope * x).abs().sum())
    candidates = [0.0] + [a / b for a, b in pairs if b]
    assert left == pytest.approx(min(float((y - c * x).abs().sum()) for c in candidates))


def test_a_slope_is_0_when_more_than_half_of_the_weight_has_no_difference():
    assert float(weighted_median(column(9, 9, 0, 0)[None], column(1, 1, 1, 1))) in (0.0, 9.0)
    assert float(weighted_median(column(9, 9, 0, 0)[None], column(1, 1, 1, 2))) == 0.0
    assert float(weighted_median(column(9, 9, 0, 0)[None], column(1, 2, 1, 1))) == 4.5
    assert float(weighted_median(column(3, 5)[None], column(0, 0))) == 0.0


@given(
    data=st.data(),
    count=st.integers(0, 3),
    size=st.integers(1, 6),
    fit=st.booleans(),
    min_share=st.sampled_from([0.01, 0.1, 0.4]),
)
def test_the_best_set_agrees_with_trying_all(data, count, size, fit, min_share):
    def row():
        return data.draw(st.lists(whole, min_size=size, max_size=size))

    difference, direction = column(*row()), column(*row())
    shift = torch.tensor([row() for _ in range(count)], dtype=F64).reshape(count, size)
    found = best(difference, shift, direction, fit=fit, min_share=min_share)
    gap = float(difference.abs().sum())
    left, cost = {}, {}
    for bits in product((0, 1), repeat=count + 1):
        plain = difference + sum((b * s for b, s in zip(bits[1:], shift)), torch.zeros(size, dtype=F64))
        slope = weighted_median(plain[None], direction) * bits[0]
        left[bits] = plain - slope * direction
        if fit or not bits[0]:
            cost[bits] = float(left[bits].abs().sum()) + min_share * gap * sum(bits)
    least = min(cost.values())
    good = [bits for bits, value in cost.items() if value <= least + 1e-9]
    assert any(torch.allclose(found.residual, left[bits]) for bits in good)
    used = tuple(int(x) for x in (found.shift.abs().sum(1) > 0))
    for bits in good[:1] if len(good) == 1 else []:
        assert all(u <= b for u, b in zip(used, bits))
        assert torch.allclose(difference + found.shift.sum(0), found.residual)
        assert bool((found.shift[0] == -found.slope * direction).all())
    closed = gap - float(found.residual.abs().sum())
    assert float(found.share.sum()) == pytest.approx(closed / gap if gap else 0.0, abs=1e-9)
    assert bool((found.share >= -1e-12).all())


def test_shares_are_what_each_closes_last_scaled_to_what_all_close():
    difference = column(1, 1, 1, 1)
    shift = torch.stack([column(-1, -1, 0, 0), column(0, -1, -1, -1)])
    found = best(difference, shift, column(0, 0, 0, 0))
    # Both together leave |1 - 2| at the second token: each alone leaves 2 and 1, both leave 1.
    assert found.share.tolist() == [0.0, 0.0, 0.75] and found.residual.tolist() == [1, 0, 0, 0]
    shift = torch.stack([column(-1, -1, 0, 0), column(0, 0, -1, 0)])
    found = best(difference, shift, column(0, 0, 0, 0))
    assert found.share.tolist() == [0.0, 0.5, 0.25] and found.residual.tolist() == [0, 0, 0, 1]
    shift = torch.stack([column(-0.5, 0, 0, 0), column(0, -1, -1, -1)])
    found = best(difference, shift, column(1, 0, 0, 0))
    assert found.share.tolist() == [0.25, 0.0, 0.75] and float(found.slope) == 1.0
    assert found.shift.tolist() == [[-1, 0, 0, 0], [0, 0, 0, 0], [0, -1, -1, -1]]


def test_two_that_overlap_share_in_proportion_to_what_each_closes_last():
    difference = column(4, 4, 4, 4)
    shift = torch.stack([column(-4, -1, 0, 0), column(0, -1, -4, -4)])
    found = best(difference, shift, column(0, 0, 0, 0))
    # Left: 16 none, 11 first, 7 second, 2 both; last ones 5 and 9 of the 14 that both close.
    assert found.share.tolist() == pytest.approx([0, 5 / 16, 9 / 16])
    shift = torch.stack([column(-4, -4, 0, 0), column(0, -2, -4, -4)])
    found = best(difference, shift, column(0, 0, 0, 0))
    # Left: 16 none, 8 first, 6 second, 2 both; last ones 4 and 6, scaled from 10 to 14.
    assert found.share.tolist() == pytest.approx([0, 5.6 / 16, 8.4 / 16])


def test_a_rescoring_that_closes_less_than_its_price_is_not_used():
    difference, none = column(1, 1, 1, 1), column(0, 0, 0, 0)
    shift = column(-1, 0, 0, 0)[None]
    assert best(difference, shift, none, min_share=0.24).share.tolist() == [0, 0.25]
    unused = best(difference, shift, none, min_share=0.26)
    assert (
        unused.share.tolist() == [0, 0]
        and not unused.shift.any()
        and torch.equal(unused.residual, difference)
    )


def test_no_gap_has_no_shares():
    found = best(column(0, 0), column(1, -1)[None], column(1, 1))
    assert found.share.tolist() == [0, 0] and float(found.slope) == 0 and not found.residual.any()
