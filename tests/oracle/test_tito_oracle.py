"""core/tito.py and core/ledger.py against a plain list of tokens."""

from __future__ import annotations

from collections.abc import Callable

import oracle_tito as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.ledger import NOT_SAMPLED, Ledger, sampled, split
from core.ledger import given as given_span
from core.tito import (
    agreed_delta,
    append_completion,
    append_observation,
    close,
    continue_rows,
    observation_delta,
    open_ledger,
    sampled_runs,
    trained_once,
    truncate,
)

ids = st.lists(st.integers(0, 4), max_size=4)
some_ids = st.lists(st.integers(0, 4), min_size=1, max_size=4)
chunks = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([-0.1, -0.5, -2.0]), st.integers(0, 3)), max_size=3
)
reasons = st.sampled_from(["stop", "stop", "length", "abort"])


def flat(row: Ledger) -> oracle.Row:
    """The columns of a row as one list."""
    columns = (row.token_ids, row.loss_mask, row.rollout_logprob, row.policy_version)
    assert {len(column) for column in columns} == {len(row)}
    return oracle.Row(tuple(zip(*columns)), row.finish_reason)


MOVES: dict[str, tuple[Callable[..., Ledger], Callable[..., oracle.Row]]] = {
    "close": (close, oracle.closed),
    "observation": (append_observation, oracle.observed),
    "truncate": (truncate, oracle.truncated),
    "completion": (
        lambda row, ids, logprob, version, reason: append_completion(
            row, ids, logprob, version, finish_reason=reason
        ),
        oracle.completed,
    ),
}


def moved(kind: str, row: Ledger, plain: oracle.Row, arguments: tuple) -> tuple[Ledger, oracle.Row]:
    """Both after a move, or as they were if both refuse it."""
    move, rule = MOVES[kind]
    try:
        expected = rule(plain, *arguments)
    except oracle.Refused:
        with pytest.raises(ValueError):
            move(row, *arguments)
        return row, plain
    found = move(row, *arguments)
    assert flat(found) == expected
    return found, expected


@st.composite
def grown(draw: st.DrawFn) -> tuple[Ledger, oracle.Row]:
    """A row after up to six moves, checked at each."""
    prompt = draw(some_ids)
    row, plain = open_ledger(prompt), oracle.opened(prompt)
    assert flat(row) == plain
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["completion", *MOVES]))
        if kind == "completion":
            chunk = draw(chunks)
            columns = tuple([c[k] for c in chunk] for k in range(3))
            row, plain = moved(kind, row, plain, (*columns, draw(reasons)))
        elif kind == "truncate":
            row, plain = moved(kind, row, plain, (draw(st.integers(1, 12)),))
        else:
            row, plain = moved(kind, row, plain, (draw(ids),))
    return row, plain


@settings(max_examples=100)
@given(grown())
def test_moves_are_those_on_a_list_and_runs_are_its_sampled_stretches(
    pair: tuple[Ledger, oracle.Row],
) -> None:
    row, plain = pair
    assert list(sampled_runs(row)) == oracle.sampled_runs(plain)
    if len(row):
        assert row.last_token == plain.tokens[-1][0]
    for at in range(len(row) + 1):
        head, tail = split(row, at)
        assert sum(map(len, head)) == at and sum(map(len, tail)) == len(row) - at
        both = Ledger(spans=(*head, *tail), finish_reason=row.finish_reason)
        assert flat(both) == plain and both == row and hash(both) == hash(row)


@settings(max_examples=100)
@given(grown(), some_ids, st.data())
def test_continue_rows_grows_a_row_that_the_prompt_begins_with_or_adds_one(
    pair: tuple[Ledger, oracle.Row], other: list[int], data: st.DataObject
) -> None:
    row, plain = pair
    cut = data.draw(st.integers(0, len(row)))
    prompt = data.draw(st.sampled_from([other, [*row.token_ids, *other], [*row.token_ids[:cut], *other]]))
    found = continue_rows((row,), prompt)
    assert [flat(one) for one in found] == list(oracle.continued((plain,), prompt))
    assert [flat(one) for one in continue_rows((), prompt)] == list(oracle.continued((), prompt))


@settings(max_examples=60)
@given(grown(), st.lists(st.tuples(st.integers(0, 9), chunks), max_size=3))
def test_trained_once_trains_no_shared_beginning_twice(
    pair: tuple[Ledger, oracle.Row], branches: list[tuple[int, list[tuple[int, float, int]]]]
) -> None:
    row, _ = pair
    rows = [row]
    for cut, chunk in branches:
        stem = Ledger(spans=truncate(row, min(cut, len(row))).spans, finish_reason="")
        tokens, logprob, version = [c[0] for c in chunk], [c[1] for c in chunk], [c[2] for c in chunk]
        rows.append(append_completion(stem, tokens, logprob, version, finish_reason="stop"))
    expected = oracle.trained_once([flat(one) for one in rows])
    assert [flat(one) for one in trained_once(tuple(rows))] == expected


tokens = st.lists(st.sampled_from([1, 2, 10, 100]), max_size=4)
deltas = st.tuples(
    st.sampled_from([{100}, {100, 1}, {2}]), st.sampled_from([100, 1, 2]), st.sampled_from([[], [10]])
)


@st.composite
def renderings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A conversation and the same with something more, or with something else."""
    prefix = draw(tokens) + draw(st.sampled_from([[], [100], [100, 10], [1, 10]]))
    start = draw(st.sampled_from([prefix, prefix, prefix[:-1]]))
    return prefix, start + draw(st.sampled_from([[], [100], [10]])) + draw(tokens)


@settings(max_examples=200)
@given(renderings(), deltas)
def test_observation_delta_is_what_follows_a_stop_token_whose_place_is_certain(
    pair: tuple[list[int], list[int]], setting: tuple[set[int], int, list[int]]
) -> None:
    stop, last, separator = setting
    found = observation_delta(*pair, stop_ids=stop, last_token=last, separator=separator)
    expected = oracle.observation_delta(*pair, stop, last, separator)
    assert (None if found is None else list(found)) == expected


@given(st.lists(renderings(), min_size=1, max_size=3), st.booleans(), deltas)
def test_agreed_delta_is_the_one_that_all_give(
    pairs: list[tuple[list[int], list[int]]], repeat: bool, setting: tuple[set[int], int, list[int]]
) -> None:
    stop, last, separator = setting
    pairs = pairs[:1] * 2 if repeat else pairs
    found = agreed_delta(pairs, stop_ids=stop, last_token=last, separator=separator)
    expected = oracle.agreed_delta(pairs, stop, last, separator)
    assert (None if found is None else list(found)) == expected


@given(chunks, ids)
def test_spans_are_columns_of_one_origin(chunk: list[tuple[int, float, int]], seen: list[int]) -> None:
    tokens, logprob, version = [c[0] for c in chunk], [c[1] for c in chunk], [c[2] for c in chunk]
    wrote, read = sampled(tokens, logprob, version), given_span(seen)
    assert len(wrote) == len(chunk) and len(read) == len(seen)
    assert not chunk or wrote.sampled
    assert not read.sampled
    spans = tuple(span for span in (wrote, read) if len(span))
    row = Ledger(spans=spans, finish_reason="")
    expected = [(t, True, lp, v) for t, lp, v in chunk] + [(t, False, 0.0, NOT_SAMPLED) for t in seen]
    assert list(flat(row).tokens) == expected
    for start in range(len(tokens) + 1):
        for end in range(start, len(tokens) + 1):
            part = wrote.part(start, end)
            assert (list(part.token_ids), list(part.rollout_logprob), list(part.policy_version)) == (
                tokens[start:end],
                logprob[start:end],
                version[start:end],
            )


# cases.md and recipe.md F.9.


def turn(row: Ledger, out: list[int], reason: str = "stop", version: int = 0) -> Ledger:
    """A completion with equal logprobs."""
    return append_completion(row, out, [-0.5] * len(out), [version] * len(out), finish_reason=reason)


def mask_of(row: Ledger) -> str:
    """The mask as zeros and ones."""
    return "".join("1" if m else "0" for m in row.loss_mask)


def test_g11_a_rewritten_past_begins_a_row_and_is_never_spliced() -> None:
    rows = (turn(open_ledger([1, 2]), [5, 6, 2]),)
    rows = continue_rows(rows, [1, 2, 6, 2, 3])
    rows = (*rows[:-1], turn(rows[-1], [7, 2]))
    assert [(list(row.token_ids), mask_of(row)) for row in rows] == [
        ([1, 2, 5, 6, 2], "00111"),
        ([1, 2, 6, 2, 3, 7, 2], "0000011"),
    ]


def test_g12_the_template_speaks_only_after_the_sampled_end_of_turn() -> None:
    row = turn(open_ledger([7, 8, 9]), [50, 51, 2])
    delta = observation_delta(
        [7, 8, 9, 77, 2], [7, 8, 9, 77, 2, 30, 31], stop_ids={2}, last_token=2, separator=[]
    )
    assert delta is not None
    assert list(append_observation(row, delta).token_ids) == [7, 8, 9, 50, 51, 2, 30, 31]


def test_g13_the_separator_is_kept_and_not_trained() -> None:
    delta = observation_delta(
        [1, 100, 10], [1, 100, 10, 3, 4], stop_ids={100}, last_token=100, separator=[10]
    )
    assert delta is not None and list(delta) == [10, 3, 4]
    row = append_observation(turn(open_ledger([1]), [100]), delta)
    assert mask_of(row) == "01000"


def test_g14_what_was_sampled_is_what_is_stored() -> None:
    row = turn(open_ledger([1]), [11, 12])
    rows = continue_rows((row,), [1, 11])
    assert list(rows[0].token_ids[-2:]) == [11, 12]


def test_g15_a_synthesised_end_of_turn_is_in_the_context_and_not_trained() -> None:
    row = close(turn(open_ledger([9]), [5, 6], "length"), [2])
    row = turn(append_observation(row, [3]), [8, 2])
    assert mask_of(row) == "0110011"
    assert [lp for lp, m in zip(row.rollout_logprob, row.loss_mask) if m] == [-0.5] * 4


def test_g21_assistant_turns_inside_the_prompt_are_prompt() -> None:
    row = turn(open_ledger([1, 7, 7, 7, 2]), [8, 2])
    assert sum(row.loss_mask) == 2


def test_g32_truncation_cuts_all_columns_together() -> None:
    row = truncate(turn(open_ledger([1, 2]), [3, 4, 5, 6]), 4)
    assert {len(row.token_ids), len(row.loss_mask), len(row.rollout_logprob), len(row.policy_version)} == {4}


def test_g33_a_resumed_turn_has_a_mask_as_long_as_its_tokens() -> None:
    row = turn(open_ledger([1, 1, 1]), [4, 5])
    assert mask_of(row) == "00011"


def test_g34_every_chunk_has_its_own_version() -> None:
    row = turn(turn(open_ledger([1]), [3, 4, 5], "abort", 2), [6, 7], "stop", 3)
    assert list(row.policy_version[1:]) == [2, 2, 2, 3, 3]


def test_g37_a_truncated_turn_is_never_extended() -> None:
    row = turn(open_ledger([1]), [5], "length")
    rows = continue_rows((row,), [1, 5, 7])
    assert rows[0] == row and mask_of(rows[1]) == "000"


def test_g39_a_merged_row_is_not_cut_at_the_cap_of_a_turn() -> None:
    row = turn(append_observation(turn(open_ledger([1]), [5, 6, 2]), [7, 7]), [5, 6, 2])
    assert len(row) - 1 == 8


@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [([10], [10, 20, 30], 1), ([10], [10, 21, 30], 2)],
    ids=["prefix", "mismatch"],
)
def test_rows_of_steps_merge_where_the_prompt_extends_them(
    first: list[int], second: list[int], rows: int
) -> None:
    row = append_completion(open_ledger(first), [20], [-0.5], [0], finish_reason="stop")
    grown_rows = continue_rows((row,), second)
    last = append_completion(grown_rows[-1], [40, 41], [-0.3, -0.4], [0, 0], finish_reason="stop")
    assert len(grown_rows) == rows
    if rows == 1:
        assert list(last.token_ids[1:]) == [20, 30, 40, 41]
        assert mask_of(last)[1:] == "1011"
        assert list(last.rollout_logprob[1:]) == [-0.5, 0.0, -0.3, -0.4]


E, N, S, TOOL, X, ASSISTANT, OK, OBSERVATION = 100, 10, 101, 102, 103, 104, 105, 106


def test_chatml_observation_keeps_the_newline_after_the_end_of_turn() -> None:
    base = [1, OK, E, N]
    full = [*base, S, TOOL, N, X, E, N, S, ASSISTANT, N]
    found = observation_delta(base, full, stop_ids={E}, last_token=E, separator=[N])
    assert found is not None and list(found) == [N, S, TOOL, N, X, E, N, S, ASSISTANT, N]


def test_glm_observation_does_not_repeat_the_token_that_opens_it() -> None:
    found = observation_delta(
        [1, OK],
        [1, OK, OBSERVATION, X, ASSISTANT],
        stop_ids={OBSERVATION},
        last_token=OBSERVATION,
        separator=[],
    )
    assert found is not None and list(found) == [X, ASSISTANT]
