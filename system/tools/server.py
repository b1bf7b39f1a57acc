"""The MCP server of a world: a set of tools, with one-line errors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from mcp import types
from mcp.server import Server, ServerRequestContext

from system.tools import calendar, chat, code, documents, files, mail, pdfs, sheets, slides
from system.tools.registration import Tool
from system.tools.results import cut, one_line

TOOLSETS = ("brief", "full")
"""`brief`: the fifteen tools that policies/clerk was made for. `full`: them and the rest, some with more arguments."""


Shorten = Callable[[str], str]
"""Makes a result fit: cuts it, and says where the rest is."""


def build_server(root: Path, toolset: str = "brief", *, shorten: Shorten | None = None) -> Server[Any]:
    """Build the server of the world at `root`; it starts no thread and leaves logging as it was.

    Args:
        root: The world folder; every path that a tool takes is relative to it.
        toolset: "brief", whose tools cut their results themselves, or "full".
        shorten: Applied to every result; left out, `full` cuts at `RESULT_LIMIT`.
    """
    if toolset == "full" and shorten is None:
        shorten = partial(cut, rest="ask for less at a time")
    return serve_tools(root, tools_of(toolset), shorten=shorten)


def expected_tools(toolset: str) -> tuple[str, ...]:
    """Name the tools of a set, in order: what a server must list before an agent starts."""
    return tuple(tools_of(toolset))


def serve_tools(root: Path, tools: Mapping[str, Tool], *, shorten: Shorten | None = None) -> Server[Any]:
    """Build a server of the world at `root` that offers `tools`, by name, and applies `shorten` to what they say."""

    async def list_tools(
        _: ServerRequestContext[Any], __: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool.listing for tool in tools.values()])

    async def call_tool(
        _: ServerRequestContext[Any], call: types.CallToolRequestParams
    ) -> types.CallToolResult:
        tool = tools.get(call.name)
        if tool is None:
            line = f"error: no such tool {one_line(call.name)[:80]}; tools: {', '.join(tools)}"
            text, failed = line, True
        else:
            text, failed = tool.call(root, call.arguments or {})
            text = shorten(text) if shorten else text
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=failed)

    return Server("office", on_list_tools=list_tools, on_call_tool=call_tool)


@cache
def tools_of(toolset: str) -> dict[str, Tool]:
    """The tools of a set by name, in order; what `full` needs is imported when it is first asked for."""
    if toolset not in TOOLSETS:
        raise ValueError(f'toolset must be "brief" or "full", got {toolset!r}')
    rooms: list[Any] = [files, sheets, pdfs, slides, documents, mail, chat, calendar, code]
    if toolset == "full":
        rooms = [importlib.import_module("system.tools.full")]
    return {tool.name: tool for room in rooms for tool in room.TOOLS}


TOOL_LINES: list[str] = [tool.line for tool in tools_of("brief").values()]
"""Each tool of `brief`, `read_sheet(path, find, range, sheet)`: lines for the system prompt."""
