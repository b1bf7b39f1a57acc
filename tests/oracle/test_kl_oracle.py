"""core/kl.py against the estimators written out, and the divergence by enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable

import oracle_kl as oracle
import pytest
from comparing import assert_same, flags, gradient, junk, logprobs, no_number, numbers, numeric_gradient
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from core.kl import k1, k2, k3, weighted_k3

Row = tuple[float, float, float, bool]
"""logprob, rollout_logprob, reference_logprob, loss_mask"""

ESTIMATORS: dict[str, tuple[Callable[..., Tensor], Callable[[float, float], tuple[float, float]]]] = {
    "k1": (k1, oracle.k1),
    "k2": (k2, oracle.k2),
    "k3": (k3, oracle.k3),
}

tokens = st.lists(
    st.tuples(logprobs, logprobs, logprobs, st.just(True))
    | st.tuples(logprobs, no_number, logprobs, st.just(True))
    | st.tuples(logprobs, logprobs, no_number | st.just(-9999.0), st.just(True))
    | st.tuples(junk, junk, junk, st.just(False)),
    max_size=8,
)


def columns(rows: list[Row]) -> tuple[list[float], Tensor, Tensor, Tensor]:
    """Logprobs as a list, the recorded ones and the mask as tensors."""
    one, two, three, four = zip(*rows) if rows else ((), (), (), ())
    return list(one), numbers(two), numbers(three), flags(four)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(rows=tokens)
def test_estimator_has_its_value_and_slope_and_drops_what_has_no_reference(
    name: str, rows: list[Row]
) -> None:
    function, rule = ESTIMATORS[name]
    logprob, _, reference, mask = columns(rows)
    pairs = [rule(lp, ref) if m and math.isfinite(ref) else (0.0, 0.0) for lp, _, ref, m in rows]
    assert_same(function(numbers(logprob), reference, mask), [value for value, _ in pairs])
    found = gradient(lambda leaf: function(leaf, reference, mask), logprob)
    assert_same(found, [slope for _, slope in pairs])


@given(tokens)
def test_weighted_k3_has_its_value_and_slope_through_the_ratio(rows: list[Row]) -> None:
    logprob, rollout, reference, mask = columns(rows)
    pairs = []
    for lp, roll, ref, m in rows:
        whole = m and math.isfinite(roll) and math.isfinite(ref)
        pairs.append(oracle.weighted_k3(lp, roll, ref) if whole else (0.0, 0.0))
    found = weighted_k3(numbers(logprob), rollout, reference, mask)
    assert_same(found, [value for value, _ in pairs])
    slope = gradient(lambda leaf: weighted_k3(leaf, rollout, reference, mask), logprob)
    assert_same(slope, [one for _, one in pairs])


@pytest.mark.parametrize("lp", [-1000.0])
def test_a_value_whose_ratio_overflows_is_dropped_and_never_clamped(lp: float) -> None:
    leaf = numbers([lp, -1.0]).requires_grad_(True)
    found = k3(leaf, numbers([-1.0, -2.0]), flags([True, True]))
    found.sum().backward()
    assert leaf.grad is not None
    assert_same(found, [0.0, math.exp(-1)])
    assert_same(leaf.grad, [0.0, 1 - math.exp(-1)])
    assert_same(k1(numbers([lp]), numbers([-1.0]), flags([True])), [-999.0])
    assert_same(k2(numbers([lp]), numbers([-1.0]), flags([True])), [999.0**2 / 2])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_nan_logprob_in_the_mask_comes_out_as_nan(name: str) -> None:
    assert math.isnan(ESTIMATORS[name][0](numbers([math.nan]), numbers([-1.0]), flags([True])).item())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_only_the_logprob_has_a_gradient(name: str) -> None:
    reference = numbers([-2.0]).requires_grad_(True)
    found = ESTIMATORS[name][0](numbers([-1.0]).requires_grad_(True), reference, flags([True]))
    found.sum().backward()
    assert reference.grad is None


def test_weighted_k3_has_no_gradient_in_what_was_recorded() -> None:
    rollout, reference = numbers([-1.5]).requires_grad_(True), numbers([-2.0]).requires_grad_(True)
    weighted_k3(numbers([-1.0]).requires_grad_(True), rollout, reference, flags([True])).sum().backward()
    assert rollout.grad is None and reference.grad is None


# Gradients in expectation, a vocabulary enumerated.

vocabularies = st.integers(2, 4).flatmap(
    lambda n: st.tuples(*(st.lists(st.floats(-2, 2), min_size=n, max_size=n) for _ in range(3)))
)


def expected_gradient(
    function: Callable[[Tensor], Tensor], p: list[float], sampler: list[float]
) -> list[float]:
    """In logits, over tokens drawn from the sampler; the function sees the logprob of every token at once."""
    slope = gradient(function, [math.log(x) for x in p])
    return oracle.expected_gradient(p, sampler, lambda v: slope[v])


@given(vocabularies)
def test_in_expectation_k1_pulls_nowhere_k2_along_the_divergence_and_k3_along_the_reverse(
    logits: tuple[list[float], ...],
) -> None:
    p, q, mu = (oracle.softmax(z) for z in logits)
    every = flags([True] * len(p))
    reference, rollout = numbers([math.log(x) for x in q]), numbers([math.log(x) for x in mu])
    forward = oracle.divergence_gradient(p, q)
    reverse = [a - b for a, b in zip(p, q)]
    assert_same(expected_gradient(lambda x: k1(x, reference, every), p, p), [0.0] * len(p))
    assert_same(expected_gradient(lambda x: k2(x, reference, every), p, p), forward)
    assert_same(expected_gradient(lambda x: k3(x, reference, every), p, p), reverse)
    found = expected_gradient(lambda x: weighted_k3(x, rollout, reference, every), p, mu)
    assert_same(found, forward, absolute=1e-11)


@given(vocabularies)
def test_in_expectation_k1_k3_and_weighted_k3_are_the_divergence(logits: tuple[list[float], ...]) -> None:
    p, q, mu = (oracle.softmax(z) for z in logits)
    every = flags([True] * len(p))
    lp, ref, roll = (numbers([math.log(x) for x in one]) for one in (p, q, mu))
    whole = oracle.divergence(p, q)
    assert_same((numbers(p) * k1(lp, ref, every)).sum(), whole)
    assert_same((numbers(p) * k3(lp, ref, every)).sum(), whole)
    assert_same((numbers(mu) * weighted_k3(lp, roll, ref, every)).sum(), whole)


@given(vocabularies)
def test_divergence_gradient_is_the_numeric_one(logits: tuple[list[float], ...]) -> None:
    q = oracle.softmax(logits[1])
    expected = numeric_gradient(lambda z: oracle.divergence(oracle.softmax(z), q), logits[0])
    assume(max(map(abs, expected)) > 1e-4)
    assert_same(
        oracle.divergence_gradient(oracle.softmax(logits[0]), q), expected, relative=1e-5, absolute=1e-8
    )


# losses.md 5.1.


@pytest.mark.parametrize(
    ("name", "d", "value", "slope"),
    [
        ("k1", 0.5, 0.5, 1.0),
        ("k2", 0.5, 0.125, 0.5),
        ("k3", 0.5, 0.106530659713, 0.393469340287),
        ("k1", -0.5, -0.5, 1.0),
        ("k2", -0.5, 0.125, -0.5),
        ("k3", -0.5, 0.1487212707, -0.6487212707),
    ],
)
def test_estimator_table(name: str, d: float, value: float, slope: float) -> None:
    function, reference, mask = ESTIMATORS[name][0], numbers([-2.0]), flags([True])
    assert_same(function(numbers([d - 2]), reference, mask), [value], relative=1e-9)
    assert_same(gradient(lambda leaf: function(leaf, reference, mask), [d - 2]), [slope], relative=1e-9)


P, Q = [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]


@pytest.mark.parametrize(
    ("name", "mean", "pull"),
    [
        ("k1", 0.0252671539216, [0.0, 0.0, 0.0]),
        ("k2", 0.0248624073448, [0.0989381987, -0.0938847679, -0.0050534308]),
        ("k3", 0.0252671539216, [0.1, -0.1, 0.0]),
    ],
)
def test_estimators_of_three_tokens(name: str, mean: float, pull: list[float]) -> None:
    function, every = ESTIMATORS[name][0], flags([True] * 3)
    lp, ref = (numbers([math.log(x) for x in one]) for one in (P, Q))
    assert_same((numbers(P) * function(lp, ref, every)).sum(), mean, relative=1e-10)
    found = expected_gradient(lambda x: function(x, ref, every), P, P)
    assert_same(found, pull, relative=1e-8, absolute=1e-10)


def test_divergence_of_three_tokens() -> None:
    assert_same(oracle.divergence(P, Q), 0.0252671539216, relative=1e-11)


# recipe.md F.3, cases.md G40 to G42.


@pytest.mark.parametrize(("name", "value"), [("k1", 0.1), ("k2", 0.005), ("k3", 0.0048374)])
def test_estimators_of_recipe_f3_ignore_a_nan_outside_the_mask(name: str, value: float) -> None:
    function = ESTIMATORS[name][0]
    found = function(numbers([0.2, 0.3, math.nan]), numbers([0.1, 0.2, 0.4]), flags([True, True, False]))
    assert_same(found, [value, value, 0.0], absolute=1e-7)


def test_g40_kl_over_an_observation_is_not_counted() -> None:
    found = k1(numbers([-0.9, 5.0, -0.7]), numbers([-1.0, 0.0, -1.0]), flags([True, False, True]))
    assert_same(found.sum() / 2, 0.2)


@pytest.mark.parametrize(
    ("name", "pull"), [("k1", 0.0), ("k2", 0.27465), ("k3", 0.25), ("weighted_k3", 0.27465)]
)
def test_g41_two_tokens_show_which_gradient_each_estimator_has(name: str, pull: float) -> None:
    p, every = [0.5, 0.5], flags([True, True])
    lp, ref = numbers([math.log(0.5)] * 2), numbers([math.log(0.25), math.log(0.75)])
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "k1": lambda x: k1(x, ref, every),
        "k2": lambda x: k2(x, ref, every),
        "k3": lambda x: k3(x, ref, every),
        "weighted_k3": lambda x: weighted_k3(x, lp, ref, every),
    }
    found = expected_gradient(functions[name], p, p)
    assert_same(found, [pull, -pull], absolute=1e-5)


def test_g42_k3_of_minus_one_against_minus_two_has_a_gradient() -> None:
    reference, mask = numbers([-2.0]), flags([True])
    assert_same(k3(numbers([-1.0]), reference, mask), [0.36788], absolute=1e-5)
    assert_same(gradient(lambda leaf: k3(leaf, reference, mask), [-1.0]), [0.63212], absolute=1e-5)
