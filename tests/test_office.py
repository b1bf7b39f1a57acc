"""The office agent with a scripted policy over the real tools: every token it sampled, and nothing else, is trained."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import anyio
import mcp
import pytest

from core.tito import sampled_runs
from system.engine import Completion, EngineError, GenerateRequest
from system.harness.chat import Chat, ToolCall, call_text, function_schema
from system.harness.office import NUDGE, Episode, Limits, OfficeAgent
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


def test_a_request_the_engine_gave_up_is_an_error_and_no_answer(world):
    with pytest.raises((EngineError, ExceptionGroup)):
        play(ScriptedPolicy("x", reason="abort"), world)


def test_a_template_that_rewrites_the_past_begins_a_new_row_each_time(world, tmp_path, monkeypatch):
    """It numbers its turns from the end. Each request is still the row so far, and each token is trained once."""
    folder = tmp_path / "policy"
    folder.mkdir()
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).symlink_to(CLERK / name)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ messages | length - loop.index }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    monkeypatch.setattr(sys.modules[__name__], "CHAT", Chat(folder))
    policy = ScriptedPolicy(LIST, LIST, "done")
    episode = play(policy, world)
    assert episode.answer == "done" and len(episode.rows) == 3
    assert [turn.row for turn in episode.turns] == [0, 1, 2]
    for request, row, ids in zip(policy.requests, episode.rows, policy.says, strict=True):
        ((start, end),) = sampled_runs(row)
        assert row.token_ids[:start] == tuple(request.token_ids) and row.token_ids[start:end] == tuple(ids)
