"""Agents of others, for test_harbor.py: they work by `exec`, as Harbor's own do."""

from __future__ import annotations

from typing import override

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class ShellAgent(BaseAgent):
    """Runs `command` and is done."""

    def __init__(self, *args, command: str, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.command = command

    @staticmethod
    @override
    def name() -> str:
        return "shell"

    @override
    def version(self) -> str:
        return "1"

    @override
    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None: ...

    @override
    async def setup(self, environment: BaseEnvironment) -> None: ...

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        done = await environment.exec(self.command)
        context.metadata = {"code": done.return_code, "out": done.stdout, "err": done.stderr}
