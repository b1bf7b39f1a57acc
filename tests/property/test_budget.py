"""Laws of core.budget: never past the window, one warning, both ends of a long text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import budget


@given(window=st.integers(0, 300), used=st.integers(0, 400), cap=st.integers(1, 99))
def test_what_is_asked_fits_window_and_cap_and_is_the_most_that_does(window, used, cap):
    ask = budget.tokens_to_ask(window=window, used=used, cap=cap)
    assert 0 <= ask <= cap and (ask == 0 or used + ask <= window)
    assert ask == cap or used + ask >= window


@pytest.mark.parametrize(
    "window, used, cap, ask",
    [(256, 273, 20, 0), (100, 90, 20, 10), (100, 90, 50, 10), (100, 99, 50, 1), (9, 9, 5, 0)],
)
def test_worked_budgets(window, used, cap, ask):
    assert budget.tokens_to_ask(window=window, used=used, cap=cap) == ask


def nudges(spent, *, window, ratio):
    told, result = False, []
    for used in spent:
        now = budget.should_nudge(window=window, used=used, ratio=ratio, already_nudged=told)
        told = told or now
        result.append(now)
    return result


@given(spent=st.lists(st.integers(0, 120)).map(sorted), ratio=st.floats(0, 1))
def test_a_trial_is_nudged_once_at_the_first_turn_with_little_left(spent, ratio):
    little = [100 - used <= ratio * 100 for used in spent]
    expected = [flag and not any(little[:i]) for i, flag in enumerate(little)]
    assert nudges(spent, window=100, ratio=ratio) == expected


@pytest.mark.parametrize("left, nudge, percent", [(32000, True, 20), (32001, False, 20), (-5, True, 0)])
def test_worked_nudges(left, nudge, percent):
    """Window 160000, ratio 0.2."""
    used = 160000 - left
    assert budget.should_nudge(window=160000, used=used, ratio=0.2, already_nudged=False) is nudge
    assert budget.percent_left(window=160000, used=used) == percent


@given(text=st.text(max_size=80), limit=st.integers(0, 60))
def test_a_cut_text_is_its_head_the_marker_and_its_tail(text, limit):
    cut = budget.cut_text(text, limit=limit, marker="<cut>")
    if len(text) <= limit:
        assert cut == text
    else:
        head = limit * 2 // 3
        assert cut == text[:head] + "<cut>" + "".join(reversed(text[::-1][: limit - head]))
        assert len(cut) == limit + len("<cut>")


def test_worked_cut():
    """42000 stays, 42001 becomes 28000 + marker + 14000."""
    text = "a" * 28000 + "b" + "c" * 14000
    assert budget.cut_text(text[:-1], limit=42000, marker="|") == text[:-1]
    assert budget.cut_text(text, limit=42000, marker="|") == "a" * 28000 + "|" + "c" * 14000


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="cap must be positive, got 0"):
        budget.tokens_to_ask(window=9, used=1, cap=0)
    with pytest.raises(ValueError, match="ratio must lie between 0 and 1, got nan"):
        budget.should_nudge(window=9, used=1, ratio=math.nan, already_nudged=False)
    with pytest.raises(ValueError, match="limit must not be negative, got -1"):
        budget.cut_text("a", limit=-1, marker="")
