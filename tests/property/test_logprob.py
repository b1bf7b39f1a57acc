"""Laws of core.logprob: chunks change memory and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import logprob

F64 = torch.float64


@st.composite
def problems(draw, dtype=F64):
    tokens, width, vocabulary = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype)
    head = torch.randn(vocabulary, width, generator=generator, dtype=dtype)
    label = torch.randint(vocabulary, (tokens,), generator=generator)
    upstream = torch.randn(tokens, generator=generator, dtype=dtype)
    return hidden, head, label, upstream


def dense(hidden, head, label, temperature):
    table = (hidden @ head.T / temperature).log_softmax(1)
    return table.gather(1, label[:, None]).squeeze(1), -(table.exp() * table).sum(1)


@given(problem=problems(), chunk=st.integers(1, 9), temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_chunked_equals_dense_in_value_and_both_gradients(problem, chunk, temperature):
    hidden, head, label, upstream = problem
    ours = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    theirs = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    found = logprob.token_logprob(*ours, label, temperature=temperature, chunk=chunk)
    value, entropy = dense(*theirs, label, temperature)
    (found.logprob * upstream).sum().backward()
    (value * upstream).sum().backward()
    assert torch.allclose(found.logprob, value, rtol=1e-12, atol=1e-12)
    assert torch.allclose(found.entropy, entropy, rtol=1e-10, atol=1e-12)
    for a, b in zip(ours, theirs):
        assert torch.allclose(a.grad, b.grad, rtol=1e-10, atol=1e-12)


@given(problem=problems(), chunk=st.integers(1, 9))
def test_tokens_without_weight_give_no_gradient(problem, chunk):
    hidden, head, label, _ = problem
    leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    found = logprob.token_logprob(*leaves, label, temperature=1.0, chunk=chunk)
    (found.logprob * 0).sum().backward()
    assert not leaves[0].grad.any() and not leaves[1].grad.any()


@given(problem=problems())
def test_the_head_may_stand_still(problem):
    hidden, head, label, _ = problem
    leaf = hidden.clone().requires_grad_()
    logprob.token_logprob(leaf, head, label, temperature=1.0, chunk=2).logprob.sum().backward()
    assert leaf.grad is not None and head.grad is None


@given(problem=problems())
def test_inputs_are_untouched_and_entropy_has_no_gradient(problem):
    hidden, head, label, _ = problem
    before = hidden.clone(), head.clone(), label.clone()
    found = logprob.token_logprob(hidden.requires_grad_(), head, label, temperature=1.0, chunk=3)
    assert not found.entropy.requires_grad and found.logprob.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, head, label)))


@pytest.mark.parametrize("temperature, expected", [(0.5, -0.01815), (1.0, -0.12693)])
def test_temperature_is_the_samplers(temperature, expected):
    """Logits 2 and 0."""
    hidden, head = torch.tensor([[1.0]], dtype=F64), torch.tensor([[2.0], [0.0]], dtype=F64)
    found = logprob.token_logprob(hidden, head, torch.tensor([0]), temperature=temperature, chunk=1)
    assert float(found.logprob) == pytest.approx(expected, abs=1e-5)


def test_entropy_worked_example():
    """Probabilities .5 .3 .2."""
    head = torch.tensor([[math.log(p)] for p in (0.5, 0.3, 0.2)], dtype=F64)
    found = logprob.token_logprob(
        torch.ones(1, 1, dtype=F64), head, torch.tensor([2]), temperature=1.0, chunk=1
    )
    assert float(found.entropy) == pytest.approx(1.02965301406)


def test_half_precision_is_computed_in_float32_and_returned_to_its_owner():
    hidden = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    head = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    label = torch.arange(5)
    found = logprob.token_logprob(hidden, head, label, temperature=1.0, chunk=2)
    assert found.logprob.dtype == torch.float32
    value, _ = dense(hidden.detach().float(), head.detach().float(), label, 1.0)
    assert torch.allclose(found.logprob, value, rtol=0, atol=1e-6)
    found.logprob.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in (hidden, head))


def test_large_logits_do_not_overflow():
    hidden, head = torch.tensor([[1e4]]), torch.tensor([[1.0], [-1.0]])
    found = logprob.token_logprob(hidden, head, torch.tensor([0]), temperature=1.0, chunk=1)
    assert float(found.logprob) == 0 and float(found.entropy) == 0


@pytest.mark.parametrize(
    "shapes, temperature, chunk, text",
    [
        ((2, 3, 3), 0.0, 1, "temperature must be positive, got 0.0"),
        ((2, 3, 3), math.nan, 1, "temperature must be positive, got nan"),
        ((2, 3, 3), 1.0, 0, "chunk must be positive, got 0"),
        ((2, 3, 4), 1.0, 1, r"hidden \[T, H\] and head \[V, H\] must agree on H"),
    ],
)
def test_bad_input_is_refused(shapes, temperature, chunk, text):
    tokens, width, other = shapes
    with pytest.raises(ValueError, match=text):
        logprob.token_logprob(
            torch.zeros(tokens, width),
            torch.zeros(5, other),
            torch.zeros(tokens, dtype=torch.long),
            temperature=temperature,
            chunk=chunk,
        )


def test_labels_must_be_one_per_token():
    with pytest.raises(ValueError, match=r"label must have shape \(2,\), got \(3,\)"):
        logprob.token_logprob(
            torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(3, dtype=torch.long), temperature=1.0, chunk=1
        )
