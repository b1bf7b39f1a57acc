"""Laws of nearness: another spelling of the wanted answer is near, another answer is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.nearness import near_miss, numbers_in

words = st.text(st.characters(categories=("L", "N", "P", "Zs"), max_codepoint=0x2FF), max_size=12)


@given(words)
def test_a_text_is_near_to_itself_in_any_case_and_in_a_sentence_unless_it_says_nothing(text: str) -> None:
    says = any(letter.isalnum() for letter in text)
    assert near_miss(text, text) == near_miss(text, text.upper().lower()) == says or not text.isascii()
    if text.isascii() and any(letter.isalpha() for letter in text):
        assert near_miss(text, f"the answer is {text} , I think")


@given(st.integers(-9999, 9999), st.integers(-9999, 9999))
def test_a_wanted_number_is_near_where_it_comes_first_or_last(wanted: int, other: int) -> None:
    assert near_miss(f"{wanted}", f"{wanted}.0 of {other}") and near_miss(
        f"{wanted}", f"{other} and {wanted:,}"
    )
    assert near_miss(f"{wanted}", f"{other} , {wanted} , {other}") == (wanted == other)
    assert not near_miss(f"{wanted}", "") and not near_miss("", f"{wanted}")


@given(st.lists(st.integers(-99_999, 99_999) | st.sampled_from([0.5, -2.25, 1234.75]), max_size=5))
def test_numbers_come_back_from_the_text_that_lists_them(numbers: list[float]) -> None:
    assert numbers_in("; ".join(f"{number:,}" for number in numbers)) == numbers


def test_digits_that_are_no_number_are_none() -> None:
    assert numbers_in("version 1.2.3 of 5-7, ², x-4.") == [5.0, 7.0, 4.0]
