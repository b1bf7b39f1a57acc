"""Laws of core.tito: what was sampled is kept to the token, and what was not is never trained."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import tito

E, N, S, O, A, U = 100, 101, 102, 103, 104, 105  # end, newline, start, observation, assistant, user  # noqa: E741
TEXT = st.lists(st.integers(0, 50), max_size=4)
EQUALLY_LONG = "token_ids, logprob and policy_version must be equally long"
COLUMNS = ("token_ids", "loss_mask", "rollout_logprob", "policy_version")


def complete(row, ids, *, finish="stop", version=0):
    return tito.append_completion(row, ids, [-0.5] * len(ids), [version] * len(ids), finish_reason=finish)


def mask_of(row):
    return "".join("1" if live else "0" for live in row.loss_mask)


def check(row):
    """What holds of every row at any time."""
    assert {len(getattr(row, name)) for name in COLUMNS} == {len(row)}
    assert all(len(span) for span in row.spans)
    for live, logprob, version in zip(row.loss_mask, row.rollout_logprob, row.policy_version):
        assert (version >= 0) == live
        assert math.isfinite(logprob) and (live or logprob == 0.0)


@st.composite
def histories(draw):
    """Any legal sequence of moves, with the row after each."""
    row = tito.open_ledger(draw(st.lists(st.integers(0, 50), min_size=1, max_size=3)))
    seen = [row]
    for _ in range(draw(st.integers(0, 7))):
        ids = draw(TEXT)
        if row.finish_reason in ("", "abort") and (row.finish_reason == "" or draw(st.booleans())):
            logprob = draw(st.lists(st.floats(-9, 0), min_size=len(ids), max_size=len(ids)))
            version = draw(st.lists(st.integers(0, 9), min_size=len(ids), max_size=len(ids)))
            reason = draw(st.sampled_from(["stop", "length", "abort"]))
            row = tito.append_completion(row, ids, logprob, version, finish_reason=reason)
        elif row.finish_reason == "stop":
            row = tito.append_observation(row, ids)
        else:
            row = tito.close(row, ids)
        seen.append(row)
    return seen


@given(history=histories())
def test_every_field_has_one_entry_per_token_after_any_move(history):
    for row in history:
        check(row)


@given(history=histories())
def test_a_ledger_only_grows(history):
    for before, after in zip(history, history[1:]):
        for name in COLUMNS:
            assert getattr(after, name)[: len(before)] == getattr(before, name)


@given(history=histories())
def test_a_move_copies_none_of_the_tokens_that_were_there(history):
    """So it costs what it adds, and a row that is kept from before still reads as it did."""
    then = [(len(row), *(getattr(row, name) for name in COLUMNS)) for row in history]
    for before, after in zip(history, history[1:]):
        assert all(old is new for old, new in zip(before.spans, after.spans))
        assert len(after.spans) - len(before.spans) == (len(after) > len(before))
    assert then == [(len(row), *(getattr(row, name) for name in COLUMNS)) for row in history]


@given(history=histories(), length=st.integers(0, 20))
def test_truncation_cuts_all_fields_together(history, length):
    """G32."""
    whole = history[-1]
    row = tito.truncate(whole, length)
    check(row)
    assert len(row) == min(length, len(whole))
    for name in COLUMNS:
        assert getattr(row, name) == getattr(whole, name)[:length]
    assert row.finish_reason == (whole.finish_reason if length >= len(whole) else "length")
    assert tito.truncate(whole, len(whole)) == whole


@given(history=histories())
def test_sampled_runs_cover_exactly_the_sampled_tokens(history):
    row = history[-1]
    runs = tito.sampled_runs(row)
    assert sorted(i for a, b in runs for i in range(a, b)) == [
        i for i, live in enumerate(row.loss_mask) if live
    ]
    assert all(a < b for a, b in runs)
    assert all(b < c for (_, b), (c, _) in zip(runs, runs[1:]))


@pytest.mark.parametrize("mask, lengths", [("1100111", [2, 3]), ("01010", [1, 1]), ("000", [])])
def test_turns_are_runs_of_the_mask(mask, lengths):
    spans = [
        tito.Span((i,), (-0.5,), (0,)) if c == "1" else tito.Span((i,), (), ()) for i, c in enumerate(mask)
    ]
    row = tito.Ledger(spans=tuple(spans), finish_reason="stop")
    assert mask_of(row) == mask
    assert [b - a for a, b in tito.sampled_runs(row)] == lengths


def test_truncation_keeps_four_aligned_fields():
    row = tito.truncate(complete(tito.open_ledger([1, 2]), [3, 4, 5, 2]), 4)
    assert row.token_ids == (1, 2, 3, 4) and mask_of(row) == "0011"
    assert row.rollout_logprob == (0.0, 0.0, -0.5, -0.5) and row.policy_version == (-1, -1, 0, 0)


def test_a_merged_row_is_cut_by_the_window_and_not_by_the_cap_of_a_turn():
    """Cap 4, but out 3 + observation 2 + out 3 stays whole."""
    row = complete(tito.append_observation(complete(tito.open_ledger([1]), [5, 6, 2]), [7, 8]), [5, 6, 2])
    assert len(tito.truncate(row, 100)) == 1 + 8


def test_a_rewritten_history_forks():
    """The template drops old thinking, so turn 2's prompt is not an extension."""
    first = complete(tito.open_ledger([1, 2]), [5, 6, 2])
    rows = tito.continue_rows((first,), [1, 2, 6, 2, 3])
    rows = (*rows[:-1], complete(rows[-1], [7, 2]))
    assert [row.token_ids for row in rows] == [(1, 2, 5, 6, 2), (1, 2, 6, 2, 3, 7, 2)]
    assert [mask_of(row) for row in rows] == ["00111", "0000011"]


@given(prompt=st.lists(st.integers(0, 9), min_size=1), out=TEXT, extra=TEXT)
def test_a_prompt_that_extends_the_row_grows_it(prompt, out, extra):
    row = complete(tito.open_ledger(prompt), [*out, E])
    rows = tito.continue_rows((row,), [*row.token_ids, *extra])
    assert len(rows) == 1
    assert rows[0].token_ids == (*row.token_ids, *extra) and not any(rows[0].loss_mask[len(row) :])


@given(history=histories(), prompt=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_whatever_the_prompt_the_next_turn_sees_exactly_it(history, prompt):
    rows = tito.continue_rows((history[-1],), prompt)
    assert rows[-1].token_ids == tuple(prompt) and rows[-1].finish_reason == ""
    assert rows[0].token_ids[: len(history[-1])] == history[-1].token_ids
    trained = sum(sum(row.loss_mask) for row in rows)
    assert trained == sum(history[-1].loss_mask)


def test_a_trajectory_begins_with_its_first_prompt():
    assert tito.continue_rows((), [1, 2]) == (tito.open_ledger([1, 2]),)


def test_sampled_ids_are_kept_where_the_template_writes_others():
    """Model 7 8 9 50 51 2, template 7 8 9 77 2 30 31."""
    row = complete(tito.open_ledger([7, 8, 9]), [50, 51, 2])
    delta = tito.observation_delta(
        [7, 8, 9, 77, 2], [7, 8, 9, 77, 2, 30, 31], stop_ids={2}, last_token=2, separator=()
    )
    assert delta is not None
    assert tito.append_observation(row, delta).token_ids == (7, 8, 9, 50, 51, 2, 30, 31)


def test_the_separator_after_the_end_of_turn_is_kept_and_not_trained():
    delta = tito.observation_delta(
        [1, 100, 10], [1, 100, 10, 3, 4], stop_ids={100}, last_token=100, separator=[10]
    )
    assert delta == (10, 3, 4)
    row = tito.append_observation(complete(tito.open_ledger([7]), [1, 100]), delta or ())
    assert mask_of(row)[-3:] == "000"


def test_sampled_text_that_a_template_would_strip_stays():
    """The text "ok" and a trailing blank that a re-rendering drops."""
    row = complete(tito.open_ledger([1]), [11, 12, 2])
    delta = tito.observation_delta([1, 11, 2], [1, 11, 2, 9], stop_ids={2}, last_token=2, separator=())
    assert tito.append_observation(row, delta or ()).token_ids == (1, 11, 12, 2, 9)


def test_an_end_of_turn_that_was_added_is_context_and_never_trained():
    row = tito.close(complete(tito.open_ledger([1]), [5, 6], finish="length"), [2])
    row = complete(tito.append_observation(row, [3]), [8, 2])
    assert mask_of(row)[1:] == "110011"
    assert sum(logprob != 0 for logprob in row.rollout_logprob) == 4
    assert row.policy_version == (-1, 0, 0, -1, -1, 0, 0)


def test_assistant_turns_inside_the_prompt_are_not_trained():
    assert sum(complete(tito.open_ledger([U, 1, A, 5, 6, 7, U, 2]), [8, 2]).loss_mask) == 2


def test_a_resumed_turn_extends_the_mask_with_the_tokens():
    """Three old tokens as prompt, two new ones."""
    assert mask_of(complete(tito.open_ledger([4, 5, 6]), [7, 2])) == "00011"


def test_chunks_of_one_turn_keep_their_own_versions():
    """Three tokens at version 2, none in an aborted chunk, two at version 3."""
    row = complete(tito.open_ledger([1]), [4, 5, 6], finish="abort", version=2)
    row = complete(row, [], finish="abort")
    row = complete(row, [7, 2], version=3)
    assert row.policy_version == (-1, 2, 2, 2, 3, 3) and mask_of(row) == "011111"


@pytest.mark.parametrize("finish", ["length", "abort", ""])
def test_only_a_completed_turn_is_followed_by_an_observation(finish):
    row = tito.open_ledger([1])
    row = complete(row, [5], finish=finish) if finish else row
    with pytest.raises(ValueError, match=f"^an observation must follow a completed turn, got '{finish}'$"):
        tito.append_observation(row, [3])


def test_a_cut_turn_is_never_extended_by_the_next_prompt():
    """The row ends at turn 1; going on begins a new row."""
    row = complete(tito.open_ledger([1]), [5], finish="length")
    rows = tito.continue_rows((row,), [1, 5, 3])
    assert rows[0] == row and len(rows) == 2


def test_chatml_delta_keeps_the_newline_after_the_sampled_end():
    base = [1, E, N]
    full = [*base, S, 7, N, 8, E, N, S, A, N]
    delta = tito.observation_delta(base, full, stop_ids={E}, last_token=E, separator=[N])
    assert delta == (N, S, 7, N, 8, E, N, S, A, N)


def test_glm_delta_drops_the_observation_token_that_was_sampled():
    """The turn ends with the token that opens the observation."""
    delta = tito.observation_delta([1, 2], [1, 2, O, 7, A], stop_ids={O, U}, last_token=O, separator=())
    assert delta == (7, A)


def test_glm_delta_does_not_cut_at_an_earlier_observation():
    """The stop token of an older turn in the prefix proves nothing about this one."""
    prefix = [U, 1, A, 2, O, 7, A, 3]
    assert (
        tito.observation_delta(prefix, [*prefix, U, 8, A], stop_ids={O, U}, last_token=O, separator=())
        is None
    )


@pytest.mark.parametrize(
    "why, prefix, full, last, separator",
    [
        ("the template rewrote what came before", [1, 2, E], [1, 3, E, 4], E, ()),
        ("the observation made the conversation shorter", [1, 2, E], [1, 2], E, ()),
        ("the turn has no stop token", [1, E, N], [1, E, N, S], 5, (N,)),
        ("the turn has no stop token, nor has its rendering", [1, 5], [1, 5, S], 5, ()),
        ("the template does not end with the stop token", [1, 2], [1, 2, 7], E, ()),
        ("something else follows the stop token", [1, E, 9], [1, E, 9, 7], E, (N,)),
        ("the separator is missing", [1, E], [1, E, 7], E, (N,)),
    ],
)
def test_what_cannot_be_proved_is_none(why, prefix, full, last, separator):
    assert tito.observation_delta(prefix, full, stop_ids={E}, last_token=last, separator=separator) is None, (
        why
    )


@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), lossy=st.booleans())
def test_under_chatml_the_row_is_the_rendering_with_sampled_text_in_its_place(turns, lossy):
    """Whether or not the template keeps the assistant's wording, the ledger has it."""

    def render(words):
        return [t for role, text in words for t in (S, role, N, *text, E, N)] + [S, A, N]

    seen = [(U, [1])]
    row, expected = tito.open_ledger(render(seen)), render(seen)
    for said, observed in turns:
        row = complete(row, [*said, E])
        seen.append((A, said[:-1] if lossy else said))
        prefix, full = render(seen)[:-3], render([*seen, (O, observed)])
        delta = tito.observation_delta(prefix, full, stop_ids={E}, last_token=E, separator=(N,))
        assert delta is not None
        row = tito.append_observation(row, delta)
        seen.append((O, observed))
        expected += [*said, E, N, S, O, N, *observed, E, N, S, A, N]
    assert row.token_ids == tuple(expected)
    assert lossy or row.token_ids == tuple(render(seen))


@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_under_glm_no_observation_token_is_lost_or_doubled(turns):
    def render(words):
        return [t for role, text in words for t in (role, *text)]

    seen = [(U, [1])]
    row = tito.open_ledger([*render(seen), A])
    for said, observed in turns:
        row = complete(row, [*said, O])
        seen.append((A, said))
        prefix, full = render(seen), [*render([*seen, (O, observed)]), A]
        delta = tito.observation_delta(prefix, full, stop_ids={O, U}, last_token=O, separator=())
        assert delta is not None
        row = tito.append_observation(row, delta)
        seen.append((O, observed))
    assert row.token_ids == (*render(seen), A)


# Deltas

SMALL = st.lists(st.integers(0, 2), max_size=5)


@given(prefix=SMALL, new=SMALL, stop=st.sets(st.integers(0, 2)), last=st.integers(0, 2), gap=SMALL)
def test_a_delta_is_what_follows_the_stop_token_in_the_rendering(prefix, new, stop, last, gap):
    """Whatever the template: the delta ends the rendering, and the token before it is the row's last one."""
    full = prefix + new
    delta = tito.observation_delta(prefix, full, stop_ids=stop, last_token=last, separator=gap)
    after_the_turn = prefix[-len(gap) - 1 :] == [last, *gap]
    opens_the_next = new[:1] == [last]
    assert (delta is None) is (last not in stop or not (after_the_turn or opens_the_next))
    if delta is not None:
        at = len(full) - len(delta)
        assert full[at:] == list(delta) and full[at - 1] == last
        assert at == (len(prefix) - len(gap) if after_the_turn else len(prefix) + 1)


@given(prefix=SMALL, full=SMALL, last=st.integers(0, 2))
def test_a_rendering_that_does_not_extend_the_first_has_no_delta(prefix, full, last):
    delta = tito.observation_delta(prefix, full, stop_ids={0, 1, 2}, last_token=last, separator=())
    assert delta is None or full[: len(prefix)] == prefix


PAIRS = st.lists(
    st.sampled_from(
        [
            ([1, E, N], [1, E, N, 7]),
            ([5, 1, E, N], [5, 1, E, N, 7]),
            ([1, E, N], [1, E, N, 8]),
            ([1, E, N], [2, E, N, 7]),
        ]
    ),
    min_size=1,
    max_size=4,
)


@given(pairs=PAIRS, data=st.data())
def test_short_conversations_speak_for_a_long_one_only_where_all_agree(pairs, data):
    found = {tito.observation_delta(a, b, stop_ids={E}, last_token=E, separator=(N,)) for a, b in pairs}
    shuffled = data.draw(st.permutations(pairs))
    agreed = tito.agreed_delta(shuffled, stop_ids={E}, last_token=E, separator=(N,))
    assert agreed == (found.pop() if len(found) == 1 else None)


def test_a_template_that_drops_reasoning_is_caught_by_the_stub_that_reasons():
    """Without reasoning a new user turn looks harmless; 6 is what the template drops."""
    plain, reasoned = ([1, 2, E], [1, 2, E, 7]), ([1, 6, 2, E], [1, 2, E, 7])
    accepted = tito.agreed_delta([plain], stop_ids={E}, last_token=E, separator=())
    assert accepted == (7,)
    assert tito.agreed_delta([plain, reasoned], stop_ids={E}, last_token=E, separator=()) is None


def test_stop_tokens_separator_and_last_token_reach_the_proof():
    pair = ([1, E, N], [1, E, N, 7])
    assert tito.agreed_delta([pair], stop_ids={E}, last_token=E, separator=(N,)) == (N, 7)
    assert tito.agreed_delta([pair], stop_ids={O}, last_token=E, separator=(N,)) is None
    assert tito.agreed_delta([pair], stop_ids={E, O}, last_token=O, separator=(N,)) is None
    assert tito.agreed_delta([pair], stop_ids={E}, last_token=E, separator=()) is None
    with pytest.raises(ValueError, match="^renderings must not be empty$"):
        tito.agreed_delta([], stop_ids={E}, last_token=E, separator=())


# Once


def tagged(row, count, tag, *, finish):
    """A completion whose logprobs name it: no two sampled tokens of a trajectory are the same sample."""
    names = [-(tag * 10.0 + i) - 1 for i in range(count)]
    return tito.append_completion(row, [7] * count, names, [0] * count, finish_reason=finish), names


@given(data=st.data())
def test_each_sampled_token_of_a_conversation_is_trained_exactly_once(data):
    """Prompts that extend, rewrite, cut or repeat the past, and turns that end in any way."""
    rows, said = (), []
    for tag in range(data.draw(st.integers(1, 5))):
        past = list(rows[-1].token_ids) if rows else [1]
        prompt = data.draw(st.sampled_from([past, [*past, 3], past[:-1] or [1], [2, *past], past[::-1]]))
        rows = tito.continue_rows(rows, prompt)
        assert rows[-1].token_ids == tuple(prompt)
        row, names = tagged(
            rows[-1],
            data.draw(st.integers(0, 3)),
            tag,
            finish=data.draw(st.sampled_from(["stop", "stop", "length"])),
        )
        rows, said = (*rows[:-1], row), said + names
    assert sorted(trained(rows)) == sorted(said)
    assert tito.trained_once(rows) == rows


def trained(rows):
    return [lp for row in rows for lp, live in zip(row.rollout_logprob, row.loss_mask) if live]


@st.composite
def branches(draw):
    """Rows that grew from each other: any row may be gone on with more than once, from any of its states."""
    states, said = [tito.open_ledger([1, 2])], []
    ends = []
    for tag in range(draw(st.integers(1, 6))):
        row = draw(st.sampled_from(states))
        if row.finish_reason == "stop":
            row = tito.append_observation(row, draw(st.lists(st.integers(3, 4), max_size=2)))
        elif row.finish_reason == "length":
            row = tito.append_observation(tito.close(row, [9]), [3])
        finish = draw(st.sampled_from(["stop", "length", "abort"]))
        row, names = tagged(row, draw(st.integers(0, 3)), tag, finish=finish)
        states.append(row)
        ends.append(row)
        said += names
    return tuple(ends), said


@given(grown=branches())
def test_each_sampled_token_of_branches_is_trained_exactly_once(grown):
    rows, said = grown
    once = tito.trained_once(rows)
    assert sorted(trained(once)) == sorted(said)
    assert tito.trained_once(once) == once
    assert once[0] == rows[0]
    alone = tito.Ledger(spans=(tito.Span((5,), (-0.5,), (0,)),), finish_reason="stop")
    assert tito.trained_once((alone,)) == (alone,)


@given(grown=branches())
def test_training_once_only_takes_tokens_out_of_the_mask(grown):
    rows, _ = grown
    once = tito.trained_once(rows)
    for before, after in zip(rows, once, strict=True):
        check(after)
        assert after.token_ids == before.token_ids and after.finish_reason == before.finish_reason
        for t, live in enumerate(after.loss_mask):
            assert not live or before.loss_mask[t]
            assert not live or after.rollout_logprob[t] == before.rollout_logprob[t]
            assert not live or after.policy_version[t] == before.policy_version[t]


def test_the_row_that_was_there_first_trains_what_two_share():
    start = tito.append_observation(complete(tito.open_ledger([1]), [5, 2]), [3])
    left, right = complete(start, [6, 2]), complete(start, [7, 8, 2])
    once = tito.trained_once((left, right, left))
    assert [mask_of(row) for row in once] == ["011011", "0000111", "000000"]
    assert [row.token_ids for row in once] == [left.token_ids, right.token_ids, left.token_ids]
    assert once[2].spans == tuple(tito.Span(span.token_ids, (), ()) for span in left.spans)
    assert tito.trained_once(()) == ()


def test_what_two_rows_share_ends_at_the_first_token_that_differs():
    """Also inside a completion, and also where only the logprob or the version tells two samples apart."""
    row = tito.append_completion(tito.open_ledger([1]), [5, 6], [-0.5, -0.25], [3, 3], finish_reason="stop")
    others = [
        ([5, 7], [-0.5, -0.25], [3, 3]),
        ([5, 6], [-0.5, -0.125], [3, 3]),
        ([5, 6], [-0.5, -0.25], [3, 4]),
    ]
    for ids, logprob, version in others:
        other = tito.append_completion(tito.open_ledger([1]), ids, logprob, version, finish_reason="stop")
        assert [mask_of(r) for r in tito.trained_once((row, other))] == ["011", "001"]
    longer = tito.append_observation(row, [4])
    assert [mask_of(r) for r in tito.trained_once((row, longer))] == ["011", "0000"]
    assert [mask_of(r) for r in tito.trained_once((longer, row))] == ["0110", "000"]
    # a later row may share most with any earlier one
    far = complete(tito.open_ledger([9]), [2])
    assert [mask_of(r) for r in tito.trained_once((far, row, far, row))] == ["01", "011", "00", "000"]


@given(out=TEXT, extra=TEXT)
def test_inputs_are_untouched(out, extra):
    prompt, ids, logprob, version = [1, 2], [*out, 2], [-1.0] * (len(out) + 1), [0] * (len(out) + 1)
    row = tito.open_ledger(prompt)
    longer = tito.append_completion(row, ids, logprob, version, finish_reason="stop")
    tito.append_observation(longer, extra)
    assert prompt == [1, 2] and ids == [*out, 2] and len(row) == 2 and len(longer) == 3 + len(out)


@pytest.mark.parametrize(
    "ids, logprob, version, finish, text",
    [
        ([5], [-1.0], [0], "eos", "finish_reason must be one of stop, length, abort, got 'eos'"),
        ([5], [], [0], "stop", f"{EQUALLY_LONG}, got 1, 0 and 1"),
        ([5], [-1.0], [], "stop", f"{EQUALLY_LONG}, got 1, 1 and 0"),
        ([5], [math.nan], [0], "stop", "logprob of a sampled token must be finite, got nan"),
        ([5], [-math.inf], [0], "stop", "logprob of a sampled token must be finite, got -inf"),
        ([5, 6], [-1.0, math.inf], [0, 0], "stop", "logprob of a sampled token must be finite, got inf"),
        ([-7], [-1.0], [0], "stop", "token_ids must not be negative, got -7"),
        (
            [5, 6],
            [-1.0, -1.0],
            [1, -2],
            "stop",
            "policy_version of a sampled token must not be negative, got -2",
        ),
        ([5], [-1.0], [-1], "stop", "policy_version of a sampled token must not be negative, got -1"),
    ],
)
def test_a_completion_with_incomplete_records_is_refused(ids, logprob, version, finish, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        tito.append_completion(tito.open_ledger([1]), ids, logprob, version, finish_reason=finish)


def test_moves_out_of_turn_are_refused():
    done = complete(tito.open_ledger([1]), [2])
    with pytest.raises(
        ValueError, match="^a completion must follow a prompt or an aborted chunk, got one after 'stop'$"
    ):
        complete(done, [3])
    with pytest.raises(ValueError, match="^only a turn cut by length or abort can be closed, got 'stop'$"):
        tito.close(done, [2])
    with pytest.raises(ValueError, match="^prompt_ids must not be empty$"):
        tito.open_ledger([])
    with pytest.raises(ValueError, match="^length must not be negative, got -1$"):
        tito.truncate(done, -1)
