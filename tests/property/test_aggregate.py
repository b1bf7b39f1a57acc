"""Laws of core.aggregate: who has how many votes, whatever the split."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PackedStep, packed_steps, step_of

from core import aggregate

F64 = torch.float64


def sequence_sum(loss_mask, row_id, group_id, *, dtype):
    return aggregate.sequence_sum_weight(loss_mask, row_id, group_id, length=8, dtype=dtype)


RULES = {
    "token": aggregate.token_mean_weight,
    "sequence": aggregate.sequence_mean_weight,
    "prompt": aggregate.prompt_mean_weight,
    "prompt of sequence means": aggregate.prompt_mean_of_sequence_means_weight,
    "sequence sum": sequence_sum,
}
MEANS = [name for name in RULES if name != "sequence sum"]


def weight(rule: str, step: PackedStep):
    return RULES[rule](step.loss_mask, step.row_id, step.group_id, dtype=F64)


def loss(rule: str, step: PackedStep) -> float:
    value = torch.where(step.loss_mask, step.value, 0.0)
    return float((weight(rule, step) * value).sum())


def simple(groups, names=None) -> PackedStep:
    rows = sum(len(group) for group in groups)
    return step_of(groups, list(range(100, 100 + rows)), names or list(range(len(groups))))


def by_loop(rule: str, step: PackedStep) -> float:
    """Each rule as a sentence: means of means, over what is live."""
    rows: dict[int, list[float]] = defaultdict(list)
    owner: dict[int, int] = {}
    for live, row, group, value in zip(*(field.tolist() for field in step)):
        if live:
            rows[row].append(value)
            owner[row] = group
    groups: dict[int, list[list[float]]] = defaultdict(list)
    for row, values in rows.items():
        groups[owner[row]].append(values)

    def mean(values):
        return sum(values) / len(values) if values else 0.0

    return {
        "token": lambda: mean([v for values in rows.values() for v in values]),
        "sequence": lambda: mean([mean(values) for values in rows.values()]),
        "prompt": lambda: mean([mean([v for values in g for v in values]) for g in groups.values()]),
        "prompt of sequence means": lambda: mean([mean([mean(v) for v in g]) for g in groups.values()]),
        "sequence sum": lambda: mean([sum(values) / 8 for values in rows.values()]),
    }[rule]()


@given(step=packed_steps())
def test_weights_agree_with_means_of_means_by_loop(step):
    for rule in RULES:
        assert loss(rule, step) == pytest.approx(by_loop(rule, step), abs=1e-12), rule


@given(step=packed_steps(), data=st.data())
def test_gradient_adds_up_over_any_split_of_tokens_and_ranks(step, data):
    """Weights come from the whole step, so micro-batches and ranks only add."""
    for rule in RULES:
        value = torch.where(step.loss_mask, step.value, 0.0)
        part = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(value), max_size=len(value))))
        given_weight = weight(rule, step)
        whole = torch.ones((), dtype=F64, requires_grad=True)
        (given_weight * value * whole).sum().backward()
        split = torch.ones((), dtype=F64, requires_grad=True)
        for index in range(4):
            own = part == index
            (given_weight[own] * value[own] * split).sum().backward()
        assert whole.grad is not None and split.grad is not None
        assert torch.allclose(whole.grad, split.grad, rtol=0, atol=1e-12), rule


@given(step=packed_steps(), data=st.data())
def test_weight_follows_its_token_through_any_permutation(step, data):
    for rule in RULES:
        order = torch.tensor(data.draw(st.permutations(range(len(step.value)))), dtype=torch.long)
        moved = PackedStep(*(field[order] for field in step))
        assert torch.equal(weight(rule, moved), weight(rule, step)[order]), rule


@given(step=packed_steps(), junk=st.integers(-99, 99), new=st.booleans())
def test_masked_tokens_rows_and_groups_are_as_if_absent(step, junk, new):
    """Padding and dead rows count in no denominator."""
    for rule in RULES:
        row = 2 * 10**9 + junk if new or not len(step.value) else int(step.row_id[0])
        group = 2 * 10**9 if new or not len(step.value) else int(step.group_id[0])
        padded = PackedStep(
            torch.cat([step.loss_mask, torch.tensor([False, False])]),
            torch.cat([step.row_id, torch.tensor([row, row])]),
            torch.cat([step.group_id, torch.tensor([group, group])]),
            torch.cat([step.value, torch.tensor([torch.nan, torch.inf], dtype=F64)]),
        )
        assert torch.equal(weight(rule, padded)[:-2], weight(rule, step)), rule
        assert torch.equal(weight(rule, padded)[-2:], torch.zeros(2, dtype=F64)), rule


@given(step=packed_steps())
def test_names_of_rows_and_groups_do_not_matter(step):
    for rule in RULES:
        renamed = step._replace(row_id=5 - 3 * step.row_id, group_id=7 * step.group_id + 1)
        assert torch.equal(weight(rule, renamed), weight(rule, step)), rule


@given(step=packed_steps())
def test_the_same_batch_twice_gives_the_same_loss(step):
    for rule in RULES:
        twice = PackedStep(
            step.loss_mask.repeat(2),
            torch.cat([step.row_id, step.row_id + 3 * 10**9]),
            torch.cat([step.group_id, step.group_id + 3 * 10**9]),
            step.value.repeat(2),
        )
        assert loss(rule, twice) == pytest.approx(loss(rule, step), abs=1e-12), rule


@given(step=packed_steps())
def test_votes_of_a_mean_sum_to_one_or_to_nothing(step):
    for rule in MEANS:
        total = float(weight(rule, step).sum())
        assert total == pytest.approx(1.0 if step.loss_mask.any() else 0.0), rule


@given(step=packed_steps())
def test_prompt_mean_gives_every_live_prompt_the_same_vote(step):
    for rule in ("prompt", "prompt of sequence means"):
        votes = weight(rule, step)
        live = {int(g) for g in step.group_id[step.loss_mask]}
        for group in live:
            assert float(votes[step.group_id == group].sum()) == pytest.approx(1 / len(live)), rule


@given(step=packed_steps())
def test_prompt_mean_and_token_mean_do_not_see_where_a_row_was_split(step):
    split = step._replace(row_id=torch.arange(len(step.row_id)))
    for rule in ("token", "prompt"):
        assert torch.equal(weight(rule, split), weight(rule, step)), rule


@given(step=packed_steps())
def test_sequence_mean_is_prompt_mean_of_single_rows(step):
    alone = step._replace(group_id=step.row_id)
    assert torch.equal(weight("sequence", step), weight("prompt", alone))
    assert torch.equal(weight("prompt of sequence means", alone), weight("prompt", alone))


TABLE = [[[1.0, 1], [2.0, 2, 2, 2], [5.0]], [[3.0], [7.0, 7, 7]]]


@pytest.mark.parametrize(
    "case, rule, groups, expected",
    [
        ("two prompts", "token", TABLE, 39 / 11),
        ("two prompts", "sequence", TABLE, 3.6),
        ("two prompts", "sequence sum", TABLE, 0.975),
        ("two prompts", "prompt", TABLE, 4.07142857142857),
        ("two prompts", "prompt of sequence means", TABLE, 3.83333333333333),
        ("a dead prompt has no vote", "prompt", [[[None, None]], [[6.0, 6]]], 6.0),
        ("ten tokens against two", "token", [[[1.0] * 10], [[4.0] * 2]], 1.5),
        ("four, two and two tokens", "token", [[[1.0] * 4], [[3.0] * 2], [[5.0] * 2]], 2.5),
        ("eight rows of one token", "sequence", [[[1.0]] * 8], 1.0),
        ("padding and dead rows", "token", [[[1.0, 1, 1, None, None, None], [None] * 6, [None] * 4]], 1.0),
        ("nothing live", "prompt", [[[None, None]]], 0.0),
        ("a dead prompt has no vote", "prompt", [[[1.0, 1], [3.0, 3]], [[10.0]], [[None]]], 6.0),
        ("a dead prompt has no vote", "token", [[[1.0, 1], [3.0, 3]], [[10.0]], [[None]]], 3.6),
        ("a dead prompt has no vote", "sequence", [[[1.0, 1], [3.0, 3]], [[10.0]], [[None]]], 14 / 3),
        ("padding", "token", [[[1.0, 2, None], [4.0, 5, 6]]], 3.6),
        ("padding", "sequence", [[[1.0, 2], [3.0, None]]], 2.25),
        ("padding", "prompt", [[[1.0, 2], [3.0, None]], [[5.0, 6], [7.0, 8]]], 4.25),
        ("a hundred tokens against nine", "token", [[[0.5] * 100], [[0.3] * 900]], 0.32),
    ],
)
def test_worked_examples(case, rule, groups, expected):
    assert loss(rule, simple(groups)) == pytest.approx(expected, rel=1e-12)


def test_sequence_sum_divides_by_rows_and_a_constant():
    step = simple([[[2.0, 3], [9.0, None]]])
    votes = aggregate.sequence_sum_weight(step.loss_mask, step.row_id, step.group_id, length=10, dtype=F64)
    assert float((votes * step.value.nan_to_num()).sum()) == pytest.approx(0.7)


@pytest.mark.parametrize(
    "rule, expected",
    [
        ("prompt", [0.125, -0.125, 1 / 6, -1 / 6]),
        ("token", [0.1, -0.1, 0.2, -0.2]),
        ("sequence", [1 / 12, -0.25, 0.25, -0.125]),
        ("sequence sum", [1 / 32, -1 / 32, 1 / 16, -1 / 16]),
    ],
)
def test_weighted_advantages_of_two_prompts(rule, expected):
    """Rows of 3, 1 and 2, 4 tokens, advantages 1, -1 and 2, -2."""
    step = simple([[[1.0] * 3, [-1.0]], [[2.0] * 2, [-2.0] * 4]])
    product = weight(rule, step) * step.value
    first = [int((step.row_id == row).nonzero()[0]) for row in range(100, 104)]
    assert product[first].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_to_train_gives_loss_zero_and_a_zero_gradient(rule):
    """Still attached to the graph."""
    step = simple([[[None, None]], [[None]]])
    parameter = torch.ones((), dtype=F64, requires_grad=True)
    total = (weight(rule, step) * parameter).sum()
    total.backward()
    assert total.detach() == 0 and parameter.grad == 0


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_step_has_empty_weights(rule):
    empty = torch.zeros(0, dtype=torch.long)
    assert RULES[rule](empty.bool(), empty, empty, dtype=F64).shape == (0,)


@pytest.mark.parametrize("rule", RULES)
def test_weights_are_float32_at_least(rule):
    """A reciprocal of many tokens is 0 in float16."""
    step = simple([[[1.0], [1.0, None]]])
    for asked, got in ((torch.float16, torch.float32), (torch.float32, torch.float32), (F64, F64)):
        assert RULES[rule](step.loss_mask, step.row_id, step.group_id, dtype=asked).dtype == got


@given(step=packed_steps())
def test_inputs_are_untouched(step):
    for rule in RULES:
        before = [field.clone() for field in step]
        weight(rule, step)
        assert all(torch.equal(a, b) for a, b in zip(before[:3], step[:3])), rule


@pytest.mark.parametrize("length", [0.0, -1.0, float("nan")])
def test_sequence_sum_refuses_a_length_that_is_not_positive(length):
    step = simple([[[1.0]]])
    with pytest.raises(ValueError, match=f"length must be positive, got {length}"):
        aggregate.sequence_sum_weight(step.loss_mask, step.row_id, step.group_id, length=length, dtype=F64)


def test_sequence_sum_refuses_a_length_without_end():
    """It would train nothing, in silence."""
    step = simple([[[1.0]]])
    with pytest.raises(ValueError, match="^length must be finite, got inf$"):
        aggregate.sequence_sum_weight(
            step.loss_mask, step.row_id, step.group_id, length=float("inf"), dtype=F64
        )


def test_a_length_keeps_all_its_digits():
    """An integer count times a float would be float32."""
    step = simple([[[1.0]]])
    votes = aggregate.sequence_sum_weight(step.loss_mask, step.row_id, step.group_id, length=0.1, dtype=F64)
    assert float(votes) == pytest.approx(10.0, rel=1e-14)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "loss_mask, row_id, group_id, text",
    [
        (
            torch.ones(2),
            torch.zeros(2).long(),
            torch.zeros(2).long(),
            "loss_mask must be bool, got torch.float32",
        ),
        (
            torch.ones(2).bool(),
            torch.zeros(2),
            torch.zeros(2).long(),
            "row_id must be an integer tensor, got torch.float32",
        ),
        (
            torch.ones(2).bool(),
            torch.zeros(2).long(),
            torch.zeros(2),
            "group_id must be an integer tensor, got torch.float32",
        ),
        (
            torch.ones(2).bool(),
            torch.zeros(1).long(),
            torch.zeros(2).long(),
            r"loss_mask, row_id and group_id must have one shape [T], got [(2,), (1,), (2,)]",
        ),
        (
            torch.ones(2, 2).bool(),
            torch.zeros(2, 2).long(),
            torch.zeros(2, 2).long(),
            r"loss_mask, row_id and group_id must have one shape [T], got [(2, 2), (2, 2), (2, 2)]",
        ),
    ],
)
def test_bad_input_is_refused(rule, loss_mask, row_id, group_id, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        RULES[rule](loss_mask, row_id, group_id, dtype=F64)


ROW_RULES = ("sequence", "prompt of sequence means", "sequence sum")


@pytest.mark.parametrize("rule", sorted(ROW_RULES))
def test_one_token_in_another_group_than_its_row_is_refused_by_its_row(rule):
    step = simple([[[1.0]], [[2.0]]])._replace(row_id=torch.tensor([5, 5]))
    with pytest.raises(ValueError, match="^row_id must name rows of one group each, got 5 in several$"):
        weight(rule, step)


@pytest.mark.parametrize("rule", RULES)
def test_row_ids_that_start_again_in_every_group_are_refused_where_rows_count(rule):
    """Two rows would be one. What is not live may be called anything."""
    step = simple([[[1.0], [2.0, 2.0]], [[3.0]]])
    again = step._replace(row_id=torch.tensor([4, 5, 5, 5]))
    if rule in ROW_RULES:
        with pytest.raises(ValueError, match="^row_id must name rows of one group each, got 5 in several$"):
            weight(rule, again)
    else:
        assert torch.equal(weight(rule, again), weight(rule, step))
    dead = step._replace(loss_mask=torch.tensor([True, True, True, False]))
    assert torch.equal(weight(rule, dead._replace(row_id=again.row_id)), weight(rule, dead))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_compiles_into_one_graph(rule):
    """No shape depends on the data."""
    torch.compiler.reset()
    compiled = torch.compile(RULES[rule], fullgraph=True, backend="eager")
    for groups in ([[[1.0, None], [2.0]], [[3.0]]], [[[1.0], [None]], [[2.0], [3.0]]], [[[None]]], []):
        step = simple(groups)
        expected = weight(rule, step)
        assert torch.equal(compiled(step.loss_mask, step.row_id, step.group_id, dtype=F64), expected)


@given(step=packed_steps())
def test_ids_may_be_of_any_integer_type(step):
    for rule in RULES:
        small = step._replace(row_id=step.row_id.int(), group_id=step.group_id.int())
        assert torch.equal(weight(rule, small), weight(rule, step)), rule


@given(step=packed_steps())
def test_a_weight_is_finite_and_positive_at_live_tokens_and_exactly_zero_elsewhere(step):
    for rule in RULES:
        votes = weight(rule, step)
        assert torch.equal(votes > 0, step.loss_mask) and votes.isfinite().all(), rule


@given(step=packed_steps())
def test_every_live_row_of_a_prompt_of_sequence_means_has_the_same_vote(step):
    votes = weight("prompt of sequence means", step)
    for group in {int(g) for g in step.group_id[step.loss_mask]}:
        rows = {int(r) for r in step.row_id[step.loss_mask & (step.group_id == group)]}
        shares = [float(votes[step.row_id == row].sum()) for row in rows]
        assert shares == pytest.approx([shares[0]] * len(rows), rel=1e-12)
