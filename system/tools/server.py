"""The MCP server of a world: every tool, with one-line errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, InputRequiredResult, TextContent
from pydantic import ValidationError

from system.tools import calendar, chat, code, documents, files, mail, pdfs, sheets, slides
from system.tools.registration import moved
from system.tools.results import one_line

_TYPE_NAMES = {"string": "a string", "integer": "an integer"}


class OfficeServer(MCPServer[Any]):
    """An MCP server whose every failed call is one line `error: ...` that the model can read."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Any = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool; what went wrong becomes a text result with `is_error` true."""
        try:
            self._refuse_unknown(name, arguments)
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            content = TextContent(type="text", text=self._line(name, error))
            return CallToolResult(content=[content], is_error=True)

    def _refuse_unknown(self, name: str, arguments: Mapping[str, Any]) -> None:
        tools = {tool.name: tool for tool in self._tool_manager.list_tools()}
        if name not in tools:
            raise ToolError(f"error: no such tool {one_line(name)[:80]}; tools: {', '.join(tools)}")
        known = tools[name].parameters["properties"]
        unknown = [argument for argument in arguments if argument not in known]
        if unknown:
            names = ", ".join(known) or "none"
            raise ToolError(f"error: {name} has no argument {one_line(unknown[0])[:80]}; arguments: {names}")

    def _line(self, name: str, error: ToolError) -> str:
        cause = error.__cause__
        if cause is None or not isinstance(cause, ToolError | ValidationError):
            return str(error)
        if isinstance(cause, ToolError):  # the SDK puts its own words in front of the tool's line
            return str(cause)
        first = cause.errors()[0]
        argument = str(first["loc"][0])
        if first["type"] == "missing":
            return f"error: {name} needs argument {argument}"
        tool = self._tool_manager.get_tool(name)
        wanted = tool.parameters["properties"][argument].get("type") if tool else None
        got = json.dumps(first["input"], ensure_ascii=False, default=str)[:80]
        return f"error: {argument} must be {_TYPE_NAMES.get(str(wanted), wanted)}, got {got}"


def build_server(root: Path) -> MCPServer:
    """Build the server of the world at `root`; it starts no thread and leaves logging as it was.

    Args:
        root: The world folder; every path that a tool takes is relative to it.
    """
    with _logging_untouched():
        return OfficeServer("office", log_level="ERROR", tools=[moved(tool, root) for tool in _tools()])


@cache
def _tools() -> list[Tool]:
    """Describe every tool once; this takes fifteen times as long as the rest of a server."""
    with _logging_untouched():
        server = MCPServer("office", log_level="ERROR")
    for module in (files, sheets, pdfs, slides, documents, mail, chat, calendar, code):
        module.register(server, Path("."))
    return server._tool_manager.list_tools()


@contextmanager
def _logging_untouched() -> Iterator[None]:
    """Keep the SDK from putting its own handler on the root logger, which it does where there is none."""
    guard = logging.NullHandler()
    logging.root.addHandler(guard)
    try:
        yield
    finally:
        logging.root.removeHandler(guard)


TOOL_LINES: list[str] = [f"{tool.name}({', '.join(tool.parameters['properties'])})" for tool in _tools()]
"""Each tool as the server has it, `read_sheet(path, find, range, sheet)`: lines for the system prompt."""
