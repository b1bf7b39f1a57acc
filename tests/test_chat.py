"""The chat template and tokenizer of the embedded policy: ids that only grow, and text that cannot pose as control."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import anyio
import mcp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from system.harness.chat import Chat, ToolCall, call_text, function_schema, parse_completion
from system.harness.office import observation_ids
from system.tools.server import build_server

CLERK = Path(__file__).resolve().parent.parent / "policies" / "clerk"
CHAT = Chat(CLERK)
TOOLS = [
    function_schema("read_mail", "Read a mail.", {"properties": {"id": {"type": "string"}}}),
    function_schema("list_mail", "List mails.", {"properties": {}}),
]
CONTROL = {CHAT.tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
texts = st.text(alphabet=st.sampled_from("abKes 09:|\n{}\"'<>é€"), max_size=40)


def test_a_prompt_is_what_transformers_renders_from_the_same_folder():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(CLERK)
    messages = [{"role": "user", "content": "Find Norvik fee (fees.xlsx). Answer with the number."}]
    theirs = tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=True
    )
    assert CHAT.render(messages, TOOLS, add_generation_prompt=True) == theirs["input_ids"]


def test_tools_are_named_in_one_short_line_each():
    ids = CHAT.render([{"role": "user", "content": "x"}], TOOLS, add_generation_prompt=True)
    assert "read_mail(id)\nlist_mail()\n" in CHAT.decode(ids)


@pytest.mark.parametrize("spelt", ["<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<tool_call>"])
def test_control_tokens_spelt_in_a_tool_result_stay_text(spelt):
    stop = CHAT.stop_ids[0]
    ids = observation_ids(CHAT, f"a{spelt}b", stop)
    plain = observation_ids(CHAT, "ab", stop)
    assert [i for i in ids if i in CONTROL] == [i for i in plain if i in CONTROL]
    assert CHAT.tokenizer.token_to_id("<tool_call>") not in ids
    assert f"a{spelt}b" in CHAT.tokenizer.decode(ids, skip_special_tokens=False)


@given(texts)
def test_an_observation_begins_with_the_newline_that_the_template_writes_after_a_turn(text):
    stop = CHAT.stop_ids[0]
    ids = observation_ids(CHAT, text, stop)
    assert CHAT.tokenizer.decode(list(ids), skip_special_tokens=False) == (
        f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@given(texts)
def test_a_completion_decodes_to_its_text_without_the_stop_token(text):
    assert CHAT.decode(CHAT.completion(text)) == text


@given(st.integers(0, 10**6))
def test_a_number_is_one_token_a_digit(number):
    assert len(CHAT.completion(str(number))) == len(str(number)) + 1


@given(
    st.text(max_size=30),
    st.dictionaries(
        st.text(max_size=5),
        st.text(max_size=20) | st.sampled_from(["<tool_call>", "</tool_call>", "</think>"]),
    ),
)
def test_a_call_reads_back_as_it_was_written_whatever_its_strings_say(name, arguments):
    assert parse_completion(call_text(ToolCall(name, arguments))).call == ToolCall(name, arguments)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_nested_arguments_read_back(value):
    call = ToolCall("todowrite", {"todos": value})
    assert parse_completion(call_text(call)).call == call


@given(texts, texts)
def test_words_around_a_call_are_no_part_of_it(before, after):
    assert parse_completion(f"{before}{call_text(CALL)}{after}").call == CALL


CALL = ToolCall("read_file", {"path": "a.txt"})
ONE = '{"name": "a"}'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>\n{\n</tool_call>", "the tool call is not JSON"),
        (f"<tool_call>{ONE[:-1]}</tool_call>", "the tool call is not JSON"),
        (f"<tool_call>{ONE} and</tool_call>", "the tool call is not JSON"),
        ('<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>', "the tool call is not JSON"),
        (r'<tool_call>{"name": "a", "arguments": {"b": "\ud800"}}</tool_call>', "the tool call is not JSON"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "the tool call is not JSON"),
        (f"<tool_call>{ONE}", "the tool call is not closed by </tool_call>"),
        ('<tool_call>{"name": "a", "argum', "the tool call is not closed by </tool_call>"),
        (f"{ONE}</tool_call>", "a tool call must be opened by <tool_call> before it is closed"),
        (f"</tool_call><tool_call>{ONE}</tool_call>", "a tool call must be opened by <tool_call> before"),
        (f"<tool_call>{ONE}</tool_call><tool_call>{ONE}</tool_call>", "one tool call a turn, opened and"),
        (f"<tool_call>{ONE}<tool_call>{ONE}</tool_call>", "one tool call a turn, opened and closed once"),
        (f"<tool_call>{ONE}</tool_call></tool_call>", "one tool call a turn, opened and closed once"),
        (f"<tool_call>{ONE}</tool_call><tool_call>", "one tool call a turn, opened and closed once"),
        ("<tool_call>[1]</tool_call>", 'a tool call needs "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'a tool call needs "name"'),
        ('<tool_call>{"name": "a", "arguments": 3}</tool_call>', '"arguments" must be an object'),
        ('<tool_call>{"name": "a", "name": "b"}</tool_call>', 'the tool call names "name" twice'),
        (
            '<tool_call>{"name": "a", "arguments": {"b": {"c": 1, "c": 1}}}</tool_call>',
            'the tool call names "c" twice',
        ),
        (
            '<tool_call>{"name": "a", "path": "b"}</tool_call>',
            'a tool call has only "name" and "arguments", got "path"',
        ),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(text, error):
    parsed = parse_completion(text)
    assert parsed.call is None and parsed.answer is None
    assert parsed.error is not None and error in parsed.error and "\n" not in parsed.error


def in_tags(call: ToolCall) -> str:
    """A call as the templates of Qwen3.5 teach it."""
    given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{given}</function>\n</tool_call>"


names = st.text(alphabet="abC_-.9", min_size=1, max_size=8)
values_in_tags = texts | st.sampled_from(
    ["<tool_call>", "</tool_call>", "</parameter>", "</think>", "a\n", "\n"]
)


@given(names, st.dictionaries(names, values_in_tags, max_size=3))
def test_a_call_in_tags_reads_back_as_it_was_written(name, arguments):
    assert parse_completion(in_tags(ToolCall(name, arguments))).call == ToolCall(name, arguments)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<function=a>", "the tool call is not closed by </tool_call>"),
        ("<function=a><parameter=b>1</parameter></function>", "the tool call is not closed by </tool_call>"),
        ("<function=></function></tool_call>", "a function must have a name"),
        ("<function=a><parameter=b>1</function></tool_call>", "a function must hold <parameter=name>value"),
        (
            "<function=a>1</function></tool_call>",
            "a function must hold <parameter=name>value</parameter> only",
        ),
        (
            "<function=a><parameter=b>1</parameter><parameter=b>2</parameter></function></tool_call>",
            'the tool call names "b" twice',
        ),
        ("<function=a></function></tool_call><tool_call>", "one tool call a turn, opened and closed once"),
        ("<function=a></function><function=b></function></tool_call>", "the tool call is not JSON"),
    ],
)
def test_a_call_in_tags_that_cannot_be_read_is_told_in_one_line(text, error):
    parsed = parse_completion(f"<tool_call>{text}")
    assert parsed.call is None and parsed.answer is None
    assert parsed.error is not None and error in parsed.error


def test_reasoning_is_no_answer_and_makes_no_call():
    thought = f"I could say {call_text(CALL)} here.</think>\n\n"
    assert parse_completion(f"<think>{thought}4821").answer == "4821"
    assert parse_completion(f"{thought}{call_text(CALL)}").call == CALL
    assert parse_completion(f"<think>x</think>{call_text(CALL)[:-3]}").error is not None


def test_what_the_imitated_mistake_is_answered_has_not_changed():
    """The policy of the repository has learnt from this very line."""
    told = parse_completion(call_text(CALL).replace("}}", "}"))
    assert told.error == "the tool call is not JSON"


def test_the_prompt_of_the_repository_policy_is_token_for_token_what_it_was_trained_on(tmp_path):
    """Fifteen tools, their names, schemas and lines: a change here is a change of the policy's world."""

    async def listed() -> list[dict[str, Any]]:
        async with mcp.Client(build_server(tmp_path)) as client:
            tools = (await client.list_tools()).tools
            return [function_schema(t.name, t.description or "", t.input_schema) for t in tools]

    tools = anyio.run(listed)
    ids = CHAT.render([{"role": "user", "content": "Find it."}], tools, add_generation_prompt=True)
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
    assert (len(tools), len(ids), digest) == (15, 99, "a977257cd6a1cf8d")


def test_a_folder_without_a_file_is_refused_by_its_name(tmp_path):
    with pytest.raises(ValueError, match="policy folder must hold tokenizer.json"):
        Chat(tmp_path)
