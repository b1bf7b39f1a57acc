"""core/nearness.py against regular expressions."""

from __future__ import annotations

import oracle_nearness as oracle
from hypothesis import given
from hypothesis import strategies as st

from core.nearness import near_miss, numbers_in

texts = st.text("0123459.,- −²aB\n", max_size=14)


@given(texts)
def test_numbers_in_are_those_of_a_regular_expression(text: str) -> None:
    assert numbers_in(text) == oracle.numbers_in(text)


@given(
    st.sampled_from(["4", "-4", "4,000", "fee", "Fee 4", "12", ""]) | texts,
    texts | st.sampled_from(["the FEE, 4", "x 4"]),
)
def test_near_miss_is_what_numbers_and_words_say(expected: str, got: str) -> None:
    assert near_miss(expected, got) == oracle.near_miss(expected, got)
