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


def test_the_mean_over_no_token_is_nan_and_not_zero():
    sums = mismatch.mismatch_sums(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert all(value.isnan() for value in mismatch.mismatch(sums))


def test_nothing_carries_a_gradient():
    lp = torch.tensor([-1.0], requires_grad=True)
    sums = mismatch.mismatch_sums(lp, torch.tensor([-2.0]), torch.tensor([True]))
    assert not any(value.requires_grad for value in sums)
