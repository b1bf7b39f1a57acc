"""Laws of token identity: an honest row has no fault, and every planted drift has one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.identity import Emission, Span, identity_faults


@st.composite
def honest(draw):
    """A row of one to four turns with the engine's record of each, as the harness would build it."""
    ids, mask, logprob, version, spans = [], [], [], [], []
    for _ in range(draw(st.integers(1, 4))):
        seen = draw(st.lists(st.integers(0, 50), min_size=1, max_size=4))
        ids, mask = ids + seen, mask + [False] * len(seen)
        logprob, version = logprob + [0.0] * len(seen), version + [-1] * len(seen)
        said = draw(st.lists(st.integers(0, 50), min_size=1, max_size=4))
        told = [-draw(st.floats(0.001, 9.0)) for _ in said]
        weights = [draw(st.integers(0, 3)) for _ in said]
        spans.append(Span(len(ids), len(ids) + len(said), Emission(tuple(ids), said, told, weights)))
        ids, mask, logprob = ids + said, mask + [True] * len(said), logprob + told
        version = version + weights
    return ids, mask, logprob, version, spans


@given(honest())
def test_a_row_made_of_what_the_engine_emitted_has_no_fault(row):
    assert identity_faults(*row) == ()


@given(honest(), st.data())
def test_one_token_of_drift_anywhere_is_a_fault(row, data):
    ids, mask, logprob, version, spans = row
    at = data.draw(st.integers(0, spans[-1].end - 1))
    drifted = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
    assert identity_faults(drifted, mask, logprob, version, spans)


@given(honest())
def test_a_mask_shifted_by_one_is_a_fault(row):
    ids, mask, logprob, version, spans = row
    assert identity_faults(ids, [*mask[1:], False], logprob, version, spans)
    assert identity_faults(ids, [False, *mask[:-1]], logprob, version, spans)


@given(honest(), st.data())
def test_a_logprob_off_by_one_bit_or_a_version_off_by_one_is_a_fault(row, data):
    ids, mask, logprob, version, spans = row
    at = data.draw(st.sampled_from([i for i, trained in enumerate(mask) if trained]))
    nudged = [*logprob[:at], logprob[at] * (1 + 2**-52), *logprob[at + 1 :]]
    assert identity_faults(ids, mask, nudged, version, spans)
    older = [*version[:at], version[at] + 1, *version[at + 1 :]]
    assert identity_faults(ids, mask, logprob, older, spans)


@given(honest(), st.data())
def test_a_retokenised_turn_is_a_fault_even_where_its_length_stays(row, data):
    ids, mask, logprob, version, spans = row
    number = data.draw(st.integers(0, len(spans) - 1))
    start, end, _ = spans[number]
    other = [token + 51 for token in ids[start:end]]
    faults = identity_faults([*ids[:start], *other, *ids[end:]], mask, logprob, version, spans)
    assert any(f"completion {number} differs in token_ids at 0" in fault for fault in faults)


@given(honest())
def test_a_completion_the_row_leaves_out_is_a_fault(row):
    ids, mask, logprob, version, spans = row
    assert identity_faults(ids, mask, logprob, version, spans[:-1])


def test_faults_name_the_completion_the_field_and_the_place():
    emission = Emission((7, 8), (5, 2), (-0.5, -0.25), (3, 3))
    faults = identity_faults(
        [7, 8, 5, 9],
        [False, False, True, True],
        [0.0, 0.0, -0.5, -0.25],
        [-1, -1, 3, 4],
        [Span(2, 4, emission)],
    )
    assert faults == (
        "completion 0 differs in token_ids at 1",
        "completion 0 differs in policy_version at 1",
    )


def test_faults_come_in_the_order_prompt_tokens_logprobs_versions_then_the_mask():
    emission = Emission((7, 9), (5, 2), (-0.5, -0.25), (3, 3))
    faults = identity_faults(
        [7, 8, 6, 2],
        [True, False, True, True],
        [0.0, 0.0, -0.5, -0.5],
        [-1, -1, 2, 3],
        [Span(2, 4, emission)],
    )
    assert faults == (
        "completion 0 differs in prompt at 1",
        "completion 0 differs in token_ids at 0",
        "completion 0 differs in logprob at 1",
        "completion 0 differs in policy_version at 0",
        "loss_mask differs from the completions at 0",
    )


@pytest.mark.parametrize("token_ids, at", [((5,), 1), ((5, 2, 9), 2)])
def test_a_completion_that_is_longer_or_shorter_differs_where_the_other_ends(token_ids, at):
    emission = Emission((7,), token_ids, (-0.5, -0.25), (3, 3))
    faults = identity_faults(
        [7, 5, 2], [False, True, True], [0, -0.5, -0.25], [-1, 3, 3], [Span(1, 3, emission)]
    )
    assert faults == (f"completion 0 differs in token_ids at {at}",)


def test_a_row_cut_before_the_end_of_a_completion_is_a_fault():
    emission = Emission((7,), (5, 2), (-0.5, -0.25), (3, 3))
    faults = identity_faults([7, 5], [False, True], [0, -0.5], [-1, 3], [Span(1, 3, emission)])
    assert [fault.split(" differs")[0] for fault in faults] == ["completion 0"] * 3


def test_a_nan_is_equal_to_nothing_itself_included():
    nan = float("nan")
    emission = Emission((7,), (5,), (nan,), (3,))
    faults = identity_faults([7, 5], [False, True], [0.0, nan], [-1, 3], [Span(1, 2, emission)])
    assert faults == ("completion 0 differs in logprob at 0",)


def test_a_mask_of_zeros_and_ones_is_a_mask():
    emission = Emission((7,), (5,), (-1.0,), (3,))
    assert identity_faults([7, 5], [0, 1], [0.0, -1.0], [-1, 3], [Span(1, 2, emission)]) == ()  # pyright: ignore[reportArgumentType]
    assert identity_faults([7, 5], [2, 1], [0.0, -1.0], [-1, 3], [Span(1, 2, emission)]) == (  # pyright: ignore[reportArgumentType]
        "loss_mask differs from the completions at 0",
    )


def test_a_row_without_completions_trains_nothing():
    assert identity_faults([7], [False], [0.0], [-1], []) == ()
    assert identity_faults([7], [True], [0.0], [-1], []) == ("loss_mask differs from the completions at 0",)


@given(honest())
def test_the_row_is_left_as_it_was(row):
    before = [list(part) for part in row]
    identity_faults(*row)
    assert before == [list(part) for part in row]


NOTHING = Emission((), (), (), ())


def test_a_completion_of_no_tokens_may_lie_anywhere_and_trains_nothing():
    seen = Emission((1, 2), (), (), ())
    assert (
        identity_faults([1, 2], [False] * 2, [0.0] * 2, [-1] * 2, [Span(2, 2, seen), Span(2, 2, seen)]) == ()
    )


@pytest.mark.parametrize(
    "places, text",
    [
        ([(-1, 0)], "span 0 must begin at 0 or later and not end before, got -1 to 0"),
        ([(1, 0)], "span 0 must begin at 0 or later and not end before, got 1 to 0"),
        ([(0, 2), (1, 3)], "span 1 must begin at 2 or later and not end before, got 1 to 3"),
        ([(0.0, 1)], r"every start must be a whole number, got 0\.0"),
        ([(0, None)], "every end must be a whole number, got None"),
    ],
)
def test_spans_that_do_not_follow_each_other_are_refused(places, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        identity_faults(
            [1, 2, 3],
            [False] * 3,
            [0.0] * 3,
            [0] * 3,
            [Span(*place, NOTHING) for place in places],  # pyright: ignore[reportCallIssue]
        )


@pytest.mark.parametrize("short", range(4))
def test_lists_of_different_length_are_refused(short):
    lists = [[1, 2], [True, True], [0.0, 0.0], [0, 0]]
    lists[short] = lists[short][:1]
    counts = [len(one) for one in lists]
    with pytest.raises(
        ValueError,
        match="token_ids, loss_mask, rollout_logprob and policy_version must be equally long, "
        f"got {counts[0]}, {counts[1]}, {counts[2]} and {counts[3]}",
    ):
        identity_faults(*lists, [])  # pyright: ignore[reportCallIssue]
