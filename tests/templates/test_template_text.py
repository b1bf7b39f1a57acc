"""Deltas on the templates of Qwen3, Qwen3.5, GLM-4.6 and the Llama 3 format, at the level of text."""

from __future__ import annotations

import pytest
from family import ANSWER_STUBS, FAMILIES, answer, call, system, tool, user
from hypothesis import given
from hypothesis import strategies as st

from core.tito import (
    Ledger,
    append_completion,
    append_observation,
    close,
    continue_rows,
    observation_delta,
    open_ledger,
    trained_once,
)

families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
texts = st.text(alphabet="ab {}é\n", min_size=1, max_size=5).map(lambda text: f"x{text}x")
answers_of_tools = st.lists(st.builds(tool, texts), min_size=1, max_size=1) | st.lists(
    st.builds(tool, texts), min_size=2, max_size=3
)


ALWAYS, SOMETIMES = st.just("why"), st.sampled_from(["", "why"])


@st.composite
def exchanges(draw, reasoned):
    """A question, any number of steps, an answer."""
    messages = [user(draw(texts))]
    for _ in range(draw(st.integers(0, 3))):
        messages.append(call(draw(texts), reasoning=draw(reasoned), cell=draw(texts)))
        messages += draw(answers_of_tools)
    return [*messages, answer(draw(texts), reasoning=draw(reasoned))]


def conversations(reasoned):
    opening = st.just([]) | st.lists(st.builds(system, texts), min_size=1, max_size=1)
    several = st.lists(exchanges(reasoned), min_size=1, max_size=3).map(lambda parts: sum(parts, []))
    return st.tuples(opening, several).map(lambda parts: parts[0] + parts[1])


def tag(row, ids, said, *, finish="stop"):
    """The row with a completion whose logprobs name each token of the conversation."""
    logprob = [-1.0 - len(said) - i for i in range(len(ids))]
    said += logprob
    return append_completion(row, ids, logprob, [0] * len(ids), finish_reason=finish)


def trained(rows):
    return sorted(lp for row in rows for lp, live in zip(row.rollout_logprob, row.loss_mask) if live)


@families
@given(
    past=conversations(ALWAYS),
    last=st.builds(call, texts, reasoning=st.just("r"), cell=texts),
    new=answers_of_tools,
)
def test_what_two_short_conversations_agree_on_is_what_the_template_writes_in_any(family, past, last, new):
    """One tool answer or several at once: the template wraps a run of them together (G56)."""
    stop = family.stop(True)
    delta = family.delta(new, stop)
    before = family.ids([*past, last], prompt=False)
    full = family.ids([*past, last, *new], prompt=True)
    assert delta is not None and full[: len(before)] == before
    assert tuple(full[-len(delta) :]) == delta and full[-len(delta) - 1] == stop


@families
@given(past=conversations(SOMETIMES), new=answers_of_tools)
def test_the_delta_does_not_depend_on_which_turns_reasoned(family, past, new):
    last = call("c", reasoning="", cell="A1")
    delta = family.delta(new, family.stop(True))
    full = family.ids([*past, last, *new], prompt=True)
    assert delta is not None and tuple(full[-len(delta) :]) == delta


@families
def test_a_new_user_turn_forks_where_the_template_drops_reasoning(family):
    delta = family.delta([user("next")], family.stop(False))
    assert (delta is None) == family.forgets


@pytest.mark.parametrize("name", ["glm4_6"])
def test_a_stub_that_does_not_reason_would_let_dropped_reasoning_pass(name):
    family, stub = FAMILIES[name], [user("u"), answer("a", reasoning="")]
    without = observation_delta(
        family.ids(stub, prompt=False),
        family.ids([*stub, user("next")], prompt=True),
        stop_ids={family.stop(False)},
        last_token=family.stop(False),
        separator=(),
    )
    assert without is not None and family.delta([user("next")], family.stop(False)) is None


@families
@given(conversation=conversations(ALWAYS))
def test_every_prompt_of_a_ledger_is_the_templates_own_and_each_sampled_token_is_trained_once(
    family, conversation
):
    """Canonical turns, so that even the wording is the template's; new rows only where it drops reasoning."""
    rows = tuple[Ledger, ...]()
    said, past, new = [], [], []
    for message in conversation:
        if message["role"] != "assistant":
            new.append(message)
            continue
        prompt = family.ids([*past, *new], prompt=True)
        delta = family.delta(new, rows[-1].last_token) if rows else None
        if delta is not None:
            rows = (*rows[:-1], append_observation(rows[-1], delta))
        else:
            rows = continue_rows(rows, prompt)
        assert list(rows[-1].token_ids) == prompt
        past += new
        rows = (*rows[:-1], tag(rows[-1], family.said(past, message), said))
        past.append(message)
        new = []
    assert trained(rows) == sorted(said) and trained_once(rows) == rows
    users = sum(message["role"] == "user" for message in conversation)
    assert len(rows) == (users if family.forgets else 1)


@families
@given(first=texts, second=texts)
def test_answers_of_two_tools_are_rendered_together(family, first, second):
    """G56: one wrapper for the run, where the template has one; never a generation prompt between them."""
    stop = family.stop(True)
    together = family.delta([tool(first), tool(second)], stop)
    alone = [family.delta([tool(text)], stop) for text in (first, second)]
    assert together is not None and alone[0] is not None and alone[1] is not None
    text, pieces = family.letters.decode(together), [family.letters.decode(delta) for delta in alone]
    end = family.render([user("u")], prompt=True).removeprefix(family.render([user("u")], prompt=False))
    assert text.count(end) == 1 and text.endswith(end) and all(piece.endswith(end) for piece in pieces)
    wrapper = {"<|im_end|>": "<|im_start|>user", "<|observation|>": "<|observation|>"}.get(family.after_call)
    if wrapper:
        assert text.count(wrapper) == pieces[0].count(wrapper)


def test_glm_opens_the_observation_by_the_token_that_ended_the_turn():
    """The policy sampled it; the row has it once. After another stop token nothing is proved."""
    family = FAMILIES["glm4_6"]
    observation, person, end = (
        family.letters.encode(t)[0] for t in ("<|observation|>", "<|user|>", "<|endoftext|>")
    )
    delta = family.delta([tool("42")], observation)
    assert delta is not None
    assert family.letters.decode(delta) == "\n<tool_response>\n42\n</tool_response><|assistant|>"
    assert family.delta([tool("42")], person) is None
    assert family.delta([tool("42")], end) is None
    assert family.delta([tool("42")], ord("x")) is None


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_chatml_writes_a_newline_that_the_policy_did_not(name):
    """G13: slicing the rendering at the length of the prefix would lose it."""
    family = FAMILIES[name]
    delta = family.delta([tool("42")], family.stop(True))
    assert delta is not None
    assert family.letters.decode(delta).startswith(
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    )
    assert family.delta([tool("42")], family.letters.encode("<|endoftext|>")[0]) is None


@families
@given(cut=st.integers(0, 30), text=texts)
def test_a_turn_that_was_cut_goes_on_after_tokens_that_are_never_trained(family, cut, text):
    """G15: the closing tokens shift what follows, and carry no logprob."""
    past, stop = [user("u")], family.stop(True)
    ids = family.said(past, call("c", reasoning="r", cell="A1"))[:-1][:cut]
    row = tag(open_ledger(family.ids(past, prompt=True)), ids, said := [], finish="length")
    row = close(row, [*family.letters.encode("</think>"), stop])
    delta = family.delta([tool(text)], row.last_token)
    assert delta is not None
    row = append_observation(row, delta)
    start = len(family.ids(past, prompt=True))
    assert [t for t, live in enumerate(row.loss_mask) if live] == [*range(start, start + len(ids))]
    assert trained((row,)) == sorted(said) and row.rollout_logprob[start + len(ids) :] == (0.0,) * (
        len(row) - start - len(ids)
    )
    assert family.letters.decode(row.token_ids).count(family.letters.decode(delta)) == 1


@families
def test_a_template_that_rewrites_what_it_is_given_keeps_what_was_sampled_only_in_the_ledger(family):
    """G14: line breaks and blanks that the templates trim were sampled, and stay."""
    past, stop = [user("u")], family.stop(True)
    sampled = [*family.letters.encode("<think>\nr\n</think>\n\n\n  spaced  \n"), stop]
    row = tag(open_ledger(family.ids(past, prompt=True)), sampled, [])
    delta = family.delta([tool("42")], stop)
    assert delta is not None
    grown = append_observation(row, delta)
    assert list(grown.token_ids[len(row) - len(sampled) : len(row)]) == sampled
    again = family.ids([*past, answer("\n  spaced  \n", reasoning="r"), tool("42")], prompt=True)
    assert list(grown.token_ids) != again


def test_stubs_that_speak_for_answers_have_reasoning_in_every_turn():
    assert all(m.get("reasoning_content") for stub in ANSWER_STUBS for m in stub if m["role"] == "assistant")
