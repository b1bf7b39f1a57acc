"""core/budget.py against counting tokens and characters."""

from __future__ import annotations

from fractions import Fraction

import oracle_budget as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.budget import cut_text, fair_shares, percent_left, should_nudge, tokens_to_ask

windows = st.integers(1, 60)
used = st.integers(0, 80)


@given(windows, used, st.integers(1, 50))
def test_tokens_to_ask_is_what_fits(window: int, taken: int, cap: int) -> None:
    assert tokens_to_ask(window=window, used=taken, cap=cap) == oracle.tokens_to_ask(window, taken, cap)


@given(windows, used, st.sampled_from([0.0, 0.07, 0.25, 0.29, 1.0]), st.booleans())
def test_should_nudge_once_when_what_is_left_is_at_most_the_share(
    window: int, taken: int, ratio: float, already: bool
) -> None:
    little = window - taken <= Fraction(str(ratio)) * window
    found = should_nudge(window=window, used=taken, ratio=ratio, already_nudged=already)
    assert found == (little and not already)


@given(windows, used)
def test_percent_left_is_within_one_of_the_share_and_exact_where_whole(window: int, taken: int) -> None:
    share = max(Fraction(0), Fraction(100 * (window - taken), window))
    found = percent_left(window=window, used=taken)
    assert abs(found - share) < 1
    assert share.denominator > 1 or found == share


@given(st.text(alphabet="abcde", max_size=30), st.integers(1, 25), st.sampled_from(["", "<cut>"]))
def test_cut_text_is_two_thirds_head_and_one_third_tail(text: str, limit: int, marker: str) -> None:
    assert cut_text(text, limit=limit, marker=marker) == oracle.cut_text(text, limit, marker)


@given(st.lists(st.integers(0, 20), max_size=5), st.integers(0, 60))
def test_fair_shares_hands_out_one_by_one_to_who_has_the_fewest(sizes: list[int], limit: int) -> None:
    assert list(fair_shares(sizes, limit=limit)) == oracle.fair_shares(sizes, limit)


# recipe.md F.9 and cases.md G38.


@pytest.mark.parametrize(
    ("window", "taken", "cap", "ask"),
    [(100, 90, 50, 10), (100, 100, 50, 0), (100, 99, 50, 1), (256, 273, 50, 0), (100, 90, 20, 10)],
)
def test_tokens_to_ask_table(window: int, taken: int, cap: int, ask: int) -> None:
    assert tokens_to_ask(window=window, used=taken, cap=cap) == ask


@pytest.mark.parametrize(("left", "nudge", "percent"), [(32000, True, 20), (32001, False, 20), (-5, True, 0)])
def test_nudge_table(left: int, nudge: bool, percent: int) -> None:
    window = 160000
    found = should_nudge(window=window, used=window - left, ratio=0.2, already_nudged=False)
    assert found == nudge
    assert percent_left(window=window, used=window - left) == percent


def test_cut_text_keeps_42000_characters_and_cuts_one_more_to_28000_and_14000() -> None:
    text = "a" * 28000 + "b" + "c" * 14000
    assert cut_text(text[:-1], limit=42000, marker="|") == text[:-1]
    assert cut_text(text, limit=42000, marker="|") == "a" * 28000 + "|" + "c" * 14000
