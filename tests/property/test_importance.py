"""Laws of core.importance: what a sample of the sampler counts as a sample of the old policy."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import poison, poisoned
from torch import Tensor

from core import importance, loss, loss_old

F64 = torch.float64
NONE = math.inf


class Recorded(NamedTuple):
    """What weights are made of."""

    old_logprob: Tensor
    rollout_logprob: Tensor
    loss_mask: Tensor
    row_id: Tensor


def tokens(old, roll, mask=None, row=None, dtype=F64) -> Recorded:
    return Recorded(
        torch.tensor(old, dtype=dtype),
        torch.tensor(roll, dtype=dtype),
        torch.tensor(mask if mask is not None else [True] * len(old)),
        torch.tensor(row if row is not None else [0] * len(old)),
    )


@st.composite
def recorded(draw: st.DrawFn) -> Recorded:
    """Up to eight tokens of up to three rows in any order."""
    logprobs = st.sampled_from([-1e-9, -0.2, -1.0, -1.1, -1.5, -12.0]) | st.floats(-9, -1e-6)
    token = st.tuples(logprobs, logprobs, st.booleans(), st.sampled_from([-(10**9), 0, 7]))
    columns = list(zip(*draw(st.lists(token, min_size=1, max_size=8))))
    return tokens(columns[0], columns[1], columns[2], columns[3])


def truncated(b: Recorded, cap=2.0):
    return importance.truncated_importance_weight(
        b.old_logprob, b.rollout_logprob, b.loss_mask, max_weight=cap
    )


def masked(b: Recorded, low=0.5, high=2.0):
    return importance.masked_importance_weight(
        b.old_logprob, b.rollout_logprob, b.loss_mask, min_weight=low, max_weight=high
    )


def row_truncated(b: Recorded, cap=5.0):
    return importance.sequence_truncated_importance_weight(*b, max_weight=cap)


def row_masked(b: Recorded, low=0.9, high=1.1):
    return importance.sequence_masked_importance_weight(*b, min_weight=low, max_weight=high)


WEIGHTS = {"truncated": truncated, "masked": masked, "row truncated": row_truncated, "row masked": row_masked}
BY_TOKEN = ["truncated", "masked"]
BY_ROW = ["row truncated", "row masked"]


def expected(name: str, b: Recorded) -> list[float]:
    """The definitions, in a loop."""
    found = []
    for old, roll, live, row in zip(*(field.tolist() for field in b)):
        mine = [o - r for o, r, m, i in zip(*(field.tolist() for field in b)) if m and i == row]
        k = math.exp(old - roll)
        geometric = math.exp(math.fsum(mine) / len(mine)) if mine else 0.0
        weight = {
            "truncated": min(k, 2.0),
            "masked": k if 0.5 <= k <= 2 else 0.0,
            "row truncated": min(math.exp(math.fsum(mine)), 5.0),
            "row masked": float(0.9 <= geometric <= 1.1),
        }[name]
        found.append(weight if live else 0.0)
    return found


def on_a_bound(b: Recorded) -> bool:
    rows = [
        (b.old_logprob - b.rollout_logprob)[b.loss_mask & (b.row_id == i)] for i in set(b.row_id.tolist())
    ]
    ratios = [*(b.old_logprob - b.rollout_logprob).exp().tolist(), *(x.mean().exp().item() for x in rows)]
    return any(abs(r - bound) < 1e-9 for r in ratios for bound in (0.5, 2.0, 0.9, 1.1))


@pytest.mark.parametrize("name", WEIGHTS)
@given(batch=recorded())
def test_weight_is_the_definition(name, batch):
    if not on_a_bound(batch):
        assert WEIGHTS[name](batch).tolist() == pytest.approx(expected(name, batch), rel=1e-12, abs=0)


@pytest.mark.parametrize("name", WEIGHTS)
@given(batch=recorded(), junk=poison, where=st.sets(st.sampled_from(Recorded._fields[:2]), min_size=1))
def test_nothing_is_read_outside_the_mask(name, batch, junk, where):
    dirty = batch._replace(**{f: poisoned(getattr(batch, f), batch.loss_mask, junk) for f in where})
    weight = WEIGHTS[name](dirty)
    assert torch.equal(weight, WEIGHTS[name](batch)) and not weight[~batch.loss_mask].any()


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("field", ["old_logprob", "rollout_logprob"])
@pytest.mark.parametrize("junk", [math.nan, -math.inf, math.inf, -9999.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_token_without_a_usable_ratio_has_weight_zero_and_its_row_goes_on(name, field, junk, dtype):
    """Never weight 1. Of an old logprob of -9999 the ratio is finite, and is 0."""
    batch = tokens([-1.0, -1.0], [-1.05, -1.05], dtype=dtype)
    first = torch.tensor([True, False])
    weight = WEIGHTS[name](batch._replace(**{field: torch.where(first, junk, getattr(batch, field))}))
    alone = WEIGHTS[name](Recorded(*(x[1:] for x in batch)))
    assert weight[0] == 0
    if field == "old_logprob" and junk == -9999 and name in BY_ROW:
        assert weight[1] == 0
    else:
        assert torch.equal(weight[1:], alone) and weight[1] > 0


def test_a_product_that_overflows_is_the_bound_or_nothing():
    batch = tokens([-1.0, -1.0], [-61.0, -61.0], dtype=torch.float32)
    assert row_truncated(batch, cap=5.0).tolist() == [5.0, 5.0]
    assert row_truncated(batch, cap=NONE).tolist() == [0.0, 0.0]


@given(batch=recorded())
def test_a_weight_has_no_gradient(batch):
    for name in WEIGHTS:
        leaves = [field.clone().requires_grad_() for field in batch[:2]]
        assert not WEIGHTS[name](Recorded(*leaves, *batch[2:])).requires_grad


@given(batch=recorded())
def test_sampled_by_the_old_policy_every_weight_is_one(batch):
    for name in WEIGHTS:
        weight = WEIGHTS[name](batch._replace(rollout_logprob=batch.old_logprob))
        assert torch.equal(weight, batch.loss_mask.double())


@given(batch=recorded())
def test_any_order_of_tokens_and_any_leading_shape(batch):
    for name in WEIGHTS:
        back = WEIGHTS[name](Recorded(*(field.flip(0) for field in batch)))
        assert torch.allclose(WEIGHTS[name](batch), back.flip(0), rtol=1e-12, atol=0) or on_a_bound(batch)
    for name in BY_TOKEN:
        folded = WEIGHTS[name](Recorded(*(field[None, :, None] for field in batch)))
        assert torch.equal(WEIGHTS[name](batch), folded[0, :, 0])


@given(batch=recorded(), more=recorded())
def test_tokens_of_other_rows_change_nothing(batch, more):
    for name in WEIGHTS:
        together = WEIGHTS[name](
            Recorded(*(torch.cat(pair) for pair in zip(batch, more._replace(row_id=more.row_id + 1))))
        )
        same = torch.allclose(WEIGHTS[name](batch), together[: len(batch.row_id)], rtol=1e-12, atol=0)
        assert same or on_a_bound(batch)


@given(batch=recorded())
def test_all_tokens_of_a_row_have_one_weight(batch):
    for name in BY_ROW:
        weight = WEIGHTS[name](batch)
        for row in set(batch.row_id.tolist()):
            assert len(set(weight[batch.loss_mask & (batch.row_id == row)].tolist())) <= 1


@given(batch=recorded(), cap=st.floats(0.1, 9))
def test_rows_of_one_token_are_the_weights_of_tokens(batch, cap):
    rows = batch._replace(row_id=torch.arange(len(batch.row_id)))
    assert torch.equal(row_truncated(rows, cap=cap), truncated(batch, cap=cap))
    inside = masked(batch, low=0.5, high=2.0) > 0
    assert torch.equal(row_masked(rows, low=0.5, high=2.0), inside.double())


@given(batch=recorded())
def test_inputs_are_untouched(batch):
    before = [field.clone() for field in batch]
    for name in WEIGHTS:
        WEIGHTS[name](batch)
    assert all(torch.equal(a, b) for a, b in zip(before, batch))


@pytest.mark.parametrize("name", WEIGHTS)
def test_arithmetic_is_float32_at_least(name):
    narrow = tokens([-1.0, -2.03, -0.4], [-1.06, -2.0, -0.43], dtype=torch.bfloat16)
    wide = Recorded._make([*(field.float() for field in narrow[:2]), *narrow[2:]])
    assert torch.equal(WEIGHTS[name](narrow), WEIGHTS[name](wide))
    assert WEIGHTS[name](narrow).dtype == torch.float32
    assert WEIGHTS[name](tokens([-1.0], [-1.0])).dtype == F64


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_compiles_without_a_graph_break(name):
    batch = tokens([-1.0, -0.5, -3.0], [-1.1, -0.5, math.nan], [True, True, False], [5, 5, 2])
    compiled = torch.compile(WEIGHTS[name], fullgraph=True, backend="eager")
    assert torch.equal(compiled(batch), WEIGHTS[name](batch))


# Unbiased, by enumeration


MU, OLD, PI = ([0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.25, 0.3, 0.45])
ADVANTAGE = [1.0, -0.5, 2.0]


def expected_gradient(cap: float) -> Tensor:
    """Of the weighted old-anchored policy gradient, tokens sampled from mu, in the logits of pi."""
    logits = torch.tensor(PI, dtype=F64).log().requires_grad_()
    old, roll = (torch.tensor(p, dtype=F64).log() for p in (OLD, MU))
    mask = torch.ones(3, dtype=torch.bool)
    free = loss_old.ppo_clip(
        logits.log_softmax(0),
        old,
        torch.tensor(ADVANTAGE, dtype=F64),
        mask,
        epsilon_low=NONE,
        epsilon_high=NONE,
        max_ratio=NONE,
    )
    weight = importance.truncated_importance_weight(old, roll, mask, max_weight=cap)
    (torch.tensor(MU, dtype=F64) * importance.reweighted(free, weight).value).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_without_a_bound_the_weighted_gradient_is_that_of_the_expected_advantage():
    """And with one that binds it is not."""
    logits = torch.tensor(PI, dtype=F64).log().requires_grad_()
    (-(logits.softmax(0) * torch.tensor(ADVANTAGE, dtype=F64)).sum()).backward()
    assert logits.grad is not None
    assert torch.allclose(expected_gradient(NONE), logits.grad, rtol=1e-12)
    assert torch.allclose(expected_gradient(4 / 3), logits.grad, rtol=1e-12)
    assert not torch.allclose(expected_gradient(1.2), logits.grad, rtol=1e-3)


@given(
    mu=st.lists(st.floats(0.05, 1), min_size=2, max_size=2),
    old=st.lists(st.floats(0.05, 1), min_size=2, max_size=2),
    score=st.lists(st.floats(-2, 2), min_size=8, max_size=8),
)
def test_the_product_over_a_row_makes_any_mean_that_of_the_old_policy(mu, old, score):
    """All rows of three tokens over a vocabulary of two."""
    mu, old = (torch.tensor(p, dtype=F64) / sum(p) for p in (mu, old))
    found = wanted = 0.0
    for word, value in zip(itertools.product([0, 1], repeat=3), score):
        row = tokens(old.log()[list(word)].tolist(), mu.log()[list(word)].tolist())
        found += mu[list(word)].prod().item() * row_truncated(row, cap=NONE)[0].item() * value
        wanted += old[list(word)].prod().item() * value
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)


# Published numbers


def test_truncated_weights_worked_example():
    """Log ratios 0.5, -0.5, 1: 1.6487, 0.6065 and 2 by token with C = 2; exp(1) for the row."""
    batch = tokens([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5])
    assert truncated(batch).tolist() == pytest.approx([1.6487, 0.6065, 2.0], abs=1e-4)
    assert row_truncated(batch).tolist() == pytest.approx([2.71828] * 3, abs=1e-5)
    ones = tokens([-1.0] * 3, [-2.0] * 3)
    assert row_truncated(ones).tolist() == [5.0] * 3
    gap = tokens([-1.0, -1.0, -1.0], [-1.5, -9.0, -2.0], [True, False, True])
    assert row_truncated(gap).tolist() == pytest.approx([4.4817, 0.0, 4.4817], abs=1e-4)


@pytest.mark.parametrize("logs, keep", [([0.1, -0.1, 0.0], 1.0), ([0.5] * 3, 0.0), ([0.0] * 3, 1.0)])
def test_geometric_mask_worked_examples(logs, keep):
    assert row_masked(tokens([x - 2 for x in logs], [-2.0] * 3)).tolist() == [keep] * 3


def test_a_long_row_is_judged_by_its_mean_and_weighed_by_its_product():
    """A thousand log ratios of 0.01: geometric mean 1.01005016708, product 22026.4657948."""
    batch = tokens([-1.0] * 1000, [-1.01] * 1000)
    assert not row_masked(batch, low=0.99, high=1.01).any()
    assert row_masked(batch, low=0.99, high=1.010050168).all()
    assert float(row_truncated(batch, cap=NONE)[0]) == pytest.approx(22026.4657948)


def test_icepop_worked_example():
    """Bounds 0.5 and 2: ratios 1, 1 and 7.389 keep 1, 1, 0; 0.135 is masked."""
    batch = tokens([-1.0, -1.0, -1.0, -3.0], [-1.0, -1.0, -3.0, -1.0])
    assert masked(batch).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_bounds_are_included():
    """Ratios that are exact in binary."""
    batch = tokens([-math.log(2), 0.0], [0.0, -math.log(2)], row=[0, 1])
    assert masked(batch).tolist() == [0.5, 2.0]
    assert row_masked(batch, low=0.5, high=2.0).tolist() == [1.0, 1.0]
    assert masked(batch, low=0.5 + 1e-9, high=2 - 1e-9).tolist() == [0.0, 0.0]
    assert row_masked(batch, low=0.5 + 1e-9, high=2 - 1e-9).tolist() == [0.0, 0.0]


# The loss with its weights


def weighted_policy_gradient(weight, lp=(-1.0, -0.5, -2.0), a=(1.0, -1.0, 0.0), mask=(True, True, True)):
    logprob = torch.tensor(lp, dtype=F64, requires_grad=True)
    plain = loss.importance_weighted_policy_gradient(
        logprob, torch.tensor([-1.0, -0.7, -1.9], dtype=F64), torch.tensor(a, dtype=F64), torch.tensor(mask)
    )
    result = importance.reweighted(plain, torch.tensor(weight, dtype=F64))
    result.value.sum().backward()
    assert logprob.grad is not None
    return plain, result, logprob.grad


def test_reweighted_multiplies_gradient_value_and_slope():
    plain, result, grad = weighted_policy_gradient([2.0, 0.5, 3.0])
    expected = torch.tensor([-2.0, 0.5 * math.exp(0.2), 0.0], dtype=F64)
    assert torch.allclose(grad, expected, rtol=1e-12) and torch.equal(result.slope, grad)
    assert torch.equal(result.value, grad * torch.tensor([-1.0, -0.5, -2.0], dtype=F64))
    assert torch.equal(result.importance_ratio, plain.importance_ratio)
    assert not result.out_of_region.any() and not result.unusable.any()


def test_a_weight_of_zero_is_out_of_region_where_the_loss_trained_something():
    plain, result, grad = weighted_policy_gradient([0.0, 1.0, 0.0])
    assert result.out_of_region.tolist() == [True, False, False]
    assert grad[0] == 0 and result.value[0] == 0 and torch.equal(result.unusable, plain.unusable)


@pytest.mark.parametrize("junk", [math.nan, math.inf, 0.0])
def test_a_weight_is_not_read_where_nothing_is_trained(junk):
    """Outside the mask, where unusable, where the region already cut, and for an advantage of 0."""
    knobs = {"epsilon_low": 0.2, "epsilon_high": 0.2, "max_ratio": NONE}
    logprob = torch.tensor([math.nan, -1.0, -0.5, -1.0, -1.0], dtype=F64, requires_grad=True)
    old = torch.tensor([-1.0, math.nan, -1.0, -1.0, -1.0], dtype=F64)
    advantage = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0], dtype=F64)
    mask = torch.tensor([False, True, True, True, True])
    plain = loss_old.ppo_clip(logprob, old, advantage, mask, **knobs)
    result = importance.reweighted(plain, torch.tensor([junk] * 4 + [2.0], dtype=F64))
    result.value.sum().backward()
    assert logprob.grad is not None and torch.equal(result.slope, logprob.grad)
    assert logprob.grad.tolist() == [0.0, 0.0, 0.0, 0.0, -2.0]
    assert result.out_of_region.tolist() == [False, False, True, False, False]
    assert result.unusable.tolist() == [False, True, False, False, False]


def test_a_nan_weight_or_loss_is_seen():
    _, result, grad = weighted_policy_gradient([math.nan, 1.0, 1.0])
    assert result.value[0].isnan() and grad[0].isnan() and not result.value[1:].isnan().any()
    _, result, _ = weighted_policy_gradient([0.0, 1.0, 1.0], a=[math.nan, 1.0, 1.0])
    assert result.value[0].isnan() and result.slope[0].isnan()


def test_reweighted_sends_no_gradient_into_the_weight_and_keeps_the_dtype_of_the_loss():
    logprob = torch.tensor([-1.0], requires_grad=True)
    plain = loss.importance_weighted_policy_gradient(
        logprob, torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([True])
    )
    weight = torch.tensor([2.0], dtype=F64, requires_grad=True)
    result = importance.reweighted(plain, weight)
    result.value.sum().backward()
    assert weight.grad is None and result.value.dtype == result.slope.dtype == torch.float32


def test_reweighted_compiles_without_a_graph_break():
    plain, _, _ = weighted_policy_gradient([1.0, 1.0, 1.0])
    plain = plain._replace(value=plain.value.detach())
    compiled = torch.compile(importance.reweighted, fullgraph=True, backend="eager")
    weight = torch.tensor([2.0, 0.0, 3.0], dtype=F64)
    again, here = compiled(plain, weight), importance.reweighted(plain, weight)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, here))


# Refusals


@pytest.mark.parametrize("name", WEIGHTS)
def test_shapes_must_agree_and_the_mask_must_be_bool(name):
    batch = tokens([-1.0, -1.0], [-1.0, -1.0])
    with pytest.raises(
        ValueError, match="old_logprob, rollout_logprob and loss_mask must have one shape, got"
    ):
        WEIGHTS[name](batch._replace(rollout_logprob=batch.rollout_logprob[:1]))
    with pytest.raises(ValueError, match="loss_mask must be bool, got torch.int64"):
        WEIGHTS[name](batch._replace(loss_mask=batch.loss_mask.long()))
    if name in BY_ROW:
        with pytest.raises(ValueError, match="row_id must be an integer tensor, got torch.float64"):
            WEIGHTS[name](batch._replace(row_id=batch.row_id.double()))
        for bad in (batch._replace(row_id=batch.row_id[:1]), Recorded(*(field[None] for field in batch))):
            with pytest.raises(ValueError, match=r"old_logprob and row_id must have one shape \[T\], got"):
                WEIGHTS[name](bad)


def test_a_weight_must_have_the_shape_of_the_loss():
    with pytest.raises(ValueError, match="value and importance_weight must have one shape, got"):
        weighted_policy_gradient([1.0])


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_bound_must_be_positive(bad):
    for weight in (truncated, row_truncated):
        with pytest.raises(ValueError, match=f"max_weight must be positive, got {bad}"):
            weight(tokens([-1.0], [-1.0]), cap=bad)


@pytest.mark.parametrize("low, high", [(-0.1, 2.0), (2.0, 2.0), (math.nan, 2.0), (0.5, math.nan)])
def test_bounds_must_be_ordered(low, high):
    for weight in (masked, row_masked):
        with pytest.raises(
            ValueError, match=f"min_weight must be at least 0 and below max_weight, got {low} and"
        ):
            weight(tokens([-1.0], [-1.0]), low=low, high=high)
