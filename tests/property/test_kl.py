"""Laws of core.kl: what an estimate says, and which way it pulls as a loss."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import poison, poisoned
from torch import Tensor

from core import kl

F64 = torch.float64


class Anchored(NamedTuple):
    """What estimates take, in float64."""

    logprob: Tensor
    rollout_logprob: Tensor
    reference_logprob: Tensor
    loss_mask: Tensor


def tokens(lp, reference, mask=None, *, roll=None, dtype=F64) -> Anchored:
    return Anchored(
        torch.tensor(lp, dtype=dtype),
        torch.tensor(roll if roll is not None else lp, dtype=dtype),
        torch.tensor(reference, dtype=dtype),
        torch.tensor(mask if mask is not None else [True] * len(lp)),
    )


@st.composite
def anchored(draw: st.DrawFn) -> Anchored:
    logprobs = st.sampled_from([-1e-9, -0.2, -1.0, -1.1, -12.0]) | st.floats(-15, -1e-6)
    columns = list(
        zip(*draw(st.lists(st.tuples(logprobs, logprobs, logprobs, st.booleans()), min_size=1, max_size=8)))
    )
    return tokens(columns[0], columns[1], columns[3], roll=columns[2])


def weighted(b: Anchored) -> Tensor:
    return kl.weighted_k3(b.logprob, b.rollout_logprob, b.reference_logprob, b.loss_mask)


def plain(rule):
    return lambda b: rule(b.logprob, b.reference_logprob, b.loss_mask)


RULES = {"k1": plain(kl.k1), "k2": plain(kl.k2), "k3": plain(kl.k3), "weighted k3": weighted}


def definition(rule: str, lp: float, roll: float, reference: float) -> tuple[float, float]:
    """Value and derivative in logprob, for one token."""
    d, r = lp - reference, math.exp(lp - roll)
    third = math.expm1(-d) + d
    return {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (third, -math.expm1(-d)),
        "weighted k3": (r * third, r * d),
    }[rule]


def run(rule: str, batch: Anchored) -> tuple[Tensor, Tensor]:
    logprob = batch.logprob.clone().requires_grad_()
    value = RULES[rule](batch._replace(logprob=logprob))
    value.sum().backward()
    assert logprob.grad is not None
    return value.detach(), logprob.grad


@given(batch=anchored())
def test_value_and_gradient_are_the_definition(batch):
    for rule in RULES:
        value, grad = run(rule, batch)
        wanted = [
            definition(rule, lp, roll, reference) if live else (0.0, 0.0)
            for lp, roll, reference, live in zip(*(field.tolist() for field in batch))
        ]
        assert value.tolist() == pytest.approx([v for v, _ in wanted], rel=1e-9, abs=1e-12)
        assert grad.tolist() == pytest.approx([g for _, g in wanted], rel=1e-9, abs=1e-12)


@given(batch=anchored())
def test_the_weighted_gradient_is_that_of_the_product(batch):
    """r k3 written out, differentiated through the ratio too."""
    logprob = batch.logprob.clone().requires_grad_()
    d, r = logprob - batch.reference_logprob, (logprob - batch.rollout_logprob).exp()
    torch.where(batch.loss_mask, r * ((-d).exp() - 1 + d), 0.0).sum().backward()
    _, grad = run("weighted k3", batch)
    scale = (batch.reference_logprob - batch.rollout_logprob).exp() + r.detach()
    assert bool(((grad - logprob.grad).abs() <= 1e-12 * scale * 20).all())


def test_the_weighted_gradient_survives_where_the_product_cancels():
    """float32; r is 1e-13 and r exp(-d) is e^10: autograd through the product would find rounding noise."""
    batch = tokens([-40.0], [-0.5], roll=[-10.5], dtype=torch.float32)
    assert float(run("weighted k3", batch)[1]) == pytest.approx(math.exp(-29.5) * -39.5, rel=1e-5)


@given(batch=anchored(), junk=poison, where=st.sets(st.sampled_from(Anchored._fields[:3]), min_size=1))
def test_nothing_is_read_outside_the_mask(batch, junk, where):
    dirty = batch._replace(**{f: poisoned(getattr(batch, f), batch.loss_mask, junk) for f in where})
    for rule in RULES:
        for ours, theirs in zip(run(rule, batch), run(rule, dirty)):
            assert torch.equal(ours, theirs) and not ours[~batch.loss_mask].any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("junk", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_token_whose_reference_is_not_finite_is_dropped(rule, junk, dtype):
    value, grad = run(rule, tokens([-1.0, -1.0], [junk, -2.0], dtype=dtype))
    assert value[0] == grad[0] == 0 and value[1] > 0 and grad[1] > 0


@pytest.mark.parametrize("junk", [math.nan, -math.inf, math.inf, -9999.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_token_without_a_usable_sampler_is_dropped_from_the_weighted_estimate(junk, dtype):
    value, grad = run("weighted k3", tokens([-1.0, -1.0], [-2.0, -2.0], roll=[junk, -1.0], dtype=dtype))
    assert value[0] == grad[0] == 0 and value[1] > 0 and grad[1] > 0


@pytest.mark.parametrize("rule", ["k3", "weighted k3"])
@pytest.mark.parametrize("lp", [-9999.0, -math.inf])
def test_a_ratio_that_overflows_is_dropped_and_not_clamped(rule, lp):
    value, grad = run(rule, tokens([lp, -80.0], [-1.0, -1.0], roll=[-1.0, -80.0]))
    assert value[0] == grad[0] == 0
    assert float(value[1]) == pytest.approx(math.exp(79) - 80) and float(grad[1]) < -70


@pytest.mark.parametrize("junk", [math.inf, -math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_a_token_with_an_infinite_logprob_is_dropped(rule, junk):
    value, grad = run(rule, tokens([junk, -1.0], [-1.0, -2.0], roll=[-1.0, -1.0]))
    expected = definition(rule, -1.0, -1.0, -2.0)
    assert (value[1].item(), grad[1].item()) == pytest.approx(expected)
    assert value[0] == grad[0] == 0


@pytest.mark.parametrize("dtype, far", [(torch.float32, 70.0), (F64, 600.0)])
def test_a_weighted_estimate_whose_value_or_slope_overflows_is_dropped(dtype, far):
    """Each ratio alone is a number; their product, or that of ratio and distance, is none."""
    for reference in (0.0, -1e38 if dtype == torch.float32 else -1e300):
        batch = tokens([-far, -1.0], [reference, -1.0], roll=[-2 * far, -1.0], dtype=dtype)
        value, grad = run("weighted k3", batch)
        assert value.tolist() == [0.0, 0.0] == grad.tolist()
    largest = math.log(torch.finfo(dtype).max) - 0.1
    value, grad = run("weighted k3", tokens([-0.5], [-2.0], roll=[-0.5 - largest], dtype=dtype))
    assert value == grad == 0
    value, grad = run("weighted k3", tokens([-far / 2], [0.0], roll=[-far], dtype=dtype))
    assert float(value) == pytest.approx(math.exp(far), rel=1e-3) and -math.inf < float(grad) < 0


def test_an_estimate_without_a_ratio_is_never_cut_off():
    batch = tokens([-9999.0], [-1.0])
    assert [float(x) for x in run("k1", batch)] == [-9998.0, 1.0]
    assert [float(x) for x in run("k2", batch)] == [9998.0**2 / 2, -9998.0]


@pytest.mark.parametrize("rule", RULES)
def test_a_nan_from_upstream_is_seen(rule):
    value, grad = run(rule, tokens([math.nan, -1.0], [-1.0, -2.0], roll=[-1.0, -1.0]))
    assert value[0].isnan() and value[1].isfinite() and grad[1].isfinite()
    assert grad[0].isnan() or rule == "k1"


@given(batch=anchored())
def test_only_logprob_has_a_gradient(batch):
    for rule in RULES:
        leaves = [field.clone().requires_grad_() for field in batch[:3]]
        RULES[rule](Anchored._make([*leaves, batch.loss_mask])).sum().backward()
        assert [leaf.grad is None for leaf in leaves] == [False, True, True]


@given(batch=anchored())
def test_any_leading_shape_and_any_order_of_tokens(batch):
    for rule in RULES:
        whole = RULES[rule](batch)
        assert torch.equal(whole, RULES[rule](Anchored(*(x[None, :, None] for x in batch)))[0, :, 0])
        assert torch.equal(whole, RULES[rule](Anchored(*(x.flip(0) for x in batch))).flip(0))


@given(batch=anchored())
def test_inputs_are_untouched(batch):
    before = [field.clone() for field in batch]
    for rule in RULES:
        run(rule, batch)
    assert all(torch.equal(a, b) for a, b in zip(before, batch))


@given(batch=anchored())
def test_equal_policies_are_at_no_distance_and_pull_nowhere(batch):
    for rule in RULES:
        value, grad = run(rule, batch._replace(reference_logprob=batch.logprob))
        assert not value.any() and (rule == "k1" or not grad.any())


@given(batch=anchored())
def test_k2_and_k3_are_never_negative(batch):
    for rule in ("k2", "k3", "weighted k3"):
        assert (RULES[rule](batch) >= 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_arithmetic_is_float32_at_least(rule):
    narrow = tokens([-1.0, -2.03], [-1.25, -1.9], roll=[-1.1, -2.0], dtype=torch.bfloat16)
    wide = Anchored._make([*(field.float() for field in narrow[:3]), narrow.loss_mask])
    assert torch.equal(RULES[rule](narrow), RULES[rule](wide))
    assert RULES[rule](narrow).dtype == torch.float32
    assert RULES[rule](tokens([-1.0], [-1.25])).dtype == F64
    recorded = tokens([-1.0], [-1.25])
    assert RULES[rule](recorded._replace(logprob=recorded.logprob.float())).dtype == torch.float32


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_mask_gives_zero_that_is_still_attached(rule):
    value, grad = run(rule, tokens([math.nan], [math.nan], [False]))
    assert value == 0 and grad == 0


@pytest.mark.parametrize("rule", RULES)
def test_an_estimate_compiles_without_a_graph_break(rule):
    batch = tokens([-1.0, -0.5, -3.0], [-1.1, -0.2, math.nan], [True, True, False], roll=[-1.2, -0.5, -3.0])
    compiled = torch.compile(RULES[rule], fullgraph=True, backend="eager")
    assert torch.equal(compiled(batch), RULES[rule](batch))


# Expectations, by enumeration


def expected(rule: str, logits: Tensor, reference: list[float], roll: list[float] | None = None):
    """Expected value and logit gradient of the estimate as a loss, tokens sampled from roll (from pi itself)."""
    leaf = logits.clone().requires_grad_()
    logprob = leaf.log_softmax(0)
    sampler = logprob.detach().exp() if roll is None else torch.tensor(roll, dtype=F64)
    batch = Anchored(
        logprob,
        sampler.log(),
        torch.tensor(reference, dtype=F64).log(),
        torch.ones(len(reference), dtype=torch.bool),
    )
    value = (sampler * RULES[rule](batch)).sum()
    value.backward()
    assert leaf.grad is not None
    return float(value.detach()), leaf.grad


def divergence(logits: Tensor, reference: list[float], *, forward: bool):
    """KL(pi || reference), or the other way round, and its logit gradient."""
    leaf = logits.clone().requires_grad_()
    p, q = leaf.softmax(0), torch.tensor(reference, dtype=F64)
    value = (p * (p / q).log()).sum() if forward else (q * (q / p).log()).sum()
    value.backward()
    assert leaf.grad is not None
    return float(value.detach()), leaf.grad


three = st.lists(st.floats(0.05, 1), min_size=3, max_size=3).map(lambda p: [x / sum(p) for x in p])


@given(pi=three, reference=three, roll=three)
def test_which_gradient_each_estimate_gives(pi, reference, roll):
    logits = torch.tensor(pi, dtype=F64).log()
    value, gradient = divergence(logits, reference, forward=True)
    _, reverse = divergence(logits, reference, forward=False)
    for rule, wanted in (("k1", torch.zeros_like(logits)), ("k2", gradient), ("k3", reverse)):
        assert torch.allclose(expected(rule, logits, reference)[1], wanted, atol=1e-12)
    for rule in ("k1", "k3"):
        assert expected(rule, logits, reference)[0] == pytest.approx(value, abs=1e-12)
    for sampler in (None, roll):
        found = expected("weighted k3", logits, reference, sampler)
        assert found[0] == pytest.approx(value, abs=1e-12)
        assert torch.allclose(found[1], gradient, atol=1e-12)


def test_two_token_policy_and_its_reference():
    """p = (.5, .5), reference (.25, .75): the gradient is 0.27465; k1 gives 0, k3 0.25, k2 and weighted k3 it."""
    logits = torch.zeros(2, dtype=F64)
    found = {rule: float(expected(rule, logits, [0.25, 0.75])[1][0]) for rule in RULES}
    wanted = {"k1": 0.0, "k2": 0.27465, "k3": 0.25, "weighted k3": 0.27465}
    assert found == pytest.approx(wanted, abs=1e-5)


def test_three_token_policy_and_its_reference():
    logits, reference = torch.tensor([0.5, 0.3, 0.2], dtype=F64).log(), [0.4, 0.4, 0.2]
    values = [expected(rule, logits, reference)[0] for rule in ("k1", "k2", "k3")]
    assert values == pytest.approx([0.0252671539216, 0.0248624073448, 0.0252671539216])
    second = expected("k2", logits, reference)[1]
    assert second.tolist() == pytest.approx([0.0989381987, -0.0938847679, -0.0050534308])
    assert expected("k3", logits, reference)[1].tolist() == pytest.approx([0.1, -0.1, 0.0], abs=1e-12)


# Published numbers


@pytest.mark.parametrize(
    "d, values, k3_gradient",
    [
        (0.5, [0.5, 0.125, 0.106530659713], 0.393469340287),
        (-0.5, [-0.5, 0.125, 0.1487212707], -0.6487212707),
    ],
)
def test_table_of_one_log_ratio(d, values, k3_gradient):
    batch = tokens([d - 1], [-1.0])
    assert [float(run(rule, batch)[0]) for rule in ("k1", "k2", "k3")] == pytest.approx(values)
    assert float(run("k3", batch)[1]) == pytest.approx(k3_gradient)


def test_a_k3_loss_has_a_gradient():
    """logprob -1 against -2: 0.36788, and 0.63212 in the logprob."""
    value, grad = run("k3", tokens([-1.0], [-2.0]))
    assert float(value) == pytest.approx(0.36788, abs=1e-5)
    assert float(grad) == pytest.approx(0.63212, abs=1e-5)


def test_observations_are_not_in_the_mean():
    """Distances 0.1, 5, 0.3 with the mask 1, 0, 1: the mean is 0.2, not 1.8."""
    batch = tokens([-0.9, -0.1, -0.7], [-1.0, -5.1, -1.0], [True, False, True])
    assert float(RULES["k1"](batch).sum() / batch.loss_mask.sum()) == pytest.approx(0.2)


def test_masked_means_of_three_estimates():
    """0.1, 0.005 and 0.0048374; NaN outside the mask is nothing."""
    batch = tokens([0.2, 0.3, math.nan], [0.1, 0.2, 0.4], [True, True, False])
    means = [float(RULES[rule](batch).sum() / 2) for rule in ("k1", "k2", "k3")]
    assert means == pytest.approx([0.1, 0.005, 0.0048374], abs=1e-7)


# Refusals


@pytest.mark.parametrize("rule", RULES)
def test_shapes_must_agree_and_the_mask_must_be_bool(rule):
    batch = tokens([-1.0, -1.0], [-1.0, -1.0])
    names = ["logprob", "reference_logprob"] + ["rollout_logprob"] * (rule == "weighted k3")
    for name in names:
        with pytest.raises(ValueError, match=rf"logprob, .*{name}.*loss_mask must have one shape, got"):
            RULES[rule](batch._replace(**{name: getattr(batch, name)[:1]}))
    with pytest.raises(ValueError, match="loss_mask must be bool, got torch.int64"):
        RULES[rule](batch._replace(loss_mask=batch.loss_mask.long()))
