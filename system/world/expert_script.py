"""The scripted expert in a policy's place: it reads the prompt that a policy would read, and writes its turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from system.engine.scripted import Script
from system.harness.chat import ToolCall, call_text

from . import expert
from .demonstration import step_text
from .expert_shell import by_shell

_OFFICE_TOOL = re.compile(r"\bread_sheet\b")


def expert_script(opening: Sequence[tuple[str, str]]) -> Script:
    """The turns of the expert on the task of a prompt, made with the tools that the prompt offers.

    Args:
        opening: role and text of every message before the first turn, the system's with the tools in it.

    Raises:
        ValueError: at the first turn, if the instruction is of no known family.
    """
    offered = "\n".join(text for role, text in opening if role == "system")
    instruction = next(text for role, text in reversed(opening) if role == "user")
    return plays(instruction, as_it_is if _OFFICE_TOOL.search(offered) else by_shell)


def as_it_is(call: expert.ToolCall) -> ToolCall:
    """The expert's own call."""
    return ToolCall(*call)


def plays(instruction: str, translated: Callable[[expert.ToolCall], ToolCall] = as_it_is) -> Script:
    """The expert's turns on a task; each of its calls may be made with another tool."""
    steps = expert.Expert(instruction).steps()
    try:
        step = next(steps)
        while True:
            if isinstance(step, expert.BadCall):
                step = steps.send((yield step_text(step)))
            else:
                step = steps.send((yield call_text(translated(step))))
    except StopIteration as stop:
        yield stop.value
