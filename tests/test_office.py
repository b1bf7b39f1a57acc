"""The office agent with a scripted policy over the real tools: every token it sampled, and nothing else, is trained."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import anyio
import mcp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.outcome import Outcome
from core.tito import sampled_runs
from system.engine import Completion, EngineError, GenerateRequest
from system.harness.chat import Chat, ToolCall, call_text, function_schema
from system.harness.office import NUDGE, Call, Episode, Limits, OfficeAgent
from system.tools.server import build_server

CLERK = Path(__file__).resolve().parent.parent / "policies" / "clerk"
CHAT = Chat(CLERK)
LIST = call_text(ToolCall("list_files", {}))


class ScriptedPolicy:
    """Says given texts one after the other; token ids as given, or the tokenizer's."""

    def __init__(self, *says: str | list[int], reason: str = "stop") -> None:
        self.says = [CHAT.completion(s) if isinstance(s, str) else s for s in says]
        self.reason = reason
        self.requests: list[GenerateRequest] = []

    def generate(self, request: GenerateRequest) -> Completion:
        ids = self.says[len(self.requests)]
        self.requests.append(request)
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        return Completion(
            request_id=request.request_id,
            token_ids=ids,
            logprob=[-0.5 - i / 64 for i in range(len(ids))],
            policy_version=[len(self.requests)] * len(ids),
            finish_reason="length" if cut else self.reason,  # type: ignore[arg-type]
        )

    def release(self, session_id: str) -> None: ...
    def update_weights(self, version: int, weights_path: str, *, reset_kv: bool = False) -> None: ...
    def stats(self) -> dict:
        return {}

    def close(self) -> None: ...


def play(policy: ScriptedPolicy, world: Path, **changed) -> Episode:
    limits = {
        "context": 800,
        "turn_tokens": 200,
        "turns": 10,
        "repairs": 2,
        "result_characters": 500,
        "nudge_ratio": 0.2,
        "temperature": 1.0,
        "deadline": time.monotonic() + 60,
    }
    agent = OfficeAgent(
        trial_id="t",
        seed=1,
        engine=policy,
        chat=CHAT,
        limits=Limits(**(limits | changed)),  # type: ignore[arg-type]
    )

    async def run() -> Episode:
        async with mcp.Client(build_server(world)) as client:
            listed = await client.list_tools()
            tools = [function_schema(t.name, t.description or "", t.input_schema) for t in listed.tools]

            async def call(name, arguments):
                reply = await client.call_tool(name, arguments)
                return reply.content[0].text, bool(reply.is_error)  # type: ignore[union-attr]

            return await agent(instruction="Find it.", tools=tools, call=call)

    return anyio.run(run)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("Norvik fee: 4821\n")
    (tmp_path / "long.txt").write_text("x" * 3000)
    return tmp_path


def test_a_turn_without_a_call_is_the_answer(world):
    policy = ScriptedPolicy(call_text(ToolCall("read_file", {"path": "notes.txt"})), "4821")
    episode = play(policy, world)
    assert episode.answer == "4821" and episode.truncated is None
    assert episode.turns[0].tool == "read_file" and episode.turns[0].result.strip() == "Norvik fee: 4821"


def test_exactly_the_sampled_tokens_are_masked_in_with_their_own_logprobs_and_versions(world):
    policy = ScriptedPolicy(LIST, LIST, "done")
    (row,) = play(policy, world).rows
    assert [row.token_ids[a:b] for a, b in sampled_runs(row)] == [tuple(ids) for ids in policy.says]
    assert [set(row.policy_version[a:b]) for a, b in sampled_runs(row)] == [{1}, {2}, {3}]
    assert row.rollout_logprob[sampled_runs(row)[0][0]] == -0.5


def test_each_request_is_the_row_so_far(world):
    policy = ScriptedPolicy(LIST, "done")
    (row,) = play(policy, world).rows
    for request, (start, _) in zip(policy.requests, sampled_runs(row), strict=True):
        assert tuple(request.token_ids) == row.token_ids[:start]


def test_what_was_sampled_is_kept_where_its_text_would_encode_otherwise(world):
    spelt = [i for letter in "done" for i in CHAT.completion(letter)[:-1]] + CHAT.stop_ids
    assert spelt != CHAT.completion("done")
    (row,) = play(ScriptedPolicy(spelt), world).rows
    assert list(row.token_ids[-len(spelt) :]) == spelt


def test_an_unreadable_call_is_answered_at_most_twice(world):
    broken = "<tool_call>\n{\n</tool_call>"
    episode = play(ScriptedPolicy(broken, broken, "7"), world)
    assert episode.answer == "7" and [t.error for t in episode.turns] == [True, True, False]
    assert episode.messages[2]["content"] == "error: the tool call is not JSON"
    ended = play(ScriptedPolicy(broken, broken, broken, "7"), world)
    assert len(ended.turns) == 3 and ended.answer == "" and ended.truncated is None


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (LIST[: -len("</tool_call>")], "error: the tool call is not closed by </tool_call>"),
        (LIST + LIST, "error: one tool call a turn, opened and closed once"),
        (LIST.replace("}}", '}, "name": 1}'), 'error: the tool call names "name" twice'),
    ],
)
def test_each_unreadable_call_gets_its_own_correction_and_counts(world, said, told):
    episode = play(ScriptedPolicy(said, LIST, "7"), world)
    assert episode.turns[0].result == told and episode.turns[0].error and episode.turns[0].tool == ""
    assert episode.answer == "7" and episode.repairs == 1


def test_a_call_of_no_tool_or_without_an_argument_is_corrected_and_is_no_repair(world):
    calls = [ToolCall("read_mails", {}), ToolCall("read_file", {}), ToolCall("read_file", {"file": "x"})]
    episode = play(ScriptedPolicy(*map(call_text, calls), "7"), world, repairs=0)
    unknown, missing, misnamed = (turn.result for turn in episode.turns[:3])
    assert unknown.startswith("error: no such tool read_mails; tools: list_files, read_file,")
    assert missing == "error: read_file needs argument path"
    assert misnamed == "error: read_file has no argument file; arguments: path"
    assert episode.answer == "7" and episode.repairs == 0


def test_a_long_result_is_cut_in_its_middle(world):
    episode = play(
        ScriptedPolicy(call_text(ToolCall("read_file", {"path": "long.txt"})), "x"), world, nudge_ratio=0
    )
    assert "[... cut ...]" in episode.turns[0].result and len(episode.turns[0].result) < 530


@pytest.mark.parametrize(("ratio", "times"), [(0.9, 1), (0.0, 0)])
def test_the_reminder_comes_once_or_never(world, ratio, times):
    episode = play(ScriptedPolicy(LIST, LIST, LIST, "x"), world, nudge_ratio=ratio)
    assert sum(NUDGE in turn.result for turn in episode.turns) == times
    assert episode.nudged == bool(times)


def test_limits_are_told_apart(world):
    prompt = len(play(ScriptedPolicy("x"), world).rows[0]) - 2
    reason = {
        "step_cap": play(ScriptedPolicy(LIST, LIST), world, turns=2),
        "turn_cap": play(ScriptedPolicy(LIST), world, turn_tokens=5),
        "context": play(ScriptedPolicy(LIST), world, context=prompt + 5),
        "wall_clock": play(ScriptedPolicy(LIST), world, deadline=0.0),
    }
    for expected, episode in reason.items():
        assert episode.truncated is not None and episode.truncated.reason == expected
    full = play(ScriptedPolicy(LIST, LIST), world, context=prompt + 2 * len(CHAT.completion(LIST)))
    assert full.truncated is not None and full.truncated.reason == "context"
    assert len(full.rows[0]) <= prompt + 200


def alone(policy: ScriptedPolicy, call: Call, **changed: Any) -> Episode:
    """An episode without tools of its own."""
    limits: dict[str, Any] = {
        "context": 800,
        "turn_tokens": 200,
        "turns": 10,
        "repairs": 2,
        "result_characters": 500,
        "nudge_ratio": 0.0,
        "temperature": 1.0,
        "deadline": time.monotonic() + 60,
    }
    agent = OfficeAgent(trial_id="t", seed=1, engine=policy, chat=CHAT, limits=Limits(**(limits | changed)))

    async def run() -> Episode:
        return await agent(instruction="Find it.", tools=[], call=call)

    return anyio.run(run)


def answering(text: str) -> Call:
    """A tool that always says the same."""

    async def call(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        return text, False

    return call


def test_a_result_that_leaves_no_room_for_a_turn_is_not_appended():
    episode = alone(ScriptedPolicy(LIST, "x"), answering("y" * 900), result_characters=900, context=200)
    assert episode.truncated == Outcome(kind="truncated", reason="context")
    assert len(episode.rows[0]) < 200 and episode.turns[0].result == "y" * 900
    assert [message["role"] for message in episode.messages] == ["user", "assistant"]


def test_the_clock_ends_a_call_that_does_not_come_back():
    async def never(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        await anyio.sleep_forever()
        raise AssertionError

    begun = time.monotonic()
    episode = alone(ScriptedPolicy(LIST), never, deadline=begun + 0.3)
    assert episode.truncated == Outcome(kind="truncated", reason="wall_clock")
    assert time.monotonic() - begun < 3 and episode.turns[0].tool == "list_files" and episode.turns[0].error


def test_an_engine_that_is_out_of_time_is_the_clock_only_when_the_clock_is_up():
    class Late(ScriptedPolicy):
        def generate(self, request: GenerateRequest) -> Completion:
            raise TimeoutError("not yet")

    class Slow(Late):
        def generate(self, request: GenerateRequest) -> Completion:
            time.sleep(0.05)
            return super().generate(request)

    episode = alone(Slow(), answering(""), deadline=time.monotonic() + 0.02)
    assert episode.truncated == Outcome(kind="truncated", reason="wall_clock") and episode.turns == []
    with pytest.raises(TimeoutError, match="not yet"):
        alone(Late(), answering(""))


spoken = st.one_of(
    st.sampled_from(
        [LIST, LIST[:-5], LIST + LIST, "<tool_call>", "</think>4", "<|im_end|>", "<|im_start|>user"]
    ),
    st.text(alphabet="ab<|>_/ \n{}", max_size=12),
)


@pytest.mark.parametrize("rewrites", [False, True])
@given(said=st.lists(spoken, min_size=1, max_size=6), result=st.text(max_size=40), data=st.data())
def test_what_the_policy_sampled_is_trained_once_and_nothing_of_the_harness_ever(
    tmp_path_factory, rewrites, said, result, data
):
    """Whatever it says, whatever the tools answer, with corrections, reminder, cuts, forks and every ending."""
    chat = rewriting_chat(tmp_path_factory.mktemp("chat") / "policy") if rewrites else CHAT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "CHAT", chat)
        policy = ScriptedPolicy(*said, "the end")
        limits = {
            "context": data.draw(st.sampled_from([60, 120, 800])),
            "turn_tokens": data.draw(st.sampled_from([5, 200])),
            "turns": data.draw(st.integers(1, 7)),
            "nudge_ratio": data.draw(st.sampled_from([0.0, 0.5, 1.0])),
            "result_characters": 20,
        }
        episode = alone(policy, answering(result), **limits)
    sampled = [ids[: request.max_tokens] for ids, request in zip(policy.says, policy.requests)]
    trained: list[tuple[int, ...]] = []
    for row in episode.rows:
        trained += [row.token_ids[a:b] for a, b in sampled_runs(row)]
        columns = zip(row.loss_mask, row.policy_version, row.rollout_logprob, strict=True)
        assert all(mask or (version == -1 and logprob == 0.0) for mask, version, logprob in columns)
    assert [token for run in trained for token in run] == [token for ids in sampled for token in ids]
    for row, request in zip([episode.rows[turn.row] for turn in episode.turns], policy.requests):
        assert row.token_ids[: len(request.token_ids)] == tuple(request.token_ids)
    grown = [row for row in episode.rows if row.finish_reason]
    assert all(len(row) <= limits["context"] for row in grown)


def test_a_request_the_engine_gave_up_is_an_error_and_no_answer(world):
    with pytest.raises((EngineError, ExceptionGroup)):
        play(ScriptedPolicy("x", reason="abort"), world)


def rewriting_chat(folder: Path) -> Chat:
    """A template that numbers its turns from the end, so that each turn rewrites the past."""
    folder.mkdir()
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).symlink_to(CLERK / name)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ messages | length - loop.index }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    return Chat(folder)


def test_a_template_that_rewrites_the_past_begins_a_new_row_each_time(world, tmp_path, monkeypatch):
    """Each request is still the row so far, and each token is trained once."""
    monkeypatch.setattr(sys.modules[__name__], "CHAT", rewriting_chat(tmp_path / "policy"))
    policy = ScriptedPolicy(LIST, LIST, "done")
    episode = play(policy, world)
    assert episode.answer == "done" and len(episode.rows) == 3
    assert [turn.row for turn in episode.turns] == [0, 1, 2]
    for request, row, ids in zip(policy.requests, episode.rows, policy.says, strict=True):
        ((start, end),) = sampled_runs(row)
        assert row.token_ids[:start] == tuple(request.token_ids) and row.token_ids[start:end] == tuple(ids)
