"""Plays a task with the real tools on a copy of its world, as the harness would, without sandbox and MCP."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from system.sandbox.frozen import FrozenWorld
from system.tools import chat, code, documents, files, mail, pdfs, sheets, slides
from system.world.expert import BadCall, Expert, Slip, ToolCall, careful

TOOLS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        sheets.read_sheet, sheets.edit_cell, pdfs.read_pdf, slides.read_slides, documents.read_document,
        files.search_files,
        files.write_file, mail.search_mail, mail.read_mail, chat.read_channel, code.run_code,
    )
}  # fmt: skip


def call_tool(root: Path, call: ToolCall) -> str:
    """The result text of a call in the world at `root`."""
    return TOOLS[call.name](root, **call.arguments)


def play(instruction: str, root: Path, *, slip: Slip = careful) -> tuple[str, list[tuple[ToolCall, str]]]:
    """The expert's final answer, and its calls with what the tools answered."""
    steps = Expert(instruction, slip=slip).steps()
    made: list[tuple[ToolCall, str]] = []
    try:
        step = next(steps)
        while True:
            if isinstance(step, BadCall):
                step = steps.send("error: the tool call is not JSON")
                continue
            reply = call_tool(root, step)
            made.append((step, reply))
            step = steps.send(reply)
    except StopIteration as stop:
        return stop.value, made


def copied(world: Path, place: Path) -> FrozenWorld:
    """A world whose copy at `place` an agent may change."""
    shutil.copytree(world, place)
    return FrozenWorld(lower=world, root=place)
