"""The life of one trial: sandbox, agent, frozen world, verdict, nothing left behind.

Runs in a process of its own, forked by the fleet; its specification and its result are JSON.
"""

import math
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import anyio

from core.outcome import Outcome
from core.tito import Ledger
from system.engine import EngineClient
from system.harness.chat import Chat
from system.harness.code import CodeAgent
from system.harness.connection import NotReady, open_tools
from system.harness.conversation import Episode, Harness, Limits
from system.harness.office import OfficeAgent
from system.harness.serving import expected_tools, serving
from system.sandbox import Limits as SandboxLimits
from system.sandbox import Sandbox, SandboxError, Serve, open_sandbox
from system.verify import Verdict, VerifyError, verify
from system.verify.judge_service import RemoteJudge
from system.world.task import Opening, read_opening

HARNESSES: dict[str, type[OfficeAgent] | type[CodeAgent]] = {"office": OfficeAgent, "code": CodeAgent}


class TrialError(Exception):
    """Something around the policy failed, not the policy: where, and what."""

    def __init__(self, phase: str, cause: str) -> None:
        super().__init__(f"{phase}: {cause}")
        self.phase, self.cause = phase, cause


def run_trial(spec: dict[str, Any], *, serving: Callable[..., Serve] = serving) -> dict[str, Any]:
    """One attempt at a task.

    Each layer has a deadline of its own. A tool that is late is an answer to the policy; an agent that is late is
    truncated and graded; a sandbox or a verifier that is late is a system error of its phase.

    Args:
        spec: trial_id, task (folder), policy (folder), engine_socket, sandbox, scratch, seed, limits (the fields of
            `Limits` but the deadline), deadline_s (of the agent, from its first turn on) and tool_timeout_s (of a
            call). May have harness ("office" or "code"), toolset (of the office; the task's own if left out),
            judge_socket (of a `JudgeService`, for rubrics), sandbox_limits, purpose ("train" or "eval"),
            nudge_purposes (when the agent is reminded that the context ends; ["train"]), and start_s, verify_s,
            stop_s (of the start, of grading, of each half of the end; left out, only the fleet ends them), engine_s
            (what the engine may take for a reply; later it is at fault, and not the agent's clock), and modal
            (the fields of `system.sandbox.modal.ModalSettings`, for the sandbox "modal").
        serving: what serves the tools in the sandbox; takes what `system.harness.serving.serving` does.

    Raises:
        TrialError: a system error; such a trial has no reward.
    """
    seconds: dict[str, float] = {}
    start_s, verify_s, stop_s = (spec.get(name, math.inf) for name in ("start_s", "verify_s", "stop_s"))
    with phase("start", seconds, limit_s=start_s):
        task = read_opening(Path(spec["task"]))
        instruction = task.instruction
        sandbox = _opened(spec, task, serving)
    engine = EngineClient(spec["engine_socket"], patience_s=spec.get("engine_s", math.inf))
    try:
        with phase("agent", seconds):
            engine.deadline = time.monotonic() + spec["deadline_s"]
            agent = agent_for(spec, engine)
            expected = expected_tools(*_kit(spec, task))
            given = agent, instruction, sandbox, expected, spec["tool_timeout_s"], seconds
            episode, restarts = anyio.run(work, *given)
        with phase("freeze", seconds, limit_s=stop_s, blame="teardown"):
            engine.release(spec["trial_id"])
            frozen = sandbox.freeze()
        with phase("verify", seconds, limit_s=verify_s):
            judge = RemoteJudge(spec["judge_socket"]) if spec.get("judge_socket") else None
            scratch = Path(spec["scratch"])
            verdict = verify(task.folder, frozen, episode.answer, judge=judge, scratch_root=scratch)
        with phase("teardown", seconds, limit_s=stop_s):
            engine.close()
            sandbox.close()
    except BaseException:
        # What failed first is told; what this leaves behind goes with the process, and the fleet clears it away.
        with suppress(TrialError), phase("teardown", seconds, limit_s=stop_s):
            engine.close()
            sandbox.close()
        raise
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds["engine"] = episode.engine_seconds
    return {
        **result(episode, verdict),
        "tool_restarts": restarts,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "cpu_seconds": {"agent": usage.ru_utime + usage.ru_stime},
    }


def _opened(spec: dict[str, Any], task: Opening, serving: Callable[..., Serve]) -> Sandbox:
    if task.world is None:
        raise ValueError(f"task must bring a world in environment/world, got {task.folder}")
    serve = serving(
        *_kit(spec, task),
        result_characters=spec["limits"]["result_characters"],
        longest_call_s=spec["tool_timeout_s"],
    )
    limits = SandboxLimits(**spec.get("sandbox_limits", {}))
    return open_sandbox(
        spec["sandbox"],
        task.world,
        Path(spec["scratch"]),
        serve,
        limits,
        trial=spec["trial_id"],
        agent_s=spec["deadline_s"],
        modal=spec.get("modal"),
    )


def _kit(spec: dict[str, Any], task: Opening) -> tuple[str, str]:
    """Which harness, and which tools of the office."""
    harness = spec.get("harness", "office")
    if harness not in HARNESSES:
        raise ValueError(f"harness must be one of {', '.join(HARNESSES)}, got {harness!r}")
    return harness, spec.get("toolset", task.toolset)


def agent_for(spec: dict[str, Any], engine: EngineClient) -> Harness:
    """The agent of a spec; it works until the engine's deadline."""
    limits = dict(spec["limits"])
    if spec.get("purpose", "train") not in spec.get("nudge_purposes", ["train"]):
        limits["nudge_ratio"] = 0.0
    return HARNESSES[spec.get("harness", "office")](
        trial_id=spec["trial_id"],
        seed=spec["seed"],
        engine=engine,
        chat=load_chat(spec["policy"]),
        limits=Limits(**limits, deadline=engine.deadline),
    )


@cache
def load_chat(policy: str) -> Chat:
    """Tokenizer and template of a policy; the parent of the trials calls this once for all of them."""
    return Chat(Path(policy))


async def work(
    agent: Harness,
    instruction: str,
    sandbox: Sandbox,
    expected: Collection[str],
    timeout_s: float,
    seconds: dict[str, float],
) -> tuple[Episode, int]:
    """Runs the agent on the tools of the sandbox; also how often their server had to be started again.

    Args:
        seconds: gets "ready", the time until every tool was listed; it is a part of the agent's.
    """
    begun = time.monotonic()
    try:
        async with open_tools(sandbox, expected=expected, timeout_s=timeout_s) as tools:
            seconds["ready"] = time.monotonic() - begun
            episode = await agent(instruction=instruction, tools=tools.schemas, call=tools.call)
            return episode, tools.restarts
    except NotReady as error:
        raise TrialError("start", str(error)) from error


def result(episode: Episode, verdict: Verdict) -> dict[str, Any]:
    """What a run keeps of a trial, as JSON."""
    graded = Outcome(kind="solved" if verdict.passed else "failed")
    return {
        "outcome": asdict(episode.truncated or graded),
        "reward": verdict.reward,
        "passed": verdict.passed,
        "criteria": [asdict(criterion) for criterion in verdict.criteria],
        **episode_record(episode),
    }


def episode_record(episode: Episode) -> dict[str, Any]:
    """What an agent left, as JSON, but for what became of the trial."""
    return {
        "answer": episode.answer,
        "nudged": episode.nudged,
        "repairs": episode.repairs,
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


class _Late(BaseException):
    """A phase is out of time. No Exception, so that a broad `except` inside the phase does not take it for its own."""


@contextmanager
def phase(
    name: str, seconds: dict[str, float], *, limit_s: float = math.inf, blame: str = ""
) -> Iterator[None]:
    """Names the phase in which something failed, times it, and ends it when it is late.

    Args:
        name: of the phase, in `seconds`.
        seconds: where its time goes.
        limit_s: after so long an alarm breaks into what runs, once and then every second; only in the main thread.
        blame: the phase to name in an error, if it is another.
    """
    begun = time.monotonic()
    armed, late = [True], []

    def ring(_signal: int, _frame: FrameType | None) -> None:
        late.append(True)
        if armed:
            raise _Late

    before = signal.signal(signal.SIGALRM, ring) if limit_s < math.inf else None
    try:
        if limit_s < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(limit_s, 1e-6), 1.0)
        try:
            yield
        finally:
            armed.clear()
            if limit_s < math.inf:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
    except _Late:
        pass
    except (SandboxError, VerifyError) as error:
        if not late:
            cause = error.cause if isinstance(error, SandboxError) else str(error)
            raise TrialError(blame or name, cause) from error
    except TrialError:
        if not late:
            raise
    except Exception as error:
        if not late:
            cause = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
            raise TrialError(blame or name, cause) from error
    finally:
        seconds[name] = time.monotonic() - begun
    if late:
        raise TrialError(blame or name, f"deadline: {limit_s:g} s")
