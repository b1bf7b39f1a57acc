"""Laws of core.shard: sums of rounded logits are a softmax's, in which the label's own logit is exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.shard import Sums, combine_sums, log2_total, logprob_and_entropy, shard_sums, softmax_gradient

F64 = torch.float64


def head_of(vocabulary, seed):
    """Hidden states of four tokens and a head, in bfloat16; labels: the likeliest token, the last, two more."""
    generator = torch.Generator().manual_seed(seed)
    hidden, head = (torch.randn(n, 6, generator=generator).bfloat16() for n in (4, vocabulary))
    exact = hidden.double() @ head.double().T
    label = torch.tensor([int(exact[0].argmax()), vocabulary - 1, 0, seed % vocabulary])
    return hidden, head, label, exact


@pytest.mark.parametrize("vocabulary", [1, 5, 32, 33, 2048])
@given(seed=st.integers(0, 999), temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]))
def test_sums_of_bfloat16_logits_are_a_softmax_with_the_label_exact(vocabulary, seed, temperature):
    hidden, head, label, exact = head_of(vocabulary, seed)
    logits = exact.bfloat16()
    z = logits.double().scatter(1, label[:, None], exact.gather(1, label[:, None])) / temperature
    sums = shard_sums(logits, hidden, head, label, temperature)
    assert {x.dtype for x in sums} == {torch.float32}
    logprob, entropy = logprob_and_entropy(sums)
    told = z.log_softmax(1)
    near = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(logprob, told.gather(1, label[:, None]).squeeze(1), **near)
    torch.testing.assert_close(entropy, -(told.exp() * told).sum(1), **near)
    torch.testing.assert_close(log2_total(sums), z.logsumexp(1) / math.log(2), **near)


@given(seed=st.integers(0, 999))
def test_the_gradient_of_bfloat16_logits_is_computed_in_float32(seed):
    hidden, head, label, exact = head_of(32, seed)
    logits, weight = exact.bfloat16(), torch.tensor([1.0, -0.5, 2.0, 0.0])
    total = (logits.double() / 0.7).logsumexp(1) / math.log(2)
    ours = softmax_gradient(logits, total.float(), weight, 0.7, torch.float32)
    theirs = -weight[:, None].double() * (logits.double() / 0.7).softmax(1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, check_dtype=False)


def test_a_label_that_no_shard_holds_has_no_logprob_and_its_neighbour_has_one():
    hidden, head, _, exact = head_of(6, 1)
    label = torch.tensor([5, 6, -1, 0])
    parts = [
        shard_sums(exact[:, rows].float(), hidden, head[rows], label - rows.start, 1.0)
        for rows in (slice(0, 4), slice(4, 6))
    ]
    logprob, _ = logprob_and_entropy(combine_sums(parts))
    assert logprob.isnan().tolist() == [False, True, True, False]
    assert logprob[0] == pytest.approx(float(exact.log_softmax(1)[0, 5]), abs=1e-5)


def test_the_sums_of_one_shard_are_its_own():
    one = Sums(*(torch.tensor([x, x + 1], dtype=F64) for x in (0.5, 2.0, -1.0, 0.25, 0.0)))
    for ours, theirs in zip(combine_sums([one]), one, strict=True):
        assert torch.equal(ours, theirs)
