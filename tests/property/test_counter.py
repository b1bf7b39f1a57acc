"""Laws of core.counter: random enough, and the same for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import counter

SEED = st.integers(-(2**70), 2**70)


def test_the_hash_never_changes():
    """A recorded run is replayed by these numbers."""
    assert counter.counter_hash(0) == 16294208416658607535
    assert counter.counter_hash(1, 2, 3) == 17077552343324241147


@given(seed=SEED, a=SEED, b=SEED)
def test_seed_index_and_order_all_matter(seed, a, b):
    one, mask = counter.counter_hash(seed, a, b), 2**64 - 1
    assert 0 <= one < 2**64 and one == counter.counter_hash(seed, a, b)
    if a & mask != b & mask:
        assert one != counter.counter_hash(seed, b, a)
        assert counter.counter_hash(seed, a) != counter.counter_hash(seed, b)
        assert counter.counter_hash(a, 0) != counter.counter_hash(b, 0)
    assert one != counter.counter_hash(seed, a)


def test_uniform_numbers_fill_the_interval_evenly():
    drawn = [counter.counter_uniform(5, i) for i in range(20000)]
    assert 0 <= min(drawn) and max(drawn) < 1
    bins = Counter(int(x * 10) for x in drawn)
    assert all(abs(count - 2000) < 200 for count in bins.values()) and len(bins) == 10


@given(count=st.integers(0, 40), seed=SEED, epoch=st.integers(0, 5))
def test_a_permutation_has_everything_once(count, seed, epoch):
    assert sorted(counter.permutation(count, seed, epoch)) == list(range(count))


def test_every_epoch_has_its_own_order():
    """Reloading the first state would give one order for all."""
    orders = {counter.permutation(20, 42, epoch) for epoch in range(50)}
    assert len(orders) == 50


def test_every_place_is_equally_likely():
    places = Counter(counter.permutation(4, seed).index(0) for seed in range(4000))
    assert all(abs(count - 1000) < 120 for count in places.values())


def test_a_seed_and_an_index_count_modulo_two_to_the_64():
    assert counter.counter_hash(-1, 2**64 + 3) == counter.counter_hash(2**64 - 1, 3)


def test_one_changed_bit_of_the_index_changes_half_the_bits():
    changed = [
        (counter.counter_hash(9, i) ^ counter.counter_hash(9, i ^ (1 << bit))).bit_count()
        for i in range(20)
        for bit in range(64)
    ]
    assert 31.5 < sum(changed) / len(changed) < 32.5 and min(changed) > 10


def test_the_uniform_number_is_the_first_53_bits_of_the_hash():
    assert counter.counter_uniform(1, 2, 3) == (counter.counter_hash(1, 2, 3) >> 11) / 2**53


def test_the_order_of_a_permutation_never_changes():
    """A recorded run is replayed by it."""
    assert counter.permutation(5, 42, 0) == (2, 1, 0, 3, 4)
    assert counter.permutation(0, 42) == ()


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: counter.permutation(-1, 0), "count must not be negative, got -1"),
        (lambda: counter.permutation(2.0, 0), r"count must be a whole number, got 2\.0"),  # pyright: ignore[reportArgumentType]
        (lambda: counter.permutation(True, 0), "count must be a whole number, got True"),
        (lambda: counter.permutation(2, 0.5), r"seed must be a whole number, got 0\.5"),  # pyright: ignore[reportArgumentType]
        (lambda: counter.counter_hash(1.0), r"seed must be a whole number, got 1\.0"),  # pyright: ignore[reportArgumentType]
        (lambda: counter.counter_hash(False), "seed must be a whole number, got False"),
        (lambda: counter.counter_hash(1, 2, None), "every index must be a whole number, got None"),  # pyright: ignore[reportArgumentType]
        (lambda: counter.counter_uniform(1, float("nan")), "every index must be a whole number, got nan"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_is_no_whole_number_is_refused(call, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        call()
