"""Laws of core.comparison: what two arms can say about each other, and what they cannot."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import comparison, estimate
from core.counter import counter_uniform
from core.student import student_quantile

SCORE = st.sampled_from([0.0, 0.25, 0.5, 1.0])


def test_a_comparison_can_be_had_from_estimate_too():
    for name in ("Comparison", "compare", "holm", "seeds_needed"):
        assert vars(estimate)[name] is vars(comparison)[name]


@st.composite
def tables(draw, arms=2):
    seeds, tasks = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    row = st.lists(SCORE, min_size=tasks, max_size=tasks)
    return [draw(st.lists(row, min_size=seeds, max_size=seeds)) for _ in range(arms)]


@given(arms=tables())
def test_comparing_the_other_way_round_mirrors_everything(arms):
    one, two = comparison.compare(*arms, confidence=0.9), comparison.compare(*reversed(arms), confidence=0.9)
    assert one.difference == pytest.approx(-two.difference)
    assert one.low == pytest.approx(-two.high) and one.p_value == pytest.approx(two.p_value)
    assert {one.verdict, two.verdict} in ({"tie"}, {"a better", "b better"})


@given(arms=tables())
def test_the_verdict_follows_the_interval_and_the_p_value(arms):
    found = comparison.compare(*arms, confidence=0.9)
    assert found.low <= found.difference <= found.high
    assert (found.verdict == "tie") == (found.low <= 0 <= found.high)
    if abs(found.p_value - 0.1) > 1e-6:
        assert (found.verdict == "tie") == (found.p_value > 0.1)
    assert found.verdict != "b better" or found.difference > 0


@given(arms=tables(arms=1))
def test_an_arm_ties_with_itself(arms):
    found = comparison.compare(arms[0], arms[0], confidence=0.95)
    assert found.verdict == "tie" and found.difference == 0 and found.p_value == 1


@given(arms=tables(), data=st.data())
def test_order_of_seeds_and_tasks_does_not_matter(arms, data):
    rows = data.draw(st.permutations(range(len(arms[0]))))
    columns = data.draw(st.permutations(range(len(arms[0][0]))))
    moved = [[[arm[r][c] for c in columns] for r in rows] for arm in arms]
    one, two = comparison.compare(*arms, confidence=0.9), comparison.compare(*moved, confidence=0.9)
    assert one.difference == pytest.approx(two.difference) and one.low == pytest.approx(two.low)


def test_more_confidence_is_a_wider_interval():
    a, b = [[0.0, 0.5, 0.25]] * 2, [[0.5, 0.25, 1.0], [0.25, 0.25, 0.5]]
    narrow, wide = (comparison.compare(a, b, confidence=c) for c in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_one_task_is_the_paired_t_test_over_seeds():
    """Differences 1, 2, 3: mean 2, error 0.57735, t with 2 degrees of freedom."""
    found = comparison.compare([[0.0]] * 3, [[1.0], [2.0], [3.0]], confidence=0.95)
    reach = 4.30265272991 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((2 - reach, 2 + reach))
    assert found.seed_spread == pytest.approx(1.0)


def test_many_tasks_do_not_hide_a_spread_over_seeds():
    """Each seed moves all 100 tasks alike: what is known is known from three seeds."""
    a = [[0.5] * 100] * 3
    b = [[0.5 + shift] * 100 for shift in (0.1, 0.2, 0.3)]
    few = comparison.compare([[0.5]] * 3, [[0.6], [0.7], [0.8]], confidence=0.95)
    many = comparison.compare(a, b, confidence=0.95)
    assert many.low == pytest.approx(few.low) and many.high == pytest.approx(few.high)


def test_seeds_and_tasks_both_widen_the_interval():
    """Mean squares 9, 9 and 1: variance (9 + 9 - 1) / 4, Satterthwaite 17^2 / (81 + 81 + 1)."""
    found = comparison.compare([[0.0, 0.0]] * 2, [[0.0, 2.0], [2.0, 6.0]], confidence=0.95)
    reach = student_quantile(0.975, 289 / 163) * math.sqrt(4.25)
    assert (found.low, found.high) == pytest.approx((2.5 - reach, 2.5 + reach))
    assert found.seed_spread == pytest.approx(3 / math.sqrt(2))


def test_one_seed_and_one_task_prove_nothing():
    found = comparison.compare([[0.0]], [[1.0]], confidence=0.5)
    assert found.verdict == "tie" and found.low == -math.inf and math.isnan(found.seed_spread)


def test_one_seed_is_the_paired_t_test_over_tasks():
    found = comparison.compare([[0.0, 0.0, 0.0]], [[1.0, 2.0, 3.0]], confidence=0.95)
    reach = 4.30265272991 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((2 - reach, 2 + reach))
    assert math.isnan(found.seed_spread)


def noise(*index):
    """Normal, by Box and Muller."""
    u, v = counter_uniform(7, *index, 0), counter_uniform(7, *index, 1)
    return math.sqrt(-2 * math.log(1 - u)) * math.cos(2 * math.pi * v)


def table(run, *, seeds, tasks, seed_part, task_part, rest):
    """One set of paired differences."""
    return [
        [
            seed_part * noise(run, 0, s) + task_part * noise(run, 1, t) + rest * noise(run, 2, s, t)
            for t in range(tasks)
        ]
        for s in range(seeds)
    ]


@pytest.mark.parametrize(
    "seeds, tasks, seed_part, task_part, rest",
    [
        (4, 12, 0.5, 0.5, 1.0),
        (4, 12, 0.0, 0.0, 1.0),
        (3, 24, 1.0, 0.0, 0.3),
        (3, 24, 0.0, 1.0, 0.3),
        (5, 1, 1.0, 0.0, 0.0),
        (1, 9, 0.0, 1.0, 0.5),
        (2, 2, 0.0, 0.0, 1.0),
    ],
)
def test_an_interval_holds_the_truth_as_often_as_stated(seeds, tasks, seed_part, task_part, rest):
    """Two equal arms whose difference has a part of every seed, of every task, and a rest: 200 runs at 90 %.

    More than 32 misses of 200 would come once in three hundred times if one in ten were missed.
    """
    misses = 0
    for run in range(200):
        b = table(run, seeds=seeds, tasks=tasks, seed_part=seed_part, task_part=task_part, rest=rest)
        found = comparison.compare([[0.0] * tasks] * seeds, b, confidence=0.9)
        misses += not found.low <= 0 <= found.high
        assert (found.verdict == "tie") == (found.low <= 0 <= found.high)
    assert misses <= 32, misses


def test_an_interval_is_no_wider_than_it_needs_to_be():
    """It misses now and then, and a clear difference is found nearly always."""
    shapes = {"seeds": 4, "tasks": 12, "seed_part": 0.3, "task_part": 0.3, "rest": 1.0}
    zero = [[0.0] * 12] * 4
    found = [comparison.compare(zero, table(run, **shapes), confidence=0.9).verdict for run in range(200)]
    assert found.count("tie") < 200
    moved = [
        comparison.compare(
            zero, [[x + 2 for x in row] for row in table(run, **shapes)], confidence=0.9
        ).verdict
        for run in range(50)
    ]
    assert moved.count("b better") > 45


@given(arms=tables(), shift=st.floats(-2, 2), scale=st.floats(0.5, 2))
def test_a_score_that_both_arms_gain_changes_nothing_and_a_unit_scales_everything(arms, shift, scale):
    one = comparison.compare(*arms, confidence=0.9)
    moved = [[[scale * (score + shift) for score in row] for row in arm] for arm in arms]
    two = comparison.compare(*moved, confidence=0.9)
    assert two.verdict == one.verdict or min(abs(one.low), abs(one.high)) < 1e-9
    assert two.difference == pytest.approx(scale * one.difference, abs=1e-9)
    assert two.low == pytest.approx(scale * one.low, abs=1e-6)
    assert two.p_value == pytest.approx(one.p_value, abs=1e-6)


@given(arms=tables())
def test_arms_are_left_as_they_were(arms):
    before = [[list(row) for row in arm] for arm in arms]
    comparison.compare(*arms, confidence=0.9)
    assert before == arms


@pytest.mark.parametrize(
    "seeds, tasks, p_value",
    [
        (1, 1, 1.0),
        (1, 5, 0.0625),
        (1, 6, 0.03125),
        (3, 1, 0.25),
        (6, 1, 0.03125),
        (3, 24, 0.25),
        (6, 7, 0.03125),
    ],
)
@pytest.mark.parametrize("by", [0.1, -0.5])
def test_one_difference_everywhere_is_judged_by_its_signs(seeds, tasks, p_value, by):
    """No spread is no proof: the fewer of seeds and tasks are so many equal signs, and six are needed for 95 %."""
    a = [[0.2 + 0.1 * t for t in range(tasks)] for _ in range(seeds)]
    b = [[score + by for score in row] for row in a]
    found = comparison.compare(a, b, confidence=0.95)
    assert found.p_value == p_value and found.difference == pytest.approx(by)
    if p_value > 0.05:
        assert found.verdict == "tie" and (found.low, found.high) == (-math.inf, math.inf)
    else:
        assert found.verdict == ("b better" if by > 0 else "a better")
        assert found.low == found.high == found.difference


def test_so_many_equal_signs_as_the_confidence_asks_for():
    """Five give p = 0.0625, exactly what 93.75 % asks for."""
    a, b = [[0.0] * 5], [[1.0] * 5]
    assert comparison.compare(a, b, confidence=0.9375).verdict == "b better"
    assert comparison.compare(a, b, confidence=0.94).verdict == "tie"


def test_the_same_scores_everywhere_are_a_tie_without_width():
    found = comparison.compare([[0.1, 0.7]] * 9, [[0.1, 0.7]] * 9, confidence=0.95)
    assert (found.difference, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)
    assert found.verdict == "tie"


def test_rounding_is_no_difference():
    """0.1 + 0.2 is not 0.3 by a bit, twenty times over; a t test would be sure of it."""
    found = comparison.compare([[0.3] * 20], [[0.1 + 0.2] * 20], confidence=0.95)
    assert (found.difference, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)
    b = [[0.1 + 0.2, 0.3]]
    assert comparison.compare([[0.2, 0.2]], b, confidence=0.95).verdict == "tie"


def test_equal_means_of_seeds_and_of_tasks_prove_nothing_where_the_rest_differs():
    """[[1, 2], [2, 1]]: no seed and no task stands out, yet the four differ; mean 1.5, rest 1 with one degree."""
    found = comparison.compare([[0.0, 0.0]] * 2, [[1.0, 2.0], [2.0, 1.0]], confidence=0.95)
    reach = student_quantile(0.975, 1) * math.sqrt(1 / 4)
    assert (found.low, found.high) == pytest.approx((1.5 - reach, 1.5 + reach))
    assert found.verdict == "tie"


@pytest.mark.parametrize("d", [[[0.0, 1.0], [3.0, 2.0]], [[0.0, 3.0], [1.0, 2.0]]])
def test_the_larger_part_alone_counts_where_the_rest_exceeds_the_other(d):
    """Mean squares 4, 0 and 1 in the first table, 0, 4 and 1 in the second: variance 4 / 4, one degree."""
    found = comparison.compare([[0.0, 0.0]] * 2, d, confidence=0.95)
    reach = student_quantile(0.975, 1)
    assert (found.low, found.high) == pytest.approx((1.5 - reach, 1.5 + reach))


def test_the_degrees_are_those_of_the_larger_part():
    """Three seeds, four tasks, and a rest: 48 and 4 of them; three seeds have two degrees, four tasks three."""
    by_seed, by_task = (-2.0, 0.0, 2.0), (-1.5, -0.5, 0.5, 1.5)
    rest = ((0.1, -0.1, -0.1, 0.1), (-0.2, 0.2, 0.2, -0.2), (0.1, -0.1, -0.1, 0.1))
    for seed_part, task_part, degrees in ((1.0, 0.0, 2), (0.0, 1.0, 3)):
        d = [
            [1 + seed_part * by_seed[s] + task_part * by_task[t] + rest[s][t] for t in range(4)]
            for s in range(3)
        ]
        found = comparison.compare([[0.0] * 4] * 3, d, confidence=0.95)
        error = math.sqrt(4 / 3) if seed_part else math.sqrt(5 / 3 / 4)
        reach = student_quantile(0.975, degrees) * error
        assert (found.low, found.high) == pytest.approx((1 - reach, 1 + reach))


@pytest.mark.parametrize(
    "a, b, confidence, text",
    [
        ([], [], 0.9, r"a and b must be two equal tables \[seed\]\[task\]"),
        ([[1.0]], [[1.0, 2.0]], 0.9, r"a and b must be two equal tables \[seed\]\[task\]"),
        ([[1.0], [1.0, 2.0]], [[1.0], [1.0, 2.0]], 0.9, r"a and b must be two equal tables"),
        ([[]], [[]], 0.9, r"a and b must be two equal tables \[seed\]\[task\], got rows of \[\[0\], \[0\]\]"),
        ([[1.0]] * 2, [[1.0]], 0.9, r"a and b must be two equal tables .* got rows of \[\[1, 1\], \[1\]\]"),
        ([[1.0]], [[1.0]], 1.0, "confidence must lie between 0 and 1, got 1.0"),
        ([[1.0]], [[1.0]], 0.0, "confidence must lie between 0 and 1, got 0.0"),
        ([[1.0]], [[1.0]], math.nan, "confidence must lie between 0 and 1, got nan"),
        ([[1.0, math.nan]], [[1.0, 1.0]], 0.9, "every score must be finite, got nan"),
        ([[1.0]], [[math.inf]], 0.9, "every score must be finite, got inf"),
    ],
)
def test_compare_refuses_unequal_tables(a, b, confidence, text):
    with pytest.raises(ValueError, match=text):
        comparison.compare(a, b, confidence=confidence)


def test_holm_worked_example():
    assert comparison.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))


@given(p=st.lists(st.floats(0, 1), max_size=6))
def test_holm_lies_between_no_correction_and_bonferroni(p):
    adjusted = comparison.holm(p)
    for before, after in zip(p, adjusted):
        assert before <= after <= min(1.0, len(p) * before) + 1e-12
    assert [a for _, a in sorted(zip(p, adjusted))] == sorted(adjusted)


@pytest.mark.parametrize("difference, spread, seeds", [(1.0, 0.0, 2), (0.05, 0.05, 10), (-0.05, 0.1, 34)])
def test_seeds_needed_at_power_80_percent(difference, spread, seeds):
    """Effect sizes 1 and 0.5: textbook samples of a paired t test are 10 and 34."""
    assert (
        abs(
            comparison.seeds_needed(difference=difference, seed_spread=spread, power=0.8, confidence=0.95)
            - seeds
        )
        <= 1
    )


@given(difference=st.floats(0.02, 1), spread=st.floats(0, 0.3), more=st.floats(1, 2))
def test_more_spread_needs_more_seeds(difference, spread, more):
    def need(s):
        return comparison.seeds_needed(difference=difference, seed_spread=s, power=0.8, confidence=0.95)

    assert 2 <= need(spread) <= need(spread * more)


@given(
    difference=st.floats(0.1, 1),
    spread=st.floats(0.05, 0.5),
    power=st.floats(0.05, 0.95),
    confidence=st.floats(0.5, 0.99),
)
def test_seeds_needed_is_the_first_number_that_is_enough(difference, spread, power, confidence):
    need = comparison.seeds_needed(
        difference=difference, seed_spread=spread, power=power, confidence=confidence
    )

    def enough(n):
        reach = student_quantile((1 + confidence) / 2, n - 1) + student_quantile(power, n - 1)
        return n >= (max(0.0, reach) * spread / difference) ** 2 - 1e-9

    assert need >= 2 and enough(need) and (need == 2 or not enough(need - 1) or need > 2 and need <= 3)


def test_little_power_needs_no_more_seeds_than_much():
    few, many = (
        comparison.seeds_needed(difference=0.1, seed_spread=0.2, power=power, confidence=0.5)
        for power in (0.01, 0.9)
    )
    assert few == 2 < many


@pytest.mark.parametrize(
    "change, text",
    [
        ({"difference": 0.0}, r"difference must be finite and not 0, got 0\.0"),
        ({"difference": math.nan}, "difference must be finite and not 0, got nan"),
        ({"difference": -math.inf}, "difference must be finite and not 0, got -inf"),
        ({"seed_spread": math.nan}, "seed_spread must be finite and not negative, got nan"),
        ({"seed_spread": math.inf}, "seed_spread must be finite and not negative, got inf"),
        ({"seed_spread": -0.1}, r"seed_spread must be finite and not negative, got -0\.1"),
        ({"power": 1.0}, r"power must lie between 0 and 1, got 1\.0"),
        ({"power": 0.0}, r"power must lie between 0 and 1, got 0\.0"),
        ({"confidence": math.nan}, "confidence must lie between 0 and 1, got nan"),
    ],
)
def test_seeds_needed_refuses_what_has_no_answer(change, text):
    plain = {"difference": 1.0, "seed_spread": 1.0, "power": 0.8, "confidence": 0.95}
    with pytest.raises(ValueError, match=f"^{text}$"):
        comparison.seeds_needed(**(plain | change))


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_a_p_value_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"p_values must lie between 0 and 1, got \[0.5, "):
        comparison.holm([0.5, value])


def test_a_table_that_is_nearly_all_rest_proves_nothing():
    """Equal means of seeds and of tasks but for a hair: the rest, .99, is the least that the mean varies by."""
    found = comparison.compare([[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.01], [0.0, 1.0]], confidence=0.95)
    assert found.verdict == "tie" and found.low < 0 < found.high
