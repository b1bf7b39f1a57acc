"""core/mask.py against loops over rows."""

from __future__ import annotations

import oracle_mask as oracle
import pytest
from comparing import assert_same, flags, numbers, places
from hypothesis import given
from hypothesis import strategies as st

from core.mask import next_in_row, rows_kept, sampled_only


@st.composite
def packed(draw: st.DrawFn) -> list[int]:
    """Row ids of rows that lie end to end."""
    names = draw(st.lists(st.integers(-3, 3), max_size=5))
    names = [name for k, name in enumerate(names) if k == 0 or name != names[k - 1]]
    return [name for name in names for _ in range(draw(st.integers(1, 4)))]


@given(packed(), st.integers(-9, 9), st.data())
def test_next_in_row_is_the_value_of_the_next_token(rows: list[int], fill: int, data: st.DataObject) -> None:
    value = data.draw(st.lists(st.integers(0, 99), min_size=len(rows), max_size=len(rows)))
    assert_same(next_in_row(places(value), places(rows), fill=fill), oracle.next_in_row(value, rows, fill))


@given(packed(), st.data())
def test_next_in_row_of_floats_and_flags_too(rows: list[int], data: st.DataObject) -> None:
    value = data.draw(st.lists(st.floats(-9, 9), min_size=len(rows), max_size=len(rows)))
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    assert_same(next_in_row(numbers(value), places(rows), fill=0.5), oracle.next_in_row(value, rows, 0.5))
    assert_same(next_in_row(flags(mask), places(rows), fill=False), oracle.next_in_row(mask, rows, False))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([-1, -7, 0, 3])), max_size=8))
def test_sampled_only_keeps_what_some_version_sampled(rows: list[tuple[bool, int]]) -> None:
    mask, version = [m for m, _ in rows], [v for _, v in rows]
    assert_same(sampled_only(flags(mask), places(version)), oracle.sampled_only(mask, version))


@given(
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.lists(st.tuples(st.booleans(), st.integers(-2, 5)), max_size=8),
)
def test_rows_kept_keeps_tokens_of_kept_rows(keep: list[bool], tokens: list[tuple[bool, int]]) -> None:
    mask, row = [m for m, _ in tokens], [r for _, r in tokens]
    assert_same(rows_kept(flags(mask), places(row), flags(keep)), oracle.rows_kept(mask, row, keep))


def test_g16_the_mask_goes_with_the_label() -> None:
    rows = places([0] * 4)
    mask = next_in_row(flags([False, False, True, True]), rows, fill=False)
    assert_same(mask, [False, True, True, False])
    losses = numbers([10, 20, 30, 40])  # of the labels at positions 0, 1, 2; the last has none
    kept = [x for x, m in zip(losses.tolist(), mask.tolist()) if m]
    assert_same(sum(kept) / len(kept), 25.0)


def test_g17_labels_never_cross_from_one_row_into_the_next() -> None:
    found = next_in_row(places([10, 11, 12, 20, 21]), places([0, 0, 0, 1, 1]), fill=-1)
    assert_same(found, [11, 12, -1, 21, -1])


def test_g18_what_is_trained_is_selected_by_the_mask_wherever_it_lies() -> None:
    mask = sampled_only(flags([False, False, True, True, True]), places([-1, -1, 4, 4, 4]))
    value = [0.0, 0.0, -1.0, -2.0, -3.0]
    assert_same([x for x, m in zip(value, mask.tolist()) if m], [-1.0, -2.0, -3.0])


@pytest.mark.parametrize(
    ("reason", "kept"), [("stop", [True, True]), ("length", [False, False])], ids=["stop", "length"]
)
def test_g20_a_row_is_overlong_by_its_finish_reason(reason: str, kept: list[bool]) -> None:
    found = rows_kept(flags([True, True]), places([0, 0]), flags([reason == "stop"]))
    assert_same(found, kept)
