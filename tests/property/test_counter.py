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


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="count must not be negative, got -1"):
        counter.permutation(-1, 0)
