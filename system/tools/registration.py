"""How a plain function of a world becomes a tool of a server."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from pydantic import Field

from system.tools.results import failure_line

_ARGUMENT_TYPES: dict[Any, Any] = {
    str: Annotated[str, Field(coerce_numbers_to_str=True)],  # a model writes 77 as often as "77"
    int: int,
}


def add_tool(server: MCPServer, root: Path, function: Callable[..., str]) -> None:
    """Offer `function(root, ...)` as a tool: its name, the first line of its docstring, a flat schema.

    The tool is a coroutine function although it never waits: the SDK runs plain functions in worker threads.

    Args:
        server: Where the tool is added.
        root: The world folder, passed as the first argument.
        function: Takes strings and integers, returns text, raises ValueError for what the model did wrong.
    """
    signature = inspect.signature(function, eval_str=True)
    arguments = [
        argument.replace(annotation=_ARGUMENT_TYPES[argument.annotation])
        for argument in list(signature.parameters.values())[1:]
    ]
    bound: Any = partial(_call, function, root)
    bound.__name__ = function.__name__
    bound.__annotations__ = {argument.name: argument.annotation for argument in arguments} | {"return": str}
    bound.__signature__ = inspect.Signature(arguments, return_annotation=str)
    description = inspect.getdoc(function) or ""
    server.add_tool(bound, description=description.partition("\n")[0], structured_output=False)


def moved(tool: Tool, root: Path) -> Tool:
    """Give the same tool for another world, without the cost of describing it anew."""
    return tool.model_copy(update={"fn": partial(_call, tool.fn.args[0], root)})


async def _call(function: Callable[..., str], root: Path, /, **given: Any) -> str:
    try:
        text = function(root, **given)
    except Exception as error:  # a damaged file can raise anything; the model reads it as one line
        raise ToolError(_sendable(failure_line(error, root))) from error
    return _sendable(text)


def _sendable(text: str) -> str:
    """Replace lone surrogates, which a file can bring in and JSON cannot carry out."""
    return text.encode("utf-8", "replace").decode("utf-8")
