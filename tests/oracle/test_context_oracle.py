"""core/context.py against who has which token, token by token."""

from __future__ import annotations

import oracle_context as oracle
from hypothesis import given
from hypothesis import strategies as st

from core.context import share


@given(st.data(), st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 4))
def test_share_has_the_tokens_and_keys_of_the_oracle(
    data: st.DataObject, lengths: list[int], ranks: int, multiple: int
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    found = share(lengths, ranks=ranks, rank=rank, multiple=multiple)
    rows, here, seen = oracle.share(lengths, ranks, rank, multiple)
    assert list(found.padded) == rows
    flat = [(row, place) for row, length in enumerate(rows) for place in range(length)]
    assert [flat[take] for take in found.take] == here
    assert list(found.position) == [place for _, place in here]

    gathered = [token for other in range(ranks) for token in oracle.share(lengths, ranks, other, multiple)[1]]
    keys = [gathered[place] for place in found.key] if ranks > 1 else here
    query, key = 0, 0
    for queries, count in zip(found.query_length, found.key_length, strict=True):
        own = keys[key : key + count]
        for index, token in enumerate(here[query : query + queries]):
            assert own[: count - queries + index + 1] == seen[token]
        query, key = query + queries, key + count
    assert (query, key) == (len(here), len(keys))
