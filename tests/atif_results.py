"""Results of trials of every ending, for the tests of the ATIF documents on Python 3.11 and, with Harbor, on 3.12."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio

from system.engine import Completion, GenerateRequest
from system.harness.chat import Chat, ToolCall, call_text, function_schema
from system.harness.code import CodeAgent
from system.harness.conversation import Limits
from system.trial import result
from system.verify import Criterion, Verdict

CHAT = Chat(Path(__file__).resolve().parent.parent / "policies" / "clerk")
READ = call_text(ToolCall("read_file", {"path": "notes.txt"}))
SCHEMAS = [function_schema("read_file", "Read.", {"type": "object", "properties": {}})]


class Speaking:
    """An engine that says given texts, each token with its own logprob and each turn with its own version."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.sampled: list[list[int]] = []

    def generate(self, request: GenerateRequest) -> Completion:
        ids = CHAT.completion(self.texts[len(self.sampled)])
        cut = len(ids) > request.max_tokens
        self.sampled.append(ids[: request.max_tokens])
        return Completion(
            request_id=request.request_id,
            token_ids=self.sampled[-1],
            logprob=[-0.25 - i / 64 for i in range(len(self.sampled[-1]))],
            policy_version=[len(self.sampled)] * len(self.sampled[-1]),
            finish_reason="length" if cut else "stop",
        )

    def release(self, session_id: str) -> None: ...
    def update_weights(self, version: int, weights_path: str, *, reset_kv: bool = False) -> None: ...
    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def played(*texts: str, **changed: Any) -> tuple[dict[str, Any], Speaking]:
    """The result of a trial in which a policy said these texts, and its engine."""
    limits = {
        "context": 2000,
        "turn_tokens": 200,
        "turns": 5,
        "repairs": 1,
        "result_characters": 500,
        "nudge_ratio": 0.0,
        "temperature": 1.0,
        "deadline": time.monotonic() + 60,
    }
    engine = Speaking(*texts)
    agent = CodeAgent(
        trial_id="t/1",
        seed=1,
        engine=engine,
        chat=CHAT,
        limits=Limits(**(limits | changed)),  # type: ignore[arg-type]
    )

    async def call(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        known = name == "read_file"
        return ("Norvik fee: 4821" if known else f"error: no tool {name}"), not known

    async def run() -> Any:
        return await agent(instruction="Find the fee.", tools=SCHEMAS, call=call)

    verdict = Verdict(
        reward=0.5, passed=False, criteria=(Criterion(name="answer", met=False, detail="none", gate=False),)
    )
    return {"trial_id": "t/1", "task": "abc", **result(anyio.run(run), verdict)}, engine


ENDINGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "answered": ((READ, "4821"), {}),
    "answered at once": (("4821",), {}),
    "reasoned": ((f"<think>It is in the notes.</think>I look.\n{READ}", "<think>So.</think>4821"), {}),
    "a call of no tool": ((call_text(ToolCall("fly", {})), "4821"), {}),
    "unreadable, then answered": (("<tool_call>{", "4821"), {}),
    "unreadable to the end": (("<tool_call>{", "<tool_call>["), {}),
    "cut by the turn cap": ((READ, "word " * 300), {"turn_tokens": 60}),
    "at the step cap": ((READ, READ), {"turns": 2}),
    "out of context": ((READ, READ), {"context": 372}),
    "out of time": ((READ,), {"deadline": 0.0}),
}
"""What a policy says, and under which limits."""
