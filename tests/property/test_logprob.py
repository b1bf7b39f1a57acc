"""Laws of core.logprob: chunks and shards change memory and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core import logprob
from core.shard import WHOLE, Shard, Sums, combine_sums

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
    found = logprob.token_logprob(*ours, label, temperature=temperature, chunk=chunk, shard=WHOLE)
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
    found = logprob.token_logprob(*leaves, label, temperature=1.0, chunk=chunk, shard=WHOLE)
    (found.logprob * 0).sum().backward()
    assert not leaves[0].grad.any() and not leaves[1].grad.any()


@given(problem=problems())
def test_the_head_may_stand_still(problem):
    hidden, head, label, _ = problem
    leaf = hidden.clone().requires_grad_()
    logprob.token_logprob(leaf, head, label, temperature=1.0, chunk=2, shard=WHOLE).logprob.sum().backward()
    assert leaf.grad is not None and head.grad is None


@given(problem=problems())
def test_inputs_are_untouched_and_entropy_has_no_gradient(problem):
    hidden, head, label, _ = problem
    before = hidden.clone(), head.clone(), label.clone()
    found = logprob.token_logprob(hidden.requires_grad_(), head, label, temperature=1.0, chunk=3, shard=WHOLE)
    assert not found.entropy.requires_grad and found.logprob.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, head, label)))


@pytest.mark.parametrize("temperature, expected", [(0.5, -0.01815), (1.0, -0.12693)])
def test_temperature_is_the_samplers(temperature, expected):
    """Logits 2 and 0."""
    hidden, head = torch.tensor([[1.0]], dtype=F64), torch.tensor([[2.0], [0.0]], dtype=F64)
    found = logprob.token_logprob(
        hidden, head, torch.tensor([0]), temperature=temperature, chunk=1, shard=WHOLE
    )
    assert float(found.logprob) == pytest.approx(expected, abs=1e-5)


def test_entropy_worked_example():
    """Probabilities .5 .3 .2."""
    head = torch.tensor([[math.log(p)] for p in (0.5, 0.3, 0.2)], dtype=F64)
    found = logprob.token_logprob(
        torch.ones(1, 1, dtype=F64), head, torch.tensor([2]), temperature=1.0, chunk=1, shard=WHOLE
    )
    assert float(found.entropy) == pytest.approx(1.02965301406)


def test_half_precision_is_computed_in_float32_and_returned_to_its_owner():
    hidden = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    head = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    label = torch.arange(5)
    found = logprob.token_logprob(hidden, head, label, temperature=1.0, chunk=2, shard=WHOLE)
    assert found.logprob.dtype == torch.float32
    value, _ = dense(hidden.detach().float(), head.detach().float(), label, 1.0)
    assert torch.allclose(found.logprob, value, rtol=0, atol=1e-6)
    found.logprob.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in (hidden, head))


def test_large_logits_do_not_overflow():
    hidden, head = torch.tensor([[1e4]]), torch.tensor([[1.0], [-1.0]])
    found = logprob.token_logprob(hidden, head, torch.tensor([0]), temperature=1.0, chunk=1, shard=WHOLE)
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
            shard=WHOLE,
        )


def test_labels_must_be_one_per_token():
    with pytest.raises(ValueError, match=r"label must have shape \(2,\), got \(3,\)"):
        logprob.token_logprob(
            torch.zeros(2, 3),
            torch.zeros(5, 3),
            torch.zeros(3, dtype=torch.long),
            temperature=1.0,
            chunk=1,
            shard=WHOLE,
        )


def slope(logprob, rollout_logprob, advantage, weight):
    """Of `weight` times the importance-weighted policy gradient."""
    return -weight * advantage * (logprob - rollout_logprob).exp()


def same(function):
    return function


@st.composite
def losses(draw):
    hidden, head, label, upstream = draw(problems())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    field = [torch.randn(len(label), generator=generator, dtype=F64) for _ in range(2)]
    return hidden, head, label, [-field[0].abs(), field[1], upstream]


def gradient(hidden, head, label, field, *, chunk, shard=WHOLE, temperature=1.0, dtype=F64, fuse=same):
    return logprob.head_gradient(
        hidden,
        head,
        label,
        field,
        slope=slope,
        temperature=temperature,
        chunk=chunk,
        logit_dtype=dtype,
        fuse=fuse,
        shard=shard,
    )


@given(problem=losses(), chunk=st.integers(1, 9), temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_one_way_through_the_chunks_gives_the_gradients_of_autograd(problem, chunk, temperature):
    hidden, head, label, field = problem
    leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    value, entropy = dense(*leaves, label, temperature)
    (slope(value.detach(), *field) * value).sum().backward()
    found = gradient(hidden, head, label, field, chunk=chunk, temperature=temperature)
    for ours, theirs in zip(found, (value, entropy, leaves[0].grad, leaves[1].grad)):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11)


@given(problem=losses(), chunk=st.integers(1, 9))
def test_gradients_leave_their_inputs_alone(problem, chunk):
    hidden, head, label, field = problem
    before = [x.clone() for x in (hidden, head, label, *field)]
    found = gradient(hidden, head, label, field, chunk=chunk)
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, head, label, *field)))
    assert not any(x.requires_grad for x in found)


@given(problem=losses(), cut=st.integers(0, 9), chunk=st.integers(1, 9))
def test_a_split_step_adds_up_to_the_gradient_of_the_whole(problem, cut, chunk):
    hidden, head, label, field = problem
    whole = gradient(hidden, head, label, field, chunk=chunk)
    parts = [
        gradient(hidden[s], head, label[s], [x[s] for x in field], chunk=2)
        for s in (slice(cut), slice(cut, None))
    ]
    assert torch.allclose(whole.head, parts[0].head + parts[1].head, rtol=1e-9, atol=1e-11)
    for name in ("logprob", "entropy", "hidden"):
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.allclose(getattr(whole, name), together, rtol=1e-9, atol=1e-11)


def in_shards(head, cuts, run):
    """Runs every shard until all have told their sums, as ranks in a collective would."""
    edges = sorted({0, head.shape[0], *(c % head.shape[0] for c in cuts)})
    parts = list(zip(edges, edges[1:]))
    told: list[list[Sums]] = [[] for _ in parts]
    for index, (start, end) in enumerate(parts):

        def remember(sums, index=index):
            told[index].append(sums)
            return sums

        run(head[start:end], Shard(start, remember))
    found = []
    for start, end in parts:
        turn = iter(range(len(told[0])))

        def combine(_, turn=turn):
            now = next(turn)
            return combine_sums([sums[now] for sums in told])

        found.append(run(head[start:end], Shard(start, combine)))
    return found


@given(problem=losses(), cuts=st.lists(st.integers(0, 6), max_size=3), chunk=st.integers(1, 9))
def test_shards_of_the_vocabulary_add_up_to_the_whole(problem, cuts, chunk):
    hidden, head, label, field = problem
    whole = gradient(hidden, head, label, field, chunk=chunk)
    parts = in_shards(
        head, cuts, lambda rows, shard: gradient(hidden, rows, label, field, chunk=chunk, shard=shard)
    )
    assert all(torch.allclose(part.logprob, whole.logprob, rtol=1e-9, atol=1e-11) for part in parts)
    assert all(torch.allclose(part.entropy, whole.entropy, rtol=1e-9, atol=1e-11) for part in parts)
    assert torch.allclose(
        torch.stack([part.hidden for part in parts]).sum(0), whole.hidden, rtol=1e-9, atol=1e-11
    )
    assert torch.allclose(torch.cat([part.head for part in parts]), whole.head, rtol=1e-9, atol=1e-11)


@given(problem=problems(), cuts=st.lists(st.integers(0, 6), max_size=3), chunk=st.integers(1, 9))
def test_a_differentiable_logprob_in_shards_adds_up_to_the_whole(problem, cuts, chunk):
    hidden, head, label, upstream = problem

    def run(rows, shard):
        leaves = hidden.clone().requires_grad_(), rows.clone().requires_grad_()
        found = logprob.token_logprob(*leaves, label, temperature=0.7, chunk=chunk, shard=shard)
        (found.logprob * upstream).sum().backward()
        return found.logprob.detach(), found.entropy, leaves[0].grad, leaves[1].grad

    whole, parts = run(head, WHOLE), in_shards(head, cuts, run)
    assert all(torch.allclose(part[0], whole[0], rtol=1e-9, atol=1e-11) for part in parts)
    assert all(torch.allclose(part[1], whole[1], rtol=1e-9, atol=1e-11) for part in parts)
    assert torch.allclose(torch.stack([part[2] for part in parts]).sum(0), whole[2], rtol=1e-9, atol=1e-11)
    assert torch.allclose(torch.cat([part[3] for part in parts]), whole[3], rtol=1e-9, atol=1e-11)


def test_the_label_is_exact_although_the_logits_are_bfloat16():
    """A logit of 20.05 is 20.0 in bfloat16; alone in the vocabulary its logprob must be 0 all the same."""
    hidden = torch.tensor([[20.0, 0.05]], dtype=torch.bfloat16)
    head = torch.tensor([[1.0, 1.0], [-1.0, 0.0]], dtype=torch.bfloat16)
    field = [torch.zeros(1), torch.ones(1), torch.ones(1)]
    told = gradient(hidden, head, torch.tensor([0]), field, chunk=1, dtype=torch.bfloat16)
    assert told.logprob.dtype == told.head.dtype == torch.float32 and told.hidden.dtype == torch.bfloat16
    assert float(told.logprob) == pytest.approx(0, abs=1e-7)
    wide = gradient(hidden, head, torch.tensor([1]), field, chunk=1, dtype=torch.float32)
    half = gradient(hidden, head, torch.tensor([1]), field, chunk=1, dtype=torch.bfloat16)
    assert float(wide.logprob) == pytest.approx(-40.05, abs=2e-3)
    assert float(half.logprob) == pytest.approx(float(wide.logprob), abs=20 / 256)


@given(problem=losses())
def test_tokens_without_slope_leave_no_gradient(problem):
    hidden, head, label, field = problem
    found = gradient(hidden, head, label, [*field[:2], torch.zeros_like(field[2])], chunk=2)
    assert not found.hidden.any() and not found.head.any()


def test_nothing_to_train_is_an_empty_answer():
    empty = torch.zeros(0, 3, dtype=F64)
    found = gradient(
        empty, torch.ones(5, 3, dtype=F64), torch.zeros(0, dtype=torch.long), [empty[:, 0]] * 3, chunk=4
    )
    assert found.logprob.shape == found.entropy.shape == (0,) and found.hidden.shape == (0, 3)
    assert not found.head.any()


def test_a_compiled_pass_is_the_plain_one():
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 4, generator=generator, dtype=F64) for n in (7, 11))
    label, field = torch.arange(7), [torch.randn(7, generator=generator, dtype=F64) for _ in range(3)]

    def fuse(function):
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    plain, fused = (gradient(hidden, head, label, field, chunk=3, fuse=f) for f in (same, fuse))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(plain, fused))


@pytest.mark.parametrize("narrow", [False, True])
def test_all_chunks_lie_in_one_place_and_where_dtypes_agree_their_gradient_over_them(narrow):
    """One [chunk, V] of logits, whatever the number of tokens; `chunk_within` counts on it."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if narrow else F64
    hidden, head = (torch.randn(n, 4, generator=generator, dtype=F64).to(dtype) for n in (7, 11))
    label, field = torch.arange(7), [torch.randn(7, generator=generator, dtype=F64) for _ in range(3)]
    seen = []

    def fuse(function):
        def kept(logits, *facts):
            result = function(logits, *facts)
            seen.append((logits, result))
            return result

        return kept

    gradient(hidden, head, label, field, chunk=3, dtype=torch.float32 if narrow else F64, fuse=fuse)
    wide = [(a, b) for a, b in seen if isinstance(a, torch.Tensor) and a.ndim == 2]
    assert len(wide) == 6 and len({a.data_ptr() for a, _ in wide}) == 1
    written = [b.data_ptr() == a.data_ptr() for a, b in wide if isinstance(b, torch.Tensor)]
    assert len(written) == 3 and all(written) is not narrow and any(written) is not narrow


@pytest.mark.parametrize(
    ("memory", "vocabulary", "dtype", "tokens"),
    [
        (3e9, 248_320, torch.bfloat16, 6016),
        (3e9, 248_320, torch.float32, 1920),
        (128 * 20, 10, torch.bfloat16, 128),
        (127 * 20, 10, torch.bfloat16, 127),
        (1, 10, torch.float32, 1),
        (2**60 - 1, 1, torch.bfloat16, 2**59 - 128),  # As a quotient of floats it would be 2^59.
    ],
)
def test_chunks_fit_the_memory_given(memory, vocabulary, dtype, tokens):
    found = logprob.chunk_within(
        memory_bytes=memory, vocabulary=vocabulary, logit_dtype=dtype, hidden_dtype=torch.bfloat16
    )
    assert found == tokens


@pytest.mark.parametrize(
    ("memory", "vocabulary", "text"),
    [
        (0, 5, "memory_bytes must be positive, got 0"),
        (math.nan, 5, "memory_bytes must be positive, got nan"),
        (1, 0, "vocabulary must be positive, got 0"),
    ],
)
def test_chunks_of_nothing_are_refused(memory, vocabulary, text):
    with pytest.raises(ValueError, match=text):
        logprob.chunk_within(
            memory_bytes=memory, vocabulary=vocabulary, logit_dtype=torch.float32, hidden_dtype=torch.float32
        )


@pytest.mark.parametrize("label", [-100, 5, 10**12])
def test_a_label_outside_the_vocabulary_has_no_logprob(label):
    hidden, head = torch.ones(1, 2, dtype=F64), torch.arange(10, dtype=F64).view(5, 2)
    told = logprob.token_logprob(hidden, head, torch.tensor([label]), temperature=1.0, chunk=1, shard=WHOLE)
    assert torch.isnan(told.logprob).all() and not torch.isnan(told.entropy).any()
    field = [torch.zeros(1, dtype=F64)] * 3
    assert torch.isnan(gradient(hidden, head, torch.tensor([label]), field, chunk=1).logprob).all()


@pytest.mark.parametrize("temperature", [0.005, 0.01, 0.1])
def test_rounded_logits_stay_finite_at_low_temperatures(temperature):
    """The rounding of a logit over the temperature may be larger than all the other labels together."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(256, 64, generator=generator) * 2).bfloat16()
    head = torch.randn(512, 64, generator=generator).bfloat16()
    label = (hidden.float() @ head.float().T).argmax(1)
    field = [torch.zeros(256), torch.ones(256), torch.ones(256)]
    told = gradient(hidden, head, label, field, chunk=64, temperature=temperature, dtype=torch.bfloat16)
    assert all(torch.isfinite(x).all() for x in told)
    assert (told.logprob <= 0).all()
