"""Laws of core.centering: a constant advantage moves nothing, whoever sampled."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import poison, poisoned
from torch import Tensor

from core import centering, loss

F64 = torch.float64
NONE = math.inf


class HeadBatch(NamedTuple):
    """What score centering takes, in float64; the head is of two tokens."""

    logprob: Tensor
    rollout_logprob: Tensor
    advantage: Tensor
    loss_mask: Tensor
    head_logprob: Tensor
    head_rollout_logprob: Tensor


def tokens(lp, roll, a, mask, head, head_roll, dtype=F64) -> HeadBatch:
    """Probabilities of the head, logprobs of the token."""
    return HeadBatch(
        torch.tensor(lp, dtype=dtype),
        torch.tensor(roll, dtype=dtype),
        torch.tensor(a, dtype=dtype),
        torch.tensor(mask),
        torch.tensor(head, dtype=F64).log().to(dtype),
        torch.tensor(head_roll, dtype=F64).log().to(dtype),
    )


shares = st.tuples(st.floats(0.01, 0.6), st.floats(0.01, 0.35))


@st.composite
def head_batches(draw: st.DrawFn) -> HeadBatch:
    logprobs = st.floats(-6, -1e-6)
    advantage = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0])
    token = st.tuples(logprobs, logprobs, advantage, st.booleans(), shares, shares)
    columns = list(zip(*draw(st.lists(token, min_size=1, max_size=6))))
    return tokens(columns[0], columns[1], columns[2], columns[3], columns[4], columns[5])


def centred(b: HeadBatch, cap=2.0):
    return centering.score_centering(*b, max_ratio=cap)


def run(batch: HeadBatch, cap=2.0) -> tuple[Tensor, Tensor, Tensor]:
    lp, head = batch.logprob.clone().requires_grad_(), batch.head_logprob.clone().requires_grad_()
    value = centred(batch._replace(logprob=lp, head_logprob=head), cap)
    value.sum().backward()
    assert lp.grad is not None and head.grad is not None
    return value.detach(), lp.grad, head.grad


def definition(lp, roll, a, head, head_roll, cap=2.0) -> tuple[float, list[float]]:
    """Coefficients of log p of the token and of the head, for one token."""
    p, q = [math.exp(x) for x in head], [math.exp(x) for x in head_roll]
    rho = max(1 - sum(q), 1e-6) / max(1 - sum(p), 1e-6)
    alpha = rho * min(1 / rho, cap)
    weights = [b * min(x / b, cap) - alpha * x for x, b in zip(p, q)]
    return -a * min(math.exp(lp - roll), cap), [a * w for w in weights]


@given(batch=head_batches(), cap=st.floats(0.3, 5.0))
def test_gradient_is_the_definition(batch, cap):
    value, own, head = run(batch, cap)
    for i in range(len(own)):
        lp, roll, a, live, head_p, head_q = (field[i].tolist() for field in batch)
        wanted = definition(lp, roll, a, head_p, head_q, cap) if live else (0.0, [0.0, 0.0])
        assert float(own[i]) == pytest.approx(wanted[0], rel=1e-9)
        assert head[i].tolist() == pytest.approx(wanted[1], rel=1e-9, abs=1e-12)
    score = own * batch.logprob + (head * batch.head_logprob).sum(-1)
    assert torch.allclose(value, score, rtol=1e-12, atol=1e-12)


@given(batch=head_batches())
def test_without_a_cap_it_is_the_weighted_policy_gradient(batch):
    value, own, head = run(batch, NONE)
    assert torch.equal(value, loss.importance_weighted_policy_gradient(*batch[:4]).value)
    assert not head.any() and own.isfinite().all()


@given(batch=head_batches(), cap=st.floats(0.3, 5.0))
def test_an_empty_head_leaves_truncated_importance_sampling(batch, cap):
    empty = batch._replace(
        head_logprob=batch.head_logprob[:, :0], head_rollout_logprob=batch.head_rollout_logprob[:, :0]
    )
    plain = loss.cispo(*batch[:4], min_ratio=0.0, max_ratio=cap)
    assert torch.equal(centred(empty, cap), plain.value)


@given(
    batch=head_batches(), junk=poison, where=st.sets(st.integers(0, 5).filter(lambda i: i != 3), min_size=1)
)
def test_nothing_is_read_outside_the_mask(batch, junk, where):
    fields = list(batch)
    for i in where:
        mask = batch.loss_mask if i < 3 else batch.loss_mask[:, None]
        fields[i] = poisoned(fields[i], mask, junk)
    for ours, theirs in zip(run(batch), run(HeadBatch(*fields))):
        assert torch.equal(ours, theirs) and not ours[~batch.loss_mask].any()


ONE = ([-1.0], [-1.1], [1.0], [True], [[0.4, 0.4]], [[0.5, 0.3]])


@pytest.mark.parametrize("junk", [math.nan, -math.inf, math.inf, -9999.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_token_without_a_usable_rollout_logprob_is_dropped_with_its_head(junk, dtype):
    batch = tokens(*ONE, dtype=dtype)._replace(rollout_logprob=torch.tensor([junk], dtype=dtype))
    assert not any(part.any() for part in run(batch, 1.1))


@pytest.mark.parametrize("junk", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("other", [math.nan, math.inf, -1.0])
def test_a_head_token_without_a_rollout_logprob_is_not_in_the_head(junk, other):
    """A shorter head is filled up with placeholders."""
    batch = tokens(*ONE)
    longer = batch._replace(
        head_logprob=torch.cat([batch.head_logprob, torch.tensor([[other]], dtype=F64)], -1),
        head_rollout_logprob=torch.cat([batch.head_rollout_logprob, torch.tensor([[junk]], dtype=F64)], -1),
    )
    (value, own, head), (wanted, own_wanted, head_wanted) = run(longer, 1.1), run(batch, 1.1)
    assert torch.equal(value, wanted) and torch.equal(own, own_wanted)
    assert torch.equal(head[:, :2], head_wanted) and head[0, 2] == 0


@pytest.mark.parametrize("field", ["logprob", "advantage", "head_logprob"])
def test_a_nan_from_upstream_is_seen(field):
    batch = HeadBatch(*(field.repeat_interleave(2, 0) for field in tokens(*ONE)))
    bad = getattr(batch, field).clone()
    bad[0] = math.nan
    value, own, _ = run(batch._replace(**{field: bad}), 1.1)
    assert value[0].isnan() and value[1].isfinite()
    assert (field == "head_logprob") or own[0].isnan()


def test_a_head_token_that_the_trainer_rules_out_has_no_gradient_and_stays_finite():
    batch = tokens(*ONE)._replace(head_logprob=torch.tensor([[-math.inf, -0.3]], dtype=F64))
    value, _, head = run(batch, 1.1)
    assert value.isfinite().all() and head[0, 0] == 0 and head.isfinite().all()


@pytest.mark.parametrize("q, rho_q", [([0.7, 0.3], 1e-6), ([0.7, 0.3 + 1e-9], 1e-6), ([0.5, 0.3], 0.2)])
@pytest.mark.parametrize("p, rho_p", [([0.6, 0.4], 1e-6), ([0.6, 0.4 + 1e-9], 1e-6), ([0.4, 0.3], 0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_head_that_is_the_whole_vocabulary_leaves_a_millionth(q, rho_q, p, rho_p, dtype):
    """Rounding may leave less than nothing: never a division by 0 nor a negative tail."""
    _, own, head = run(tokens([-1.0], [-1.1], [1.0], [True], [p], [q], dtype=dtype), 1.2)
    share = min(1.2 * rho_q / rho_p, 1.0)
    wanted = [min(x, 1.2 * y) - share * x for x, y in zip(p, q)]
    assert own.isfinite().all() and head[0].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@given(batch=head_batches())
def test_only_logprobs_of_the_trainer_have_a_gradient(batch):
    leaves = [field.clone().requires_grad_() for field in batch if field.dtype == F64]
    centred(HeadBatch._make([*leaves[:3], batch.loss_mask, *leaves[3:]])).sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [False, True, True, False, True]


@given(batch=head_batches())
def test_any_leading_shape_and_any_order_of_tokens_and_of_the_head(batch):
    whole = centred(batch)
    folded = HeadBatch(*(x[None, :, None] for x in batch))
    assert torch.equal(whole, centred(folded)[0, :, 0])
    assert torch.equal(whole, centred(HeadBatch(*(x.flip(0) for x in batch))).flip(0))
    turned = batch._replace(
        head_logprob=batch.head_logprob.flip(-1), head_rollout_logprob=batch.head_rollout_logprob.flip(-1)
    )
    assert torch.allclose(whole, centred(turned), rtol=1e-12, atol=1e-12)


@given(batch=head_batches(), factor=st.sampled_from([0.5, 2.0, -1.0]))
def test_gradient_scales_with_the_advantage(batch, factor):
    scaled = run(batch._replace(advantage=batch.advantage * factor))
    assert all(torch.equal(one * factor, other) for one, other in zip(run(batch), scaled))


@given(batch=head_batches())
def test_inputs_are_untouched(batch):
    before = [field.clone() for field in batch]
    run(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, batch))


def test_arithmetic_is_float32_at_least():
    narrow = tokens(*ONE, dtype=torch.bfloat16)
    wide = HeadBatch(*(field.float() if field.is_floating_point() else field for field in narrow))
    assert torch.equal(centred(narrow), centred(wide)) and centred(narrow).dtype == torch.float32
    assert centred(tokens(*ONE)).dtype == F64
    recorded = tokens(*ONE)
    assert centred(recorded._replace(logprob=recorded.logprob.float())).dtype == torch.float32


def test_it_compiles_without_a_graph_break():
    batch = tokens(
        [-1.0, -0.5], [-1.1, math.nan], [1.0, -1.0], [True, False], [[0.4, 0.4]] * 2, [[0.5, 0.3]] * 2
    )
    compiled = torch.compile(centering.score_centering, fullgraph=True, backend="eager")
    for cap in (1.1, NONE):
        assert torch.equal(compiled(*batch, max_ratio=cap), centred(batch, cap))


# Drift, by enumeration


def drift(p: list[float], q: list[float], head: list[int], cap: float, advantage: float = 1.0) -> Tensor:
    """Expected logit gradient of one token sampled from q, the advantage constant."""
    logits = torch.tensor(p, dtype=F64).log().requires_grad_()
    logprob, roll = logits.log_softmax(0), torch.tensor(q, dtype=F64).log()
    count = len(p)
    value = centering.score_centering(
        logprob,
        roll,
        torch.full((count,), advantage, dtype=F64),
        torch.ones(count, dtype=torch.bool),
        logprob[head].expand(count, -1),
        roll[head].expand(count, -1),
        max_ratio=cap,
    )
    (roll.exp() * value).sum().backward()
    assert logits.grad is not None
    return logits.grad


three = st.lists(st.floats(0.05, 1), min_size=3, max_size=3).map(lambda p: [x / sum(p) for x in p])


@given(p=three, q=three, cap=st.floats(0.2, 4.0))
def test_a_constant_advantage_moves_nothing(p, q, cap):
    """The head is the whole vocabulary, or all but one token: the rest is then exactly rho p."""
    for head in ([0, 1, 2], [0, 1], [2, 0]):
        assert drift(p, q, head, cap).abs().max() < 1e-9


@given(p=three, rest=st.floats(0.1, 0.9), cap=st.floats(0.2, 4.0))
def test_a_rest_in_the_proportions_of_the_trainer_moves_nothing(p, rest, cap):
    """q outside the head is p times one number."""
    q = [1 - rest, *(rest * x / (p[1] + p[2]) for x in p[1:])]
    assert drift(p, q, [0], cap).abs().max() < 1e-9


def test_without_a_head_a_capped_weight_drifts():
    """What it is for: p over q of 0.8 and 4/3, capped at 1.1."""
    p, q = [0.4, 0.4, 0.2], [0.5, 0.3, 0.2]
    assert drift(p, q, [], 1.1).abs().max() > 0.02
    assert drift(p, q, [], NONE).abs().max() < 1e-12
    assert drift(p, q, [0, 1], 1.1).abs().max() < 1e-12


def test_a_rest_in_other_proportions_still_drifts_a_little():
    """The assumption about the tail is one."""
    p, q = [0.4, 0.4, 0.2], [0.5, 0.1, 0.4]
    assert 1e-3 < drift(p, q, [0], 1.1).abs().max() < drift(p, q, [], 1.1).abs().max()


# Published numbers


def test_head_coefficients_of_a_worked_example():
    """q .5, .3 and p .4, .4: 0 and -0.07 at C = 1.1; a C that caps every ratio gives C times .1 and -.1."""
    batch = tokens(*ONE)
    assert run(batch, 1.1)[2][0].tolist() == pytest.approx([0.0, -0.07], abs=1e-12)
    assert (run(batch, 1e-3)[2][0] / 1e-3).tolist() == pytest.approx([0.1, -0.1])


def test_uncapped_drift_of_a_worked_example():
    """The score of p under q has mean q - p."""
    p, q = [0.4, 0.4, 0.2], [0.5, 0.3, 0.2]
    assert (-drift(p, q, [], 1e-3) / 1e-3).tolist() == pytest.approx([0.1, -0.1, 0.0], abs=1e-12)


# Refusals


def test_shapes_must_agree_and_the_mask_must_be_bool():
    batch = HeadBatch(*(field.repeat_interleave(2, 0) for field in tokens(*ONE)))
    with pytest.raises(
        ValueError, match="logprob, rollout_logprob, advantage and loss_mask must have one shape"
    ):
        centred(batch._replace(advantage=batch.advantage[:1]))
    with pytest.raises(ValueError, match="loss_mask must be bool, got torch.int64"):
        centred(batch._replace(loss_mask=batch.loss_mask.long()))
    with pytest.raises(ValueError, match="head_logprob and head_rollout_logprob must have one shape, got"):
        centred(batch._replace(head_logprob=batch.head_logprob[:, :1]))
    for bad in (batch.head_logprob[:1], batch.head_logprob[:, 0], batch.head_logprob[..., None]):
        with pytest.raises(ValueError, match=r"head_logprob must have shape \[2, K\], got \("):
            centred(batch._replace(head_logprob=bad, head_rollout_logprob=bad))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_max_ratio_must_be_positive(bad):
    with pytest.raises(ValueError, match=f"max_ratio must be positive, got {bad}"):
        centred(tokens(*ONE), bad)
