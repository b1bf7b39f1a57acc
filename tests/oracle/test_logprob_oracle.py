"""core/logprob.py and core/shard.py against the softmax, one logit at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import oracle_logprob as oracle
import pytest
import torch
from comparing import assert_same, numbers, places
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core.logprob import chunk_within, head_gradient, token_logprob
from core.loss import cispo
from core.shard import (
    WHOLE,
    Shard,
    Sums,
    combine_sums,
    log2_total,
    logprob_and_entropy,
    overwrite_by_gradient,
    set_label_gradient,
    shard_sums,
    softmax_gradient,
)


class Case(NamedTuple):
    """A step small enough to write out."""

    hidden: list[list[float]]
    head: list[list[float]]
    label: list[int]
    slope: list[float]
    temperature: float

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """hidden, head, label."""
        width = len(self.head[0])
        flat = [x for row in self.hidden for x in row]
        head = numbers([x for row in self.head for x in row]).reshape(len(self.head), width)
        return numbers(flat).reshape(len(self.hidden), width), head, places(self.label)

    def expected(
        self,
    ) -> tuple[oracle.OracleLogprob, list[list[float]], list[list[float]], list[list[float]]]:
        """Logprobs, and gradients of logits, hidden states and head."""
        forward = oracle.token_logprob(self.hidden, self.head, self.label, self.temperature)
        of_logits = oracle.logit_gradient(forward.share, self.label, self.slope, self.temperature)
        hidden = oracle.hidden_gradient(of_logits, self.head)
        return forward, of_logits, hidden, oracle.head_gradient(of_logits, self.hidden, len(self.head))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to five tokens, six words, three dimensions."""
    count, words, width = draw(st.tuples(st.integers(1, 5), st.integers(2, 6), st.integers(1, 3)))
    entry = st.floats(-4, 4)
    row = st.lists(entry, min_size=width, max_size=width)
    return Case(
        hidden=draw(st.lists(row, min_size=count, max_size=count)),
        head=draw(st.lists(row, min_size=words, max_size=words)),
        label=draw(st.lists(st.integers(0, words - 1), min_size=count, max_size=count)),
        slope=draw(st.lists(st.floats(-2, 2), min_size=count, max_size=count)),
        temperature=draw(st.sampled_from([0.5, 1.0, 1.7])),
    )


chunks = st.integers(1, 7)


@given(cases(), chunks)
def test_token_logprob_is_the_dense_softmax_with_its_gradients(case: Case, chunk: int) -> None:
    hidden, head, label = case.tensors()
    hidden.requires_grad_(True)
    head.requires_grad_(True)
    found = token_logprob(hidden, head, label, temperature=case.temperature, chunk=chunk, shard=WHOLE)
    forward, _, of_hidden, of_head = case.expected()
    assert_same(found.logprob, forward.logprob, absolute=1e-11)
    assert_same(found.entropy, forward.entropy, absolute=1e-11)
    assert not found.entropy.requires_grad
    (found.logprob * numbers(case.slope)).sum().backward()
    assert_same(hidden.grad, of_hidden, absolute=1e-11)
    assert_same(head.grad, of_head, absolute=1e-11)


def gradients(case: Case, chunk: int, shard: Shard = WHOLE, head: Tensor | None = None):
    """`head_gradient` in float64 without a compiler; the slope is that of the case."""
    hidden, whole, label = case.tensors()
    return head_gradient(
        hidden,
        whole if head is None else head,
        label,
        (numbers(case.slope),),
        slope=lambda logprob, slope: slope,
        temperature=case.temperature,
        chunk=chunk,
        logit_dtype=torch.float64,
        fuse=lambda function: function,
        shard=shard,
    )


@given(cases(), chunks)
def test_head_gradient_is_the_dense_one(case: Case, chunk: int) -> None:
    found = gradients(case, chunk)
    forward, _, of_hidden, of_head = case.expected()
    assert_same(found.logprob, forward.logprob, absolute=1e-11)
    assert_same(found.entropy, forward.entropy, absolute=1e-11)
    assert_same(found.hidden, of_hidden, absolute=1e-11)
    assert_same(found.head, of_head, absolute=1e-11)


@given(cases(), chunks, st.data())
def test_head_gradient_of_a_loss_is_the_gradient_of_that_loss(
    case: Case, chunk: int, data: st.DataObject
) -> None:
    hidden, head, label = case.tensors()
    count = len(case.label)
    rollout = numbers(data.draw(st.lists(st.floats(-5, -0.1), min_size=count, max_size=count)))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    weight = torch.full((count,), 0.25, dtype=torch.float64)
    field = (rollout, numbers(case.slope), mask, weight)

    def slope(logprob: Tensor, mu: Tensor, a: Tensor, m: Tensor, w: Tensor) -> Tensor:
        return w * cispo(logprob, mu, a, m, min_ratio=0.0, max_ratio=2.0).slope

    found = head_gradient(
        hidden, head, label, field, slope=slope, temperature=case.temperature, chunk=chunk,
        logit_dtype=torch.float64, fuse=lambda function: function, shard=WHOLE,
    )  # fmt: skip
    forward = oracle.token_logprob(case.hidden, case.head, case.label, case.temperature)
    slopes = [
        -0.25 * min(math.exp(lp - mu), 2.0) * a if m else 0.0
        for lp, mu, a, m in zip(forward.logprob, rollout.tolist(), case.slope, mask.tolist())
    ]
    of_logits = oracle.logit_gradient(forward.share, case.label, slopes, case.temperature)
    assert_same(found.hidden, oracle.hidden_gradient(of_logits, case.head), absolute=1e-11)
    assert_same(found.head, oracle.head_gradient(of_logits, case.hidden, len(case.head)), absolute=1e-11)


def parts(case: Case, cut: int) -> list[Sums]:
    """The sums of the words before the cut and of those from it on."""
    hidden, head, label = case.tensors()
    return [
        shard_sums(hidden @ head[a:b].T, hidden, head[a:b], label - a, case.temperature)
        for a, b in ((0, cut), (cut, len(head)))
    ]


def cut_of(case: Case, data: st.DataObject) -> int:
    """Where the vocabulary is split; both parts have a word."""
    return data.draw(st.integers(1, len(case.head) - 1))


@given(cases(), st.data())
def test_sums_of_shards_combine_to_the_whole_softmax(case: Case, data: st.DataObject) -> None:
    sums = combine_sums(parts(case, cut_of(case, data)))
    logprob, entropy = logprob_and_entropy(sums)
    forward = oracle.token_logprob(case.hidden, case.head, case.label, case.temperature)
    assert_same(logprob, forward.logprob, absolute=1e-11)
    assert_same(entropy, forward.entropy, absolute=1e-11)
    z = [[x / case.temperature for x in row] for row in oracle.logits(case.hidden, case.head)]
    totals = [math.log2(math.fsum(math.exp(x) for x in row)) for row in z]
    assert_same(log2_total(sums), totals, absolute=1e-11)
    assert_same(sums.target, [row[y] for row, y in zip(z, case.label)], absolute=1e-11)
    scale = sums.maximum.exp().tolist()
    assert_same(sums.total, [2**t / s for t, s in zip(totals, scale)], absolute=1e-11)
    weighted = [math.fsum(math.exp(x - m) * (x - m) for x in row) for row, m in zip(z, sums.maximum.tolist())]
    assert_same(sums.weighted, weighted, absolute=1e-11)


@given(cases(), st.data())
def test_gradients_of_two_shards_add_up_to_the_whole_ones(case: Case, data: st.DataObject) -> None:
    cut, (_, whole, _) = cut_of(case, data), case.tensors()
    both = parts(case, cut)
    combine: Callable[[Sums], Sums] = lambda sums: combine_sums(both)  # noqa: E731
    first = gradients(case, 9, Shard(first_id=0, combine=combine), whole[:cut])
    second = gradients(case, 9, Shard(first_id=cut, combine=combine), whole[cut:])
    forward, _, of_hidden, of_head = case.expected()
    for one in (first, second):
        assert_same(one.logprob, forward.logprob, absolute=1e-11)
        assert_same(one.entropy, forward.entropy, absolute=1e-11)
    assert_same(first.hidden + second.hidden, of_hidden, absolute=1e-11)
    assert_same(torch.cat([first.head, second.head]), of_head, absolute=1e-11)


@given(cases(), st.data())
def test_token_logprob_of_a_shard_has_its_part_of_the_gradients(case: Case, data: st.DataObject) -> None:
    cut = cut_of(case, data)
    both = parts(case, cut)
    combine: Callable[[Sums], Sums] = lambda sums: combine_sums(both)  # noqa: E731
    forward, _, of_hidden, of_head = case.expected()
    total, rows = torch.zeros_like(case.tensors()[0]), []
    for first_id, end in ((0, cut), (cut, len(case.head))):
        hidden, whole, label = case.tensors()
        hidden.requires_grad_(True)
        head = whole[first_id:end].clone().requires_grad_(True)
        shard = Shard(first_id=first_id, combine=combine)
        found = token_logprob(hidden, head, label, temperature=case.temperature, chunk=9, shard=shard)
        assert_same(found.logprob, forward.logprob, absolute=1e-11)
        (found.logprob * numbers(case.slope)).sum().backward()
        assert hidden.grad is not None and head.grad is not None
        total += hidden.grad
        rows.append(head.grad)
    assert_same(total, of_hidden, absolute=1e-11)
    assert_same(torch.cat(rows), of_head, absolute=1e-11)


@given(cases())
def test_softmax_gradient_and_its_label_are_the_gradient_of_the_logits(case: Case) -> None:
    hidden, head, label = case.tensors()
    forward, of_logits, _, _ = case.expected()
    logits = hidden @ head.T
    sums = shard_sums(logits, hidden, head, label, case.temperature)
    weight = numbers(case.slope) / case.temperature
    facts = (log2_total(sums), weight, case.temperature)
    found = softmax_gradient(logits, *facts, torch.float64)
    expected = [[-w * p for p in row] for w, row in zip(weight.tolist(), forward.share)]
    assert_same(found, expected, absolute=1e-11)
    in_place = logits.clone()
    overwrite_by_gradient(in_place, *facts, torch.float64)
    assert_same(in_place, expected, absolute=1e-11)
    set_label_gradient(found, label, numbers(forward.logprob), weight)
    assert_same(found, of_logits, absolute=1e-11)


DTYPES = {torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}


@given(
    st.integers(1, 300_000), st.integers(1, 400), st.sampled_from(list(DTYPES)), st.sampled_from(list(DTYPES))
)
def test_chunk_within_is_the_most_tokens_that_fit(
    memory: int, vocabulary: int, logit: torch.dtype, hidden: torch.dtype
) -> None:
    found = chunk_within(
        memory_bytes=float(memory), vocabulary=vocabulary, logit_dtype=logit, hidden_dtype=hidden
    )
    second = 0 if logit == hidden else DTYPES[hidden]
    assert found == oracle.chunk_within(float(memory), vocabulary, DTYPES[logit], second)


# losses.md 5.2 and 5.3, cases.md G23.


def test_594_mib_hold_the_logits_of_1024_tokens_in_float32() -> None:
    found = chunk_within(
        memory_bytes=594 * 2**20, vocabulary=151936, logit_dtype=torch.float32, hidden_dtype=torch.float32
    )
    assert found == 1024


def test_entropy_of_three_tokens() -> None:
    head = numbers([math.log(x) for x in (0.5, 0.3, 0.2)]).reshape(3, 1)
    found = token_logprob(
        numbers([1.0]).reshape(1, 1), head, places([0]), temperature=1.0, chunk=1, shard=WHOLE
    )
    assert_same(found.entropy, [1.02965301406], relative=1e-11)


@pytest.mark.parametrize(("temperature", "logprob"), [(0.5, -0.01815), (1.0, -0.12693)])
def test_g23_the_temperature_divides_the_logits(temperature: float, logprob: float) -> None:
    head = numbers([2.0, 0.0]).reshape(2, 1)
    found = token_logprob(
        numbers([1.0]).reshape(1, 1), head, places([0]), temperature=temperature, chunk=1, shard=WHOLE
    )
    assert_same(found.logprob, [logprob], absolute=5e-6)
