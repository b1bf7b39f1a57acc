"""The loop that the harnesses share: a policy samples, its call is made, the tool's answer is appended.

What the policy sampled is never re-tokenised: a completion is appended as ids, a tool result as the ids that the chat
template adds for it, or in a new row where the template rewrites what was before. Completions that cannot be read are
answered, and retried at most so often in a trial.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import anyio

from core.budget import cut_text, should_nudge, tokens_to_ask
from core.outcome import Outcome
from core.tito import Ledger, append_completion, append_observation, continue_rows, open_ledger
from system.engine import Engine, EngineError, GenerateRequest, check_reply
from system.harness.chat import Chat, Message, ToolCall, parse_completion

NUDGE = "The context is nearly used up: answer soon."


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an agent may use in one trial, and how it samples."""

    context: int
    """Tokens a trajectory may have."""
    turn_tokens: int
    """Most tokens of one completion."""
    turns: int
    """Most completions."""
    repairs: int
    """Unreadable completions that are answered instead of ending the trial."""
    result_characters: int
    """A longer tool result is cut in its middle."""
    nudge_ratio: float
    """Share of the context left at which the agent is reminded once; 0 for never."""
    temperature: float
    deadline: float
    """On the clock of time.monotonic; an engine and a tool that are still at work then are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion: where it lies in the row, and what the tool answered."""

    request_id: str
    row: int
    start: int
    end: int
    tool: str
    arguments: dict[str, Any]
    result: str
    error: bool
    seconds: float
    """Of its call, from the asking to the answer."""


@dataclass(slots=True, kw_only=True)
class Episode:
    """What an agent run leaves behind."""

    rows: tuple[Ledger, ...]
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    answer: str = ""
    truncated: Outcome | None = None
    nudged: bool = False
    repairs: int = 0
    """Unreadable completions that were answered."""
    engine_seconds: float = 0.0


Call = Callable[[str, dict[str, Any]], Awaitable[tuple[str, bool]]]
"""Calls a tool by name: its text, and whether it is an error. What it raises is a fault of the system."""


class Harness(Protocol):
    """An agent loop: policy and tools in, an episode out."""

    async def __call__(self, *, instruction: str, tools: list[dict[str, Any]], call: Call) -> Episode: ...


class Speaker(Protocol):
    """Who speaks in a conversation, and by which limits: what every harness is made of."""

    @property
    def trial_id(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def chat(self) -> Chat: ...
    @property
    def limits(self) -> Limits: ...


async def converse(
    speaker: Speaker, opening: list[Message], tools: list[dict[str, Any]], call: Call
) -> Episode:
    """One tool call a turn until a turn calls none: that text is the answer.

    Args:
        speaker: the policy and its limits.
        opening: the messages before the first turn.
        tools: as the chat template wants them.
        call: makes a call. It runs in a cancel scope that ends at the agent's deadline.

    Raises:
        EngineError: the engine gave a request up.
    """
    prompt = speaker.chat.render(opening, tools, add_generation_prompt=True)
    episode = Episode(rows=(open_ledger(prompt),), messages=list(opening))
    for turn in range(speaker.limits.turns):
        text = _sample(speaker, episode, turn)
        if text is None:
            return episode
        parsed = parse_completion(text)
        episode.messages.append({"role": "assistant", "content": text})
        if parsed.answer is not None:
            episode.answer = parsed.answer
            return episode
        if parsed.call is not None:
            answered = await _called(speaker, episode, parsed.call, call)
            if answered is None:
                return episode
            result, error = answered
        elif episode.repairs == speaker.limits.repairs:
            return episode
        else:
            episode.repairs += 1
            result, error = f"error: {parsed.error}", True
        result = _observe(speaker, episode, result, tools)
        _note(episode, parsed.call, result, error)
        if episode.truncated is not None:
            return episode
    episode.truncated = Outcome(kind="truncated", reason="step_cap")
    return episode


def _sample(speaker: Speaker, episode: Episode, turn: int) -> str | None:
    """The text of the next completion; None when a limit ends the trial."""
    limits, row = speaker.limits, episode.rows[-1]
    ask = tokens_to_ask(window=limits.context, used=len(row), cap=limits.turn_tokens)
    if ask == 0:
        episode.truncated = Outcome(kind="truncated", reason="context")
        return None
    begun = time.monotonic()
    if begun >= limits.deadline:
        episode.truncated = Outcome(kind="truncated", reason="wall_clock")
        return None
    request_id = f"{speaker.trial_id}/{turn}"
    request = GenerateRequest(
        request_id=request_id,
        session_id=speaker.trial_id,
        token_ids=list(row.token_ids),
        max_tokens=ask,
        stop_token_ids=speaker.chat.stop_ids,
        seed=speaker.seed,
        temperature=limits.temperature,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        repetition_penalty=1.0,
    )
    try:
        completion = speaker.engine.generate(request)
    except TimeoutError:
        if time.monotonic() < limits.deadline:
            raise
        episode.truncated = Outcome(kind="truncated", reason="wall_clock")
        return None
    finally:
        episode.engine_seconds += time.monotonic() - begun
    if completion.finish_reason == "abort":
        raise EngineError(f"engine gave up request {request_id}")
    check_reply(request, completion, vocabulary=speaker.chat.vocabulary)
    grown = append_completion(
        row,
        completion.token_ids,
        completion.logprob,
        completion.policy_version,
        finish_reason=completion.finish_reason,
    )
    episode.rows = (*episode.rows[:-1], grown)
    episode.turns.append(
        Turn(
            request_id=request_id,
            row=len(episode.rows) - 1,
            start=len(row),
            end=len(grown),
            tool="",
            arguments={},
            result="",
            error=False,
            seconds=0.0,
        )
    )
    if completion.finish_reason != "stop":
        full = len(grown) >= limits.context
        episode.truncated = Outcome(kind="truncated", reason="context" if full else "turn_cap")
        return None
    return speaker.chat.decode(completion.token_ids)


async def _called(speaker: Speaker, episode: Episode, asked: ToolCall, call: Call) -> tuple[str, bool] | None:
    """What a tool answered; None when the agent's time was up before it did."""
    begun = time.monotonic()
    answered: tuple[str, bool] | None = None
    with anyio.move_on_after(max(0.0, speaker.limits.deadline - begun)):
        answered = await call(asked.name, asked.arguments)
    episode.turns[-1] = replace(episode.turns[-1], seconds=round(time.monotonic() - begun, 6))
    if answered is None:
        _note(episode, asked, "", True)
        episode.truncated = Outcome(kind="truncated", reason="wall_clock")
    return answered


def _note(episode: Episode, asked: ToolCall | None, result: str, error: bool) -> None:
    """Completes the last turn by its call and what came back."""
    name, arguments = asked or ("", {})
    episode.turns[-1] = replace(episode.turns[-1], tool=name, arguments=arguments, result=result, error=error)


def _observe(speaker: Speaker, episode: Episode, result: str, tools: list[dict[str, Any]]) -> str:
    """Appends a tool's answer, cut and with the one reminder if it is due; returns the text that was shown.

    An answer that leaves no room for a turn is not appended: no row grows beyond the window by what nobody trains.
    """
    limits = speaker.limits
    text = cut_text(result, limit=limits.result_characters, marker="\n[... cut ...]\n")
    rows = _observed(speaker, episode, text, tools)
    if limits.nudge_ratio > 0 and should_nudge(
        window=limits.context,
        used=len(rows[-1]),
        ratio=limits.nudge_ratio,
        already_nudged=episode.nudged,
    ):
        text = f"{text}\n{NUDGE}"
        rows = _observed(speaker, episode, text, tools)
        episode.nudged = True
    if tokens_to_ask(window=limits.context, used=len(rows[-1]), cap=limits.turn_tokens) == 0:
        episode.truncated = Outcome(kind="truncated", reason="context")
        return text
    episode.messages.append({"role": "tool", "content": text})
    episode.rows = rows
    return text


def _observed(
    speaker: Speaker, episode: Episode, text: str, tools: list[dict[str, Any]]
) -> tuple[Ledger, ...]:
    """The rows with a tool's answer: the last one longer, or one more where the template rewrites the past."""
    answer: Message = {"role": "tool", "content": text}
    row = episode.rows[-1]
    delta = speaker.chat.observation([answer], row.last_token)
    if delta is None:
        prompt = speaker.chat.render([*episode.messages, answer], tools, add_generation_prompt=True)
        return continue_rows(episode.rows, prompt)
    return (*episode.rows[:-1], append_observation(row, delta))


def observation_ids(chat: Chat, text: str, last_token: int) -> tuple[int, ...]:
    """What a tool's answer adds to a row that ends with the stop token `last_token`, next prompt included."""
    delta = chat.observation([{"role": "tool", "content": text}], last_token)
    if delta is None:
        raise ValueError("chat template must only append when a tool result follows, got another rendering")
    return delta
