"""Laws of core.segment: who belongs together, whatever the ids are called and wherever they stand."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from core import segment

F64 = torch.float64
ids_of = st.lists(st.sampled_from([-(2**63), -7, 0, 1, 5, 2**63 - 1]), max_size=12)
numbers = st.sampled_from([0.0, 0.1, -0.1, 1 / 3, 7.0, -7.0]) | st.floats(-1e3, 1e3)


@st.composite
def segments(draw):
    """Places, values and a mask of some tokens."""
    ids = draw(ids_of)
    value = draw(st.lists(numbers, min_size=len(ids), max_size=len(ids)))
    counted = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    place = segment.dense(torch.tensor(ids, dtype=torch.long))
    return torch.tensor(value, dtype=F64), torch.tensor(counted, dtype=torch.bool), place


def members(counted, place):
    """For every token the positions of the counted tokens of its segment."""
    return [[j for j in range(len(place)) if counted[j] and place[j] == place[i]] for i in range(len(place))]


@given(ids=ids_of)
@example(ids=[])
@example(ids=[30, 10, 30, 20])
def test_places_are_the_ranks_of_the_distinct_ids(ids):
    tensor = torch.tensor(ids, dtype=torch.long)
    place = segment.dense(tensor)
    assert place.dtype == torch.int64 and place.shape == tensor.shape
    assert place.tolist() == [sorted(set(ids)).index(name) for name in ids]


@given(ids=ids_of, data=st.data())
def test_places_follow_their_ids_through_any_permutation(ids, data):
    order = torch.tensor(data.draw(st.permutations(range(len(ids)))), dtype=torch.long)
    tensor = torch.tensor(ids, dtype=torch.long)
    assert torch.equal(segment.dense(tensor[order]), segment.dense(tensor)[order])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_ids_may_be_of_any_integer_type(dtype):
    assert segment.dense(torch.tensor([3, 1, 3, 2], dtype=dtype)).tolist() == [2, 0, 2, 1]


@given(batch=segments())
def test_sums_agree_with_a_loop(batch):
    value, counted, place = batch
    everyone = members(torch.ones_like(counted), place)
    expected = [math.fsum(value[j] for j in own) for own in everyone]
    assert segment.per_segment(value, place).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    table = segment.segment_sum(value, place)
    assert table.shape == value.shape
    for k in range(len(place)):
        own = math.fsum(value[j] for j in range(len(place)) if place[j] == k)
        assert float(table[k]) == pytest.approx(own, rel=1e-12, abs=1e-12)


@given(batch=segments())
def test_a_mask_is_counted_exactly(batch):
    _, counted, place = batch
    found = segment.per_segment(counted, place)
    assert found.dtype == torch.int64 and found.tolist() == [len(own) for own in members(counted, place)]


def test_sums_are_wide():
    """Eight bits would wrap round at 300 ones, sixteen lose the 2049th."""
    place = torch.zeros(3000, dtype=torch.long)
    assert int(segment.per_segment(torch.ones(3000, dtype=torch.uint8), place)[0]) == 3000
    for given_dtype, got in ((torch.float16, torch.float32), (torch.bfloat16, torch.float32), (F64, F64)):
        total = segment.per_segment(torch.ones(3000, dtype=given_dtype), place)
        assert total.dtype == got and float(total[0]) == 3000


def test_a_sum_gives_each_of_its_values_a_gradient_of_one():
    value = torch.tensor([1.0, 2.0, 4.0], dtype=F64, requires_grad=True)
    segment.segment_sum(value, torch.tensor([1, 0, 1]))[1].backward()
    assert value.grad is not None and value.grad.tolist() == [1, 0, 1]


@given(batch=segments())
def test_moments_agree_with_a_loop(batch):
    value, counted, place = batch
    got = segment.moment(*batch)
    for i, own in enumerate(members(counted, place)):
        values = [float(value[j]) for j in own]
        mean = math.fsum(values) / len(values) if values else 0.0
        spread = max(values) - min(values) if values else 0.0
        assert int(got.size[i]) == len(values) and float(got.spread[i]) == spread
        assert float(got.mean[i]) == pytest.approx(mean, rel=1e-12, abs=1e-12)
        assert float(got.centred[i]) == pytest.approx(float(value[i]) - mean if counted[i] else 0, abs=1e-12)
        for lost in (0, 1):
            variance = math.fsum((v - mean) ** 2 for v in values) / max(len(values) - lost, 1)
            assert float(got.deviation(lost=lost)[i]) == pytest.approx(math.sqrt(variance), abs=1e-11)


@given(batch=segments(), data=st.data())
def test_moments_are_bit_for_bit_the_same_in_any_order(batch, data):
    order = torch.tensor(data.draw(st.permutations(range(len(batch[0])))), dtype=torch.long)
    for moved, stayed in zip(segment.moment(*(x[order] for x in batch)), segment.moment(*batch)):
        assert torch.equal(moved, stayed[order])


def test_rounding_does_not_show_the_order():
    """.1 + .2 + .3 is one bit more than .3 + .2 + .1, and what cancels may leave nothing or 1e-17."""
    for values in ([0.1, 0.2, 0.3], [0.1, 0.2, -0.3], [1e16, 1.0, -1e16]):
        found = set()
        for order in itertools.permutations(values):
            value, place = torch.tensor(order, dtype=F64), torch.zeros(3, dtype=torch.long)
            told = segment.moment(value, torch.ones(3, dtype=torch.bool), place)
            found.add((float(told.mean[0]), float(told.square[0])))
        assert len(found) == 1


@given(count=st.integers(1, 40), value=numbers)
def test_equal_values_have_no_deviation_at_all(count, value):
    """Their mean is themselves, whatever the rounding of their sum."""
    same = torch.full((count,), value, dtype=F64)
    got = segment.moment(same, torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.long))
    assert torch.equal(got.mean, same) and not got.centred.any() and not got.deviation(lost=0).any()


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_a_deviation_is_not_lost_in_its_square(scale):
    value = torch.tensor([0.0, 2.0], dtype=F64) * scale
    got = segment.moment(value, torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.long))
    assert got.deviation(lost=0).tolist() == pytest.approx([scale, scale], rel=1e-12)


@given(batch=segments(), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e308]))
def test_moments_read_nothing_outside_the_mask(batch, junk):
    value, counted, place = batch
    value = value.requires_grad_()
    dirty = torch.where(counted, value, junk)
    for poisoned, clean in zip(segment.moment(dirty, counted, place), segment.moment(*batch)):
        assert torch.equal(poisoned, clean)
    segment.moment(dirty, counted, place).centred.sum().backward()
    assert value.grad is not None and value.grad.isfinite().all()


def test_a_counted_nan_is_seen_in_its_segment_only():
    value = torch.tensor([math.nan, 1.0, 2.0, 4.0], dtype=F64)
    got = segment.moment(value, torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1]))
    for field in (got.mean, got.spread, got.centred, got.deviation(lost=0)):
        assert field.isnan().tolist() == [True, True, False, False]


@given(batch=segments())
def test_inputs_are_untouched(batch):
    before = [x.clone() for x in batch]
    segment.dense(batch[2]), segment.per_segment(batch[0], batch[2]), segment.moment(*batch)  # pyright: ignore[reportUnusedExpression]
    assert all(torch.equal(a, b) for a, b in zip(before, batch))


def test_everything_compiles_into_one_graph():
    def whole(ids, value, counted):
        place = segment.dense(ids)
        told = segment.moment(value, counted, place)
        return place, segment.per_segment(value, place), told.deviation(lost=1), *told

    compiled = torch.compile(whole, fullgraph=True, backend="eager")
    for ids in ([4, 2, 4, 9], [], [7, 7]):
        given_ids, value = torch.tensor(ids, dtype=torch.long), torch.arange(len(ids)).to(F64)
        for one, other in zip(compiled(given_ids, value, value > 0), whole(given_ids, value, value > 0)):
            assert torch.equal(one, other)


@pytest.mark.parametrize("ids", [torch.ones(2), torch.ones(2).bool(), torch.ones(2, dtype=torch.complex64)])
def test_ids_that_are_not_integers_are_refused(ids):
    with pytest.raises(ValueError, match=f"^ids must be an integer tensor, got {ids.dtype}$"):
        segment.dense(ids)


def test_ids_of_two_axes_and_values_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"^ids must have one shape \[T\], got \(2, 3\)$"):
        segment.dense(torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(
        ValueError, match=r"^value and place must have one shape \[T\], got \[\(3,\), \(2,\)\]$"
    ):
        segment.segment_sum(torch.ones(3), torch.zeros(2, dtype=torch.long))


def test_a_sum_of_a_million_does_not_stall_in_float32():
    """Added one after another in float32, a mean of 10.5 over two million tokens would be off in the third digit."""
    value = torch.linspace(10, 11, 2_000_000)
    found = segment.moment(
        value, torch.ones(len(value), dtype=torch.bool), torch.zeros(len(value), dtype=torch.long)
    )
    assert float(found.mean[0]) == pytest.approx(10.5, rel=1e-6)


@pytest.mark.parametrize("short", ["value", "counted", "place"])
def test_moments_of_shapes_that_differ_are_refused(short):
    given = {"value": torch.ones(2), "counted": torch.ones(2).bool(), "place": torch.zeros(2).long()}
    given[short] = given[short][:1]
    got = [tuple(x.shape) for x in given.values()]
    text = re.escape(f"value, counted and place must have one shape [T], got {got}")
    with pytest.raises(ValueError, match=f"^{text}$"):
        segment.moment(**given)
