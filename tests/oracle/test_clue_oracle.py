"""core/clue.py against a walk through the list of causes."""

from __future__ import annotations

import oracle_clue as oracle
from hypothesis import given
from hypothesis import strategies as st

from core.clue import CAUSES, Clue, likely_cause


@given(st.lists(st.tuples(st.sampled_from(CAUSES), st.integers(0, 4)), min_size=1, max_size=6))
def test_likely_cause_is_the_heaviest_clues_first_cause(pairs: list[tuple[str, int]]) -> None:
    clues = [Clue(cause, "rule", weight, -1, "", "") for cause, weight in pairs]
    assert likely_cause(clues) == oracle.likely_cause(pairs, CAUSES)
