"""core/outcome.py against its table, every case enumerated."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import oracle_outcome as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.outcome import (
    TRUNCATIONS,
    Outcome,
    group_verdict,
    has_valid_reward,
    is_retriable,
    reward_per_rollout,
    too_many_system_errors,
)

SCORED_CHOICES = [(), ("context",), ("context", "turn_cap", "step_cap"), TRUNCATIONS]


def outcome(kind: str, reason: str = "") -> Outcome:
    """An outcome with what its kind asks for."""
    if kind == "system_error":
        return Outcome(kind=kind, phase="agent", cause="it broke")
    return Outcome(kind=kind, reason=reason)


@pytest.mark.parametrize("scored", SCORED_CHOICES)
def test_has_valid_reward_is_the_table_of_kinds(scored: tuple[str, ...]) -> None:
    table = {"solved": True, "failed": True, "system_error": False, "cancelled": False}
    for kind, valid in table.items():
        assert has_valid_reward(outcome(kind), scored_truncations=scored) == valid
    for reason in TRUNCATIONS:
        found = has_valid_reward(outcome("truncated", reason), scored_truncations=scored)
        assert found == (reason in scored)


def test_is_retriable_is_the_table_of_kinds() -> None:
    assert is_retriable(outcome("system_error"))
    for kind in ("solved", "failed", "cancelled"):
        assert not is_retriable(outcome(kind))
    for reason in TRUNCATIONS:
        assert not is_retriable(outcome("truncated", reason))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_group_verdict_is_what_playing_every_future_says(size: int) -> None:
    for min_valid in range(2, size + 1):
        for valid, lost, retriable in product(range(size + 1), repeat=3):
            if valid + lost + retriable <= size:
                found = group_verdict(
                    size=size, valid=valid, lost=lost, retriable=retriable, min_valid=min_valid
                )
                assert found == oracle.group_verdict(size, valid, lost, retriable, min_valid)


@given(
    st.dictionaries(st.integers(0, 9), st.none() | st.sampled_from([0.0, 0.5, 1.0]), max_size=5),
    st.data(),
)
def test_reward_per_rollout_is_what_all_its_rows_say(
    table: dict[int, float | None], data: st.DataObject
) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(table)), max_size=8)) if table else []
    reward = [table[name] for name in names]
    assert reward_per_rollout(names, reward) == oracle.reward_per_rollout(names, reward)


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [None, 0.0]])
def test_g10_rows_of_a_rollout_that_disagree_are_refused_by_name(rewards: list[float | None]) -> None:
    with pytest.raises(ValueError):
        oracle.reward_per_rollout([7, 7], rewards)
    with pytest.raises(ValueError, match="7"):
        reward_per_rollout([7, 7], rewards)


def test_g53_a_reward_of_zero_is_a_reward() -> None:
    assert reward_per_rollout(["a", "b"], [0.0, None]) == {"a": 0.0, "b": None}


@given(
    st.integers(0, 30), st.integers(0, 30), st.sampled_from([0.0, 0.07, 0.25, 0.29, 1.0]), st.integers(1, 10)
)
def test_too_many_system_errors_is_a_share_above_the_rate_once_enough_trials_ended(
    errors: int, others: int, rate: float, enough: int
) -> None:
    trials = errors + others
    expected = trials >= enough and errors > Fraction(str(rate)) * trials
    found = too_many_system_errors(system_errors=errors, trials=trials, max_rate=rate, min_trials=enough)
    assert found == expected
