"""The life of one trial: sandbox, agent, frozen world, verdict, nothing left behind.

Runs in a process of its own, forked by the fleet; its specification and its result are JSON.
"""

import math
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import anyio

from core.outcome import Outcome
from core.steps import final_rewards, goes_on, mean_rewards
from core.tito import Ledger
from system.child import ChildDied, in_a_child
from system.engine import EngineConnection, connect
from system.fleet.starting import started
from system.harness.chat import Chat
from system.harness.code import CodeAgent
from system.harness.connection import NotReady, open_tools
from system.harness.conversation import Episode, Harness, Limits
from system.harness.office import OfficeAgent
from system.harness.serving import expected_tools, serving
from system.sandbox import FrozenWorld, Sandbox, SandboxError, Serve, Thawable, open_sandbox
from system.sandbox import Limits as SandboxLimits
from system.verify import Criterion, Verdict, VerifyError, verify, verify_step
from system.verify.judge_service import RemoteJudge
from system.world.task import Opening, Part, read_opening

HARNESSES: dict[str, type[OfficeAgent] | type[CodeAgent]] = {"office": OfficeAgent, "code": CodeAgent}


LASTING = ("bubblewrap", "process")
"""The sandboxes that can go on after a freeze."""


class TrialError(Exception):
    """Something around the policy failed, not the policy: where, and what."""

    def __init__(self, phase: str, cause: str) -> None:
        super().__init__(f"{phase}: {cause}")
        self.phase, self.cause = phase, cause


def run_trial(spec: dict[str, Any], *, serving: Callable[..., Serve] = serving) -> dict[str, Any]:
    """One attempt at a task.

    Each layer has a deadline of its own. A tool that is late is an answer to the policy; an agent that is late is
    truncated and graded; a sandbox or a verifier that is late is a system error of its phase.

    A task of several steps goes as in Harbor: one world goes on through all of them, each step is a conversation of its
    own, and after each the world is frozen and graded; below the step's least reward the trial ends there. The times of
    a spec are then of all steps together.

    Args:
        spec: trial_id, task (folder), policy (folder), engine_address, sandbox, scratch, seed, limits (the fields of
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
    with phase("start", seconds, limit_s=_left(spec, "start_s", seconds, "start")):
        task = read_opening(Path(spec["task"]))
        sandbox = _opened(spec, task, serving)
    engine = connect(spec["engine_address"], patience_s=spec.get("engine_s", math.inf))
    stop_s = spec.get("stop_s", math.inf)
    try:
        done = _steps_done(spec, task, sandbox, engine, seconds)
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
    seconds["engine"] = sum(step.episode.engine_seconds for step in done)
    return {
        **(
            result(done[0].episode, done[0].verdict) if not done[0].part.name else stepwise_result(task, done)
        ),
        "tool_restarts": sum(step.restarts for step in done),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "cpu_seconds": {"agent": usage.ru_utime + usage.ru_stime},
    }


class StepDone(NamedTuple):
    """A step that was run and graded; `part` of a task without steps has no name."""

    part: Part
    episode: Episode
    verdict: Verdict
    restarts: int


def _steps_done(
    spec: dict[str, Any], task: Opening, sandbox: Sandbox, engine: EngineConnection, seconds: dict[str, float]
) -> list[StepDone]:
    """Runs and grades step after step, up to the last or to one that earned too little."""
    done: list[StepDone] = []
    for part in task.parts:
        if done:
            with phase("start", seconds, limit_s=_left(spec, "start_s", seconds, "start")):
                assert isinstance(sandbox, Thawable)
                sandbox.thaw()
        last = part is task.parts[-1]
        done.append(_step_done(spec, task, part, sandbox, engine, seconds, last=last))
        if not goes_on(rewards_of(done[-1].verdict), least=part.min_reward):
            break
    return done


def _step_done(
    spec: dict[str, Any],
    task: Opening,
    part: Part,
    sandbox: Sandbox,
    engine: EngineConnection,
    seconds: dict[str, float],
    *,
    last: bool,
) -> StepDone:
    session = f"{spec['trial_id']}/{part.name}" if part.name else spec["trial_id"]
    with phase("agent", seconds):
        longest_s = part.agent_timeout_s if part.name else math.inf
        engine.deadline = time.monotonic() + min(longest_s, spec["deadline_s"] - seconds.get("agent", 0.0))
        agent = agent_for({**spec, "trial_id": session}, engine)
        expected = expected_tools(*_kit(spec, task))
        given = agent, part.instruction, sandbox, expected, spec["tool_timeout_s"], seconds
        episode, restarts = anyio.run(work, *given)
    with phase("freeze", seconds, limit_s=_left(spec, "stop_s", seconds, "freeze"), blame="teardown"):
        engine.release(session)
        frozen = sandbox.freeze()
    with phase("verify", seconds, limit_s=_left(spec, "verify_s", seconds, "verify")):
        scratch = Path(spec["scratch"])
        if part.name:
            verdict = _step_graded(task.folder, part.name, frozen, episode.answer, scratch, apart=not last)
        else:
            judge = RemoteJudge(spec["judge_socket"]) if spec.get("judge_socket") else None
            verdict = verify(task.folder, frozen, episode.answer, judge=judge, scratch_root=scratch)
    return StepDone(part, episode, verdict, restarts)


def _left(spec: dict[str, Any], limit: str, seconds: dict[str, float], name: str) -> float:
    """What earlier steps left of a phase's time."""
    return spec.get(limit, math.inf) - seconds.get(name, 0.0)


def _step_graded(
    folder: Path, name: str, frozen: FrozenWorld, answer: str, scratch: Path, *, apart: bool
) -> Verdict:
    """The verdict of a step, in a child where a tool server will yet be forked from this process."""

    def grade() -> Verdict:
        return verify_step(folder, name, frozen, answer, scratch_root=scratch)

    def told() -> dict[str, Any]:
        try:
            return asdict(grade())
        except VerifyError as error:
            return {"cause": error.cause, "detail": error.detail}

    if not apart:
        return grade()
    try:
        found = in_a_child(told)
    except ChildDied as error:
        raise VerifyError("sandbox", f"the grading of step {name} broke off: {error}") from None
    if "cause" in found:
        raise VerifyError(found["cause"], found["detail"])
    return Verdict(**{**found, "criteria": tuple(Criterion(**one) for one in found["criteria"])})


def _opened(spec: dict[str, Any], task: Opening, serving: Callable[..., Serve]) -> Sandbox:
    if task.world is None:
        raise ValueError(f"task must bring a world in environment/world, got {task.folder}")
    if len(task.parts) > 1 and spec["sandbox"] not in LASTING:
        kinds = " or ".join(LASTING)
        raise ValueError(f"sandbox must be {kinds} for a task of several steps, got {spec['sandbox']!r}")
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


def agent_for(spec: dict[str, Any], engine: EngineConnection) -> Harness:
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
            started()
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


def stepwise_result(task: Opening, done: Sequence[StepDone]) -> dict[str, Any]:
    """What a run keeps of a trial of several steps: as of any other, their conversations one after the other.

    "steps" says of each its name, rewards, outcome and answer, and where its rows, turns and messages lie. The trial
    has passed if every step was reached and passed; where only the final one counts, if that was and did.
    """
    final = task.reward_strategy == "final"
    graded = [{"reward": step.verdict.reward, **rewards_of(step.verdict)} for step in done]
    rewards = final_rewards(graded) if final else mean_rewards(graded)
    counted = done[-1:] if final else done
    passed = len(done) == len(task.parts) and all(step.verdict.passed for step in counted)
    truncated = next((step.episode.truncated for step in done if step.episode.truncated is not None), None)
    joined: dict[str, list[Any]] = {"rows": [], "turns": [], "messages": []}
    steps: list[dict[str, Any]] = []
    for step in done:
        own = result(step.episode, step.verdict)
        own["turns"] = [{**turn, "row": turn["row"] + len(joined["rows"])} for turn in own["turns"]]
        places = {name: [len(kept), len(kept) + len(own[name])] for name, kept in joined.items()}
        for name, kept in joined.items():
            kept += own.pop(name)
        steps.append({"name": step.part.name, **own, "rewards": rewards_of(step.verdict), **places})
    return {
        "outcome": asdict(truncated or Outcome(kind="solved" if passed else "failed")),
        "reward": rewards["reward"],
        "passed": passed,
        "criteria": [
            {**criterion, "name": f"{step['name']}: {criterion['name']}"}
            for step in steps
            for criterion in step["criteria"]
        ],
        "answer": steps[-1]["answer"],
        "nudged": any(step["nudged"] for step in steps),
        "repairs": sum(step["repairs"] for step in steps),
        **joined,
        "steps": steps,
    }


def rewards_of(verdict: Verdict) -> dict[str, float]:
    """The numbers of a verdict by name, as a step's least rewards speak of them."""
    return dict(verdict.numbers) or {"reward": verdict.reward}


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
        seconds: where its time goes, on top of what is there.
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
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - begun
    if late:
        raise TrialError(blame or name, f"deadline: {limit_s:g} s")
