"""Laws of core.loss_old: whose gradient counts how much when the ratio is against the old policy."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import poison, poisoned
from torch import Tensor

from core import importance, loss_old
from core.aggregate import sequence_mean_weight

F64 = torch.float64
NONE = math.inf


class OldBatch(NamedTuple):
    """What these surrogates take, in float64."""

    logprob: Tensor
    old_logprob: Tensor
    rollout_logprob: Tensor
    advantage: Tensor
    loss_mask: Tensor
    row_id: Tensor


def tokens(lp, old, a, mask=None, *, roll=None, row=None, dtype=F64) -> OldBatch:
    return OldBatch(
        torch.tensor(lp, dtype=dtype),
        torch.tensor(old, dtype=dtype),
        torch.tensor(roll if roll is not None else old, dtype=dtype),
        torch.tensor(a, dtype=dtype),
        torch.tensor(mask if mask is not None else [True] * len(lp)),
        torch.tensor(row if row is not None else [0] * len(lp)),
    )


@st.composite
def old_batches(draw: st.DrawFn) -> OldBatch:
    """Up to eight tokens of up to three rows, in any order, policies close together or far apart."""
    logprobs = st.sampled_from([-1e-9, -0.2, -1.0, -1.1, -1.5, -3.0, -12.0]) | st.floats(-9, -1e-6)
    advantage = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0])
    rows = st.sampled_from([-(10**9), 0, 7])
    token = st.tuples(logprobs, logprobs, logprobs, advantage, st.booleans(), rows)
    columns = list(zip(*draw(st.lists(token, min_size=1, max_size=8))))
    return tokens(columns[0], columns[1], columns[3], columns[4], roll=columns[2], row=columns[5])


def ppo(b: OldBatch, low=0.2, high=0.3, cap=NONE):
    return loss_old.ppo_clip(
        b.logprob, b.old_logprob, b.advantage, b.loss_mask, epsilon_low=low, epsilon_high=high, max_ratio=cap
    )


def dual(b: OldBatch, low=0.2, high=0.3, dual_clip=3.0):
    return loss_old.ppo_dual_clip(
        b.logprob,
        b.old_logprob,
        b.advantage,
        b.loss_mask,
        epsilon_low=low,
        epsilon_high=high,
        dual_clip=dual_clip,
    )


def decoupled(b: OldBatch, low=0.2, high=0.3, cap=NONE):
    return loss_old.decoupled_ppo(
        b.logprob,
        b.old_logprob,
        b.rollout_logprob,
        b.advantage,
        b.loss_mask,
        epsilon_low=low,
        epsilon_high=high,
        max_weight=cap,
    )


def gspo(b: OldBatch, low=0.2, high=0.3):
    return loss_old.gspo(
        b.logprob, b.old_logprob, b.advantage, b.loss_mask, b.row_id, epsilon_low=low, epsilon_high=high
    )


def sapo(b: OldBatch, positive=1.0, negative=1.05):
    return loss_old.sapo(
        b.logprob,
        b.old_logprob,
        b.advantage,
        b.loss_mask,
        temperature_positive=positive,
        temperature_negative=negative,
    )


RULES = {"ppo": ppo, "dual": dual, "decoupled": decoupled, "gspo": gspo, "sapo": sapo}
BY_TOKEN = ["ppo", "dual", "decoupled", "sapo"]


def run(rule: str, batch: OldBatch, **knobs):
    logprob = batch.logprob.clone().requires_grad_()
    result = RULES[rule](batch._replace(logprob=logprob), **knobs)
    result.value.sum().backward()
    assert logprob.grad is not None
    return result._replace(value=result.value.detach()), logprob.grad


def objective(rule: str, batch: OldBatch) -> Tensor:
    """What the papers maximise, token by token and differentiable: `min` and `clip` as they stand there."""
    r = (batch.logprob - batch.old_logprob).exp()
    a = batch.advantage
    if rule == "sapo":
        temperature = torch.where(a > 0, torch.tensor(1.0, dtype=F64), torch.tensor(1.05, dtype=F64))
        return 4 / temperature * torch.sigmoid(temperature * (r - 1)) * a
    if rule == "gspo":
        d = torch.where(batch.loss_mask, batch.logprob - batch.old_logprob, 0.0).detach()
        same = (batch.row_id[:, None] == batch.row_id[None]) & batch.loss_mask
        s = torch.where(same, d, 0.0).sum(1).div(same.sum(1).clamp(min=1)).exp()
        r = s * (batch.logprob - batch.logprob.detach()).exp()
    kept = torch.minimum(r * a, r.clamp(1 - 0.2, 1 + 0.3) * a)
    if rule == "dual":
        return torch.where(a < 0, torch.maximum(kept, 3.0 * a), kept)
    if rule == "decoupled":
        return (batch.old_logprob - batch.rollout_logprob).exp() * kept
    return kept


def on_a_bound(batch: OldBatch) -> bool:
    """Whether a ratio is where `clamp` has two derivatives, up to rounding."""
    r = (batch.logprob - batch.old_logprob).exp()
    return any(bool((r - bound).abs().lt(1e-6).any()) for bound in (0.8, 1.3, 3.0))


@pytest.mark.parametrize("rule", RULES)
@given(batch=old_batches())
def test_gradient_is_that_of_the_papers_objective(rule, batch):
    _, grad = run(rule, batch)
    logprob = batch.logprob.clone().requires_grad_()
    torch.where(batch.loss_mask, -objective(rule, batch._replace(logprob=logprob)), 0.0).sum().backward()
    if not on_a_bound(batch):
        assert torch.allclose(grad, logprob.grad, rtol=1e-9, atol=1e-12)


@given(batch=old_batches())
def test_slope_is_the_gradient_and_value_is_slope_times_logprob(batch):
    for rule in RULES:
        result, grad = run(rule, batch)
        assert torch.equal(result.slope, grad) and not result.slope.requires_grad
        assert torch.equal(result.value, grad * batch.logprob)


@given(batch=old_batches())
def test_ratio_is_raw_and_zero_where_nothing_is_trained(batch):
    for rule in RULES:
        ratio = RULES[rule](batch).importance_ratio
        expected = torch.where(batch.loss_mask, (batch.logprob - batch.old_logprob).exp(), 0.0)
        assert torch.equal(ratio, expected)


@pytest.mark.parametrize("rule", RULES)
@given(batch=old_batches(), junk=poison, where=st.sets(st.sampled_from(OldBatch._fields[:4]), min_size=1))
def test_nothing_is_read_outside_the_mask(rule, batch, junk, where):
    clean, grad = run(rule, batch)
    dirty = batch._replace(**{f: poisoned(getattr(batch, f), batch.loss_mask, junk) for f in where})
    result, dirty_grad = run(rule, dirty)
    for ours, theirs in zip((*clean, grad), (*result, dirty_grad)):
        assert torch.equal(ours, theirs)
    assert not any(field[~batch.loss_mask].any() for field in (*result, dirty_grad))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("junk", [math.nan, -math.inf, math.inf, -9999.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_token_without_a_usable_old_logprob_is_dropped_and_shown(rule, junk, dtype):
    """Never ratio 1; in a row the other tokens decide."""
    batch = tokens([-1.0, -1.0], [junk, -1.1], [1.0, 1.0], roll=[-1.1, -1.1], dtype=dtype)
    result, grad = run(rule, batch)
    assert result.unusable.tolist() == [True, False] and result.out_of_region.tolist() == [False, False]
    assert not any(float(x[0]) for x in (result.value, result.slope, grad, result.importance_ratio))
    alone, _ = run(rule, OldBatch(*(field[1:] for field in batch)))
    assert float(grad[1]) == float(alone.slope[0]) != 0


@pytest.mark.parametrize("junk", [math.nan, -math.inf, math.inf, -9999.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_decoupled_ppo_drops_a_token_without_a_usable_rollout_logprob(junk, dtype):
    batch = tokens([-1.0, -1.0], [-1.1, -1.1], [1.0, 1.0], roll=[junk, -1.2], dtype=dtype)
    result, grad = run("decoupled", batch, cap=2.0)
    assert result.unusable.tolist() == [True, False] and float(grad[0]) == 0
    assert result.importance_ratio[0] == 0
    assert float(grad[1]) == pytest.approx(-math.exp(0.2), rel=1e-6)


def test_decoupled_ppo_drops_a_token_whose_whole_ratio_overflows():
    """Each factor is finite in float32, their product is not."""
    batch = tokens([-1.0, -1.0], [-61.0, -1.0], [-1.0, -1.0], roll=[-121.0, -1.0], dtype=torch.float32)
    result, grad = run("decoupled", batch)
    assert result.unusable.tolist() == [True, False] and grad.tolist() == [0.0, 1.0]
    assert run("decoupled", batch._replace(loss_mask=torch.tensor([False, True])))[0].unusable.sum() == 0


@pytest.mark.parametrize("junk", [math.inf, -math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_a_token_with_an_infinite_logprob_is_dropped_and_shown(rule, junk):
    """In value and in gradient: 0 times infinity would be NaN."""
    for a in (1.0, -1.0):
        result, grad = run(rule, tokens([junk, -1.0], [-1.0, -1.0], [a, a], row=[0, 1]))
        assert result.value.tolist() == [0.0, a] and grad.tolist() == result.slope.tolist() == [0.0, -a]
        assert result.unusable.tolist() == [True, False] and not result.out_of_region.any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("field", ["logprob", "advantage"])
def test_a_nan_from_upstream_is_seen(rule, field):
    batch = tokens([-1.0, -2.0], [-1.1, -2.1], [1.0, 1.0], row=[0, 1])
    result, grad = run(rule, batch._replace(**{field: torch.tensor([math.nan, -1.0], dtype=F64)}))
    assert result.value[0].isnan() and result.slope[0].isnan() and grad[0].isnan()
    assert result.value[1].isfinite() and grad[1].isfinite() and not result.unusable.any()


@given(batch=old_batches())
def test_no_gradient_flows_into_what_was_recorded(batch):
    for rule in RULES:
        leaves = [field.clone().requires_grad_() for field in batch[:4]]
        RULES[rule](OldBatch(*leaves, *batch[4:])).value.sum().backward()
        assert [leaf.grad is None for leaf in leaves] == [False, True, True, True]


@given(batch=old_batches())
def test_without_a_step_in_between_every_rule_is_the_plain_policy_gradient(batch):
    same = batch._replace(old_logprob=batch.logprob, rollout_logprob=batch.logprob)
    for rule in RULES:
        result, grad = run(rule, same)
        assert torch.equal(grad, torch.where(batch.loss_mask, -batch.advantage, 0.0))
        assert not result.out_of_region.any()


@given(batch=old_batches())
def test_any_order_of_tokens_and_any_leading_shape(batch):
    for rule in RULES:
        whole, back = RULES[rule](batch), RULES[rule](OldBatch(*(field.flip(0) for field in batch)))
        for one, other in zip(whole, back):
            assert torch.allclose(one.double(), other.flip(0).double(), rtol=1e-12, atol=0)
    for rule in BY_TOKEN:
        folded = RULES[rule](OldBatch(*(field[None, :, None] for field in batch)))
        assert all(torch.equal(flat, deep[0, :, 0]) for flat, deep in zip(RULES[rule](batch), folded))


@given(batch=old_batches(), more=old_batches())
def test_tokens_of_other_rows_change_nothing(batch, more):
    """Padding, packing and the split over micro-batches, as long as a row stays whole."""
    for rule in RULES:
        together = RULES[rule](
            OldBatch(*(torch.cat(pair) for pair in zip(batch, more._replace(row_id=more.row_id + 1))))
        )
        alone = RULES[rule](batch)
        for one, other in zip(alone, together):
            assert torch.allclose(one.double(), other[: len(one)].double(), rtol=1e-12, atol=0)


@given(batch=old_batches())
def test_inputs_are_untouched(batch):
    before = [field.clone() for field in batch]
    for rule in RULES:
        run(rule, batch)
    assert all(torch.equal(a, b) for a, b in zip(before, batch))


@pytest.mark.parametrize("rule", RULES)
def test_arithmetic_is_float32_at_least(rule):
    """bfloat16 gives what its values give in float32; float64 stays."""
    lp, old, roll, a = [-1.0, -2.03, -0.4], [-1.25, -2.0, -0.9], [-1.3, -1.9, -0.8], [1.0, -1.0, 0.3]
    narrow = tokens(lp, old, a, roll=roll, dtype=torch.bfloat16)
    wide = OldBatch._make([*(field.float() for field in narrow[:4]), *narrow[4:]])
    for ours, theirs in zip(RULES[rule](narrow), RULES[rule](wide)):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    precise = RULES[rule](tokens(lp, old, a, roll=roll))
    assert {precise.value.dtype, precise.slope.dtype, precise.importance_ratio.dtype} == {F64}
    assert RULES[rule](wide).value.dtype == torch.float32


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_mask_gives_zero_that_is_still_attached(rule):
    result, grad = run(rule, tokens([math.nan], [math.nan], [math.nan], [False]))
    assert result.value == 0 and grad == 0 and not result.unusable.any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_rule_compiles_without_a_graph_break(rule, dtype):
    lp, old, roll = [-1.0, -0.5, -3.0], [-1.1, -2.0, -2.9], [-1.2, -0.7, math.nan]
    batch = tokens(lp, old, [1.0, -1.0, 1.0], [True, True, False], roll=roll, row=[5, 5, 2], dtype=dtype)
    compiled = torch.compile(RULES[rule], fullgraph=True, backend="eager")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(compiled(batch), RULES[rule](batch)))


# PPO


@pytest.mark.parametrize("rule", ["ppo", "dual", "decoupled", "gspo"])
@pytest.mark.parametrize("a", [1.0, -1.0])
def test_a_ratio_exactly_at_a_bound_is_inside(rule, a):
    """Ratios that are exact in binary: 2 is inside (0.5, 2), and so is 0.5."""
    half = tokens([-math.log(2)], [0.0], [a])
    double = tokens([0.0], [-math.log(2)], [a])
    assert half.logprob.exp() == 0.5
    knobs = {"low": 0.5, "high": 1.0}
    for batch, r in ((half, 0.5), (double, 2.0)):
        result, grad = run(rule, batch, **knobs)
        assert not result.out_of_region and float(grad) == -r * a
    above, below = {"low": 0.5, "high": 1.0 - 1e-9}, {"low": 0.5 - 1e-9, "high": 1.0}
    assert bool(RULES[rule](double, **above).out_of_region) is (a > 0)
    assert bool(RULES[rule](half, **below).out_of_region) is (a < 0)


@pytest.mark.parametrize("rule", RULES)
def test_an_advantage_of_zero_is_never_out_of_region(rule):
    batch = tokens([-0.1, -9.0], [-9.0, -0.1], [0.0, 0.0], row=[0, 1])
    assert not RULES[rule](batch).out_of_region.any()


def test_dual_clip_keeps_exactly_its_bound():
    batch = tokens([0.0], [-math.log(2)], [-1.0])
    assert not dual(batch, dual_clip=2.0).out_of_region
    assert dual(batch, dual_clip=2.0 - 1e-9).out_of_region


@pytest.mark.parametrize("rule", ["ppo", "dual", "decoupled", "gspo"])
@given(batch=old_batches())
def test_moving_back_towards_the_old_policy_is_never_clipped(rule, batch):
    """For GSPO the row moves, not the token."""
    rows = batch._replace(row_id=torch.arange(len(batch.row_id)))
    back = batch.advantage * (batch.old_logprob - batch.logprob) >= 0
    knobs = {"dual_clip": NONE} if rule == "dual" else {}
    assert not (RULES[rule](rows, low=1e-6, high=1e-6, **knobs).out_of_region & back).any()


@given(batch=old_batches(), cap=st.floats(0.5, 3))
def test_max_ratio_caps_the_coefficient_and_nothing_else(batch, cap):
    free, (capped, grad) = ppo(batch), run("ppo", batch, cap=cap)
    keep = batch.loss_mask & ~free.out_of_region
    assert torch.equal(grad, -torch.where(keep, free.importance_ratio.clamp(max=cap) * batch.advantage, 0.0))
    assert torch.equal(capped.importance_ratio, free.importance_ratio)
    assert torch.equal(capped.out_of_region, free.out_of_region)


@given(batch=old_batches())
def test_a_dual_clip_beyond_every_ratio_is_ppo(batch):
    assert torch.equal(dual(batch, dual_clip=NONE).value, ppo(batch).value)


@given(batch=old_batches(), cap=st.floats(0.5, 3))
def test_decoupled_ppo_is_ppo_times_truncated_importance_sampling(batch, cap):
    weight = importance.truncated_importance_weight(
        batch.old_logprob, batch.rollout_logprob, batch.loss_mask, max_weight=cap
    )
    ours, theirs = decoupled(batch, cap=cap), importance.reweighted(ppo(batch), weight)
    assert torch.allclose(ours.slope, theirs.slope, rtol=1e-12, atol=0)
    assert torch.equal(ours.out_of_region, theirs.out_of_region)


@given(batch=old_batches())
def test_decoupled_ppo_sampled_by_the_old_policy_is_ppo(batch):
    assert torch.equal(decoupled(batch._replace(rollout_logprob=batch.old_logprob)).value, ppo(batch).value)


def test_decoupled_ppo_weighs_as_precisely_as_its_logprob():
    batch = tokens([-1.1], [-1.1], [1.0], roll=[-1.3])._replace(old_logprob=torch.tensor([-1.1]))
    assert float(decoupled(batch).slope) == pytest.approx(-math.exp(0.2), rel=1e-12)


def test_dual_clip_worked_example():
    """Epsilon 0.2, c = 3: objectives -0.5, 1 and 12; the first and the last have no gradient."""
    batch = tokens([-1.69315, -1.0, -0.69741], [-1.0, -1.0, -3.0], [1.0, -1.0, -4.0])
    result, grad = run("dual", batch, high=0.2)
    r = result.importance_ratio
    value = -torch.minimum(r * batch.advantage, r.clamp(0.8, 1.2) * batch.advantage)
    assert torch.minimum(value, -3 * batch.advantage.clamp(max=0) + 9e9 * (batch.advantage > 0)).tolist() == (
        pytest.approx([-0.5, 1.0, 12.0], abs=1e-4)
    )
    assert result.out_of_region.tolist() == [False, False, True]
    assert grad.tolist() == pytest.approx([-0.5, 1.0, 0.0], abs=1e-4)


def test_ppo_with_truncated_weights_worked_example():
    """PPO epsilon 0.2 per token -0.9048, 1.1052, -0.5; the weights are exp(0.05) each, and the sum -0.3150."""
    batch = tokens([-1.1, -0.9, -1.0], [-1.0] * 3, [1.0, -1.0, 0.5], roll=[-1.05] * 3)
    plain, grad = run("ppo", batch, high=0.2)
    assert grad.tolist() == pytest.approx([-0.9048, 1.1052, -0.5], abs=1e-4)
    assert float(grad.sum()) == pytest.approx(-0.2997, abs=1e-4)
    weight = importance.truncated_importance_weight(
        batch.old_logprob, batch.rollout_logprob, batch.loss_mask, max_weight=2.0
    )
    assert weight.tolist() == pytest.approx([1.05127] * 3, abs=1e-5)
    assert float(importance.reweighted(plain, weight).slope.sum()) == pytest.approx(-0.3150, abs=1e-4)


def test_decoupled_ppo_worked_example():
    """mu 0.2, pi_old 0.25, pi 0.3: weight 1.25, ratio 1.2, gradient -1.5; a cap of 1.1 makes it -1.32."""
    batch = tokens([math.log(0.3)], [math.log(0.25)], [1.0], roll=[math.log(0.2)])
    assert float(run("decoupled", batch)[1]) == pytest.approx(-1.5)
    assert float(run("decoupled", batch, cap=1.1)[1]) == pytest.approx(-1.32)
    assert float(decoupled(batch).importance_ratio) == pytest.approx(1.2)


# GSPO


PUBLISHED_ROWS = tokens(
    [0.2, -2.5, -0.3, 0.1, -1.8, 0.8, -0.2, -0.5, 0.3, -1.7, 0.4],
    [-1.0] * 11,
    [1.5, 2, 1, 0.8, 0.5, 3, 1.5, 0.5, 0.8, 1.2, 2.5],
    row=[0] * 5 + [1] * 2 + [2] * 4,
)


def clipped_objective(ratio: Tensor, advantage: Tensor) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def test_ppo_and_gspo_on_three_published_rows():
    """Sums -15.1868 and -18.0716, clipped 8 of 11 and 6 of 11, row ratios 1.1503, 3.6693, 1.8682."""
    batch = PUBLISHED_ROWS
    by_token = ppo(batch, high=0.2)
    assert int(by_token.out_of_region.sum()) == 8
    value = -clipped_objective(by_token.importance_ratio, batch.advantage).sum()
    assert float(value) == pytest.approx(-15.1868, abs=1e-4)
    by_row, free = gspo(batch, high=0.2), gspo(batch, high=NONE)
    ratio = -free.slope / batch.advantage
    assert ratio[[0, 5, 7]].tolist() == pytest.approx([1.1503, 3.6693, 1.8682], abs=1e-4)
    assert int(by_row.out_of_region.sum()) == 6
    assert float(-clipped_objective(ratio, batch.advantage).sum()) == pytest.approx(-18.0716, abs=1e-4)


def test_gspo_with_the_sequence_mean_worked_example():
    """Log ratios 0.1, -0.2, 0.4: s = 1.10517091808, and each of three tokens has a third of its gradient."""
    batch = tokens([-0.9, -1.2, -0.6], [-1.0] * 3, [1.0] * 3)
    result, _ = run("gspo", batch)
    weight = sequence_mean_weight(batch.loss_mask, batch.row_id, batch.row_id, dtype=F64)
    assert (weight * result.slope).tolist() == pytest.approx([-0.368390306025] * 3)


@given(batch=old_batches(), a=st.sampled_from([-1.0, 1.0]))
def test_gspo_with_one_advantage_a_row_is_the_gradient_of_the_clipped_row_ratio(batch, a):
    """min(s A, clip(s) A) averaged over rows, differentiated through s itself."""
    batch = batch._replace(advantage=torch.full_like(batch.advantage, a))
    _, ours = run("gspo", batch)
    weight = sequence_mean_weight(batch.loss_mask, batch.row_id, batch.row_id, dtype=F64)
    logprob = batch.logprob.clone().requires_grad_()
    live = [batch.loss_mask & (batch.row_id == row) for row in set(batch.row_id.tolist())]
    ratio = [(logprob - batch.old_logprob)[row].mean().exp() for row in live if row.any()]
    if ratio and not any(abs(s.item() - bound) < 1e-6 for s in ratio for bound in (0.8, 1.3)):
        value = sum(-torch.minimum(s * a, s.clamp(0.8, 1.3) * a) for s in ratio) / len(ratio)
        torch.as_tensor(value).backward()
        assert torch.allclose(weight * ours, logprob.grad, rtol=1e-9, atol=1e-12)


@given(batch=old_batches())
def test_gspo_of_rows_of_one_token_is_ppo(batch):
    rows = batch._replace(row_id=torch.arange(len(batch.row_id)))
    assert torch.allclose(gspo(rows).slope, ppo(rows).slope, rtol=1e-12, atol=0)
    assert torch.equal(gspo(rows).out_of_region, ppo(rows).out_of_region)


@given(batch=old_batches())
def test_gspo_gives_all_tokens_of_a_row_one_ratio(batch):
    batch = batch._replace(advantage=torch.ones_like(batch.advantage))
    slope = gspo(batch, high=NONE).slope
    for row in set(batch.row_id.tolist()):
        assert len(set(slope[batch.loss_mask & (batch.row_id == row)].tolist())) <= 1


def test_gspo_tests_each_token_by_the_sign_of_its_own_advantage():
    batch = tokens([-0.5, -0.5, -0.5], [-1.0] * 3, [1.0, -1.0, 0.0])
    assert gspo(batch).out_of_region.tolist() == [True, False, False]


def test_gspo_row_with_a_nan_is_nan_and_its_neighbours_are_not():
    batch = tokens([math.nan, -1.0, -1.0], [-1.0] * 3, [1.0] * 3, row=[0, 0, 1])
    assert gspo(batch).value.isnan().tolist() == [True, True, False]


# SAPO


@pytest.mark.parametrize(
    "r, a, value, gradient",
    [
        (1.0, 1.0, -2.0, -1.0),
        (1.0, -1.0, 1.90476190476, 1.0),
        (2.0, 1.0, -2.92423431452, -1.57289546593),
        (0.5, -1.0, 1.4159383303, 0.467069911643),
    ],
)
def test_sapo_table(r, a, value, gradient):
    batch = tokens([math.log(r) - 2], [-2.0], [a])
    assert float(run("sapo", batch)[1]) == pytest.approx(gradient)
    assert float(-objective("sapo", batch)) == pytest.approx(value)


def test_sapo_worked_example():
    """Temperatures 1 and 2; objectives -1.61153, 1.21785, -0.95245."""
    batch = tokens([-1.5, -0.8, -1.1], [-1.0] * 3, [1.0, -1.0, 0.5])
    logprob = batch.logprob.clone().requires_grad_()
    r = (logprob - batch.old_logprob).exp()
    temperature = torch.tensor([1.0, 2.0, 1.0], dtype=F64)
    value = -4 / temperature * torch.sigmoid(temperature * (r - 1)) * batch.advantage
    assert value.tolist() == pytest.approx([-1.61153, 1.21785, -0.95245], abs=1e-5)
    value.sum().backward()
    assert logprob.grad is not None
    assert torch.allclose(run("sapo", batch, negative=2.0)[1], logprob.grad, rtol=1e-12)


@given(r=st.floats(1.0, 30.0), step=st.floats(0.1, 5.0))
@example(r=30.0, step=5.0)
def test_sapo_gate_closes_as_the_ratio_grows(r, step):
    """The gradient over r falls, stays positive, and closes sooner at the higher temperature."""
    near, far = (tokens([math.log(x) - 5], [-5.0], [1.0]) for x in (r, r + step))
    gates = [-float(run("sapo", batch)[1]) / x for batch, x in ((near, r), (far, r + step))]
    assert gates[0] > gates[1] > 0
    assert float(run("sapo", far, positive=2.0)[1]) > float(run("sapo", far)[1])


def test_sapo_gate_still_passes_something_in_float32():
    """1 - sigmoid(20) is 0 in float32, sigmoid(-20) is not."""
    batch = tokens([math.log(21.0) - 5], [-5.0], [1.0], dtype=torch.float32)
    assert float(run("sapo", batch)[1]) == pytest.approx(-4 * math.exp(-20) * 21, rel=1e-4)


def test_sapo_is_never_out_of_region():
    assert not sapo(tokens([-0.1, -9.0], [-9.0, -0.1], [1.0, -1.0])).out_of_region.any()


# Refusals


@pytest.mark.parametrize("rule", RULES)
def test_a_run_without_old_logprobs_is_refused(rule):
    """Never the sampler's in their place, and never in silence."""
    batch = tokens([-1.0], [-1.0], [1.0])._replace(old_logprob=None)
    said = "old_logprob must be a tensor: this loss is anchored on the trainer's own forward before the step"
    with pytest.raises(ValueError, match=said + ", got None"):
        RULES[rule](batch)


@pytest.mark.parametrize("rule", RULES)
def test_shapes_must_agree_and_the_mask_must_be_bool(rule):
    batch = tokens([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0])
    names = ["logprob", "old_logprob", "advantage"] + ["rollout_logprob"] * (rule == "decoupled")
    for name in names:
        with pytest.raises(ValueError, match=rf"logprob, .*{name}.*must have one shape|\[T\], got"):
            RULES[rule](batch._replace(**{name: getattr(batch, name)[:1]}))
    with pytest.raises(ValueError, match="loss_mask must be bool, got torch.int64"):
        RULES[rule](batch._replace(loss_mask=batch.loss_mask.long()))


def test_gspo_takes_one_axis_and_integer_rows():
    batch = tokens([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"row_id must be an integer tensor, got torch.float64"):
        gspo(batch._replace(row_id=batch.row_id.double()))
    with pytest.raises(ValueError, match=r"logprob and row_id must have one shape \[T\], got"):
        gspo(batch._replace(row_id=batch.row_id[:1]))
    with pytest.raises(ValueError, match=r"logprob and row_id must have one shape \[T\], got"):
        gspo(OldBatch(*(field[None] for field in batch)))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_thresholds_must_be_positive(bad):
    batch = tokens([-1.0], [-1.0], [1.0])
    refused = [
        (rule, f"epsilon_{side}", side) for rule in RULES if rule != "sapo" for side in ("low", "high")
    ]
    refused += [("ppo", "max_ratio", "cap"), ("decoupled", "max_weight", "cap")]
    refused += [("sapo", f"temperature_{sign}", sign) for sign in ("positive", "negative")]
    for rule, name, knob in refused:
        with pytest.raises(ValueError, match=f"{name} must be positive, got {bad}"):
            RULES[rule](batch, **{knob: bad})


@pytest.mark.parametrize("bad", [1.0, 0.0, math.nan])
def test_dual_clip_must_be_above_one(bad):
    with pytest.raises(ValueError, match=f"dual_clip must be above 1, got {bad}"):
        dual(tokens([-1.0], [-1.0], [1.0]), dual_clip=bad)
