"""Laws of core.estimate: what graded trials can say, and what they cannot."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import estimate
from core.estimate import Behaviour, Count


@st.composite
def counts(draw):
    trials = draw(st.integers(1, 7))
    return {"trials": trials, "passed": draw(st.integers(0, trials)), "k": draw(st.integers(1, trials))}


@given(case=counts())
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(case):
    passes = [i < case["passed"] for i in range(case["trials"])]
    subsets = list(combinations(passes, case["k"]))
    assert estimate.pass_at_k(**case) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert estimate.pass_power_k(**case) == pytest.approx(sum(map(all, subsets)) / len(subsets))


@given(case=counts())
def test_with_one_trial_both_are_the_share_passed(case):
    one = {**case, "k": 1}
    share = case["passed"] / case["trials"]
    assert estimate.pass_at_k(**one) == pytest.approx(share)
    assert estimate.pass_power_k(**one) == pytest.approx(share)


@pytest.mark.parametrize("trials, passed, k, expected", [(4, 1, 2, 0.5), (5, 2, 3, 0.9), (4, 1, 1, 0.25)])
def test_pass_at_k_worked_examples(trials, passed, k, expected):
    """Four rollouts in seven rows are four trials."""
    assert estimate.pass_at_k(trials=trials, passed=passed, k=k) == pytest.approx(expected)


@pytest.mark.parametrize(
    "trials, passed, k, text",
    [
        (3, 1, 4, "k must lie between 1 and 3 trials, got 4"),
        (3, 1, 0, "k must lie between 1 and 3 trials, got 0"),
        (3, 4, 1, "passed must lie between 0 and 3 trials, got 4"),
        (3, -1, 1, "passed must lie between 0 and 3 trials, got -1"),
        (0, 0, 1, "k must lie between 1 and 0 trials, got 1"),
        (3.0, 1, 1, r"trials must be a whole number, got 3\.0"),
        (3, True, 1, "passed must be a whole number, got True"),
        (3, 1, math.nan, "k must be a whole number, got nan"),
    ],
)
def test_pass_at_k_refuses_what_was_not_tried(trials, passed, k, text):
    for call in (estimate.pass_at_k, estimate.pass_power_k):
        with pytest.raises(ValueError, match=f"^{text}$"):
            call(trials=trials, passed=passed, k=k)


def test_four_rollouts_in_seven_rows_are_four_trials():
    """One of them passed, in two rows: pass@1 is a quarter, not two sevenths."""
    found = estimate.counts_by_problem("ppppppp", [0, 0, 1, 1, 2, 3, 3], [1, 1, 0, 0, 0, 0, 0])  # pyright: ignore[reportArgumentType]
    assert found == {"p": Count(trials=4, passed=1)}
    assert estimate.mean_pass_at_k(list(found.values()), k=1).mean == 0.25


@st.composite
def rollouts(draw):
    """Problem, rollout, passed; a rollout in one to three rows, rollouts of problems named alike."""
    tried = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=4))
    rows = [
        (problem, rollout, passed)
        for problem, trials in enumerate(tried)
        for rollout, passed in enumerate(trials)
        for _ in range(draw(st.integers(1, 3)))
    ]
    return tried, draw(st.permutations(rows))


@given(case=rollouts())
def test_a_rollout_counts_once_however_many_rows_it_has_and_wherever_they_lie(case):
    tried, rows = case
    found = estimate.counts_by_problem(*map(list, zip(*rows)))
    assert found == {i: Count(trials=len(t), passed=sum(t)) for i, t in enumerate(tried)}


@given(cases=st.lists(counts(), min_size=1, max_size=5))
def test_pass_at_k_over_problems_is_the_mean_of_theirs_and_not_that_of_all_trials(cases):
    k = min(case["k"] for case in cases)
    each = [estimate.pass_at_k(**(case | {"k": k})) for case in cases]
    found = estimate.mean_pass_at_k([Count(case["trials"], case["passed"]) for case in cases], k=k)
    assert found.mean == pytest.approx(sum(each) / len(each))
    assert found == pytest.approx(estimate.mean_and_error(each), nan_ok=True)


def test_two_problems_one_easy_one_hard():
    """One of two and three of four: with k = 2, 1 and 1 on average; pooled, 4 of 6 would be 14/15."""
    counts = [Count(2, 1), Count(4, 3)]
    assert estimate.mean_pass_at_k(counts, k=2).mean == 1.0
    assert estimate.mean_pass_at_k(counts, k=1) == (0.625, 0.125)


def test_a_problem_with_too_few_trials_is_refused():
    with pytest.raises(ValueError, match="k must lie between 1 and 1 trials, got 2"):
        estimate.mean_pass_at_k([Count(4, 1), Count(1, 1)], k=2)


def test_rows_of_one_rollout_must_agree_whether_it_passed():
    with pytest.raises(ValueError, match="rows of rollout 7 must agree on whether it passed, got both"):
        estimate.counts_by_problem([0, 0], [7, 7], [True, False])
    assert estimate.counts_by_problem([0, 1], [7, 7], [True, False]) == {0: (1, 1), 1: (1, 0)}
    with pytest.raises(ValueError, match="rows of rollout 7 must agree"):
        estimate.counts_by_problem([0, 0], [7, 7], [False, True])


@pytest.mark.parametrize("short", range(3))
def test_rows_must_be_complete(short):
    lists = [[0, 0], [1, 2], [True, False]]
    lists[short] = lists[short][:1]
    told = ", ".join(str(len(one)) for one in lists[:2])
    with pytest.raises(ValueError, match=f"must be equally long, got {told} and {len(lists[2])}"):
        estimate.counts_by_problem(*lists)


def test_mean_and_error_of_few_values():
    assert estimate.mean_and_error([1.0, 3.0]) == (2.0, 1.0)
    assert estimate.mean_and_error([2.0])[0] == 2.0 and math.isnan(estimate.mean_and_error([2.0])[1])
    assert all(math.isnan(x) for x in estimate.mean_and_error([]))


@given(values=st.lists(st.floats(-100, 100), min_size=2, max_size=9), shift=st.floats(-10, 10))
def test_the_error_of_a_mean_does_not_depend_on_order_or_origin(values, shift):
    mean, error = estimate.mean_and_error(values)
    moved = estimate.mean_and_error([value + shift for value in reversed(values)])
    assert moved.mean == pytest.approx(mean + shift, abs=1e-9)
    assert moved.error == pytest.approx(error, rel=1e-6, abs=1e-9)


def test_the_error_of_a_mean_halves_with_four_times_the_values_but_for_n_minus_1():
    few, many = estimate.mean_and_error([0.0, 1.0] * 5), estimate.mean_and_error([0.0, 1.0] * 20)
    assert few.error / many.error == pytest.approx(2 * math.sqrt(39 / 36))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_mean_of_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match=f"every value must be finite, got {value}"):
        estimate.mean_and_error([1.0, value])


def test_behaviour_rates_divide_sums_once():
    """A mean of per-trial rates would give 22.5 tokens a turn and 0.5 tool success."""
    trials = [
        Behaviour(turns=1, sampled_tokens=40, tool_calls=1, tool_errors=1, context_exhausted=False),
        Behaviour(turns=4, sampled_tokens=20, tool_calls=3, tool_errors=0, context_exhausted=True),
    ]
    assert estimate.behaviour_rates(trials) == (2.5, 12.0, 0.75, 0.5)
    assert all(math.isnan(rate) for rate in estimate.behaviour_rates([]))


def test_nothing_is_divided_by_nothing():
    silent = Behaviour(turns=0, sampled_tokens=0, tool_calls=0, tool_errors=0, context_exhausted=True)
    turns, tokens, success, exhausted = estimate.behaviour_rates([silent])
    assert turns == 0.0 and exhausted == 1.0 and math.isnan(tokens) and math.isnan(success)


@pytest.mark.parametrize("name", ["turns", "sampled_tokens", "tool_calls", "tool_errors"])
@pytest.mark.parametrize(
    "value, text",
    [
        (-1, "not be negative, got -1"),
        (1.0, r"be a whole number, got 1\.0"),
        (True, "be a whole number, got True"),
    ],
)
def test_a_behaviour_counts_in_whole_numbers(name, value, text):
    one = {"turns": 1, "sampled_tokens": 1, "tool_calls": 1, "tool_errors": 0, "context_exhausted": False}
    with pytest.raises(ValueError, match=f"^{name} must {text}$"):
        Behaviour(**(one | {name: value}))


def test_a_trial_cannot_have_more_tool_errors_than_calls():
    Behaviour(turns=1, sampled_tokens=1, tool_calls=2, tool_errors=2, context_exhausted=False)
    with pytest.raises(ValueError, match="tool_errors must be at most 2 calls, got 3"):
        Behaviour(turns=1, sampled_tokens=1, tool_calls=2, tool_errors=3, context_exhausted=False)
