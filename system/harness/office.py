"""The office agent: an instruction, the tools of an office, and nothing else in the prompt."""

from dataclasses import dataclass
from typing import Any

from system.engine import Engine
from system.harness.chat import Chat
from system.harness.conversation import NUDGE as NUDGE
from system.harness.conversation import Call as Call
from system.harness.conversation import Episode as Episode
from system.harness.conversation import Harness as Harness
from system.harness.conversation import Limits as Limits
from system.harness.conversation import Turn as Turn
from system.harness.conversation import converse
from system.harness.conversation import observation_ids as observation_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficeAgent:
    """One tool call a turn until a turn calls none: that text is the answer."""

    trial_id: str
    seed: int
    engine: Engine
    chat: Chat
    limits: Limits

    async def __call__(self, *, instruction: str, tools: list[dict[str, Any]], call: Call) -> Episode:
        return await converse(self, [{"role": "user", "content": instruction}], tools, call)
