"""Which tools a harness is given in the sandbox, and how they are served there."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from system.sandbox import Serve
from system.sandbox.serve import serve_server
from system.tools import code_agent
from system.tools.server import expected_tools as office_tools
from system.tools.server import serve_tools, tools_of
from system.tools.shell import WARNING_S
from system.tools.spill import spilling

HARNESSES = ("office", "code")

SPILLING = ("full",)
"""Tool sets of the office whose long results are kept whole in a file; what the others cut is gone."""

PAGED = "read_file(path, start, lines) shows a part of it, search_files finds text in it"


def expected_tools(harness: str, toolset: str) -> tuple[str, ...]:
    """The tools without which an agent of this harness does not begin."""
    return code_agent.NAMES if harness == "code" else office_tools(toolset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A tool server that can be forked, and ordered by name where no fork reaches: `Serving(run=run, order=order)`."""

    run: Serve
    order: Mapping[str, Any]
    "As `system.sandbox.inside.order_of` has it."

    def __call__(self, fd: int, root: Path) -> None:
        """Serve until the other end closes."""
        self.run(fd, root)


def serving(harness: str, toolset: str, *, result_characters: int, longest_call_s: float) -> Serving:
    """What to run inside a sandbox.

    Args:
        harness: "office" or "code".
        toolset: of the office.
        result_characters: a longer result is cut, and where there is a tool to page it kept in a file.
        longest_call_s: what the caller waits for an answer; a command ends a little before.
    """
    if harness == "code":
        command_s = 0.9 * max(0.0, longest_call_s - WARNING_S)
        tools = code_agent.tools(result_characters=result_characters, longest_call_s=command_s)
    else:
        tools = tools_of(toolset)
        if toolset in SPILLING:
            tools = spilling(tools, limit=result_characters, how=PAGED)
    arguments = {
        "harness": harness,
        "toolset": toolset,
        "result_characters": result_characters,
        "longest_call_s": longest_call_s,
    }
    order = {"target": f"{__name__}:{serving.__name__}", "arguments": arguments}
    return Serving(run=partial(_serve, partial(serve_tools, tools=tools)), order=order)


def _serve(build, fd: int, root: Path) -> None:
    """Serve until the other end closes. The fork that calls this may have been made inside a running event loop:
    nothing of that loop is left in it."""
    asyncio._set_running_loop(None)
    contextvars.Context().run(_serve_anew, build, fd, root)


def _serve_anew(build, fd: int, root: Path) -> None:
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, force=True)
    anyio.run(serve_server, build(root), socket.socket(fileno=fd))
