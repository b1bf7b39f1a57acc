"""Laws of core.mask: a mask belongs to the label, and labels stay in their row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import mask

ROWS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=5)


def packed(rows):
    value = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    row_id = torch.tensor([i for i, row in enumerate(rows) for _ in row], dtype=torch.long)
    return value, row_id


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


def test_labels_never_cross_rows():
    labels = mask.next_in_row(*packed([[10, 11, 12], [20, 21]]), fill=-1)
    assert labels.tolist() == [11, 12, -1, 21, -1]


def test_mask_is_aligned_with_the_label():
    """Tokens p p r r; the first sampled token is predicted by the last of the prompt."""
    row_id = torch.zeros(4, dtype=torch.long)
    label_mask = mask.next_in_row(torch.tensor([False, False, True, True]), row_id, fill=False)
    assert label_mask.tolist() == [False, True, True, False]
    assert float((torch.tensor([10.0, 20, 30, 0]) * label_mask).sum() / label_mask.sum()) == 25


def test_fields_keep_their_dtype():
    row_id = torch.zeros(2, dtype=torch.long)
    assert mask.next_in_row(torch.tensor([-0.5, -1.5]), row_id, fill=0.0).tolist() == [-1.5, 0.0]
    assert mask.next_in_row(torch.zeros(2, dtype=torch.bool), row_id, fill=True).tolist() == [False, True]


@given(rows=ROWS)
def test_next_in_row_leaves_its_input_alone(rows):
    value, row_id = packed(rows)
    before = value.clone()
    mask.next_in_row(value, row_id, fill=0)
    assert torch.equal(value, before)


def test_next_in_row_refuses_shapes_that_differ():
    with pytest.raises(ValueError, match=r"value and row_id must have one shape \[T\], got"):
        mask.next_in_row(torch.zeros(2), torch.zeros(3), fill=0)


def test_only_sampled_tokens_are_trained():
    """An assistant turn of three tokens inside the prompt, then two sampled ones."""
    version = torch.tensor([-1, -1, -1, -1, -1, 0, 4])
    everything = torch.ones(7, dtype=torch.bool)
    assert mask.sampled_only(everything, version).tolist() == [False] * 5 + [True] * 2
    assert not mask.sampled_only(~everything, version).any()


def test_overlong_rows_are_told_by_finish_reason_and_not_by_their_last_token():
    """77 after a stop is kept, the end-of-turn token 2 after a cut is not."""
    finish_reason, last = ["stop", "length"], [77, 2]
    keep = torch.tensor([reason == "stop" for reason in finish_reason])
    row_index = torch.tensor([0, 0, 1, 1])
    assert mask.rows_kept(torch.ones(4, dtype=torch.bool), row_index, keep).tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert last == [77, 2]


@given(rows=ROWS, data=st.data())
def test_rows_kept_takes_all_of_a_row_or_nothing(rows, data):
    value, row_index = packed(rows)
    keep = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), dtype=torch.bool
    )
    loss_mask = value % 2 == 0
    kept = mask.rows_kept(loss_mask, row_index, keep)
    for row, kept_row in enumerate(keep.tolist()):
        own = row_index == row
        assert torch.equal(kept[own], loss_mask[own] if kept_row else torch.zeros_like(loss_mask[own]))


def test_rows_kept_refuses_a_keep_that_is_not_bool():
    with pytest.raises(ValueError, match="keep must be bool, got torch.int64"):
        mask.rows_kept(torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.long), torch.tensor([1]))
