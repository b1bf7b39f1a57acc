"""core/counter.py: no formula is published for it, so its oracle is what chance would do."""

from __future__ import annotations

import math
from collections import Counter

from comparing import assert_same
from hypothesis import given
from hypothesis import strategies as st

from core.counter import counter_hash, counter_uniform, permutation

numbers = st.integers(-(2**70), 2**70)


@given(numbers, st.lists(numbers, max_size=3))
def test_counter_hash_is_64_bits_and_the_same_twice(seed: int, index: list[int]) -> None:
    found = counter_hash(seed, *index)
    assert 0 <= found < 2**64
    assert found == counter_hash(seed, *index)


@given(numbers, st.lists(numbers, max_size=3))
def test_counter_uniform_is_a_multiple_of_two_to_the_minus_53_below_one(seed: int, index: list[int]) -> None:
    found = counter_uniform(seed, *index)
    assert 0 <= found < 1
    assert (found * 2**53).is_integer()


def test_every_bit_of_the_hash_is_a_fair_coin() -> None:
    count = 4000
    draws = [counter_hash(1, index) for index in range(count)]
    for bit in range(64):
        ones = sum(draw >> bit & 1 for draw in draws)
        assert abs(ones - count / 2) < 5 * math.sqrt(count) / 2


def test_one_bit_of_an_index_changes_half_of_the_hash() -> None:
    changed = [
        (counter_hash(3, index) ^ counter_hash(3, index ^ (1 << bit))).bit_count()
        for index in range(40)
        for bit in range(20)
    ]
    assert_same(sum(changed) / len(changed), 32.0, absolute=5 * 4 / math.sqrt(len(changed)))


def test_uniform_numbers_have_the_moments_of_the_uniform_distribution() -> None:
    count = 4000
    draws = [counter_uniform(2, index) for index in range(count)]
    assert_same(sum(draws) / count, 0.5, absolute=5 / math.sqrt(12 * count))
    assert_same(sum(x * x for x in draws) / count, 1 / 3, absolute=5 * 0.3 / math.sqrt(count))
    neighbours = sum((x - 0.5) * (y - 0.5) for x, y in zip(draws, draws[1:])) / count
    assert_same(neighbours, 0.0, absolute=5 / 12 / math.sqrt(count))


@given(st.integers(0, 40), numbers, st.lists(numbers, max_size=2))
def test_permutation_holds_every_number_once(count: int, seed: int, index: list[int]) -> None:
    assert sorted(permutation(count, seed, *index)) == list(range(count))


def test_permutations_of_four_are_equally_frequent() -> None:
    count = 4800
    seen = Counter(permutation(4, 5, index) for index in range(count))
    assert len(seen) == 24
    chi_square = sum((n - count / 24) ** 2 / (count / 24) for n in seen.values())
    assert chi_square < 60  # 23 degrees of freedom: above this once in 30,000


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {permutation(20, seed, epoch) for seed in range(8) for epoch in range(8)}
    assert len(orders) == 64
