"""`system.harbor.agent:BartlebyAgent`: our office agent, or our code agent, as an agent of Harbor.

It speaks with one of our engines, in token ids; a server of texts would have to be trusted to tokenise as it sampled.
It works in a `BartlebyEnvironment` only, by tools that the sandbox serves, and leaves an ATIF document and Harbor's
rollout details, both with an entry a token.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any, override

from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.agents.options import AgentOptions
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail
from pydantic import Field

from system.harbor.atif import atif
from system.harbor.environment import BartlebyEnvironment


class BartlebyOptions(AgentOptions):
    """What the agent is given as `kwargs`."""

    policy: Path = Field(description="Folder with the policy's tokenizer and chat template.")
    engine_address: str = Field(description="Unix socket of a running engine.")
    harness: str = Field(default="office", description='"office" or "code".')
    toolset: str = Field(default="full", description='Tools of the office: "brief" or "full".')
    seed: int = Field(default=0, description="Of the sampling.")
    deadline_s: float = Field(
        default=3600.0, gt=0, description="Of the agent; Harbor's own may end it sooner."
    )
    tool_timeout_s: float = Field(default=30.0, gt=0, description="Of a tool call.")
    context: int = Field(default=32768, gt=0, description="Tokens a conversation may have.")
    turn_tokens: int = Field(default=8192, gt=0, description="Most tokens of a turn.")
    turns: int = Field(default=100, gt=0, description="Most turns.")
    repairs: int = Field(default=3, ge=0, description="Unreadable turns that are answered.")
    result_characters: int = Field(default=10_000, gt=0, description="A longer tool result is cut.")
    nudge_ratio: float = Field(
        default=0.0, ge=0, description="Share of the context left at the one reminder."
    )
    temperature: float = Field(default=1.0, ge=0, description="Of the sampling.")


LIMITS = ("context", "turn_tokens", "turns", "repairs", "result_characters", "nudge_ratio", "temperature")


class BartlebyAgent(BaseAgent):
    """The loop of `system.harness` over the tools of the sandbox. Each step of a task is a conversation of its own."""

    capabilities = AgentCapabilities(atif=True)
    options_model = BartlebyOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._runs = 0

    @staticmethod
    @override
    def name() -> str:
        return "bartleby"

    @override
    def version(self) -> str:
        try:
            return importlib.metadata.version("bartleby")
        except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
            return "unknown"

    @override
    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None:
        """There are none."""

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed: the tools are served by the sandbox."""
        if not isinstance(environment, BartlebyEnvironment):
            raise ValueError(f"environment must be a BartlebyEnvironment, got {type(environment).__name__}")

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        assert isinstance(environment, BartlebyEnvironment) and isinstance(self.options, BartlebyOptions)
        spec = self.options.model_dump(mode="json")
        self._runs += 1
        session = f"{self.session_id or 'bartleby'}/{self._runs}"
        given = {
            "trial_id": session,
            "instruction": instruction,
            "purpose": "eval",
            "nudge_purposes": ["eval"],
        }
        limits = {name: spec.pop(name) for name in LIMITS}
        played = await environment.play({**spec, **given, "limits": limits})
        truncated = played.pop("truncated")
        outcome = truncated or {"kind": "answered"}
        self._write({**played, "outcome": outcome, "trial_id": session})
        _tell(context, played, outcome)

    def _write(self, result: dict[str, Any]) -> None:
        """Harbor takes these files into the environment before the grading, after it has taken what lay there out."""
        document = atif(result, name=self.name(), version=self.version(), model=self.model_name)
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        (self.logs_dir / "answer.txt").write_text(result["answer"], errors="replace")
        (self.logs_dir / "trajectory.json").write_text(json.dumps(document, ensure_ascii=False))


def _tell(context: AgentContext, played: dict[str, Any], outcome: dict[str, Any]) -> None:
    turns = played["turns"]
    context.n_input_tokens = sum(turn["start"] for turn in turns)
    context.n_output_tokens = sum(turn["end"] - turn["start"] for turn in turns)
    context.rollout_details = [_detail(row, index, turns) for index, row in enumerate(played["rows"])]
    context.metadata = {
        "outcome": outcome,
        "nudged": played["nudged"],
        "repairs": played["repairs"],
        "tool_restarts": played["tool_restarts"],
        "seconds": played["seconds"],
    }


def _detail(row: dict[str, Any], index: int, turns: list[dict[str, Any]]) -> RolloutDetail:
    """A row as Harbor has it: an entry a turn in every list, also where that is empty."""
    spans = [(turn["start"], turn["end"]) for turn in turns if turn["row"] == index]
    return RolloutDetail(
        prompt_token_ids=[row["token_ids"][:start] for start, _ in spans],
        completion_token_ids=[row["token_ids"][start:end] for start, end in spans],
        logprobs=[row["rollout_logprob"][start:end] for start, end in spans],
        extra={
            "loss_mask": [row["loss_mask"][start:end] for start, end in spans],
            "policy_version": [row["policy_version"][start:end] for start, end in spans],
        },
    )
