"""Laws of core.surrogate: what every surrogate is built from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import TokenBatch, poison, poisoned, token_batches

from core import loss, surrogate
from core.surrogate import AnchoredToken, TokenLoss, anchored, detached_log_ratio, score_form

F64 = torch.float64
T, F = True, False


def plain(logprob, rollout_logprob, advantage, loss_mask, *, cut=None) -> TokenLoss:
    """Coefficient = ratio; out of region where `cut` says so."""
    token = anchored(logprob, rollout_logprob, advantage, loss_mask)
    outside = torch.zeros_like(loss_mask) if cut is None else cut
    return score_form(token, token.ratio, out_of_region=outside)


@st.composite
def cut_batches(draw: st.DrawFn) -> tuple[TokenBatch, torch.Tensor]:
    batch = draw(token_batches())
    size = len(batch.logprob)
    return batch, torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))


def test_the_result_is_found_where_it_always_was():
    assert loss.TokenLoss is TokenLoss
    assert TokenLoss._fields == ("value", "slope", "importance_ratio", "out_of_region", "unusable")


# The result


@given(drawn=cut_batches())
def test_value_is_slope_times_logprob_and_slope_is_its_gradient(drawn):
    batch, cut = drawn
    logprob = batch.logprob.clone().requires_grad_()
    result = plain(logprob, *batch[1:], cut=cut)
    result.value.sum().backward()
    assert torch.equal(result.slope, logprob.grad) and not result.slope.requires_grad
    assert torch.equal(result.value.detach(), result.slope * batch.logprob)
    trained = batch.loss_mask & ~cut
    expected = torch.where(trained, -(batch.logprob - batch.rollout_logprob).exp() * batch.advantage, 0.0)
    assert torch.equal(result.slope, expected)


@given(drawn=cut_batches())
def test_out_of_region_speaks_of_usable_tokens_only(drawn):
    batch, cut = drawn
    broken = torch.where(cut, math.nan, batch.rollout_logprob)
    result = plain(batch.logprob, broken, batch.advantage, batch.loss_mask, cut=torch.ones_like(cut))
    assert torch.equal(result.out_of_region, batch.loss_mask & ~cut)
    assert torch.equal(result.unusable, batch.loss_mask & cut)
    assert not result.value.any() and not result.slope.any()


def test_where_nothing_is_trained_the_logprob_itself_is_not_read():
    """Cut, unusable, masked; -inf times 0 would be NaN."""
    logprob = torch.full((3,), -math.inf, dtype=F64, requires_grad=True)
    anchor = torch.tensor([-1.0, math.nan, -1.0], dtype=F64)
    result = plain(
        logprob,
        anchor,
        torch.ones(3, dtype=F64),
        torch.tensor([T, T, F]),
        cut=torch.tensor([T, F, F]),
    )
    result.value.sum().backward()
    assert logprob.grad is not None
    assert result.value.tolist() == [0, 0, 0] and logprob.grad.tolist() == [0, 0, 0]


def test_a_nan_advantage_is_never_out_of_region():
    one = torch.tensor([-1.0], dtype=F64)
    result = plain(one, one, one * math.nan, torch.tensor([T]), cut=torch.tensor([T]))
    assert result.value.isnan() and result.slope.isnan() and not result.out_of_region


# The token


@given(batch=token_batches())
def test_an_anchored_token_says_its_arguments(batch):
    token = anchored(*batch)
    live = batch.loss_mask
    assert torch.equal(token.usable, live) and torch.equal(token.loss_mask, live)
    assert torch.equal(token.logprob, batch.logprob)
    assert torch.equal(token.anchor, torch.where(live, batch.rollout_logprob, 0.0))
    assert torch.equal(token.advantage, torch.where(live, batch.advantage, 0.0))
    expected = torch.where(live, (batch.logprob - batch.rollout_logprob).exp(), 0.0)
    assert torch.equal(token.ratio, expected)


@given(batch=token_batches(), junk=poison)
def test_an_anchored_token_holds_no_poison_but_its_own_logprob(batch, junk):
    lp, anchor, advantage = (poisoned(field, batch.loss_mask, junk) for field in batch[:3])
    dirty, clean = anchored(lp, anchor, advantage, batch.loss_mask), anchored(*batch)
    assert all(torch.equal(one, other) for one, other in zip(dirty[1:], clean[1:]))


def test_only_the_logprob_of_a_token_has_a_gradient():
    lp, anchor, advantage = (torch.tensor([-1.0], dtype=F64, requires_grad=True) for _ in range(3))
    token = anchored(lp, anchor, advantage, torch.tensor([T]))
    asked = {name: getattr(token, name).requires_grad for name in AnchoredToken._fields}
    assert [name for name, grad in asked.items() if grad] == ["logprob"]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_token_is_usable_with_a_finite_anchor_and_a_ratio_that_does_not_overflow(dtype):
    largest = math.log(torch.finfo(dtype).max)
    anchor = torch.tensor([-1.0, math.nan, -math.inf, math.inf, -largest - 2, -largest], dtype=dtype)
    logprob = torch.full_like(anchor, -1.0)
    token = anchored(logprob, anchor, torch.ones_like(anchor), torch.ones_like(anchor, dtype=torch.bool))
    assert token.usable.tolist() == [T, F, F, F, F, T]
    for field in (token.anchor, token.advantage, token.ratio):
        assert field.isfinite().all() and not field[~token.usable].any()


def test_a_ratio_of_zero_is_usable_a_nan_is_kept_and_an_infinite_logprob_has_no_ratio():
    log_ratio, usable = detached_log_ratio(
        torch.tensor([-1e4, math.nan, math.inf, -math.inf], dtype=F64),
        torch.tensor([-1.0] * 4, dtype=F64),
        torch.tensor([T] * 4),
    )
    assert usable.tolist() == [T, T, F, F]
    assert log_ratio[0] == -9999 and log_ratio[1].isnan() and log_ratio[2] == log_ratio[3] == 0


@given(batch=token_batches(), junk=poison)
def test_a_log_ratio_is_the_difference_inside_the_mask(batch, junk):
    lp, anchor = (poisoned(field, batch.loss_mask, junk).requires_grad_() for field in batch[:2])
    log_ratio, usable = detached_log_ratio(lp, anchor, batch.loss_mask)
    expected = torch.where(batch.loss_mask, batch.logprob - batch.rollout_logprob, 0.0)
    assert torch.equal(log_ratio, expected) and torch.equal(usable, batch.loss_mask)
    assert not log_ratio.requires_grad


@pytest.mark.parametrize(
    "dtypes, wide",
    [
        ((torch.bfloat16, torch.bfloat16), torch.float32),
        ((torch.float16, torch.float32), torch.float32),
        ((torch.float32, F64), torch.float32),
        ((F64, torch.float32), F64),
    ],
)
def test_a_token_is_as_wide_as_its_logprob_and_float32_at_least(dtypes, wide):
    """Widened before the difference is taken: in bfloat16 it would be 0.25, not 0.2578."""
    logprob = torch.tensor([-10.0], dtype=dtypes[0])
    anchor = torch.tensor([-10.25], dtype=dtypes[1])
    token = anchored(logprob, anchor, torch.ones(1, dtype=dtypes[1]), torch.tensor([T]))
    assert {x.dtype for x in (token.logprob, token.anchor, token.advantage, token.ratio)} == {wide}
    assert float(token.ratio) == pytest.approx(math.exp(float(logprob) - float(anchor)), rel=1e-6)


@given(drawn=cut_batches())
def test_inputs_are_untouched(drawn):
    batch, cut = drawn
    before = [field.clone() for field in (*batch, cut)]
    plain(*batch, cut=cut)
    assert all(torch.equal(a, b) for a, b in zip(before, (*batch, cut)))


def test_it_compiles_without_a_graph_break():
    columns = ([-1.0, -0.5], [-1.1, math.nan], [1.0, 1.0])
    batch = TokenBatch._make([*(torch.tensor(x, dtype=F64) for x in columns), torch.tensor([T, T])])
    compiled = torch.compile(plain, fullgraph=True, backend="eager")
    for cut in (torch.tensor([F, T]), torch.tensor([T, F])):
        assert all(torch.equal(a, b) for a, b in zip(compiled(*batch, cut=cut), plain(*batch, cut=cut)))


# The doors


def test_shapes_are_named_in_the_order_given_and_the_mask_comes_last():
    one, two = torch.zeros(1), torch.zeros(2)
    surrogate.check_shapes(a=one, b=one, loss_mask=one.bool())
    said = r"a, b and loss_mask must have one shape, got \[\(1,\), \(2,\), \(1,\)\]"
    with pytest.raises(ValueError, match=said):
        surrogate.check_shapes(loss_mask=one.bool(), a=one, b=two)
    with pytest.raises(ValueError, match="a and loss_mask must have one shape"):
        surrogate.check_shapes(a=one[None], loss_mask=one.bool())
    with pytest.raises(ValueError, match="loss_mask must be bool, got torch.float32"):
        surrogate.check_shapes(a=one, loss_mask=one)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_threshold_must_be_positive(bad):
    surrogate.check_positive(low=1e-9, high=math.inf)
    with pytest.raises(ValueError, match=f"high must be positive, got {bad}"):
        surrogate.check_positive(low=1.0, high=bad)


@pytest.mark.parametrize("low, high", [(-0.1, 2.0), (2.0, 2.0), (3.0, 2.0), (math.nan, 2.0), (0.5, math.nan)])
def test_bounds_must_be_ordered(low, high):
    surrogate.check_bounds(small=0.0, large=math.inf)
    with pytest.raises(ValueError, match=f"small must be at least 0 and below large, got {low} and {high}"):
        surrogate.check_bounds(small=low, large=high)
