"""Laws of core.estimate: what graded trials can say, and what they cannot."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import estimate
from core.counter import counter_uniform
from core.estimate import Behaviour
from core.student import student_cdf, student_quantile

SCORE = st.sampled_from([0.0, 0.25, 0.5, 1.0])


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


def test_pass_at_k_refuses_more_trials_than_there_were():
    with pytest.raises(ValueError, match="k must lie between 1 and 3 trials, got 4"):
        estimate.pass_at_k(trials=3, passed=1, k=4)
    with pytest.raises(ValueError, match="passed must lie between 0 and 3 trials, got 4"):
        estimate.pass_power_k(trials=3, passed=4, k=1)


def test_mean_and_error_of_few_values():
    assert estimate.mean_and_error([1.0, 3.0]) == (2.0, 1.0)
    assert estimate.mean_and_error([2.0])[0] == 2.0 and math.isnan(estimate.mean_and_error([2.0])[1])
    assert all(math.isnan(x) for x in estimate.mean_and_error([]))


@pytest.mark.parametrize(
    "probability, degrees, quantile",
    [
        (0.975, 1, 12.7062047362),
        (0.975, 2, 4.30265272991),
        (0.975, 10, 2.22813885196),
        (0.95, 5, 2.01504837333),
        (0.8, 3, 0.978472312),
        (0.975, math.inf, 1.95996398454),
    ],
)
def test_student_quantiles_of_the_tables(probability, degrees, quantile):
    assert student_quantile(probability, degrees) == pytest.approx(quantile, rel=1e-7)
    assert student_quantile(1 - probability, degrees) == pytest.approx(-quantile, rel=1e-7)


@given(x=st.floats(-20, 20), degrees=st.floats(0.5, 200))
def test_student_cdf_and_quantile_are_inverse(x, degrees):
    p = student_cdf(x, degrees)
    assert p == pytest.approx(1 - student_cdf(-x, degrees), abs=1e-12)
    if 1e-9 < p < 1 - 1e-9:
        assert student_quantile(p, degrees) == pytest.approx(x, rel=1e-5, abs=1e-6)


def test_student_with_one_degree_is_cauchy_and_with_many_is_normal():
    for x in (-3.0, -0.2, 0.0, 1.7):
        assert student_cdf(x, 1) == pytest.approx(0.5 + math.atan(x) / math.pi)
        assert student_cdf(x, 1e7) == pytest.approx(student_cdf(x, math.inf), abs=1e-7)


@pytest.mark.parametrize("call", [lambda: student_cdf(0, 0), lambda: student_quantile(1.0, 3)])
def test_student_refuses_what_has_no_answer(call):
    with pytest.raises(ValueError, match="must"):
        call()


@st.composite
def tables(draw, arms=2):
    seeds, tasks = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    row = st.lists(SCORE, min_size=tasks, max_size=tasks)
    return [draw(st.lists(row, min_size=seeds, max_size=seeds)) for _ in range(arms)]


@given(arms=tables())
def test_comparing_the_other_way_round_mirrors_everything(arms):
    one, two = estimate.compare(*arms, confidence=0.9), estimate.compare(*reversed(arms), confidence=0.9)
    assert one.difference == pytest.approx(-two.difference)
    assert one.low == pytest.approx(-two.high) and one.p_value == pytest.approx(two.p_value)
    assert {one.verdict, two.verdict} in ({"tie"}, {"a better", "b better"})


@given(arms=tables())
def test_the_verdict_follows_the_interval_and_the_p_value(arms):
    found = estimate.compare(*arms, confidence=0.9)
    assert found.low <= found.difference <= found.high
    assert (found.verdict == "tie") == (found.low <= 0 <= found.high)
    if abs(found.p_value - 0.1) > 1e-6:
        assert (found.verdict == "tie") == (found.p_value > 0.1)
    assert found.verdict != "b better" or found.difference > 0


@given(arms=tables(arms=1))
def test_an_arm_ties_with_itself(arms):
    found = estimate.compare(arms[0], arms[0], confidence=0.95)
    assert found.verdict == "tie" and found.difference == 0 and found.p_value == 1


@given(arms=tables(), data=st.data())
def test_order_of_seeds_and_tasks_does_not_matter(arms, data):
    rows = data.draw(st.permutations(range(len(arms[0]))))
    columns = data.draw(st.permutations(range(len(arms[0][0]))))
    moved = [[[arm[r][c] for c in columns] for r in rows] for arm in arms]
    one, two = estimate.compare(*arms, confidence=0.9), estimate.compare(*moved, confidence=0.9)
    assert one.difference == pytest.approx(two.difference) and one.low == pytest.approx(two.low)


def test_more_confidence_is_a_wider_interval():
    a, b = [[0.0, 0.5, 0.25]] * 2, [[0.5, 0.25, 1.0], [0.25, 0.25, 0.5]]
    narrow, wide = (estimate.compare(a, b, confidence=c) for c in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_one_task_is_the_paired_t_test_over_seeds():
    """Differences 1, 2, 3: mean 2, error 0.57735, t with 2 degrees of freedom."""
    found = estimate.compare([[0.0]] * 3, [[1.0], [2.0], [3.0]], confidence=0.95)
    reach = 4.30265272991 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((2 - reach, 2 + reach))
    assert found.seed_spread == pytest.approx(1.0)


def test_many_tasks_do_not_hide_a_spread_over_seeds():
    """Each seed moves all 100 tasks alike: what is known is known from three seeds."""
    a = [[0.5] * 100] * 3
    b = [[0.5 + shift] * 100 for shift in (0.1, 0.2, 0.3)]
    few = estimate.compare([[0.5]] * 3, [[0.6], [0.7], [0.8]], confidence=0.95)
    many = estimate.compare(a, b, confidence=0.95)
    assert many.low == pytest.approx(few.low) and many.high == pytest.approx(few.high)


def test_seeds_and_tasks_both_widen_the_interval():
    """Mean squares 9, 9 and 1: variance (9 + 9 - 1) / 4, Satterthwaite 17^2 / (81 + 81 + 1)."""
    found = estimate.compare([[0.0, 0.0]] * 2, [[0.0, 2.0], [2.0, 6.0]], confidence=0.95)
    reach = student_quantile(0.975, 289 / 163) * math.sqrt(4.25)
    assert (found.low, found.high) == pytest.approx((2.5 - reach, 2.5 + reach))
    assert found.seed_spread == pytest.approx(3 / math.sqrt(2))


def test_one_seed_and_one_task_prove_nothing():
    found = estimate.compare([[0.0]], [[1.0]], confidence=0.5)
    assert found.verdict == "tie" and found.low == -math.inf and math.isnan(found.seed_spread)


def test_false_alarms_are_as_rare_as_stated():
    """Two equal arms, with a part of every seed and of every task in their difference."""

    def noise(*index):
        return math.sqrt(3) * (2 * counter_uniform(7, *index) - 1)

    alarms = 0
    for run in range(200):
        zero = [[0.0] * 12 for _ in range(4)]
        b = [
            [0.5 * noise(run, 0, s) + 0.5 * noise(run, 1, t) + noise(run, 2, s, t) for t in range(12)]
            for s in range(4)
        ]
        alarms += estimate.compare(zero, b, confidence=0.9).verdict != "tie"
    assert alarms <= 32, alarms


@pytest.mark.parametrize(
    "a, b, confidence, text",
    [
        ([], [], 0.9, r"a and b must be two equal tables \[seed\]\[task\]"),
        ([[1.0]], [[1.0, 2.0]], 0.9, r"a and b must be two equal tables \[seed\]\[task\]"),
        ([[1.0], [1.0, 2.0]], [[1.0], [1.0, 2.0]], 0.9, r"a and b must be two equal tables"),
        ([[1.0]], [[1.0]], 1.0, "confidence must lie between 0 and 1, got 1.0"),
    ],
)
def test_compare_refuses_unequal_tables(a, b, confidence, text):
    with pytest.raises(ValueError, match=text):
        estimate.compare(a, b, confidence=confidence)


def test_holm_worked_example():
    assert estimate.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))


@given(p=st.lists(st.floats(0, 1), max_size=6))
def test_holm_lies_between_no_correction_and_bonferroni(p):
    adjusted = estimate.holm(p)
    for before, after in zip(p, adjusted):
        assert before <= after <= min(1.0, len(p) * before) + 1e-12
    assert [a for _, a in sorted(zip(p, adjusted))] == sorted(adjusted)


@pytest.mark.parametrize("difference, spread, seeds", [(1.0, 0.0, 2), (0.05, 0.05, 10), (-0.05, 0.1, 34)])
def test_seeds_needed_at_power_80_percent(difference, spread, seeds):
    """Effect sizes 1 and 0.5: textbook samples of a paired t test are 10 and 34."""
    assert (
        abs(
            estimate.seeds_needed(difference=difference, seed_spread=spread, power=0.8, confidence=0.95)
            - seeds
        )
        <= 1
    )


@given(difference=st.floats(0.02, 1), spread=st.floats(0, 0.3), more=st.floats(1, 2))
def test_more_spread_needs_more_seeds(difference, spread, more):
    def need(s):
        return estimate.seeds_needed(difference=difference, seed_spread=s, power=0.8, confidence=0.95)

    assert 2 <= need(spread) <= need(spread * more)


def test_seeds_needed_refuses_what_has_no_answer():
    with pytest.raises(ValueError, match="difference must not be 0, got 0.0"):
        estimate.seeds_needed(difference=0.0, seed_spread=1.0, power=0.8, confidence=0.95)
    with pytest.raises(ValueError, match="seed_spread must not be negative, got nan"):
        estimate.seeds_needed(difference=1.0, seed_spread=math.nan, power=0.8, confidence=0.95)


def test_behaviour_rates_divide_sums_once():
    """A mean of per-trial rates would give 22.5 tokens a turn and 0.5 tool success."""
    trials = [
        Behaviour(turns=1, sampled_tokens=40, tool_calls=1, tool_errors=1, context_exhausted=False),
        Behaviour(turns=4, sampled_tokens=20, tool_calls=3, tool_errors=0, context_exhausted=True),
    ]
    assert estimate.behaviour_rates(trials) == (2.5, 12.0, 0.75, 0.5)
    assert all(math.isnan(rate) for rate in estimate.behaviour_rates([]))
