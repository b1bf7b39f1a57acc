"""The life of one trial: sandbox, agent, frozen world, verdict, nothing left behind.

Runs in a process of its own, forked by the fleet; its specification and its result are JSON.
"""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import anyio
from mcp import MCPError

from core.outcome import Outcome
from core.tito import Ledger
from system.engine import EngineClient
from system.harness.chat import Chat, function_schema
from system.harness.office import Episode, Limits, OfficeAgent
from system.sandbox import Sandbox, open_sandbox
from system.sandbox.serve import open_client, serve
from system.verify import Verdict, verify
from system.world.task import read_task


class TrialError(Exception):
    """Something around the policy failed, not the policy: where, and what."""

    def __init__(self, phase: str, cause: str) -> None:
        super().__init__(f"{phase}: {cause}")
        self.phase, self.cause = phase, cause


def run_trial(spec: dict[str, Any]) -> dict[str, Any]:
    """One attempt at a task.

    Args:
        spec: trial_id, task (folder), policy (folder), engine_socket, sandbox, scratch, seed, deadline_s,
            tool_timeout_s and limits (the fields of `Limits` but the deadline).

    Raises:
        TrialError: a system error; such a trial has no reward.
    """
    begun = time.monotonic()
    seconds: dict[str, float] = {}
    with phase("start", seconds):
        task = read_task(Path(spec["task"]))
        if task.world is None:
            raise ValueError(f"task must bring a world in environment/world, got {task.folder}")
        sandbox = open_sandbox(spec["sandbox"], task.world, Path(spec["scratch"]), serve)
    engine = EngineClient(spec["engine_socket"])
    try:
        with phase("agent", seconds):
            agent = OfficeAgent(
                trial_id=spec["trial_id"],
                seed=spec["seed"],
                engine=engine,
                chat=load_chat(spec["policy"]),
                limits=Limits(**spec["limits"], deadline=begun + spec["deadline_s"]),
            )
            episode = anyio.run(work, agent, task.instruction, sandbox, spec["tool_timeout_s"])
            engine.release(spec["trial_id"])
        with phase("freeze", seconds):
            frozen = sandbox.freeze()
        with phase("verify", seconds):
            verdict = verify(task.folder, frozen, episode.answer)
        with phase("teardown", seconds):
            sandbox.close()
    finally:
        engine.close()
        sandbox.close()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds["engine"] = episode.engine_seconds
    return {
        **result(episode, verdict),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "cpu_seconds": {"agent": usage.ru_utime + usage.ru_stime},
    }


@cache
def load_chat(policy: str) -> Chat:
    """Tokenizer and template of a policy; the parent of the trials calls this once for all of them."""
    return Chat(Path(policy))


async def work(agent: OfficeAgent, instruction: str, sandbox: Sandbox, timeout_s: float) -> Episode:
    """Runs the agent on the tools of the sandbox."""
    async with open_client(sandbox.connect(), timeout_s=timeout_s) as client:
        listed = await client.list_tools()
        tools = [function_schema(t.name, t.description or "", t.input_schema) for t in listed.tools]

        async def call(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
            reply = await client.call_tool(name, arguments)
            text = "\n".join(part.text for part in reply.content if part.type == "text")
            return text, bool(reply.is_error)

        return await agent(instruction=instruction, tools=tools, call=call)


def result(episode: Episode, verdict: Verdict) -> dict[str, Any]:
    """What a run keeps of a trial, as JSON."""
    graded = Outcome(kind="solved" if verdict.passed else "failed")
    return {
        "outcome": asdict(episode.truncated or graded),
        "reward": verdict.reward,
        "passed": verdict.passed,
        "criteria": [asdict(criterion) for criterion in verdict.criteria],
        "answer": episode.answer,
        "nudged": episode.nudged,
        "rows": [row_record(row) for row in episode.rows],
        "turns": [asdict(turn) for turn in episode.turns],
        "messages": episode.messages,
    }


def row_record(row: Ledger) -> dict[str, Any]:
    """A ledger row as JSON."""
    return {
        "token_ids": row.token_ids,
        "loss_mask": row.loss_mask,
        "rollout_logprob": row.rollout_logprob,
        "policy_version": row.policy_version,
    }


@contextmanager
def phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Names the phase in which something failed, and times it."""
    begun = time.monotonic()
    try:
        yield
    except (MCPError, OSError, RuntimeError, ValueError, ExceptionGroup) as error:
        raise TrialError(name, f"{type(error).__name__}: {error}".replace("\n", " ")) from error
    finally:
        seconds[name] = time.monotonic() - begun
