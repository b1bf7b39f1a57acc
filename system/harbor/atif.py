"""A trial in Harbor's trajectory format, ATIF 1.8, with what that has no field for: mask, versions, validity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA_VERSION = "ATIF-v1.8"

END_OF_REASONING, CALL = "</think>", "<tool_call>"

Record = Mapping[str, Any]


def atif(
    result: Record, *, name: str = "bartleby", version: str = "unknown", model: str | None = None
) -> Record:
    """The trajectory document of one trial.

    A step of the agent has the ids of its whole prompt, so a document grows with the square of its turns. Every list
    of `metrics` that is about the completion has an entry a token: completion_token_ids, logprobs, and in its `extra`
    loss_mask and policy_version.

    Args:
        result: what `system.trial.run_trial` returned; may have trial_id.
        name: of the agent.
        version: of the agent.
        model: name of the policy, if it has one.

    Raises:
        ValueError: the result is of a system error or a cancelled trial: there is no conversation.
    """
    kind = result["outcome"]["kind"]
    if not result.get("messages"):
        raise ValueError(f"a trajectory must have messages, got none after {kind}")
    steps: list[dict[str, Any]] = []
    for part in result.get("steps") or [_whole(result)]:
        steps += _conversation(result, part, first=len(steps))
    for number, step in enumerate(steps, start=1):
        step["step_id"] = number
    session = (
        {"session_id": result["trial_id"], "trajectory_id": result["trial_id"]}
        if "trial_id" in result
        else {}
    )
    return {
        "schema_version": SCHEMA_VERSION,
        **session,
        "agent": {"name": name, "version": version, **({"model_name": model} if model else {})},
        "steps": steps,
        "final_metrics": _totals(result, len(steps)),
        "extra": _beside(result),
    }


def _whole(result: Record) -> Record:
    """The one part of a trial that has no steps of its own."""
    ends = {name: [0, len(result[name])] for name in ("messages", "turns")}
    return {"name": "", **ends}


def _conversation(result: Record, part: Record, *, first: int) -> list[dict[str, Any]]:
    """The steps of one conversation: what was said to the agent, then turn after turn.

    A turn that a limit cut has no message. A tool's last answer may have none either: it was not shown any more.
    """
    messages = result["messages"][slice(*part["messages"])]
    turns = result["turns"][slice(*part["turns"])]
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    shown = sum(message["role"] == "tool" for message in messages)
    marked = {"extra": {"step": part["name"]}} if part["name"] else {}
    steps = [
        {"step_id": 0, "source": message["role"], "message": message["content"], **marked}
        for message in messages
        if message["role"] in ("system", "user")
    ]
    for index, turn in enumerate(turns):
        step = _turn(
            result["rows"], turn, said[index] if index < len(said) else None, call_id=first + len(steps)
        )
        answered = bool(turn["tool"] or turn["result"])
        if answered:
            step["observation"] = {"results": [_answer(turn, step, shown=index < shown)]}
        steps.append(step)
    return steps


def _turn(rows: Sequence[Record], turn: Record, text: str | None, *, call_id: int) -> dict[str, Any]:
    reasoning, message = _parted(text or "")
    step: dict[str, Any] = {"step_id": 0, "source": "agent", "message": message, "llm_call_count": 1}
    if reasoning is not None:
        step["reasoning_content"] = reasoning
    if turn["tool"]:
        call = {
            "tool_call_id": f"call-{call_id}",
            "function_name": turn["tool"],
            "arguments": turn["arguments"],
        }
        step["message"] = message.partition(CALL)[0].strip()
        step["tool_calls"] = [call]
    if text is None:
        step["extra"] = {"cut": True}
    step["metrics"] = _metrics(rows[turn["row"]], turn)
    return step


def _parted(text: str) -> tuple[str | None, str]:
    """Reasoning, if there is any, and the rest; a text that begins with a call has none."""
    if END_OF_REASONING not in text or text.lstrip().startswith(CALL):
        return None, text
    reasoning, _, rest = text.partition(END_OF_REASONING)
    return reasoning.removeprefix("<think>").strip(), rest.strip()


def _metrics(row: Record, turn: Record) -> dict[str, Any]:
    start, end = turn["start"], turn["end"]
    return {
        "prompt_tokens": start,
        "completion_tokens": end - start,
        "prompt_token_ids": list(row["token_ids"][:start]),
        "completion_token_ids": list(row["token_ids"][start:end]),
        "logprobs": list(row["rollout_logprob"][start:end]),
        "extra": {
            "loss_mask": list(row["loss_mask"][start:end]),
            "policy_version": list(row["policy_version"][start:end]),
            "row": turn["row"],
            "request_id": turn["request_id"],
        },
    }


def _answer(turn: Record, step: Record, *, shown: bool) -> dict[str, Any]:
    """What a tool said, or what the agent was told of a call that nobody could read."""
    source = {"source_call_id": step["tool_calls"][0]["tool_call_id"]} if turn["tool"] else {}
    told = {"error": bool(turn["error"]), "shown": shown}
    if "seconds" in turn:
        told["seconds"] = turn["seconds"]
    return {**source, "content": turn["result"], "extra": told}


def _totals(result: Record, steps: int) -> dict[str, Any]:
    return {
        "total_prompt_tokens": sum(turn["start"] for turn in result["turns"]),
        "total_completion_tokens": sum(turn["end"] - turn["start"] for turn in result["turns"]),
        "total_steps": steps,
    }


def _beside(result: Record) -> dict[str, Any]:
    """What became of the trial; a trial that nobody has graded yet has no reward."""
    kept = ("outcome", "reward", "passed", "criteria", "answer", "nudged", "repairs", "steps")
    about = ("arm", "seed", "purpose", "group_id", "version_started", "task", "level", "family", "domain")
    return {key: result[key] for key in (*kept, *about) if key in result}
