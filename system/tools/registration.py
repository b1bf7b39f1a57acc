"""How a plain function of a world becomes a tool."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from mcp import types

from system.tools.arguments import Argument, kind_of, read_arguments, schema_of
from system.tools.results import failure_line

TIME_LIMIT_S = 30.0
"""Seconds after which a tool is broken off; one that minds its own clock has no such limit."""


class Tool(NamedTuple):
    """A tool as a server offers it; `run` takes the world folder and then the arguments by name.

    Example: `tool(read_file, reads=True)`.
    """

    name: str
    description: str
    arguments: tuple[Argument, ...]
    reads: bool
    limit_s: float | None
    run: Callable[..., str]
    described: types.Tool | None = None
    "The listing, if it was made before."

    @property
    def listing(self) -> types.Tool:
        """How the protocol lists the tool."""
        return self.described or types.Tool(
            name=self.name,
            description=self.description,
            input_schema=schema_of(self.name, self.arguments),
            annotations=types.ToolAnnotations(read_only_hint=self.reads),
        )

    @property
    def line(self) -> str:
        """The tool in one line: `read_sheet(path, find, range, sheet)`."""
        return f"{self.name}({', '.join(argument.name for argument in self.arguments)})"

    def call(self, root: Path, given: dict[str, Any]) -> tuple[str, bool]:
        """Run the tool; gives its text and whether that is an error, which is one line `error: ...`."""
        try:
            values = read_arguments(self.name, self.arguments, given)
            with _time_limit(self.name, self.limit_s):
                text = self.run(root, **values)
            if not isinstance(text, str):
                raise ValueError(f"{self.name} must say what it did, got {text!r}")
        except Exception as error:  # noqa: BLE001  # a damaged file can raise anything; the model reads it
            return _sendable(failure_line(error, root)), True
        return _sendable(text), False


def tool(
    function: Callable[..., str],
    *,
    reads: bool = False,
    limit_s: float | None = TIME_LIMIT_S,
    description: str = "",
    name: str = "",
) -> Tool:
    """Describe `function(root, ...)` as a tool: its name, the first line of its docstring, its arguments.

    Args:
        function: Its arguments are annotated with their types, or `Annotated[type, "what it means"]`; it returns
            text and raises ValueError for what the model did wrong.
        reads: The tool changes nothing, so that a call may be repeated.
        limit_s: Seconds that it may take; None if it minds its own clock.
        description: In place of the docstring's first line.
        name: In place of the function's own.
    """
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    described = description or (inspect.getdoc(function) or "").partition("\n")[0]
    arguments = tuple(_argument(parameter) for parameter in parameters)
    name = name or function.__name__
    made = Tool(name, described, arguments, reads, limit_s, function)
    return made._replace(described=made.listing)


def _argument(parameter: inspect.Parameter) -> Argument:
    annotation, meaning = parameter.annotation, ""
    if get_origin(annotation) is Annotated:
        annotation, meaning = get_args(annotation)
    needed = parameter.default is inspect.Parameter.empty
    return Argument(
        parameter.name, kind_of(annotation), meaning, needed, None if needed else parameter.default
    )


@contextmanager
def _time_limit(name: str, limit_s: float | None) -> Iterator[None]:
    """Break the block off when it takes too long; without effect outside a program's first thread."""
    if limit_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise ValueError(f"{name} must end within {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _sendable(text: str) -> str:
    """Replace lone surrogates, which a file can bring in and JSON cannot carry out."""
    return text.encode("utf-8", "replace").decode("utf-8")
