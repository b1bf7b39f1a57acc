"""The office agent: an agent loop on token ids over MCP tools.

What the policy sampled is never re-tokenised: a completion is appended as ids, a tool result as the ids that the chat
template adds for it, or in a new row where the template rewrites what was before. Completions that cannot be read are
answered, and retried at most twice in a trial.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.budget import cut_text, should_nudge, tokens_to_ask
from core.outcome import Outcome
from core.tito import Ledger, append_completion, append_observation, continue_rows, open_ledger
from system.engine import Engine, EngineError, GenerateRequest
from system.harness.chat import Chat, Message, parse_completion

NUDGE = "The context is nearly used up: answer soon."


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one trial of the office agent may use, and how it samples."""

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
    """On the clock of time.monotonic."""


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


@dataclass(slots=True, kw_only=True)
class Episode:
    """What an agent run leaves behind."""

    rows: tuple[Ledger, ...]
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    answer: str = ""
    truncated: Outcome | None = None
    nudged: bool = False
    engine_seconds: float = 0.0


class Harness(Protocol):
    """An agent loop: policy and tools in, an episode out."""

    async def __call__(self, *, instruction: str, tools: list[dict[str, Any]], call: "Call") -> Episode: ...


Call = Callable[[str, dict[str, Any]], Awaitable[tuple[str, bool]]]
"""Calls a tool by name: its text, and whether it is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficeAgent:
    """One tool call a turn until a turn calls none: that text is the answer."""

    trial_id: str
    seed: int
    engine: Engine
    chat: Chat
    limits: Limits

    async def __call__(self, *, instruction: str, tools: list[dict[str, Any]], call: Call) -> Episode:
        user: Message = {"role": "user", "content": instruction}
        prompt = self.chat.render([user], tools, add_generation_prompt=True)
        episode = Episode(rows=(open_ledger(prompt),), messages=[user])
        repairs = 0
        for turn in range(self.limits.turns):
            text = self._sample(episode, turn)
            if text is None:
                return episode
            parsed = parse_completion(text)
            episode.messages.append({"role": "assistant", "content": text})
            if parsed.answer is not None:
                episode.answer = parsed.answer
                return episode
            if parsed.call is not None:
                result, error = await call(parsed.call.name, parsed.call.arguments)
                name, arguments = parsed.call
            elif repairs == self.limits.repairs:
                return episode
            else:
                repairs += 1
                result, error, name, arguments = f"error: {parsed.error}", True, "", {}
            last = episode.turns[-1]
            result = self._observe(episode, result, tools)
            episode.turns[-1] = Turn(
                request_id=last.request_id,
                row=last.row,
                start=last.start,
                end=last.end,
                tool=name,
                arguments=arguments,
                result=result,
                error=error,
            )
        episode.truncated = Outcome(kind="truncated", reason="step_cap")
        return episode

    def _sample(self, episode: Episode, turn: int) -> str | None:
        """The text of the next completion; None when a limit ends the trial."""
        row = episode.rows[-1]
        ask = tokens_to_ask(window=self.limits.context, used=len(row), cap=self.limits.turn_tokens)
        if ask == 0:
            episode.truncated = Outcome(kind="truncated", reason="context")
            return None
        begun = time.monotonic()
        if begun >= self.limits.deadline:
            episode.truncated = Outcome(kind="truncated", reason="wall_clock")
            return None
        request_id = f"{self.trial_id}/{turn}"
        completion = self.engine.generate(
            GenerateRequest(
                request_id=request_id,
                session_id=self.trial_id,
                token_ids=list(row.token_ids),
                max_tokens=ask,
                stop_token_ids=self.chat.stop_ids,
                seed=self.seed,
                temperature=self.limits.temperature,
                top_p=1.0,
                top_k=-1,
                min_p=0.0,
                repetition_penalty=1.0,
            )
        )
        episode.engine_seconds += time.monotonic() - begun
        if completion.finish_reason == "abort":
            raise EngineError(f"engine gave up request {request_id}")
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
            )
        )
        if completion.finish_reason != "stop":
            full = len(grown) >= self.limits.context
            episode.truncated = Outcome(kind="truncated", reason="context" if full else "turn_cap")
            return None
        return self.chat.decode(completion.token_ids)

    def _observe(self, episode: Episode, result: str, tools: list[dict[str, Any]]) -> str:
        """Appends a tool's answer, cut and with the one reminder if it is due; returns the text that was shown."""
        limits = self.limits
        text = cut_text(result, limit=limits.result_characters, marker="\n[... cut ...]\n")
        rows = self._observed(episode, text, tools)
        if limits.nudge_ratio > 0 and should_nudge(
            window=limits.context,
            used=len(rows[-1]),
            ratio=limits.nudge_ratio,
            already_nudged=episode.nudged,
        ):
            episode.nudged = True
            text = f"{text}\n{NUDGE}"
            rows = self._observed(episode, text, tools)
        episode.messages.append({"role": "tool", "content": text})
        episode.rows = rows
        return text

    def _observed(self, episode: Episode, text: str, tools: list[dict[str, Any]]) -> tuple[Ledger, ...]:
        """The rows with a tool's answer: the last one longer, or one more where the template rewrites the past."""
        answer: Message = {"role": "tool", "content": text}
        row = episode.rows[-1]
        delta = self.chat.observation([answer], row.last_token)
        if delta is None:
            prompt = self.chat.render([*episode.messages, answer], tools, add_generation_prompt=True)
            return continue_rows(episode.rows, prompt)
        return (*episode.rows[:-1], append_observation(row, delta))


def observation_ids(chat: Chat, text: str, last_token: int) -> tuple[int, ...]:
    """What a tool's answer adds to a row that ends with the stop token `last_token`, next prompt included."""
    delta = chat.observation([{"role": "tool", "content": text}], last_token)
    if delta is None:
        raise ValueError("chat template must only append when a tool result follows, got another rendering")
    return delta
