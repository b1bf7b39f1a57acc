"""core/identity.py against rebuilding the row."""

from __future__ import annotations

import oracle_identity as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.identity import Emission, Span, identity_faults

Row = tuple[list[int], list[bool], list[float], list[int], list[tuple[int, int, oracle.Emitted]]]


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A row of observations and completions, as it was emitted."""
    tokens: list[int] = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    mask, logprob, version = [False] * len(tokens), [0.0] * len(tokens), [-1] * len(tokens)
    spans: list[tuple[int, int, oracle.Emitted]] = []
    for _ in range(draw(st.integers(0, 3))):
        out = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        logprobs = draw(st.lists(st.sampled_from([-0.25, -0.1, -3.0]), min_size=len(out), max_size=len(out)))
        versions = draw(st.lists(st.integers(0, 3), min_size=len(out), max_size=len(out)))
        start = len(tokens)
        spans.append((start, start + len(out), (tuple(tokens), out, logprobs, versions)))
        seen = draw(st.lists(st.integers(0, 9), max_size=2))
        tokens = [*tokens, *out, *seen]
        mask += [True] * len(out) + [False] * len(seen)
        logprob += logprobs + [0.0] * len(seen)
        version += versions + [-1] * len(seen)
    return tokens, mask, logprob, version, spans


def faults(row: Row) -> tuple[str, ...]:
    """What the function says of a row."""
    tokens, mask, logprob, version, spans = row
    return identity_faults(
        tokens,
        mask,
        logprob,
        version,
        [Span(start, end, Emission(*emitted)) for start, end, emitted in spans],
    )


@given(rows())
def test_a_row_as_emitted_has_no_fault(row: Row) -> None:
    assert oracle.is_identical(*row)
    assert faults(row) == ()


@settings(max_examples=150)
@given(rows(), st.data())
def test_identity_faults_are_none_exactly_where_the_rebuilt_row_is_equal(
    row: Row, data: st.DataObject
) -> None:
    tokens, mask, logprob, version, spans = row
    tokens, mask, logprob, version, spans = [*tokens], [*mask], [*logprob], [*version], [*spans]
    at = data.draw(st.integers(0, len(tokens) - 1))
    change = data.draw(st.sampled_from(["token", "mask", "logprob", "version", "span", "drop"]))
    if change == "token":
        tokens[at] = data.draw(st.integers(0, 9))
    elif change == "mask":
        mask[at] = data.draw(st.booleans())
    elif change == "logprob":
        logprob[at] = data.draw(st.sampled_from([-0.25, -0.1, -0.25 - 1e-16, -3.0]))
    elif change == "version":
        version[at] = data.draw(st.integers(-1, 3))
    elif change == "drop" and spans:
        spans.pop(data.draw(st.integers(0, len(spans) - 1)))
    elif spans:
        k = data.draw(st.integers(0, len(spans) - 1))
        start, end, emitted = spans[k]
        # Spans that overlap are refused, which is no fault of a row.
        free = k + 1 == len(spans) or end < spans[k + 1][0]
        shift = data.draw(st.integers(0, 1)) if free else 0
        spans[k] = (start + shift, end + shift, emitted)
    changed = (tokens, mask, logprob, version, spans)
    assert (faults(changed) == ()) == oracle.is_identical(*changed)


@pytest.mark.parametrize(
    ("emitted", "row"),
    [([1374, 3672], [21029]), ([8865, 15119], [45886])],
    ids=["excel", "spreadsheet"],
)
def test_a_retokenised_completion_is_a_fault(emitted: list[int], row: list[int]) -> None:
    n = len(row)
    span = Span(1, 1 + n, Emission((7,), emitted, [-0.5] * len(emitted), [0] * len(emitted)))
    assert identity_faults([7, *row], [False] + [True] * n, [0.0] + [-0.5] * n, [-1] + [0] * n, [span])
