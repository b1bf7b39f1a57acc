"""Laws of core/steps.py."""

from __future__ import annotations

import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.steps import final_rewards, goes_on, mean_rewards

NAMES = st.sampled_from(["reward", "style", "speed"])
VALUES = st.floats(-4, 4)
STEP = st.dictionaries(NAMES, VALUES, max_size=3)
STEPS = st.lists(STEP, min_size=1, max_size=5)


@given(STEPS)
def test_one_step_alone_earns_its_own_rewards_by_either_rule(steps):
    for step in steps:
        assert mean_rewards([step]) == final_rewards([step]) == step


@given(STEPS, st.randoms(use_true_random=False))
def test_the_mean_does_not_depend_on_the_order_and_lies_between_least_and_most(steps, random):
    mean = mean_rewards(steps)
    shuffled = list(steps)
    random.shuffle(shuffled)
    assert mean_rewards(shuffled) == mean
    for name, value in mean.items():
        earned = [step.get(name, 0.0) for step in steps]
        assert min(earned) - 1e-9 <= value <= max(earned) + 1e-9


@given(STEPS, st.integers(1, 3))
def test_the_mean_of_steps_repeated_is_their_mean(steps, times):
    once, again = mean_rewards(steps), mean_rewards(steps * times)
    assert once.keys() == again.keys()
    assert all(math.isclose(once[name], again[name], abs_tol=1e-9) for name in once)


@given(STEPS, STEP)
def test_the_final_rule_looks_at_the_last_step_alone(steps, last):
    assert final_rewards([*steps, last]) == final_rewards([last]) == last


@given(NAMES, VALUES, st.integers(1, 5))
def test_a_reward_that_a_step_lacks_counts_as_nothing(name, value, others):
    empty = [{} for _ in range(others)]
    assert mean_rewards([{name: value}, *empty]) == {name: pytest.approx(value / (others + 1))}
    assert mean_rewards(empty) == {}


def test_a_mean_of_large_rewards_is_finite():
    assert mean_rewards([{"reward": 1.5e308}, {"reward": 1.5e308}]) == {"reward": 1.5e308}


@given(STEP, STEP)
def test_a_step_goes_on_exactly_if_no_threshold_is_above_its_reward(rewards, least):
    missed = [name for name, value in least.items() if name not in rewards or rewards[name] < value]
    assert goes_on(rewards, least=least) == (not missed)


@given(STEP)
def test_every_step_goes_on_without_thresholds_and_at_its_own_rewards(rewards):
    assert goes_on(rewards, least={}) and goes_on(rewards, least=rewards)


def test_a_reward_that_is_missing_is_below_any_threshold():
    assert not goes_on({"style": 1.0}, least={"reward": -1e300})
    assert not goes_on({}, least={"reward": 0.0})
    assert goes_on({}, least={}) and not goes_on({"reward": 1.0}, least={"reward": math.inf})


@given(STEPS, STEP)
def test_arguments_are_left_alone(steps, least):
    before = copy.deepcopy((steps, least))
    mean_rewards(steps)
    final_rewards(steps)["new"] = 1.0
    goes_on(steps[0], least=least)
    assert (steps, least) == before


@pytest.mark.parametrize("rule", [mean_rewards, final_rewards])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_step_and_a_reward_that_is_not_finite_are_refused(rule, value):
    with pytest.raises(ValueError, match="^rewards must be of at least one step, got none$"):
        rule([])
    with pytest.raises(ValueError, match=f"^reward style must be finite, got {value}$"):
        rule([{"reward": 1.0, "style": value}, {"reward": 1.0}])
    with pytest.raises(ValueError, match=f"^reward style must be finite, got {value}$"):
        goes_on({"style": value}, least={})


def test_a_threshold_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="^least reward must be a number, got nan$"):
        goes_on({"reward": 1.0}, least={"reward": math.nan})
