"""core/steps.py against sums of fractions."""

from __future__ import annotations

import oracle_steps as oracle
from hypothesis import given
from hypothesis import strategies as st

from core.steps import final_rewards, goes_on, mean_rewards

step = st.dictionaries(st.sampled_from(["reward", "style"]), st.floats(-3, 3), max_size=2)
steps = st.lists(step, min_size=1, max_size=6)


@given(steps)
def test_mean_rewards_is_the_sum_over_the_number_of_steps(given_steps: list[dict[str, float]]) -> None:
    found, expected = mean_rewards(given_steps), oracle.mean_rewards(given_steps)
    assert found.keys() == expected.keys()
    assert all(abs(found[name] - float(expected[name])) < 1e-12 for name in found)


@given(steps)
def test_final_rewards_is_what_the_last_step_wrote(given_steps: list[dict[str, float]]) -> None:
    assert final_rewards(given_steps) == oracle.final_rewards(given_steps)


@given(step, step)
def test_goes_on_is_every_threshold_reached(rewards: dict[str, float], least: dict[str, float]) -> None:
    assert goes_on(rewards, least=least) == oracle.goes_on(rewards, least)
