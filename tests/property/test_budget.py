"""Laws of core.budget: never past the window, one warning, both ends of a long text."""

from __future__ import annotations

import math
from fractions import Fraction

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
    little = [100 - used <= Fraction(str(ratio)) * 100 for used in spent]
    expected = [flag and not any(little[:i]) for i, flag in enumerate(little)]
    assert nudges(spent, window=100, ratio=ratio) == expected


@pytest.mark.parametrize("left, nudge, percent", [(32000, True, 20), (32001, False, 20), (-5, True, 0)])
def test_worked_nudges(left, nudge, percent):
    """Window 160000, ratio 0.2."""
    used = 160000 - left
    assert budget.should_nudge(window=160000, used=used, ratio=0.2, already_nudged=False) is nudge
    assert budget.percent_left(window=160000, used=used) == percent


@given(left=st.integers(1, 1000), window=st.integers(1, 1000), scale=st.sampled_from([10, 100, 1000]))
def test_the_bound_is_the_ratio_as_written_and_not_as_rounded(left, window, scale):
    """0.29 * 100 is 28.999999999999996, and 29 of 100 are little left."""
    ratio = Fraction(min(left, scale), scale)
    for share in range(left - 1, left + 2):
        found = budget.should_nudge(
            window=window * scale,
            used=(scale - min(share, scale)) * window,
            ratio=float(ratio),
            already_nudged=False,
        )
        assert found == (min(share, scale) <= ratio * scale)


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


@pytest.mark.parametrize("window, used, percent", [(3, 1, 66), (3, 2, 33), (1, 0, 100), (1, 1, 0), (1, 9, 0)])
def test_percent_left_is_rounded_down_and_never_below_zero(window, used, percent):
    assert budget.percent_left(window=window, used=used) == percent


@given(window=st.integers(1, 300), used=st.integers(0, 400))
def test_percent_left_lies_between_0_and_100_and_never_grows_with_use(window, used):
    now = budget.percent_left(window=window, used=used)
    assert 0 <= budget.percent_left(window=window, used=used + 1) <= now <= 100
    assert now == max(0, math.floor(100 * (window - used) / window + 1e-9))


def test_an_observation_that_fills_the_window_leaves_nothing_to_ask_for():
    """The trial is truncated by context: it did not break. Window 256, prompt 273; and an empty window."""
    assert budget.tokens_to_ask(window=256, used=273, cap=20) == 0
    assert budget.tokens_to_ask(window=0, used=0, cap=20) == 0


def test_the_cap_holds_for_a_turn_and_not_for_the_row():
    """Cap 4: three sampled, two seen, three sampled are eight tokens; each turn may ask for four."""
    asked = [budget.tokens_to_ask(window=100, used=used, cap=4) for used in (0, 5, 8)]
    assert asked == [4, 4, 4]


@pytest.mark.parametrize("limit, kept", [(0, "|"), (1, "|d"), (2, "a|d"), (3, "ab|d"), (4, "abcd")])
def test_a_short_limit_keeps_the_tail_first(limit, kept):
    assert budget.cut_text("abcd", limit=limit, marker="|") == kept


@given(sizes=st.lists(st.integers(0, 40), max_size=6), limit=st.integers(0, 120))
def test_shares_are_the_sizes_up_to_one_bound_and_use_the_limit_up(sizes, limit):
    shares = budget.fair_shares(sizes, limit=limit)
    cut = [share for share, size in zip(shares, sizes) if share < size]
    assert sum(shares) == min(limit, sum(sizes)) and all(0 <= s <= size for s, size in zip(shares, sizes))
    assert not cut or max(shares) <= min(cut) + 1


def test_what_is_left_over_never_goes_to_a_text_that_is_whole():
    """3 of 3, and of 7 more 4 and 3: the token over is for a text that lacks it."""
    assert budget.fair_shares([3, 5, 5], limit=10) == (3, 4, 3)


def test_worked_shares():
    """A short answer stays whole beside a world of changes."""
    assert budget.fair_shares([300, 10, 200], limit=110) == (50, 10, 50)
    assert budget.fair_shares([5, 5], limit=3) == (2, 1)
    assert budget.fair_shares([], limit=3) == ()


def ask(**change):
    return budget.tokens_to_ask(**({"window": 9, "used": 1, "cap": 5} | change))


def nudge(**change):
    return budget.should_nudge(**({"window": 9, "used": 1, "ratio": 0.5, "already_nudged": False} | change))


def percent(**change):
    return budget.percent_left(**({"window": 9, "used": 1} | change))


@pytest.mark.parametrize(
    "call, change, text",
    [
        (ask, {"cap": 0}, "cap must be positive, got 0"),
        (ask, {"cap": 2.0}, r"cap must be a whole number, got 2\.0"),
        (ask, {"window": -1}, "window must not be negative, got -1"),
        (ask, {"used": -1}, "used must not be negative, got -1"),
        (ask, {"used": math.nan}, "used must be a whole number, got nan"),
        (nudge, {"ratio": math.nan}, "ratio must lie between 0 and 1, got nan"),
        (nudge, {"ratio": -0.1}, r"ratio must lie between 0 and 1, got -0\.1"),
        (nudge, {"ratio": 1.1}, r"ratio must lie between 0 and 1, got 1\.1"),
        (nudge, {"window": -1}, "window must not be negative, got -1"),
        (nudge, {"used": -1}, "used must not be negative, got -1"),
        (percent, {"window": 0}, "window must be positive, got 0"),
        (percent, {"window": True}, "window must be a whole number, got True"),
        (percent, {"used": -1}, "used must not be negative, got -1"),
        (
            lambda limit: budget.fair_shares([1], limit=limit),
            {"limit": -1},
            "limit must not be negative, got -1",
        ),
        (
            lambda size: budget.fair_shares([size], limit=1),
            {"size": -1},
            "every size must not be negative, got -1",
        ),
        (
            lambda limit: budget.cut_text("a", limit=limit, marker=""),
            {"limit": -1},
            "limit must not be negative, got -1",
        ),
        (
            lambda limit: budget.cut_text("a", limit=limit, marker=""),
            {"limit": 0.5},
            r"limit must be a whole number, got 0\.5",
        ),
    ],
)
def test_bad_input_is_refused(call, change, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        call(**change)


@pytest.mark.parametrize("ratio, left, nudged", [(0.0, 1, False), (0.0, 0, True), (1.0, 9, True)])
def test_the_ends_of_the_ratio_are_never_and_always(ratio, left, nudged):
    assert nudge(ratio=ratio, used=9 - left) is nudged


def test_an_empty_window_is_nudged_about():
    assert nudge(window=0, used=0) is True
