"""core/loss.py against the papers' equations, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import oracle_loss as oracle
import pytest
from comparing import (
    advantages,
    assert_same,
    flags,
    gradient,
    junk,
    logprobs,
    no_number,
    numbers,
    numeric_gradient,
)
from hypothesis import given
from hypothesis import strategies as st

from core.loss import (
    TokenLoss,
    cispo,
    double_sided_importance,
    dppo_binary_kl,
    dppo_binary_tv,
    importance_weighted_policy_gradient,
)

Columns = tuple[list[float], list[float], list[float], list[bool]]
"""logprob, rollout_logprob, advantage, loss_mask"""

deltas = st.floats(0.001, 1.5)
caps = st.floats(0.5, 10) | st.just(math.inf)
lows = st.floats(0, 0.999)
highs = st.floats(1.001, 20) | st.just(math.inf)


def columns(rows: Sequence[tuple[float, float, float, bool]]) -> Columns:
    """Four lists from a list of tokens."""
    one, two, three, four = zip(*rows) if rows else ((), (), (), ())
    return list(one), list(two), list(three), list(four)


@st.composite
def tokens(draw: st.DrawFn) -> Columns:
    """Up to eight tokens: trained, without a usable anchor, or outside the mask and poisoned."""
    trained = st.tuples(logprobs, logprobs, advantages, st.just(True))
    same = st.tuples(logprobs, advantages).map(lambda two: (two[0], two[0], two[1], True))
    without_anchor = st.tuples(logprobs, no_number | st.just(-9999.0), advantages, st.just(True))
    outside = st.tuples(junk, junk, junk, st.just(False))
    return columns(draw(st.lists(trained | same | without_anchor | outside, max_size=8)))


def compare(function: Callable[..., TokenLoss], batch: Columns, rule: oracle.Rule, **knobs: float) -> None:
    """Every field and the gradient."""
    logprob, rollout_logprob, advantage, loss_mask = batch
    expected = oracle.surrogate(logprob, rollout_logprob, advantage, loss_mask, rule)
    rest = (numbers(rollout_logprob), numbers(advantage), flags(loss_mask))
    found = function(numbers(logprob), *rest, **knobs)
    assert_same(found.unusable, expected.unusable, what="unusable")
    assert_same(found.out_of_region, expected.out_of_region, what="out_of_region")
    assert_same(found.importance_ratio, expected.importance_ratio, what="importance_ratio")
    assert_same(found.value, expected.value, what="value")
    assert_same(found.slope, expected.gradient, what="slope")
    slope = gradient(lambda leaf: function(leaf, *rest, **knobs).value, logprob)
    assert_same(slope, expected.gradient, what="gradient")


@given(tokens(), deltas, deltas, caps)
def test_dppo_binary_tv_is_equation_12_with_the_divergence_of_equation_13(
    batch: Columns, low: float, high: float, cap: float
) -> None:
    rule = oracle.dppo(oracle.binary_tv, low, high, cap)
    compare(dppo_binary_tv, batch, rule, delta_low=low, delta_high=high, max_ratio=cap)


@given(tokens(), deltas, deltas, caps)
def test_dppo_binary_kl_is_equation_12_with_the_divergence_of_equation_14(
    batch: Columns, low: float, high: float, cap: float
) -> None:
    rule = oracle.dppo(oracle.binary_kl, low, high, cap)
    compare(dppo_binary_kl, batch, rule, delta_low=low, delta_high=high, max_ratio=cap)


@given(tokens(), lows, highs)
def test_double_sided_importance_is_the_ratio_strictly_inside(
    batch: Columns, low: float, high: float
) -> None:
    compare(double_sided_importance, batch, oracle.double_sided(low, high), min_ratio=low, max_ratio=high)


@given(tokens())
def test_importance_weighted_policy_gradient_is_the_ratio(batch: Columns) -> None:
    compare(importance_weighted_policy_gradient, batch, oracle.policy_gradient())


@given(tokens(), lows, highs)
def test_cispo_is_the_clamped_ratio(batch: Columns, low: float, high: float) -> None:
    compare(cispo, batch, oracle.cispo(low, high), min_ratio=low, max_ratio=high)


# The score form has the gradient of the objective as it is printed: differentiate that numerically.


@given(st.lists(st.tuples(st.floats(-3, -0.1), st.floats(-3, -0.1), advantages), min_size=1, max_size=5))
def test_dppo_has_the_gradient_of_masked_ratio_times_advantage(
    rows: list[tuple[float, float, float]],
) -> None:
    logprob, rollout_logprob, advantage, loss_mask = columns([(*row, True) for row in rows])
    rule = oracle.dppo(oracle.binary_tv, 0.15, 0.15, math.inf)
    keep = [not rule(lp, roll, A)[1] for lp, roll, A in zip(logprob, rollout_logprob, advantage)]

    def objective(values: list[float]) -> float:
        return -sum(
            math.exp(lp - roll) * A
            for lp, roll, A, kept in zip(values, rollout_logprob, advantage, keep)
            if kept
        )

    rest = (numbers(rollout_logprob), numbers(advantage), flags(loss_mask))
    found = gradient(
        lambda leaf: dppo_binary_tv(leaf, *rest, delta_low=0.15, delta_high=0.15, max_ratio=math.inf).value,
        logprob,
    )
    assert_same(found, numeric_gradient(objective, logprob), relative=1e-6, absolute=1e-7)


# Edges that the formulas leave to a convention, as the module states it.

EVERY: dict[str, Callable[..., TokenLoss]] = {
    "dppo_binary_tv": lambda *a: dppo_binary_tv(*a, delta_low=0.15, delta_high=0.15, max_ratio=5.0),
    "dppo_binary_kl": lambda *a: dppo_binary_kl(*a, delta_low=0.05, delta_high=0.05, max_ratio=5.0),
    "double_sided_importance": lambda *a: double_sided_importance(*a, min_ratio=0.5, max_ratio=5.0),
    "importance_weighted_policy_gradient": importance_weighted_policy_gradient,
    "cispo": lambda *a: cispo(*a, min_ratio=0.0, max_ratio=5.0),
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("lp", [-1.0, -0.001, -4.0])
def test_a_nan_advantage_in_the_mask_comes_out_as_nan(name: str, lp: float) -> None:
    found = EVERY[name](numbers([lp]), numbers([-1.0]), numbers([math.nan]), flags([True]))
    assert math.isnan(found.value.item())


@pytest.mark.parametrize("name", EVERY)
def test_a_nan_logprob_in_the_mask_comes_out_as_nan(name: str) -> None:
    found = EVERY[name](numbers([math.nan]), numbers([-1.0]), numbers([1.0]), flags([True]))
    assert math.isnan(found.value.item())


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_token_gives_no_value(name: str, shape: tuple[int, ...]) -> None:
    empty = numbers([]).reshape(shape)
    found = EVERY[name](empty, empty, empty, empty.bool())
    assert all(field.shape == shape for field in found)


@pytest.mark.parametrize("name", EVERY)
def test_an_empty_mask_gives_zero_and_a_gradient_of_zero_still_attached(name: str) -> None:
    leaf = numbers([math.nan, -1.0]).requires_grad_(True)
    poison = numbers([math.inf, math.nan])
    found = EVERY[name](leaf, poison, poison, flags([False, False]))
    found.value.sum().backward()
    assert leaf.grad is not None
    assert_same(leaf.grad, [0.0, 0.0])
    assert_same(found.value, [0.0, 0.0])


@pytest.mark.parametrize(("A", "kept"), [(1.0, 0.0), (-1.0, 1.0), (0.0, 1.0)])
def test_binary_kl_of_a_certain_token_is_infinite_and_stops_it_only_if_it_goes_on(
    A: float, kept: float
) -> None:
    found = dppo_binary_kl(
        numbers([0.0]), numbers([-0.5]), numbers([A]), flags([True]),
        delta_low=0.05, delta_high=0.05, max_ratio=math.inf,
    )  # fmt: skip
    assert_same(found.slope, [-A * kept * math.exp(0.5)])
    assert_same(found.out_of_region, [kept == 0.0])


def test_binary_kl_takes_a_logprob_above_zero_by_rounding_as_certain() -> None:
    found = dppo_binary_kl(
        numbers([1e-7, 1e-7]), numbers([-0.5, 1e-7]), numbers([1.0, 1.0]), flags([True, True]),
        delta_low=0.05, delta_high=0.05, max_ratio=math.inf,
    )  # fmt: skip
    assert_same(found.out_of_region, [True, False])


# losses.md 1.4: rows a to f.

ROWS = {
    "a": (0.5, 0.7, 1.0, 1.4, 0.0871766935724, 0.0, 0.0),
    "b": (0.5, 0.3, -1.0, 0.6, 0.0871766935724, 0.0, 0.0),
    "c": (0.5, 0.3, 1.0, 0.6, 0.0871766935724, -0.6, -0.6),
    "d": (0.5, 0.7, -1.0, 1.4, 0.0871766935724, 1.4, 1.4),
    "e": (1e-4, 1e-2, 1.0, 100.0, 0.00948881880148, -100.0, -100.0),
    "f": (0.99, 0.80, -1.0, 0.808080808081, 0.181004960571, 0.0, 0.0),
}
"""mu, pi, A, r, D_KL, slope under TV 0.15, slope under KL 0.05"""


def of_probabilities(
    function: Callable[..., TokenLoss],
    mu: Sequence[float],
    pi: Sequence[float],
    A: Sequence[float],
    **knobs: float,
) -> TokenLoss:
    """A surrogate of probabilities, everything in the mask."""
    return function(
        numbers([math.log(x) for x in pi]).requires_grad_(True),
        numbers([math.log(x) for x in mu]),
        numbers(A),
        flags([True] * len(A)),
        **knobs,
    )


@pytest.mark.parametrize("row", ROWS)
def test_dppo_table_of_one_token(row: str) -> None:
    mu, pi, A, r, kl, tv_slope, kl_slope = ROWS[row]
    knobs = {"max_ratio": math.inf}
    tv = of_probabilities(dppo_binary_tv, [mu], [pi], [A], delta_low=0.15, delta_high=0.15, **knobs)
    bk = of_probabilities(dppo_binary_kl, [mu], [pi], [A], delta_low=0.05, delta_high=0.05, **knobs)
    assert_same(tv.importance_ratio, [r], relative=1e-11)
    assert_same(tv.slope, [tv_slope], relative=1e-11)
    assert_same(bk.slope, [kl_slope], relative=1e-11)
    assert_same(oracle.binary_kl(math.log(pi), math.log(mu)), kl, relative=1e-10)


@pytest.mark.parametrize(("mu", "pi", "kl"), [(0.5, 0.65, 0.0471553397356), (0.9, 0.999, 0.366593004807)])
@pytest.mark.parametrize("share", [0.999999, 1.000001])
def test_binary_kl_mask_turns_at_the_divergence(mu: float, pi: float, kl: float, share: float) -> None:
    found = of_probabilities(
        dppo_binary_kl, [mu], [pi], [1.0], delta_low=9.0, delta_high=kl * share, max_ratio=math.inf
    )
    assert_same(found.out_of_region, [share < 1])


def sum_of_table(**knobs: Any) -> TokenLoss:
    """Rows a to f at once."""
    mu, pi, A = zip(*(row[:3] for row in ROWS.values()))
    return of_probabilities(dppo_binary_tv, mu, pi, A, delta_low=0.15, delta_high=0.15, **knobs)


def test_dppo_table_sums_to_minus_99_2_in_ratio_form_and_460_74_in_score_form() -> None:
    found = sum_of_table(max_ratio=math.inf)
    ratio_form = found.slope.sum().item()  # d(-r A) / d log pi is -r A itself
    assert_same(ratio_form, -99.2, relative=1e-11)
    assert_same(ratio_form / 6, -16.5333333333, relative=1e-10)
    assert_same(found.value.sum(), 460.74005736, relative=1e-10)
    assert_same(found.value.mean(), 76.79000956, relative=1e-10)
    assert found.out_of_region.sum().item() == 3


def test_dppo_table_with_a_cap_of_5_sums_to_minus_4_2() -> None:
    assert_same(sum_of_table(max_ratio=5.0).slope.sum(), -4.2, relative=1e-11)


# losses.md 2.1: GLM-5 with the bounds (0.5, 5) and A = 2.


@pytest.mark.parametrize(
    ("r", "slope"),
    [(0.4, 0.0), (0.500001, -1.000002), (1.0, -2.0), (4.999, -9.998), (5.000001, 0.0), (7.0, 0.0)],
)
def test_double_sided_importance_table(r: float, slope: float) -> None:
    found = of_probabilities(double_sided_importance, [0.1], [0.1 * r], [2.0], min_ratio=0.5, max_ratio=5.0)
    assert_same(found.slope, [slope], relative=1e-9)


@pytest.mark.parametrize("bounds", [(1.0, 5.0), (0.5, 1.0)])
def test_double_sided_importance_drops_a_ratio_on_either_bound(bounds: tuple[float, float]) -> None:
    found = of_probabilities(
        double_sided_importance, [0.3], [0.3], [2.0], min_ratio=bounds[0], max_ratio=bounds[1]
    )
    assert_same(found.slope, [0.0])
    assert_same(found.out_of_region, [True])


def test_double_sided_importance_of_a_fifth_and_three_tenths() -> None:
    found = of_probabilities(double_sided_importance, [0.2], [0.3], [2.0], min_ratio=0.5, max_ratio=5.0)
    assert_same(found.importance_ratio, [1.5])
    assert_same(found.value, [3.61191841298], relative=1e-11)
    assert_same(found.slope, [-3.0])


def test_double_sided_importance_without_bounds_is_the_importance_weighted_gradient() -> None:
    mu, pi, A = [0.2, 0.9, 1e-5], [0.3, 1e-6, 0.9], [1.0, -2.0, 0.5]
    open_bounds = of_probabilities(double_sided_importance, mu, pi, A, min_ratio=0.0, max_ratio=math.inf)
    plain = of_probabilities(importance_weighted_policy_gradient, mu, pi, A)
    assert_same(open_bounds.value, plain.value.tolist())


def test_g44_cispo_bounds_are_absolute_and_keep_a_gradient_where_double_sided_importance_has_none() -> None:
    high = of_probabilities(cispo, [0.1], [0.7], [1.0], min_ratio=0.0, max_ratio=5.0)
    assert_same(high.slope, [-5.0])
    low = of_probabilities(cispo, [0.5], [0.15], [1.0], min_ratio=0.0, max_ratio=5.0)
    assert_same(low.slope, [-0.3])


def test_a_fifth_to_three_tenths_under_a_truncated_weight_of_1_1() -> None:
    found = of_probabilities(cispo, [0.2], [0.3], [1.0], min_ratio=0.0, max_ratio=1.1)
    assert_same(found.slope, [-1.1])


# recipe.md F.1.


def of_logprobs(
    function: Callable[..., TokenLoss],
    lp: Sequence[float],
    roll: Sequence[float],
    A: Sequence[float],
    **knobs: float,
) -> TokenLoss:
    """A surrogate of logprobs, everything in the mask."""
    return function(numbers(lp), numbers(roll), numbers(A), flags([True] * len(lp)), **knobs)


def test_cispo_on_the_rollout_anchor_sums_to_minus_3_19305() -> None:
    found = of_logprobs(
        cispo, [-1.69315, -1, -0.69741], [-1.30685, -1.5, -1], [1, -1, -4], min_ratio=0.8, max_ratio=1.2
    )
    assert_same(found.importance_ratio, [0.67957, 1.64872, 1.35336], absolute=1e-5)
    assert_same(found.importance_ratio.mean(), 1.2272, absolute=1e-4)
    coefficient = found.slope / -numbers([1, -1, -4])
    assert_same(coefficient.mean(), 1.0667, absolute=1e-4)
    assert_same(found.value.sum(), -3.19305, absolute=1e-5)


def test_cispo_on_the_old_anchor_sums_to_minus_2_99305() -> None:
    found = of_logprobs(
        cispo, [-1.69315, -1, -0.69741], [-1, -1, -3], [1, -1, -4], min_ratio=0.8, max_ratio=1.2
    )
    assert_same(found.value.sum(), -2.99305, absolute=1e-5)


@pytest.mark.parametrize(
    ("lp", "A", "keep", "total"),
    [
        ([-0.3, -2, -0.9], [1, -1, 1], [False, False, True], -1.10517),
        ([-2, -0.3], [1, -1], [True, True], 1.64587),
    ],
    ids=["both-sides-masked", "the-good-direction-is-never-masked"],
)
def test_dppo_binary_tv_of_recipe_f1(lp: list[float], A: list[float], keep: list[bool], total: float) -> None:
    found = of_logprobs(
        dppo_binary_tv, lp, [-1.0] * len(lp), A, delta_low=0.2, delta_high=0.2, max_ratio=math.inf
    )
    assert_same(found.out_of_region, [not one for one in keep])
    assert_same(found.slope.sum(), total, absolute=1e-5)


@pytest.mark.parametrize(
    ("anchor", "keep", "total"),
    [([-0.35, -1], [True, True], -2.10254), ([-1, -1], [False, True], -1.05127)],
    ids=["on-the-sampler", "on-the-old-policy"],
)
def test_dppo_anchor_decides_what_is_masked(anchor: list[float], keep: list[bool], total: float) -> None:
    found = of_logprobs(
        dppo_binary_tv, [-0.3, -0.95], anchor, [1, 1], delta_low=0.2, delta_high=0.2, max_ratio=math.inf
    )
    assert_same(found.out_of_region, [not one for one in keep])
    assert_same(found.slope.sum(), total, absolute=1e-5)


@pytest.mark.parametrize(
    ("delta", "lp", "A", "keep", "total"),
    [
        (0.05, [-0.1, -0.95], [1, 1], [False, True], -1.05127),
        (0.5, [-1.01, -0.99], [1, -1], [True, True], 0.0200003),
    ],
    ids=["one-masked", "none-masked"],
)
def test_dppo_binary_kl_of_recipe_f1(
    delta: float, lp: list[float], A: list[float], keep: list[bool], total: float
) -> None:
    found = of_logprobs(
        dppo_binary_kl, lp, [-1.0, -1.0], A, delta_low=delta, delta_high=delta, max_ratio=math.inf
    )
    assert_same(found.out_of_region, [not one for one in keep])
    assert_same(found.slope.sum(), total, absolute=1e-5)


def test_binary_kl_of_recipe_f1_is_0_86582_and_0_00075() -> None:
    assert_same([oracle.binary_kl(-0.1, -1), oracle.binary_kl(-0.95, -1)], [0.86582, 0.00075], absolute=1e-5)


def test_double_sided_importance_of_recipe_f1() -> None:
    found = of_logprobs(
        double_sided_importance, [-0.8, -0.8, -0.3, -3], [-1.0] * 4, [1, -1, 1, -1],
        min_ratio=0.8, max_ratio=1.28,
    )  # fmt: skip
    assert_same(found.importance_ratio, [1.2214, 1.2214, 2.0138, 0.1353], absolute=1e-4)
    assert_same(found.out_of_region, [False, False, True, True])


@pytest.mark.parametrize(("cap", "slope"), [(math.inf, 1e5), (5.0, 5.0)])
def test_dppo_never_masks_a_rare_token_and_only_the_cap_bounds_it(cap: float, slope: float) -> None:
    found = of_probabilities(
        dppo_binary_tv, [1e-6], [0.1], [-1.0], delta_low=0.2, delta_high=0.2, max_ratio=cap
    )
    assert_same(found.slope, [slope])
    assert_same(found.out_of_region, [False])


@pytest.mark.parametrize("name", EVERY)
def test_losses_need_no_old_logprob_and_stay_finite_on_recipe_f1(name: str) -> None:
    found = EVERY[name](
        numbers([-1, -1.5, -0.8, -0.7, -1.2, -2]).reshape(2, 3),
        numbers([-1.2, -1, -0.9, -0.6, -1.5, -1.7]).reshape(2, 3),
        numbers([1, 1, 1, -1, -1, -1]).reshape(2, 3),
        flags([True, True, False] * 2).reshape(2, 3),
    )
    assert bool(found.value.isfinite().all())
    assert_same(found.value[:, 2], [0.0, 0.0])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("A", [-1.5, 0.0, 2.0])
def test_equal_policies_have_the_plain_policy_gradient(name: str, A: float) -> None:
    found = EVERY[name](numbers([-0.7]), numbers([-0.7]), numbers([A]), flags([True]))
    assert_same(found.slope, [-A])


@pytest.mark.parametrize("name", EVERY)
def test_g43_what_was_recorded_has_no_gradient(name: str) -> None:
    logprob, rollout, advantage = (numbers([x]).requires_grad_(True) for x in (-0.7, -0.8, 1.5))
    EVERY[name](logprob, rollout, advantage, flags([True])).value.sum().backward()
    assert logprob.grad is not None and logprob.grad.item() != 0
    assert rollout.grad is None and advantage.grad is None
