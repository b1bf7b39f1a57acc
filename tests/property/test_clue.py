"""Laws of clues: the heaviest decides, whatever their order, and of equal ones the cause that can be repaired."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clue import CAUSES, CERTAIN, NOTED, Clue, likely_cause

clues = st.builds(
    Clue,
    cause=st.sampled_from(CAUSES),
    rule=st.just("rule"),
    weight=st.integers(NOTED, CERTAIN),
    turn=st.integers(-1, 3),
    tool=st.just(""),
    quote=st.just("a line"),
)


@given(st.lists(clues, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_likely_cause_does_not_depend_on_the_order_of_clues(found: list[Clue], random) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    assert likely_cause(found) == likely_cause(shuffled)


@given(st.lists(clues, min_size=1, max_size=6), clues)
def test_a_lighter_clue_changes_nothing(found: list[Clue], more: Clue) -> None:
    if more.weight < max(clue.weight for clue in found):
        assert likely_cause([*found, more]) == likely_cause(found)


def test_of_equal_clues_what_can_be_repaired_comes_before_what_must_be_learnt() -> None:
    found = [Clue(cause, "rule", CERTAIN, -1, "", "a line") for cause in CAUSES]
    assert likely_cause(found) == "verifier" and likely_cause(found[:0:-1]) == "dependency"
    assert CAUSES[-1] == "policy"


def test_no_clues_speak_for_nothing() -> None:
    with pytest.raises(ValueError, match="clues must not be empty"):
        likely_cause([])
