"""core/mismatch.py against averages in a loop, and the published table."""

from __future__ import annotations

import math

import oracle_mismatch as oracle
import pytest
from comparing import assert_same, flags, junk, logprobs, no_number, numbers
from hypothesis import given
from hypothesis import strategies as st

from core.mismatch import MismatchSums, add_sums, is_healthy, mismatch, mismatch_sums, worst_tokens

Token = tuple[float, float, bool]
usable = st.tuples(logprobs, logprobs, st.just(True))
tokens = st.lists(
    usable
    | st.tuples(no_number, logprobs, st.just(True))
    | st.tuples(logprobs, no_number | st.just(-9999.0), st.just(True))
    | st.tuples(junk, junk, st.just(False)),
    max_size=8,
)


def summed(rows: list[Token]) -> MismatchSums:
    """The sums of a list of tokens."""
    return mismatch_sums(
        numbers([a for a, _, _ in rows]), numbers([b for _, b, _ in rows]), flags([m for _, _, m in rows])
    )


def plain(rows: list[Token]) -> tuple[list[tuple[float, float]], int]:
    """Usable pairs, and the number of unusable tokens."""
    return oracle.pairs([a for a, _, _ in rows], [b for _, b, _ in rows], [m for _, _, m in rows])


@given(tokens)
def test_mismatch_sums_are_sums_over_usable_tokens(rows: list[Token]) -> None:
    found, (inside, unusable) = summed(rows), plain(rows)
    assert found.unusable_count.item() == unusable
    for name, expected in oracle.sums(inside).items():
        assert_same(getattr(found, name), float(expected), absolute=1e-11, what=name)


@given(tokens)
def test_mismatch_is_the_mean_over_usable_tokens(rows: list[Token]) -> None:
    found = mismatch(summed(rows))
    for name, expected in oracle.means(plain(rows)[0]).items():
        assert_same(getattr(found, name), expected, absolute=1e-11, what=name)


@given(tokens, tokens)
def test_add_sums_of_two_parts_are_the_sums_of_the_whole(one: list[Token], other: list[Token]) -> None:
    inside, unusable = plain(one + other)
    found = add_sums(summed(one), summed(other))
    assert found.unusable_count.item() == unusable
    for name, expected in oracle.sums(inside).items():
        assert_same(getattr(found, name), float(expected), absolute=1e-11, what=name)


@given(tokens, st.floats(0.01, 3))
def test_is_healthy_below_the_bound_and_never_without_a_token(rows: list[Token], bound: float) -> None:
    mean = oracle.means(plain(rows)[0])["absolute"]
    found = is_healthy(mismatch(summed(rows)), bound=bound)
    if math.isnan(mean) or abs(mean - bound) > 1e-9:
        assert found.item() == (mean < bound)


@given(tokens, st.data())
def test_worst_tokens_are_the_first_of_all_sorted_by_their_gap(
    rows: list[Token], data: st.DataObject
) -> None:
    rows = [*rows, (-1.0, -1.0, False)]
    count = data.draw(st.integers(1, len(rows)))
    usable = [(abs(a - b), -t, a - b) for t, (a, b, m) in enumerate(rows) if m and (a, b) in plain(rows)[0]]
    worst = sorted(usable, reverse=True)[:count]
    found = worst_tokens(
        numbers([a for a, _, _ in rows]), numbers([b for _, b, _ in rows]), flags([m for _, _, m in rows]),
        count=count,
    )  # fmt: skip
    spare = count - len(worst)
    assert_same(found.token_index, [-t for _, t, _ in worst] + [-1] * spare)
    assert_same(found.difference, [d for _, _, d in worst] + [0.0] * spare)


# losses.md 6.

TABLE: list[Token] = [(-1.0, -1.1, True), (-0.5, -0.5, True), (-2.0, -1.7, True)]


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("absolute", 0.133333333333),
        ("k1", 0.0666666666667),
        ("k3", 0.0153297129191),
        ("multiplicative", 1.15167657522),
        ("probability", 0.0274521994298),
        ("effective_share", 0.97461219304),
        ("perplexity", 3.21127054315),
        ("rollout_perplexity", 3.00416602395),
    ],
)
def test_mismatch_table(metric: str, value: float) -> None:
    assert_same(getattr(mismatch(summed(TABLE)), metric), value, relative=1e-11)


def test_mismatch_table_gives_chi_square_and_the_ratio_of_perplexities() -> None:
    sums, found = summed(TABLE), mismatch(summed(TABLE))
    assert_same(sums.ratio_square / sums.token_count - 1, -0.0765952019153, relative=1e-10)
    assert_same(found.perplexity / found.rollout_perplexity, 1.06893910575, relative=1e-11)


def test_mismatch_of_recipe_f8_weighs_tokens() -> None:
    first, second = (
        [(-1.0, -1.5, True), (-2.0, -1.0, True), (-3.0, -3.0, False)],
        [(-0.5, -0.5, True), (-1.5, -2.0, True), (-2.5, -1.0, True)],
    )
    found = mismatch(add_sums(summed(first), summed(second)))
    assert_same(found.absolute, 0.7)


def test_mean_gap_of_three_hundredths_is_a_multiplicative_error_of_at_least_1_0305() -> None:
    found = mismatch(summed([(-1.0, -1.03, True), (-1.0, -0.97, True)]))
    assert_same(found.absolute, 0.03)
    assert found.multiplicative.item() >= 1.0304


def test_no_token_has_no_mean() -> None:
    assert all(math.isnan(field.item()) for field in mismatch(summed([(math.nan, 0.0, False)])))
