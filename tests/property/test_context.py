"""Laws of core.context: every token once, every rank as many, attention as dear, its keys the row's beginning."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.context import share

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)
RANKS = st.integers(1, 4)


def shares(lengths: list[int], ranks: int, multiple: int = 1):
    return [share(lengths, ranks=ranks, rank=rank, multiple=multiple) for rank in range(ranks)]


@given(LENGTHS, RANKS, st.integers(1, 4))
def test_every_token_is_on_one_rank_and_every_rank_has_as_many(lengths, ranks, multiple):
    found = shares(lengths, ranks, multiple)
    assert len({one.padded for one in found}) == 1
    assert sorted(place for one in found for place in one.take) == list(range(sum(found[0].padded)))
    assert len({len(one.take) for one in found}) == 1
    assert len(found[0].take) % multiple == 0
    assert all(padded >= length for padded, length in zip(found[0].padded, lengths))
    assert sum(found[0].padded) - sum(lengths) < 2 * ranks * (len(lengths) + multiple)


@given(LENGTHS, RANKS)
def test_attention_costs_every_rank_the_same(lengths, ranks):
    def pairs(one):
        segments = zip(one.query_length, one.key_length)
        return sum(queries * keys - queries * (queries - 1) // 2 for queries, keys in segments)

    assert len({pairs(one) for one in shares(lengths, ranks)}) == 1


@given(LENGTHS, RANKS, st.integers(0, 2**31 - 1))
def test_attention_over_the_shares_is_attention_inside_each_row(lengths, ranks, seed):
    found = shares(lengths, ranks)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, sum(found[0].padded), 4, generator=generator, dtype=torch.float64)
    whole = torch.cat([attend(*x) for x in zip(*(y.split(found[0].padded) for y in (q, k, v)))])
    gathered = torch.tensor([place for one in found for place in one.take])
    for one in found:
        own = torch.tensor(one.take)
        keys = gathered[torch.tensor(one.key)] if ranks > 1 else own
        parts = zip(
            q[own].split(one.query_length), k[keys].split(one.key_length), v[keys].split(one.key_length)
        )
        assert torch.allclose(torch.cat([attend(*part) for part in parts]), whole[own])


def attend(q, k, v):
    """The last query sees every key."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    return (q @ k.T).masked_fill(~seen, -torch.inf).softmax(1) @ v


def test_two_ranks_share_eight_tokens_as_first_and_last_quarter_and_the_middle():
    first, second = shares([8], 2)
    assert first.take == (0, 1, 6, 7) and second.take == (2, 3, 4, 5)
    assert first.key_length == (2, 8) and second.key_length == (4, 6)
    assert first.key == (0, 1, 0, 1, 4, 5, 6, 7, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"lengths": []}, "lengths must not be empty, got none"),
        ({"lengths": [0]}, "every length must be positive, got 0"),
        ({"ranks": 0}, "ranks must be positive, got 0"),
        ({"rank": 2}, "rank must be in 0..1, got 2"),
        ({"rank": -1}, "rank must be in 0..1, got -1"),
        ({"multiple": 0}, "multiple must be positive, got 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, told):
    with pytest.raises(ValueError, match=f"^{told}$"):
        share(**{"lengths": [3], "ranks": 2, "rank": 0, "multiple": 1, **arguments})
