"""Laws of core.mask: a mask belongs to the label, and labels stay in their row."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import mask

ROWS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=5)
F64 = torch.float64


def packed(rows):
    value = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    row_id = torch.tensor([i for i, row in enumerate(rows) for _ in row], dtype=torch.long)
    return value, row_id


def flags(*values):
    return torch.tensor(values, dtype=torch.bool)


# Labels


@given(rows=ROWS)
def test_next_in_row_shifts_each_row_on_its_own(rows):
    expected = [token for row in rows for token in [*row[1:], -1]]
    assert mask.next_in_row(*packed(rows), fill=-1).tolist() == expected


@given(rows=ROWS)
def test_every_token_but_the_first_of_a_row_is_a_label_once(rows):
    value, row_id = packed(rows)
    labels = mask.next_in_row(torch.arange(len(value)), row_id, fill=-1)
    first = [i for i in range(len(value)) if i == 0 or row_id[i] != row_id[i - 1]]
    assert sorted(labels[labels >= 0].tolist()) == sorted(set(range(len(value))) - set(first))


@given(rows=ROWS, data=st.data())
def test_packing_does_not_show_in_a_label(rows, data):
    """Rows in any order and under any names, packed or alone, have the same labels."""
    order = data.draw(st.permutations(range(len(rows))))
    names = data.draw(st.lists(st.integers(-9, 9), min_size=len(rows), max_size=len(rows), unique=True))
    value, place = packed([rows[i] for i in order])
    row_id = torch.tensor(names, dtype=torch.long)[place] if rows else place
    alone = [mask.next_in_row(*packed([rows[i]]), fill=-7) for i in order]
    assert torch.equal(mask.next_in_row(value, row_id, fill=-7), torch.cat([value[:0], *alone]))


def test_labels_never_cross_rows():
    """G17: 12 is no label's hidden state, and 20 no label."""
    labels = mask.next_in_row(*packed([[10, 11, 12], [20, 21]]), fill=-1)
    assert labels.tolist() == [11, 12, -1, 21, -1]


def test_the_last_token_of_the_pack_is_no_neighbour_of_the_first():
    """A shift by rolling brings the first token round to the end; here even the names agree."""
    assert mask.next_in_row(torch.tensor([5, 6, 7]), torch.tensor([1, 2, 1]), fill=-1).tolist() == [-1] * 3
    assert mask.next_in_row(torch.tensor([5]), torch.tensor([1]), fill=-1).tolist() == [-1]


def test_mask_is_aligned_with_the_label():
    """G16: tokens p p r r; the first sampled token is predicted by the last of the prompt."""
    row_id = torch.zeros(4, dtype=torch.long)
    label_mask = mask.next_in_row(flags(False, False, True, True), row_id, fill=False)
    assert label_mask.tolist() == [False, True, True, False]
    assert float((torch.tensor([10.0, 20, 30, 0]) * label_mask).sum() / label_mask.sum()) == 25


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool]
)
@pytest.mark.parametrize("index", [torch.int64, torch.int32, torch.uint8])
def test_fields_keep_their_dtype(dtype, index):
    found = mask.next_in_row(torch.ones(3, dtype=dtype), torch.tensor([0, 0, 1]).to(index), fill=False)
    assert found.dtype == dtype and found.tolist() == [1, 0, 0]


def test_a_whole_number_fills_a_field_of_floats():
    found = mask.next_in_row(torch.tensor([-0.5, -1.5]), torch.tensor([0, 0]), fill=0)
    assert found.tolist() == [-1.5, 0.0] and found.dtype == torch.float32
    assert mask.next_in_row(flags(False, False), torch.tensor([0, 0]), fill=True).tolist() == [False, True]
    assert mask.next_in_row(torch.tensor([1j, 2j]), torch.tensor([0, 0]), fill=0.5).tolist() == [2j, 0.5]


@given(rows=ROWS, junk=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_the_first_token_of_a_row_is_read_by_nobody_and_has_no_gradient(rows, junk):
    """It is nobody's label, so garbage there shows neither in a value nor in a gradient."""
    value, row_id = packed(rows)
    first = torch.tensor([i == 0 or bool(row_id[i] != row_id[i - 1]) for i in range(len(value))]).bool()
    clean = value.to(F64).requires_grad_()
    dirty = torch.where(first, junk, value.to(F64)).requires_grad_()
    for field in (clean, dirty):
        (mask.next_in_row(field, row_id, fill=0.0) * torch.arange(1, len(value) + 1)).sum().backward()
    assert torch.equal(*(mask.next_in_row(f, row_id, fill=0.0) for f in (clean, dirty)))
    assert clean.grad is not None and dirty.grad is not None and torch.equal(clean.grad, dirty.grad)
    assert torch.equal(clean.grad, torch.where(first, 0, torch.arange(len(value))).to(F64))


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_next_in_row_refuses_shapes_that_differ(sizes):
    row_id = torch.zeros(sizes[1], dtype=torch.long)
    with pytest.raises(ValueError, match=r"^value and row_id must have one shape \[T\], got \[\("):
        mask.next_in_row(torch.zeros(sizes[0]), row_id, fill=0)


def test_next_in_row_refuses_more_than_one_axis():
    with pytest.raises(ValueError, match=r"must have one shape \[T\], got \[\(1, 2\), \(1, 2\)\]"):
        mask.next_in_row(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.long), fill=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_next_in_row_refuses_row_ids_that_are_not_integers(dtype):
    with pytest.raises(ValueError, match=f"^row_id must be an integer tensor, got {dtype}$"):
        mask.next_in_row(torch.zeros(2), torch.zeros(2, dtype=dtype), fill=0)


@pytest.mark.parametrize(
    "dtype, fill",
    [(torch.bool, 0), (torch.bool, -100), (torch.bool, 0.0), (torch.int64, 0.5)]
    + [(dtype, None) for dtype in (torch.bool, torch.int64, torch.float32, torch.complex64)],
)
def test_next_in_row_refuses_a_fill_that_the_field_cannot_hold(dtype, fill):
    with pytest.raises(ValueError, match=f"^fill must be of the kind of value, {dtype}, got {fill}$"):
        mask.next_in_row(torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=torch.long), fill=fill)


FULL = {
    torch.uint8: (0, 255),
    torch.int16: (-(2**15), 2**15 - 1),
    torch.int64: (-(2**63), 2**63 - 1),
    torch.float16: (-65504, 65504),
    torch.bfloat16: (-3.3895313892515355e38, 3.3895313892515355e38),
}


@pytest.mark.parametrize("dtype", FULL)
def test_a_fill_is_what_it_was_up_to_the_ends_of_its_dtype_and_refused_beyond(dtype):
    row_id, field = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=dtype)
    for fill in FULL[dtype]:
        assert mask.next_in_row(field, row_id, fill=fill).tolist() == [fill]
        beyond = type(fill)(fill * 2) + (1 if fill > 0 else -1)
        with pytest.raises(
            ValueError, match=f"^fill must lie in the range of {dtype}, got {re.escape(str(beyond))}$"
        ):
            mask.next_in_row(field, row_id, fill=beyond)


@pytest.mark.parametrize("fill", [math.inf, -math.inf, math.nan])
def test_a_field_of_floats_may_be_filled_with_what_is_no_number(fill):
    row_id, field = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.float16)
    torch.testing.assert_close(
        mask.next_in_row(field, row_id, fill=fill), torch.full_like(field, fill), equal_nan=True
    )


# Sampled tokens


def test_only_sampled_tokens_are_trained():
    """G21: an assistant turn of three tokens inside the prompt, then two sampled ones."""
    version = torch.tensor([-1, -1, -1, -1, -1, 0, 4])
    everything = torch.ones(7, dtype=torch.bool)
    assert mask.sampled_only(everything, version).tolist() == [False] * 5 + [True] * 2
    assert not mask.sampled_only(~everything, version).any()


@given(tokens=st.lists(st.tuples(st.booleans(), st.integers(-2, 2)), max_size=6), data=st.data())
def test_sampled_only_asks_each_token_for_itself(tokens, data):
    """Any order, and any shape."""
    order = data.draw(st.permutations(range(len(tokens))))
    live = flags(*(tokens[i][0] for i in order))
    version = torch.tensor([tokens[i][1] for i in order], dtype=torch.int32)
    expected = [tokens[i][0] and tokens[i][1] >= 0 for i in order]
    assert mask.sampled_only(live, version).tolist() == expected
    assert mask.sampled_only(live[None], version[None]).tolist() == [expected]


def test_sampled_only_refuses_what_is_no_mask_and_no_version():
    live, version = flags(True, True), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"^loss_mask and policy_version must have one shape, got \["):
        mask.sampled_only(live[:1], version)
    with pytest.raises(ValueError, match="^loss_mask must be bool, got torch.int64$"):
        mask.sampled_only(live.long(), version)
    with pytest.raises(ValueError, match="^policy_version must be an integer tensor, got torch.float32$"):
        mask.sampled_only(live, version.float())


# Rows


def test_overlong_rows_are_told_by_finish_reason_and_not_by_their_last_token():
    """G20: 77 after a stop is kept, the end-of-turn token 2 after a cut is not."""
    finish_reason, last = ["stop", "length"], [77, 2]
    keep = torch.tensor([reason == "stop" for reason in finish_reason])
    row_index = torch.tensor([0, 0, 1, 1])
    found = mask.rows_kept(torch.ones(4, dtype=torch.bool), row_index, keep)
    assert found.tolist() == [True, True, False, False]
    assert last == [77, 2]


@given(rows=ROWS, data=st.data())
def test_rows_kept_takes_all_of_a_row_or_nothing(rows, data):
    value, row_index = packed(rows)
    keep = flags(*data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    loss_mask = value % 2 == 0
    kept = mask.rows_kept(loss_mask, row_index, keep)
    for row, kept_row in enumerate(keep.tolist()):
        own = row_index == row
        assert torch.equal(kept[own], loss_mask[own] if kept_row else torch.zeros_like(loss_mask[own]))


@given(tokens=st.lists(st.tuples(st.booleans(), st.integers(-4, 6)), max_size=8), data=st.data())
def test_a_token_of_no_row_is_not_trained_and_never_counts_as_another_rows(tokens, data):
    """Padding at -1 does not wrap round to the last row, and an index past the end is no error of the device."""
    order = data.draw(st.permutations(range(len(tokens))))
    keep = flags(*data.draw(st.lists(st.booleans(), max_size=4)))
    index = torch.tensor([tokens[i][1] for i in order], dtype=torch.int32)
    found = mask.rows_kept(flags(*(tokens[i][0] for i in order)), index, keep)
    rows = keep.tolist()
    expected = [tokens[i][0] and 0 <= tokens[i][1] < len(rows) and rows[tokens[i][1]] for i in order]
    assert found.tolist() == expected


@pytest.mark.parametrize("more", [0, 298])
def test_indices_of_a_byte_are_indices_and_not_a_mask(more):
    """Also where there are more rows than a byte can name."""
    keep = flags(False, True, *[False] * more)
    index = torch.tensor([1, 0, 1], dtype=torch.uint8)
    assert mask.rows_kept(flags(True, True, True), index, keep).tolist() == [True, False, True]


def test_rows_kept_refuses_what_is_no_mask_no_index_and_no_row():
    live, index, keep = flags(True, True), torch.tensor([0, 0]), flags(True)
    for text, bad in {
        "^loss_mask must be bool, got torch.int64$": (live.long(), index, keep),
        "^keep must be bool, got torch.int64$": (live, index, keep.long()),
        "^row_index must be an integer tensor, got torch.float32$": (live, index.float(), keep),
        "^row_index must be an integer tensor, got torch.bool$": (live, index.bool(), keep),
        r"^loss_mask and row_index must have one shape \[T\], got \[": (live, index[:1], keep),
        r"^keep must have one shape \[B\], got \(1, 1\)$": (live, index, keep[None]),
    }.items():
        with pytest.raises(ValueError, match=text):
            mask.rows_kept(*bad)


# All of them


@given(rows=ROWS)
def test_nothing_that_was_given_is_written_to(rows):
    value, row_id = packed(rows)
    live, keep = value % 2 == 0, torch.ones(len(rows), dtype=torch.bool)
    given_in = (value, row_id, live, keep)
    before = [t.clone() for t in given_in]
    for found in (
        mask.next_in_row(value, row_id, fill=0),
        mask.sampled_only(live, value),
        mask.rows_kept(live, row_id, keep),
    ):
        found.zero_()  # nor shares memory with it
    assert all(torch.equal(a, b) for a, b in zip(given_in, before))


def test_all_masks_compile_without_a_break():
    def every(value, live, row_id, version, keep):
        label = mask.next_in_row(value, row_id, fill=-1)
        live = mask.next_in_row(mask.sampled_only(live, version), row_id, fill=False)
        return label, mask.rows_kept(live, row_id, keep)

    compiled = torch.compile(every, fullgraph=True, backend="eager", dynamic=True)
    for rows in ([[1, 2, 3], [4]], [[1], [2, 3], [4, 5]]):
        value, row_id = packed(rows)
        arguments = value, value % 2 == 0, row_id, value - 2, torch.ones(len(rows), dtype=torch.bool)
        assert all(torch.equal(a, b) for a, b in zip(compiled(*arguments), every(*arguments)))


def test_masks_stay_on_the_device_of_what_they_are_given():
    value, index, live = (torch.zeros(3, dtype=d, device="meta") for d in (F64, torch.int64, torch.bool))
    assert mask.next_in_row(value, index, fill=0).device.type == "meta"
    assert mask.sampled_only(live, index).device.type == "meta"
    assert mask.rows_kept(live, index, live).device.type == "meta"
