"""Laws of core.mismatch: sums that add up over any split, and worked examples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import poison, poisoned, token_batches

from core import mismatch

F64 = torch.float64


@pytest.mark.parametrize(
    "metric, expected",
    [
        ("absolute", 0.133333333333),
        ("k1", 0.0666666666667),
        ("k3", 0.0153297129191),
        ("ratio", 0.948663046252),
        ("multiplicative", 1.15167657522),
        ("probability", 0.0274521994298),
        ("perplexity", 3.21127054315),
        ("rollout_perplexity", 3.00416602395),
        ("effective_share", 0.97461219304),
    ],
)
def test_worked_examples(metric, expected):
    lp, lr = torch.tensor([-1.0, -0.5, -2.0], dtype=F64), torch.tensor([-1.1, -0.5, -1.7], dtype=F64)
    found = mismatch.mismatch(mismatch.mismatch_sums(lp, lr, torch.ones(3, dtype=torch.bool)))
    assert float(found._asdict()[metric]) == pytest.approx(expected, rel=1e-10)


def test_mean_difference_is_weighted_by_tokens():
    lp = torch.tensor([[-1.0, -2, -3], [-0.5, -1.5, -2.5]], dtype=F64)
    lr = torch.tensor([[-1.5, -1, -3], [-0.5, -2, -1]], dtype=F64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert float(mismatch.mismatch(mismatch.mismatch_sums(lp, lr, mask)).absolute) == pytest.approx(0.7)


@given(batch=token_batches(), data=st.data())
def test_sums_add_up_over_any_split(batch, data):
    lp, lr, _, mask = batch
    part = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(lp), max_size=len(lp))), dtype=torch.bool
    )
    whole = mismatch.mismatch_sums(lp, lr, mask)
    parts = mismatch.add_sums(
        mismatch.mismatch_sums(lp[part], lr[part], mask[part]),
        mismatch.mismatch_sums(lp[~part], lr[~part], mask[~part]),
    )
    for one, other in zip(whole, parts):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@given(batch=token_batches(), junk=poison)
def test_nothing_is_read_outside_the_mask(batch, junk):
    lp, lr, _, mask = batch
    clean = mismatch.mismatch_sums(lp, lr, mask)
    dirty = mismatch.mismatch_sums(poisoned(lp, mask, junk), poisoned(lr, mask, -junk), mask)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty))


@given(batch=token_batches())
def test_equal_logprobs_have_no_mismatch(batch):
    sums = mismatch.mismatch_sums(batch.logprob, batch.logprob, batch.loss_mask)
    assert float(sums.absolute) == float(sums.k1) == float(sums.k3) == float(sums.probability) == 0
    assert float(sums.ratio) == float(sums.token_count)


@given(batch=token_batches())
def test_k3_is_never_negative(batch):
    assert float(mismatch.mismatch_sums(batch.logprob, batch.rollout_logprob, batch.loss_mask).k3) >= 0


def test_tokens_without_a_finite_logprob_are_counted_apart():
    lp, lr = torch.tensor([-1.0, -1.0, math.nan]), torch.tensor([-1.0, -math.inf, -1.0])
    sums = mismatch.mismatch_sums(lp, lr, torch.ones(3, dtype=torch.bool))
    assert float(sums.token_count) == 1 and float(sums.unusable_count) == 2 and float(sums.absolute) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_an_engine_writes_for_no_logprob_is_counted_apart_and_is_never_a_worst_token(dtype):
    """-9999 leaves no finite ratio in any dtype; a gap of 20, which float16 could not raise to a power, does."""
    lp, lr = torch.tensor([-1.0, -1.0, -2.0]).to(dtype), torch.tensor([-9999.0, -21.0, -1.0]).to(dtype)
    mask = torch.ones(3, dtype=torch.bool)
    sums = mismatch.mismatch_sums(lp, lr, mask)
    assert float(sums.token_count) == 2 and float(sums.unusable_count) == 1 and float(sums.absolute) == 21
    worst = mismatch.worst_tokens(lp, lr, mask, count=3)
    assert worst.token_index.tolist() == [1, 2, -1] and worst.difference.tolist() == [20, -1, 0]


def test_the_mean_over_no_token_is_nan_and_not_zero():
    sums = mismatch.mismatch_sums(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert all(value.isnan() for value in mismatch.mismatch(sums))


def test_nothing_carries_a_gradient():
    lp = torch.tensor([-1.0], requires_grad=True)
    sums = mismatch.mismatch_sums(lp, torch.tensor([-2.0], requires_grad=True), torch.tensor([True]))
    assert not any(value.requires_grad for value in sums)


def test_published_batch_of_two_rows():
    """lp [[-1,-2,-3],[-.5,-1.5,-2.5]], rollout [[-1.5,-1,-3],[-.5,-2,-1]], mask [[1,1,0],[1,1,1]]: mean .7."""
    lp = torch.tensor([[-1.0, -2, -3], [-0.5, -1.5, -2.5]], dtype=F64)
    lr = torch.tensor([[-1.5, -1, -3], [-0.5, -2, -1]], dtype=F64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    worst = mismatch.worst_tokens(lp, lr, mask, count=6)
    assert worst.token_index.tolist() == [5, 1, 0, 4, 3, -1]
    assert worst.difference.tolist() == [-1.5, -1.0, 0.5, 0.5, 0.0, 0.0]


@given(batch=token_batches(), data=st.data(), junk=poison)
def test_worst_tokens_are_the_largest_differences_in_the_mask_first_come_first(batch, data, junk):
    lp, lr, _, mask = batch
    count = data.draw(st.integers(1, len(lp)))
    found = mismatch.worst_tokens(poisoned(lp, mask, junk), poisoned(lr, mask, -junk), mask, count=count)
    inside = [i for i in range(len(lp)) if mask[i]]
    expected = sorted(inside, key=lambda i: (-abs(float(lp[i] - lr[i])), i))[:count]
    expected += [-1] * (count - len(expected))
    assert found.token_index.tolist() == expected
    assert found.difference.tolist() == [float(lp[i] - lr[i]) if i >= 0 else 0.0 for i in expected]
    assert found.difference.dtype == F64


def test_a_token_without_a_finite_logprob_is_never_a_worst_token():
    lp, lr = torch.tensor([-1.0, -1.0, math.nan, -1.0]), torch.tensor([-1.0, -math.inf, -1.0, -3.0])
    found = mismatch.worst_tokens(lp, lr, torch.ones(4, dtype=torch.bool), count=4)
    assert found.token_index.tolist() == [3, 0, -1, -1] and found.difference.tolist() == [2.0, 0.0, 0.0, 0.0]


def test_worst_tokens_carry_no_gradient_and_are_at_least_float32():
    lp = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    found = mismatch.worst_tokens(lp, torch.tensor([-2.0], requires_grad=True), torch.tensor([True]), count=1)
    assert not found.difference.requires_grad and found.difference.dtype == torch.float32
    sums = mismatch.mismatch_sums(lp, torch.tensor([-2.0]), torch.tensor([True]))
    assert all(value.dtype == torch.float32 for value in sums)


def test_healthy_is_below_the_bound_and_never_a_step_without_tokens():
    def verdict(difference, mask):
        lp = torch.tensor([-1.0], dtype=F64)
        gap = mismatch.mismatch(mismatch.mismatch_sums(lp, lp + difference, torch.tensor([mask])))
        return bool(mismatch.is_healthy(gap, bound=0.03))

    assert verdict(0.029, True) and not verdict(0.031, True) and not verdict(0.0, False)
    gap = mismatch.Mismatch(*(torch.tensor(0.25) for _ in mismatch.Mismatch._fields))
    assert not bool(mismatch.is_healthy(gap, bound=0.25))


def test_sums_and_worst_tokens_leave_their_inputs_alone_and_compile_into_one_graph():
    lp, lr = torch.tensor([-1.0, math.nan, -2.0]), torch.tensor([-1.5, 0.0, -2.5])
    mask = torch.tensor([True, False, True])
    before = [t.clone() for t in (lp, lr, mask)]

    def all_of(lp, lr, mask):
        sums = mismatch.mismatch_sums(lp, lr, mask)
        gap = mismatch.mismatch(mismatch.add_sums(sums, sums))
        return (
            *sums,
            *gap,
            mismatch.is_healthy(gap, bound=0.03),
            *mismatch.worst_tokens(lp, lr, mask, count=2),
        )

    compiled = torch.compile(all_of, fullgraph=True, backend="eager")
    for one, other in zip(all_of(lp, lr, mask), compiled(lp, lr, mask)):
        assert torch.equal(one, other)
    for one, other in zip(before, (lp, lr, mask)):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("function", [mismatch.mismatch_sums, lambda *t: mismatch.worst_tokens(*t, count=1)])
def test_other_shapes_and_masks_that_are_not_bool_are_refused(function):
    two, three = torch.zeros(2), torch.zeros(3)
    with pytest.raises(ValueError) as refused:
        function(two, three, two.bool())
    assert (
        str(refused.value)
        == "logprob, rollout_logprob and loss_mask must have one shape, got [(2,), (3,), (2,)]"
    )
    with pytest.raises(ValueError) as refused:
        function(two, two, torch.ones(2))
    assert str(refused.value) == "loss_mask must be bool, got torch.float32"


@pytest.mark.parametrize("count", [0, 3, -1])
def test_a_count_of_worst_tokens_that_the_batch_cannot_hold_is_refused(count):
    two = torch.zeros(2)
    with pytest.raises(ValueError) as refused:
        mismatch.worst_tokens(two, two, two.bool(), count=count)
    assert str(refused.value) == f"count must lie between 1 and 2, got {count}"


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_that_is_not_positive_and_finite_is_refused(bound):
    gap = mismatch.Mismatch(*(torch.tensor(0.1) for _ in mismatch.Mismatch._fields))
    with pytest.raises(ValueError) as refused:
        mismatch.is_healthy(gap, bound=bound)
    assert str(refused.value) == f"bound must be positive and finite, got {bound}"
