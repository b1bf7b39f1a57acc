"""Laws of core.loss: whose gradient counts how much, and who is never read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import TokenBatch, poison, poisoned, token_batches

from core import loss

F64 = torch.float64
NONE = math.inf


def tv(*args, low=0.15, high=0.15, cap=NONE):
    return loss.dppo_binary_tv(*args, delta_low=low, delta_high=high, max_ratio=cap)


def kl(*args, low=0.05, high=0.05, cap=NONE):
    return loss.dppo_binary_kl(*args, delta_low=low, delta_high=high, max_ratio=cap)


def glm(*args, low=0.5, high=5.0):
    return loss.double_sided_importance(*args, min_ratio=low, max_ratio=high)


def cispo(*args, low=0.0, high=5.0):
    return loss.cispo(*args, min_ratio=low, max_ratio=high)


RULES = {
    "tv": tv,
    "kl": kl,
    "glm": glm,
    "cispo": cispo,
    "policy gradient": loss.importance_weighted_policy_gradient,
}


def coefficient(rule: str, lp: float, lr: float, a: float) -> float:
    """What multiplies advantage * grad log pi, by the papers, for one token."""
    pi, mu, r = math.exp(lp), math.exp(lr), math.exp(lp - lr)
    d_tv = abs(pi - mu)
    away = (a > 0 and pi > mu) or (a < 0 and pi < mu)
    if rule == "tv":
        return 0.0 if away and d_tv > 0.15 else r
    if rule == "kl":
        other_mu, other_pi = -math.expm1(lr), -math.expm1(lp)
        d_kl = mu * (lr - lp) + other_mu * (math.log(other_mu) - math.log(other_pi))
        return 0.0 if away and d_kl > 0.05 else r
    if rule == "glm":
        return r if 0.5 < r < 5 else 0.0
    if rule == "cispo":
        return min(max(r, 0.0), 5.0)
    return r


def run(rule, batch: TokenBatch):
    logprob = batch.logprob.clone().requires_grad_()
    result = RULES[rule](logprob, *batch[1:])
    result.value.sum().backward()
    assert logprob.grad is not None
    return result._replace(value=result.value.detach()), logprob.grad


def tokens(lp, lr, a, mask=None, dtype=F64) -> TokenBatch:
    return TokenBatch(
        torch.tensor(lp, dtype=dtype),
        torch.tensor(lr, dtype=dtype),
        torch.tensor(a, dtype=dtype),
        torch.tensor(mask if mask is not None else [True] * len(lp)),
    )


@given(batch=token_batches())
def test_gradient_is_minus_coefficient_times_advantage(batch):
    for rule in RULES:
        _, grad = run(rule, batch)
        expected = [
            -coefficient(rule, lp, lr, a) * a if live else 0.0
            for lp, lr, a, live in zip(*(field.tolist() for field in batch))
        ]
        assert grad.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-300)


@given(batch=token_batches())
def test_value_is_the_score_form(batch):
    for rule in RULES:
        result, grad = run(rule, batch)
        assert torch.allclose(result.value.detach(), grad * batch.logprob, rtol=1e-12, atol=0)


@given(batch=token_batches())
def test_slope_is_the_gradient_and_has_none(batch):
    """What a backward pass needs that never builds the value."""
    for rule in RULES:
        result, grad = run(rule, batch)
        assert torch.equal(result.slope, grad) and not result.slope.requires_grad
        assert torch.equal(result.value, result.slope * batch.logprob)


@pytest.mark.parametrize("junk", [math.inf, -math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_a_token_with_an_infinite_logprob_is_dropped_and_shown(rule, junk):
    """In value and in gradient: 0 times infinity would be NaN."""
    for a in (1.0, -1.0):
        result, grad = run(rule, tokens([junk, -1.0], [-1.0, -1.0], [a, a]))
        assert result.value.tolist() == [0.0, a] and grad.tolist() == result.slope.tolist() == [0.0, -a]
        assert result.unusable.tolist() == [True, False] and not result.out_of_region.any()


@pytest.mark.parametrize("rule", RULES)
def test_a_nan_advantage_is_never_out_of_region(rule):
    result, grad = run(rule, tokens([-9.0, -0.1], [-0.1, -9.0], [math.nan, math.nan]))
    assert result.value.isnan().all() and result.slope.isnan().all() and grad.isnan().all()
    assert rule == "cispo" or not result.out_of_region.any()


@given(batch=token_batches())
def test_score_form_and_ratio_form_have_one_gradient(batch):
    for rule in ["tv", "kl", "glm", "policy gradient"]:
        result, grad = run(rule, batch)
        logprob = batch.logprob.clone().requires_grad_()
        keep = batch.loss_mask & ~result.out_of_region
        ratio_form = -torch.where(keep, (logprob - batch.rollout_logprob).exp() * batch.advantage, 0.0)
        ratio_form.sum().backward()
        assert torch.allclose(grad, logprob.grad, rtol=1e-9, atol=1e-300)


@given(batch=token_batches(), junk=poison, where=st.sets(st.sampled_from(["lp", "lr", "a"]), min_size=1))
def test_nothing_is_read_outside_the_mask(batch, junk, where):
    """Mask the argument, not the result."""
    for rule in RULES:
        clean, grad = run(rule, batch)
        dirty = batch._replace(
            logprob=poisoned(batch.logprob, batch.loss_mask, junk) if "lp" in where else batch.logprob,
            rollout_logprob=poisoned(batch.rollout_logprob, batch.loss_mask, junk)
            if "lr" in where
            else batch.rollout_logprob,
            advantage=poisoned(batch.advantage, batch.loss_mask, junk) if "a" in where else batch.advantage,
        )
        result, dirty_grad = run(rule, dirty)
        for ours, theirs in zip((*clean, grad), (*result, dirty_grad)):
            assert torch.equal(ours, theirs)
        assert not any(field[~batch.loss_mask].any() for field in (*result, dirty_grad))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("junk", [math.nan, -math.inf, math.inf, -9999.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_token_without_a_usable_rollout_logprob_is_dropped_and_shown(rule, junk, dtype):
    """Never ratio 1, never an overflowing coefficient."""
    result, grad = run(rule, tokens([-1.0, -1.0], [junk, -1.1], [1.0, 1.0], dtype=dtype))
    assert result.unusable.tolist() == [True, False]
    assert float(result.value[0]) == 0 and float(grad[0]) == 0 and float(result.importance_ratio[0]) == 0
    assert float(grad[1]) == pytest.approx(-math.exp(0.1))
    assert not result.out_of_region[0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("field", ["logprob", "advantage"])
def test_a_nan_from_upstream_is_seen(rule, field):
    batch = tokens([-1.0, -2.0], [-1.1, -2.1], [1.0, 1.0])
    batch = batch._replace(**{field: torch.tensor([math.nan, -1.0], dtype=F64)})
    result, grad = run(rule, batch)
    assert result.value[0].isnan() and result.value[1].isfinite() and not result.unusable.any()
    assert grad[0].isnan() and grad[1].isfinite()


@given(batch=token_batches())
def test_no_gradient_flows_into_what_was_recorded(batch):
    for rule in RULES:
        leaves = [field.clone().requires_grad_() for field in batch[:3]]
        RULES[rule](*leaves, batch.loss_mask).value.sum().backward()
        assert leaves[0].grad is not None and leaves[1].grad is None and leaves[2].grad is None


@given(batch=token_batches())
def test_on_policy_every_rule_is_the_plain_policy_gradient(batch):
    for rule in RULES:
        same = batch._replace(rollout_logprob=batch.logprob)
        result, grad = run(rule, same)
        assert torch.equal(grad, torch.where(batch.loss_mask, -batch.advantage, 0.0))
        assert not result.out_of_region.any()


@given(batch=token_batches(), factor=st.sampled_from([0.5, 2.0, 8.0]))
def test_gradient_scales_with_the_advantage(batch, factor):
    for rule in RULES:
        _, grad = run(rule, batch)
        _, scaled = run(rule, batch._replace(advantage=batch.advantage * factor))
        assert torch.equal(grad * factor, scaled)


@given(batch=token_batches())
def test_any_leading_shape_and_any_order_of_tokens(batch):
    for rule in RULES:
        whole = RULES[rule](*batch)
        folded = RULES[rule](*(field[None, :, None] for field in batch))
        turned = RULES[rule](*(field.flip(0) for field in batch))
        for flat, deep, back in zip(whole, folded, turned):
            assert torch.equal(flat, deep[0, :, 0]) and torch.equal(flat, back.flip(0))


@given(batch=token_batches())
def test_inputs_are_untouched(batch):
    for rule in RULES:
        before = [field.clone() for field in batch]
        run(rule, batch)
        assert all(torch.equal(a, b) for a, b in zip(before, batch))


@pytest.mark.parametrize("rule", RULES)
def test_arithmetic_is_float32_at_least(rule):
    for given_dtype, got in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)):
        result = RULES[rule](*tokens([-1.0], [-1.25], [1.0], dtype=given_dtype))
        assert result.value.dtype == got and result.importance_ratio.dtype == got
        assert float(result.importance_ratio) == pytest.approx(math.exp(0.25), rel=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_bfloat16_gives_what_its_values_give_in_float32(rule):
    narrow = tokens([-1.0, -2.03, -0.4], [-1.25, -2.0, -0.9], [1.0, -1.0, 0.3], dtype=torch.bfloat16)
    wide = [field.float() for field in narrow[:3]]
    for ours, theirs in zip(RULES[rule](*narrow), RULES[rule](*wide, narrow.loss_mask)):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_mask_gives_zero_that_is_still_attached(rule):
    result, grad = run(rule, tokens([math.nan], [math.nan], [math.nan], [False]))
    assert result.value == 0 and grad == 0


# DPPO


@given(batch=token_batches(), small=st.floats(0.01, 0.5), more=st.floats(0, 0.5))
def test_a_wider_region_masks_no_more_tokens(batch, small, more):
    for rule in (tv, kl):
        narrow = rule(*batch, low=small, high=small).out_of_region
        wide = rule(*batch, low=small + more, high=small + more).out_of_region
        assert not (wide & ~narrow).any()


@given(batch=token_batches())
def test_a_region_of_one_never_masks_by_total_variation(batch):
    assert not tv(*batch, low=1.0, high=1.0).out_of_region.any()


@given(batch=token_batches())
@example(tokens([-0.01], [-3.0], [-1.0]))
def test_moving_back_towards_the_sampler_is_never_masked(batch):
    back = batch.advantage * (batch.rollout_logprob - batch.logprob) >= 0
    for rule in (tv, kl):
        assert not (rule(*batch, low=1e-6, high=1e-6).out_of_region & back).any()


@given(batch=token_batches(), cap=st.floats(0.5, 3))
def test_max_ratio_caps_the_coefficient_and_nothing_else(batch, cap):
    for rule in (tv, kl):
        logprob = batch.logprob.clone().requires_grad_()
        capped = rule(logprob, *batch[1:], cap=cap)
        capped.value.sum().backward()
        free = rule(*batch)
        keep = batch.loss_mask & ~free.out_of_region
        expected = -torch.where(keep, free.importance_ratio.clamp(max=cap) * batch.advantage, 0.0)
        assert torch.equal(logprob.grad, expected)
        assert torch.equal(capped.importance_ratio, free.importance_ratio)


@given(batch=token_batches())
def test_low_and_high_deltas_guard_their_own_side(batch):
    for rule in (tv, kl):
        up_only = rule(*batch, low=1e9, high=1e-3).out_of_region
        down_only = rule(*batch, low=1e-3, high=1e9).out_of_region
        assert not (up_only & (batch.advantage < 0)).any()
        assert not (down_only & (batch.advantage > 0)).any()
        assert torch.equal(up_only | down_only, rule(*batch, low=1e-3, high=1e-3).out_of_region)


PROBABILITIES = [
    # mu, pi, A, kept by TV, kept by KL, dL/dlogpi under TV
    (0.5, 0.7, 1.0, False, False, 0.0),
    (0.5, 0.3, -1.0, False, False, 0.0),
    (0.5, 0.3, 1.0, True, True, -0.6),
    (0.5, 0.7, -1.0, True, True, 1.4),
    (1e-4, 1e-2, 1.0, True, True, -100.0),
    (0.99, 0.80, -1.0, False, False, 0.0),
]


@pytest.mark.parametrize("mu, pi, a, tv_keep, kl_keep, gradient", PROBABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_dppo_table(mu, pi, a, tv_keep, kl_keep, gradient, dtype):
    batch = tokens([math.log(pi)], [math.log(mu)], [a], dtype=dtype)
    result, grad = run("tv", batch)
    assert bool(result.out_of_region) is not tv_keep
    assert float(grad) == pytest.approx(gradient, rel=1e-5)
    assert bool(kl(*batch).out_of_region) is not kl_keep


def test_dppo_table_in_sum():
    """Score-form sum, and the coefficient sum under a cap of 5."""
    mu, pi, advantage = ([row[i] for row in PROBABILITIES] for i in range(3))
    batch = tokens([math.log(p) for p in pi], [math.log(p) for p in mu], advantage)
    assert float(tv(*batch).value.sum()) == pytest.approx(460.74005736, rel=1e-9)
    ratio_form = -(tv(*batch).importance_ratio * batch.advantage)[~tv(*batch).out_of_region]
    assert float(ratio_form.sum()) == pytest.approx(-99.2)
    logprob = batch.logprob.clone().requires_grad_()
    tv(logprob, *batch[1:], cap=5.0).value.sum().backward()
    assert logprob.grad is not None and float(logprob.grad.sum()) == pytest.approx(-4.2)


@pytest.mark.parametrize(
    "case, lp, lr, a, low, keep, ratio_form",
    [
        ("too high, too low, inside", [-0.3, -2.0, -0.9], [-1.0] * 3, [1.0, -1, 1], 0.2, [0, 0, 1], -1.10517),
        ("on the way back", [-2.0, -0.3], [-1.0] * 2, [1.0, -1], 0.2, [1, 1], 1.64587),
        ("inside", [-0.3, -0.95], [-0.35, -1.0], [1.0, 1], 0.2, [1, 1], -2.10254),
        ("a ratio of 1e5", [math.log(0.1)], [math.log(1e-6)], [-1.0], 0.2, [1], 1e5),
    ],
)
def test_dppo_total_variation_worked_examples(case, lp, lr, a, low, keep, ratio_form):
    result = tv(*tokens(lp, lr, a), low=low, high=low)
    assert (~result.out_of_region).int().tolist() == keep
    total = -(result.importance_ratio * torch.tensor(a, dtype=F64))[~result.out_of_region].sum()
    assert float(total) == pytest.approx(ratio_form, rel=1e-5)


@pytest.mark.parametrize(
    "lp, a, delta, keep, ratio_form",
    [([-0.1, -0.95], [1.0, 1], 0.05, [0, 1], -1.05127), ([-1.01, -0.99], [1.0, -1], 0.5, [1, 1], 0.0200003)],
)
def test_dppo_kl_worked_examples(lp, a, delta, keep, ratio_form):
    result = kl(*tokens(lp, [-1.0] * 2, a), low=delta, high=delta)
    assert (~result.out_of_region).int().tolist() == keep
    total = -(result.importance_ratio * torch.tensor(a, dtype=F64))[~result.out_of_region].sum()
    assert float(total) == pytest.approx(ratio_form, rel=1e-5)


@pytest.mark.parametrize(
    "mu, pi, divergence",
    [(0.5, 0.65, 0.0471553397356), (0.9, 0.999, 0.366593004807), (0.5, 0.7, 0.0871766935724)],
)
def test_dppo_kl_threshold_is_the_binary_divergence(mu, pi, divergence):
    """The mask flips exactly at the divergence."""
    batch = tokens([math.log(pi)], [math.log(mu)], [1.0])
    assert bool(kl(*batch, high=divergence * (1 - 1e-9)).out_of_region)
    assert not bool(kl(*batch, high=divergence * (1 + 1e-9)).out_of_region)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("lp", [0.0, -1e-30, 1e-7])
def test_dppo_kl_stays_finite_where_a_token_is_certain(lp, dtype):
    """1 - pi underflows, a kernel may report a logprob above 0."""
    result, grad = run("kl", tokens([lp, -0.5], [-0.5, lp], [1.0, -1.0], dtype=dtype))
    assert result.out_of_region.tolist() == [True, True]
    assert grad.tolist() == [0.0, 0.0] and result.value.isfinite().all()
    same, _ = run("kl", tokens([lp], [lp], [1.0], dtype=dtype))
    assert not same.out_of_region.any()


# The bounded rules


@pytest.mark.parametrize("r, gradient", [(0.4, 0), (0.500001, -1.000002), (1, -2), (4.999, -9.998), (7, 0)])
def test_glm_table(r, gradient):
    """Bounds (0.5, 5), advantage 2."""
    _, grad = run("glm", tokens([math.log(r) - 8], [-8.0], [2.0]))
    assert float(grad) == pytest.approx(gradient, rel=1e-6)


def test_the_trust_region_and_the_clamp_hold_what_lies_on_their_bounds():
    batch = tokens([math.log(0.5), math.log(0.25)], [math.log(0.25), math.log(0.5)], [1.0, -1.0])
    moved = float(batch.logprob[0].exp() - batch.rollout_logprob[0].exp())
    assert tv(*batch, low=moved, high=moved).out_of_region.tolist() == [False, False]
    below = math.nextafter(moved, 0)
    assert tv(*batch, low=below, high=below).out_of_region.tolist() == [True, True]
    equal = tokens([-1.0], [-1.0], [1.0])
    assert not cispo(*equal, low=1.0, high=2.0).out_of_region.any()
    assert not cispo(*equal, low=0.5, high=1.0).out_of_region.any()


def test_glm_bounds_are_strict():
    """Ratios that are exact in binary: 0.5 and 2 are outside (0.5, 2)."""
    same = tokens([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0])
    assert glm(*same, low=0.5, high=1.0).out_of_region.tolist() == [True, True]
    assert glm(*same, low=1.0, high=2.0).out_of_region.tolist() == [True, True]
    assert glm(*same, low=0.5, high=2.0).out_of_region.tolist() == [False, False]


def test_glm_worked_examples():
    """Epsilon 0.2 and 0.28; then mu .2, pi .3, A 2."""
    result = glm(*tokens([-0.8, -0.8, -0.3, -3.0], [-1.0] * 4, [1.0, -1, 1, -1]), low=0.8, high=1.28)
    assert result.importance_ratio.tolist() == pytest.approx([1.2214, 1.2214, 2.0138, 0.1353], abs=1e-4)
    assert result.out_of_region.tolist() == [False, False, True, True]
    result, grad = run("glm", tokens([math.log(0.3)], [math.log(0.2)], [2.0]))
    assert float(result.value) == pytest.approx(3.61191841298) and float(grad) == pytest.approx(-3)


@given(batch=token_batches())
def test_glm_is_blind_to_the_sign_of_the_advantage(batch):
    assert torch.equal(
        glm(*batch).out_of_region, glm(*batch._replace(advantage=-batch.advantage)).out_of_region
    )


@given(batch=token_batches())
def test_glm_without_bounds_is_the_weighted_policy_gradient(batch):
    free = glm(*batch, low=0.0, high=math.inf)
    assert torch.equal(free.value, loss.importance_weighted_policy_gradient(*batch).value)


@given(batch=token_batches(), cap=st.floats(1, 9))
def test_cispo_from_zero_is_dppo_that_never_masks(batch, cap):
    capped = tv(*batch, low=1.0, high=1.0, cap=cap)
    assert torch.equal(cispo(*batch, low=0.0, high=cap).value, capped.value)


@pytest.mark.parametrize("r, weight", [(7.0, 5.0), (0.3, 0.3)])
def test_cispo_bounds_are_absolute(r, weight):
    result, grad = run("cispo", tokens([math.log(r) - 3], [-3.0], [1.0]))
    assert float(grad) == pytest.approx(-weight) and bool(result.out_of_region) is (r > 5)


def test_cispo_worked_examples():
    """Epsilon 0.2."""
    batch = tokens([-1.69315, -1.0, -0.69741], [-1.30685, -1.5, -1.0], [1.0, -1, -4])
    result = cispo(*batch, low=0.8, high=1.2)
    assert result.importance_ratio.tolist() == pytest.approx([0.67957, 1.64872, 1.35336], abs=1e-4)
    assert float(result.value.sum()) == pytest.approx(-3.19305, abs=1e-4)
    assert result.out_of_region.tolist() == [True, True, True]


@pytest.mark.parametrize("rule", RULES)
def test_a_masked_column_leaves_rows_finite(rule):
    shape = [[-1.0, -1.5, -0.8], [-0.7, -1.2, -2.0]], [[-1.2, -1.0, -0.9], [-0.6, -1.5, -1.7]]
    advantage, mask = [[1.0] * 3, [-1.0] * 3], [[True, True, False]] * 2
    result = RULES[rule](*(torch.tensor(x, dtype=F64) for x in (*shape, advantage)), torch.tensor(mask))
    assert result.value.isfinite().all() and not result.value[:, 2].any()


# Refusals


@pytest.mark.parametrize("rule", RULES)
def test_shapes_must_agree_and_the_mask_must_be_bool(rule):
    batch = tokens([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0])
    text = "^logprob, rollout_logprob, advantage and loss_mask must have one shape, got"
    for place in range(4):
        cut = [x[:1] if i == place else x for i, x in enumerate(batch)]
        with pytest.raises(ValueError, match=text):
            RULES[rule](*cut)
    with pytest.raises(ValueError, match="loss_mask must be bool, got torch.int64"):
        RULES[rule](*batch[:3], batch.loss_mask.long())


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_dppo_refuses_thresholds_that_are_not_positive(bad):
    batch = tokens([-1.0], [-1.0], [1.0])
    for rule in (tv, kl):
        for name, knob in (("delta_low", "low"), ("delta_high", "high"), ("max_ratio", "cap")):
            with pytest.raises(ValueError, match=f"{name} must be positive, got {bad}"):
                rule(*batch, **{knob: bad})


@pytest.mark.parametrize("low, high", [(-0.1, 2.0), (2.0, 2.0), (math.nan, 2.0), (0.5, math.nan)])
def test_bounds_must_be_ordered(low, high):
    batch = tokens([-1.0], [-1.0], [1.0])
    for rule in (glm, cispo):
        with pytest.raises(
            ValueError, match=f"min_ratio must be at least 0 and below max_ratio, got {low} and"
        ):
            rule(*batch, low=low, high=high)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_compiles_without_a_graph_break(rule):
    """No data-dependent shape, no look at a value: it fits into anybody's compiled step."""
    compiled = torch.compile(RULES[rule], fullgraph=True, backend="eager")
    batch = tokens([-1.0, -0.5], [-1.1, -2.0], [1.0, -1.0], [True, False])
    for ours, theirs in zip(compiled(*batch), RULES[rule](*batch)):
        assert torch.equal(ours, theirs)
