"""Laws of core.ledger: a row is its columns, and its spans are only how it is kept."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import ledger
from core.ledger import NOT_SAMPLED, Ledger, Span

COLUMNS = ("token_ids", "loss_mask", "rollout_logprob", "policy_version")
IDS = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def spans(draw):
    ids = draw(IDS)
    if draw(st.booleans()):
        return ledger.given(ids)
    version = draw(st.lists(st.integers(0, 2), min_size=len(ids), max_size=len(ids)))
    return ledger.sampled(ids, [-0.5] * len(ids), version)


rows = st.builds(
    lambda parts, ending: Ledger(spans=tuple(parts), finish_reason=ending),
    st.lists(spans(), max_size=4),
    st.sampled_from(["", "stop", "length"]),
)


def columns(row):
    return [getattr(row, name) for name in COLUMNS]


def test_the_example_of_the_ledger_reads_as_it_says():
    row = Ledger(spans=(Span((7, 8), (), ()), Span((2,), (-0.3,), (4,))), finish_reason="stop")
    assert columns(row) == [(7, 8, 2), (False, False, True), (0.0, 0.0, -0.3), (-1, -1, 4)]
    assert len(row) == 3 and row.last_token == 2 and NOT_SAMPLED == -1


@given(row=rows)
def test_a_column_is_its_spans_end_to_end(row):
    expected = [
        (token, span.sampled, *((lp, v) if span.sampled else (0.0, NOT_SAMPLED)))
        for span in row.spans
        for token, lp, v in zip(
            span.token_ids, span.rollout_logprob or span.token_ids, span.policy_version or span.token_ids
        )
    ]
    assert list(zip(*columns(row))) == expected and len(row) == len(expected)
    assert not row.spans or row.last_token == row.token_ids[-1]


@given(row=rows, at=st.integers(0, 12))
def test_rows_are_equal_when_their_columns_are_however_the_tokens_came(row, at):
    head, tail = ledger.split(row, at)
    other = Ledger(spans=(*head, *tail), finish_reason=row.finish_reason)
    assert other == row and hash(other) == hash(row)


def test_a_set_of_many_rows_tells_them_apart_by_their_hash():
    many = [Ledger(spans=(ledger.given([token]),), finish_reason="") for token in range(50)]
    assert len({hash(row) for row in many}) > 25


@given(one=rows, other=rows)
def test_rows_that_differ_in_a_column_or_in_their_ending_are_not_equal(one, other):
    same = columns(one) == columns(other) and one.finish_reason == other.finish_reason
    assert (one == other) is same and (one != other) is not same


@pytest.mark.parametrize(
    "span",
    [Span((1,), (), ()), Span((1,), (-0.5,), (3,)), Span((1,), (-0.25,), (4,)), Span((2,), (-0.5,), (4,))],
)
def test_a_row_is_not_equal_to_one_with_another_token_origin_logprob_or_version(span):
    row = Ledger(spans=(Span((1,), (-0.5,), (4,)),), finish_reason="stop")
    assert row != replace(row, spans=(span,)) and row != replace(row, finish_reason="length")
    assert row != (row.token_ids, row.loss_mask, row.rollout_logprob, row.policy_version, "stop")


@given(row=rows, at=st.integers(-2, 16))
def test_the_two_sides_of_a_split_are_the_row(row, at):
    head, tail = ledger.split(row, at)
    before, after = (Ledger(spans=side, finish_reason=row.finish_reason) for side in (head, tail))
    assert len(before) == min(max(at, 0), len(row))
    assert [a + b for a, b in zip(columns(before), columns(after))] == columns(row)
    assert all(len(span) for span in (*head, *tail))
    whole = [span for span in row.spans if any(span is side for side in (*head, *tail))]
    assert len(whole) <= len(row.spans) <= len(head) + len(tail) <= len(row.spans) + 1


@given(span=spans(), start=st.integers(0, 5), end=st.integers(0, 5))
def test_a_part_of_a_span_keeps_what_belongs_to_its_tokens(span, start, end):
    part = span.part(start, end)
    assert part.token_ids == span.token_ids[start:end] and len(part) == len(part.token_ids)
    assert part.rollout_logprob == span.rollout_logprob[start:end]
    assert part.policy_version == span.policy_version[start:end]


@given(ids=IDS)
def test_a_span_says_who_wrote_it(ids):
    wrote = ledger.sampled(list(ids), [-1.0] * len(ids), [0] * len(ids))
    assert wrote.sampled is True and ledger.given(list(ids)).sampled is False
    assert wrote == Span(ids, (-1.0,) * len(ids), (0,) * len(ids))
    assert ledger.given(list(ids)) == Span(ids, (), ())


def test_a_token_id_is_never_negative():
    """Padding marks such as -100 are no tokens; 0 is one."""
    with pytest.raises(ValueError, match="^token_ids must not be negative, got -100$"):
        ledger.given([5, -100, -1])
    with pytest.raises(ValueError, match="^token_ids must not be negative, got -1$"):
        ledger.sampled([-1], [-0.5], [0])
    assert ledger.given([]) == Span((), (), ()) and ledger.given([0]).token_ids == (0,)


def test_rows_and_spans_are_values():
    row = Ledger(spans=(ledger.given([1]),), finish_reason="")
    with pytest.raises(FrozenInstanceError):
        row.finish_reason = "stop"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        row.spans[0].token_ids = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        Ledger(row.spans, "")  # type: ignore[misc]
