"""core/loss_old.py against the papers' objectives, token by token and row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import oracle_aggregate
import oracle_loss_old as oracle
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
    places,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle_loss import LARGEST_EXPONENT
from torch import Tensor

from core.loss_old import decoupled_ppo, gspo, ppo_clip, ppo_dual_clip, sapo
from core.surrogate import TokenLoss

Row = tuple[float, float, float, float, bool, int]
"""logprob, old_logprob, rollout_logprob, advantage, loss_mask, row_id"""

rows_of = st.sampled_from([-4, 0, 7])
epsilons = st.floats(0.01, 0.9)
caps = st.floats(0.5, 10) | st.just(math.inf)
trained = st.tuples(logprobs, logprobs, logprobs, advantages, st.just(True), rows_of)
equal = st.tuples(logprobs, advantages, rows_of).map(lambda x: (x[0], x[0], x[0], x[1], True, x[2]))
no_anchor = st.tuples(logprobs, no_number | st.just(-9999.0), logprobs, advantages, st.just(True), rows_of)
no_rollout = st.tuples(logprobs, logprobs, no_number | st.just(-9999.0), advantages, st.just(True), rows_of)
outside = st.tuples(junk, junk, junk, junk, st.just(False), rows_of)
tokens = st.lists(trained | equal | no_anchor | no_rollout | outside, max_size=8)


def usable(lp: float, anchor: float) -> bool:
    """A finite anchor and a ratio that is a number."""
    return math.isfinite(anchor) and lp - anchor <= LARGEST_EXPONENT


def compare(
    function: Callable[..., TokenLoss],
    rows: Sequence[Row],
    expected: Sequence[oracle.Coefficient | None],
) -> None:
    """function(leaf) against the coefficient of every token, None where it has none that can be used."""
    columns = [list(column) for column in zip(*rows)] if rows else [[], [], [], [], [], []]
    logprob, old, _, advantage, mask, _ = columns
    slope, out, bad, ratio = [], [], [], []
    for lp, o, A, m, one in zip(logprob, old, advantage, mask, expected):
        kept = m and one is not None
        slope.append(-one.value * A if m and one is not None else 0.0)
        out.append(one.out_of_region if m and one is not None else False)
        bad.append(m and one is None)
        ratio.append(math.exp(lp - o) if kept else 0.0)
    found = function(numbers(logprob))
    assert_same(found.unusable, bad, what="unusable")
    assert_same(found.out_of_region, out, what="out_of_region")
    assert_same(found.importance_ratio, ratio, what="importance_ratio")
    assert_same(found.slope, slope, what="slope")
    value = [s * lp if s != 0 else 0.0 for s, lp in zip(slope, logprob)]
    assert_same(found.value, value, what="value")
    assert_same(gradient(lambda leaf: function(leaf).value, logprob), slope, what="gradient")


def rest(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """old, rollout, advantage, mask, row id as tensors."""
    columns = [list(column) for column in zip(*rows)] if rows else [[], [], [], [], [], []]
    return (
        numbers(columns[1]), numbers(columns[2]), numbers(columns[3]), flags(columns[4]), places(columns[5]),
    )  # fmt: skip


def per_token(
    rows: Sequence[Row], rule: Callable[[float, float], oracle.Coefficient]
) -> list[oracle.Coefficient | None]:
    """rule(r', A) where the ratio to the old policy can be used."""
    return [rule(math.exp(lp - old), A) if m and usable(lp, old) else None for lp, old, _, A, m, _ in rows]


@given(tokens, epsilons, epsilons, caps)
def test_ppo_clip_is_the_gradient_of_equation_7(rows: list[Row], low: float, high: float, cap: float) -> None:
    old, _, advantage, mask, _ = rest(rows)
    compare(
        lambda leaf: ppo_clip(leaf, old, advantage, mask, epsilon_low=low, epsilon_high=high, max_ratio=cap),
        rows,
        per_token(rows, lambda r, A: oracle.ppo_clip(r, A, low, high, cap)),
    )


@given(tokens, epsilons, epsilons, st.floats(1.001, 6))
def test_ppo_dual_clip_is_the_gradient_of_equation_5(
    rows: list[Row], low: float, high: float, bound: float
) -> None:
    old, _, advantage, mask, _ = rest(rows)
    compare(
        lambda leaf: ppo_dual_clip(
            leaf, old, advantage, mask, epsilon_low=low, epsilon_high=high, dual_clip=bound
        ),
        rows,
        per_token(rows, lambda r, A: oracle.ppo_dual_clip(r, A, low, high, bound)),
    )


@given(tokens, epsilons, epsilons, caps)
def test_decoupled_ppo_weighs_the_clipped_ratio_by_that_of_the_sampler(
    rows: list[Row], low: float, high: float, cap: float
) -> None:
    old, rollout, advantage, mask, _ = rest(rows)
    expected = []
    for lp, o, roll, A, m, _ in rows:
        whole = m and usable(lp, o) and usable(o, roll) and usable(lp, roll)
        expected.append(
            oracle.decoupled_ppo(math.exp(lp - o), math.exp(o - roll), A, low, high, cap) if whole else None
        )
    compare(
        lambda leaf: decoupled_ppo(
            leaf, old, rollout, advantage, mask, epsilon_low=low, epsilon_high=high, max_weight=cap
        ),
        rows,
        expected,
    )


@given(tokens, epsilons, epsilons)
def test_gspo_has_one_ratio_a_row_clipped_as_ppos(rows: list[Row], low: float, high: float) -> None:
    old, _, advantage, mask, row = rest(rows)
    good = [m and usable(lp, o) for lp, o, _, _, m, _ in rows]
    logs = [lp - o if g else 0.0 for (lp, o, *_), g in zip(rows, good)]
    ratio = oracle.sequence_ratio(logs, good, [one[5] for one in rows])
    assume(all(abs(s - 1 - high) > 1e-9 and abs(s - 1 + low) > 1e-9 for s in ratio))
    expected = []
    for (_, _, _, A, _, _), s, g in zip(rows, ratio, good):
        out = oracle.clipped_away(s, A, low, high)
        expected.append(oracle.Coefficient(0.0 if out else s, out) if g else None)

    def function(leaf: Tensor) -> TokenLoss:
        found = gspo(leaf, old, advantage, mask, row, epsilon_low=low, epsilon_high=high)
        return found._replace(importance_ratio=numbers(token_ratio))

    token_ratio = [math.exp(x) if g else 0.0 for x, g in zip(logs, good)]
    compare(function, rows, expected)


@given(tokens, st.floats(0.2, 3), st.floats(0.2, 3))
def test_sapo_is_the_gradient_of_the_soft_gate(rows: list[Row], positive: float, negative: float) -> None:
    old, _, advantage, mask, _ = rest(rows)
    compare(
        lambda leaf: sapo(
            leaf, old, advantage, mask, temperature_positive=positive, temperature_negative=negative
        ),
        rows,
        per_token(rows, lambda r, A: oracle.sapo(r, A, positive, negative)),
    )


# The score form has the gradient of the printed objective: differentiate that numerically.

near = st.lists(st.tuples(st.floats(-2, -0.5), st.floats(-2, -0.5), st.floats(-2, 2)), min_size=1, max_size=4)


def away(ratio: float, *bounds: float) -> bool:
    """No kink within the step of the difference."""
    return all(abs(math.log(ratio) - math.log(bound)) > 1e-4 for bound in bounds)


@pytest.mark.parametrize("name", ["ppo_clip", "ppo_dual_clip", "sapo"])
@given(rows=near)
def test_gradient_is_the_numeric_one_of_the_objective(
    name: str, rows: list[tuple[float, float, float]]
) -> None:
    logprob, old, advantage = (list(column) for column in zip(*rows))
    assume(all(away(math.exp(lp - o), 0.8, 1.28, 2.0) for lp, o in zip(logprob, old)))
    arguments = (numbers(old), numbers(advantage), flags([True] * len(rows)))
    objectives: dict[str, Callable[[float, float], float]] = {
        "ppo_clip": lambda r, A: oracle.ppo_objective(r, A, 0.2, 0.28),
        "ppo_dual_clip": lambda r, A: oracle.dual_clip_objective(r, A, 0.2, 0.28, 2.0),
        "sapo": lambda r, A: oracle.sapo_objective(r, A, 1.0, 1.05),
    }
    functions: dict[str, Callable[..., TokenLoss]] = {
        "ppo_clip": lambda leaf: ppo_clip(
            leaf, *arguments, epsilon_low=0.2, epsilon_high=0.28, max_ratio=math.inf
        ),
        "ppo_dual_clip": lambda leaf: ppo_dual_clip(
            leaf, *arguments, epsilon_low=0.2, epsilon_high=0.28, dual_clip=2.0
        ),
        "sapo": lambda leaf: sapo(leaf, *arguments, temperature_positive=1.0, temperature_negative=1.05),
    }
    expected = numeric_gradient(
        lambda values: (
            -sum(objectives[name](math.exp(lp - o), A) for lp, o, A in zip(values, old, advantage))
        ),
        logprob,
    )
    found = gradient(lambda leaf: functions[name](leaf).value, logprob)
    assert_same(found, expected, relative=1e-6, absolute=1e-7)


@given(st.lists(st.tuples(st.floats(-2, -0.5), st.floats(-2, -0.5), rows_of), min_size=1, max_size=6))
def test_gspo_under_the_sequence_mean_is_the_gradient_of_the_mean_over_rows(
    rows: list[tuple[float, float, int]],
) -> None:
    logprob, old, row = (list(column) for column in zip(*rows))
    advantage_of, every = {-4: 1.5, 0: -1.0, 7: 0.5}, [True] * len(rows)
    advantage = [advantage_of[name] for name in row]

    def objective(values: list[float]) -> float:
        ratio = oracle.sequence_ratio([lp - o for lp, o in zip(values, old)], every, row)
        by_row = {name: s for name, s in zip(row, ratio)}
        return -sum(oracle.ppo_objective(s, advantage_of[k], 0.2, 0.3) for k, s in by_row.items()) / len(
            by_row
        )

    ratios = oracle.sequence_ratio([lp - o for lp, o in zip(logprob, old)], every, row)
    assume(all(away(s, 0.8, 1.3) for s in ratios))
    weight = numbers(oracle_aggregate.sequence_mean(every, row, row))
    found = gradient(
        lambda leaf: (
            weight
            * gspo(
                leaf,
                numbers(old),
                numbers(advantage),
                flags(every),
                places(row),
                epsilon_low=0.2,
                epsilon_high=0.3,
            ).value
        ),
        logprob,
    )
    assert_same(found, numeric_gradient(objective, logprob), relative=1e-6, absolute=1e-7)


# Edges.

EVERY: dict[str, Callable[..., TokenLoss]] = {
    "ppo_clip": lambda lp, old, A, m: ppo_clip(
        lp, old, A, m, epsilon_low=0.2, epsilon_high=0.28, max_ratio=5.0
    ),
    "ppo_dual_clip": lambda lp, old, A, m: ppo_dual_clip(
        lp, old, A, m, epsilon_low=0.2, epsilon_high=0.28, dual_clip=3.0
    ),
    "decoupled_ppo": lambda lp, old, A, m: decoupled_ppo(
        lp, old, old, A, m, epsilon_low=0.2, epsilon_high=0.28, max_weight=2.0
    ),
    "gspo": lambda lp, old, A, m: gspo(
        lp, old, A, m, places([0] * len(lp)), epsilon_low=0.2, epsilon_high=0.28
    ),
    "sapo": lambda lp, old, A, m: sapo(lp, old, A, m, temperature_positive=1.0, temperature_negative=1.05),
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("A", [-1.5, 0.0, 2.0])
def test_equal_policies_have_the_plain_policy_gradient(name: str, A: float) -> None:
    found = EVERY[name](numbers([-0.7]), numbers([-0.7]), numbers([A]), flags([True]))
    assert_same(found.slope, [-A])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("lp", [-1.0, -0.001, -4.0])
def test_a_nan_advantage_in_the_mask_comes_out_as_nan(name: str, lp: float) -> None:
    found = EVERY[name](numbers([lp]), numbers([-1.0]), numbers([math.nan]), flags([True]))
    assert math.isnan(found.value.item())


@pytest.mark.parametrize("name", EVERY)
def test_an_empty_mask_gives_zero_and_a_gradient_of_zero_still_attached(name: str) -> None:
    leaf = numbers([math.nan, -1.0]).requires_grad_(True)
    poison = numbers([math.inf, math.nan])
    found = EVERY[name](leaf, poison, poison, flags([False, False]))
    found.value.sum().backward()
    assert leaf.grad is not None
    assert_same(leaf.grad, [0.0, 0.0])


@pytest.mark.parametrize("name", EVERY)
def test_a_run_without_old_logprobs_is_refused(name: str) -> None:
    if name != "decoupled_ppo":
        with pytest.raises(ValueError, match="old_logprob"):
            EVERY[name](numbers([-1.0]), None, numbers([1.0]), flags([True]))


# losses.md 1.4, the column of PPO.


@pytest.mark.parametrize(
    ("mu", "pi", "A", "slope"),
    [
        (0.5, 0.7, 1.0, 0.0),
        (0.5, 0.3, -1.0, 0.0),
        (0.5, 0.3, 1.0, -0.6),
        (0.5, 0.7, -1.0, 1.4),
        (1e-4, 1e-2, 1.0, 0.0),
        (0.99, 0.80, -1.0, 0.808080808081),
    ],
    ids=list("abcdef"),
)
def test_dppo_table_under_ppo(mu: float, pi: float, A: float, slope: float) -> None:
    found = ppo_clip(
        numbers([math.log(pi)]), numbers([math.log(mu)]), numbers([A]), flags([True]),
        epsilon_low=0.2, epsilon_high=0.2, max_ratio=math.inf,
    )  # fmt: skip
    assert_same(found.slope, [slope], relative=1e-11)


# losses.md 2.4.


def test_decoupled_ppo_of_a_fifth_a_quarter_and_three_tenths_is_minus_1_5() -> None:
    lp, old, roll = (numbers([math.log(x)]) for x in (0.3, 0.25, 0.2))
    found = decoupled_ppo(
        lp, old, roll, numbers([1.0]), flags([True]),
        epsilon_low=0.2, epsilon_high=0.2 + 1e-9, max_weight=math.inf,
    )  # fmt: skip
    assert_same(found.importance_ratio, [1.2])
    assert_same(found.slope, [-1.5])


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_ppo_keeps_a_ratio_of_exactly_one(A: float) -> None:
    found = ppo_clip(
        numbers([-1.0]), numbers([-1.0]), numbers([A]), flags([True]),
        epsilon_low=1e-12, epsilon_high=1e-12, max_ratio=math.inf,
    )  # fmt: skip
    assert_same(found.slope, [-A])


def test_gspo_of_three_log_ratios_is_1_105() -> None:
    logs = [0.1, -0.2, 0.4]
    found = gspo(
        numbers([x - 1 for x in logs]), numbers([-1.0] * 3), numbers([1.0] * 3), flags([True] * 3),
        places([2] * 3), epsilon_low=0.2, epsilon_high=0.2,
    )  # fmt: skip
    assert_same(found.slope, [-1.10517091808] * 3, relative=1e-11)
    assert_same(found.slope / 3, [-0.368390306025] * 3, relative=1e-11)
    assert_same(math.exp(sum(logs)), 1.34985880758, relative=1e-11)


@pytest.mark.parametrize(
    ("ratio", "A", "value", "slope"),
    [
        (1.0, 1.0, -2.0, -1.0),
        (1.0, -1.0, 1.90476190476, 1.0),
        (2.0, 1.0, -2.92423431452, -1.57289546593),
        (0.5, -1.0, 1.4159383303, 0.467069911643),
    ],
)
def test_sapo_table(ratio: float, A: float, value: float, slope: float) -> None:
    found = sapo(
        numbers([math.log(ratio) - 1]), numbers([-1.0]), numbers([A]), flags([True]),
        temperature_positive=1.0, temperature_negative=1.05,
    )  # fmt: skip
    assert_same(found.slope, [slope], relative=1e-10)
    assert_same(-oracle.sapo_objective(ratio, A, 1.0, 1.05), value, relative=1e-10)


# recipe.md F.1.


def test_dual_clip_of_recipe_f1() -> None:
    A, old, lp = [1.0, -1.0, -4.0], [-1.0, -1.0, -3.0], [-1.69315, -1.0, -0.69741]
    losses = [-oracle.dual_clip_objective(math.exp(x - o), a, 0.2, 0.2, 3.0) for x, o, a in zip(lp, old, A)]
    assert_same(losses, [-0.5, 1.0, 12.0], absolute=1e-5)
    found = ppo_dual_clip(
        numbers(lp), numbers(old), numbers(A), flags([True] * 3),
        epsilon_low=0.2, epsilon_high=0.2, dual_clip=3.0,
    )  # fmt: skip
    assert_same(found.slope, [-0.5, 1.0, 0.0], absolute=1e-5)


THREE_ROWS = (
    [[1.5, 2, 1, 0.8, 0.5], [3, 1.5], [0.5, 0.8, 1.2, 2.5]],
    [[0.2, -2.5, -0.3, 0.1, -1.8], [0.8, -0.2], [-0.5, 0.3, -1.7, 0.4]],
)
"""Advantages and logprobs; every old logprob is -1, and epsilon 0.2."""


def three_rows() -> tuple[list[float], list[float], list[int]]:
    """Advantage, logprob and row of every token."""
    advantage = [x for row in THREE_ROWS[0] for x in row]
    logprob = [x for row in THREE_ROWS[1] for x in row]
    return advantage, logprob, [k for k, row in enumerate(THREE_ROWS[0]) for _ in row]


def test_ppo_of_three_rows_of_recipe_f1() -> None:
    advantage, logprob, _ = three_rows()
    total = -sum(oracle.ppo_objective(math.exp(lp + 1), A, 0.2, 0.2) for lp, A in zip(logprob, advantage))
    assert_same(total, -15.1868, absolute=1e-4)
    found = ppo_clip(
        numbers(logprob), numbers([-1.0] * 11), numbers(advantage), flags([True] * 11),
        epsilon_low=0.2, epsilon_high=0.2, max_ratio=math.inf,
    )  # fmt: skip
    assert found.out_of_region.sum().item() == 8


def test_gspo_of_three_rows_of_recipe_f1() -> None:
    advantage, logprob, row = three_rows()
    ratio = oracle.sequence_ratio([lp + 1 for lp in logprob], [True] * 11, row)
    assert_same([ratio[0], ratio[5], ratio[7]], [1.1503, 3.6693, 1.8682], absolute=1e-4)
    total = -sum(oracle.ppo_objective(s, A, 0.2, 0.2) for s, A in zip(ratio, advantage))
    assert_same(total, -18.0716, absolute=1e-4)
    found = gspo(
        numbers(logprob), numbers([-1.0] * 11), numbers(advantage), flags([True] * 11), places(row),
        epsilon_low=0.2, epsilon_high=0.2,
    )  # fmt: skip
    assert found.out_of_region.sum().item() == 6
    assert_same(found.slope[:5], [-ratio[0] * A for A in advantage[:5]])


def test_sapo_of_recipe_f1() -> None:
    A, lp = [1.0, -1.0, 0.5], [-1.5, -0.8, -1.1]
    losses = [-oracle.sapo_objective(math.exp(x + 1), a, 1.0, 2.0) for x, a in zip(lp, A)]
    assert_same(losses, [-1.61153, 1.21785, -0.95245], absolute=1e-5)
    assert_same(sum(losses), -1.34613, absolute=1e-5)
    found = sapo(
        numbers(lp), numbers([-1.0] * 3), numbers(A), flags([True] * 3),
        temperature_positive=1.0, temperature_negative=2.0,
    )  # fmt: skip
    expected = numeric_gradient(
        lambda values: -sum(oracle.sapo_objective(math.exp(x + 1), a, 1.0, 2.0) for x, a in zip(values, A)),
        lp,
    )
    assert_same(found.slope, expected, relative=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_g43_what_was_recorded_has_no_gradient(name: str) -> None:
    logprob, old, advantage = (numbers([x]).requires_grad_(True) for x in (-0.7, -0.8, 1.5))
    EVERY[name](logprob, old, advantage, flags([True])).value.sum().backward()
    assert logprob.grad is not None and logprob.grad.item() != 0
    assert old.grad is None and advantage.grad is None
