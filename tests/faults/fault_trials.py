"""What the fleet's processes run in tests/faults: real trials, whose tools may break or be served by another program.

Nothing of the trial is replaced. A broken tool stands beside the office's own on the real server; a foreign server is
another program in the sandbox. Both break by what a program can do: signals, exits, bytes on its descriptors.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from system.harness.serving import _serve, serving
from system.sandbox import Serve
from system.tools.registration import Tool, tool
from system.tools.server import serve_tools, tools_of
from system.trial import run_trial

STREAM = 3
"""The server's end of the wire, by the sandbox's word."""


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """A trial in the surroundings that its spec names: a search path, a clock, a program that serves the tools."""
    os.environ["PATH"] = spec.get("path", os.environ["PATH"])
    if spec.get("clock") == "leaps":
        _let_the_clock_leap()
    return run_trial(spec, serving=SERVINGS[spec.get("server", "office")])


def _let_the_clock_leap() -> None:
    """The one fault that nothing else can do: `time.time` is replaced, since the machine's clock is not ours to set."""
    true, days = time.time, iter(range(1, 1_000_000))
    time.time = lambda: true() + (-1) ** (day := next(days)) * 86_400.0 * day


# Broken tools


def look(root: Path, fault: str = "", times: int = 1) -> str:
    """Read; the first times it breaks."""
    return _broken("look", root, fault, times)


def change(root: Path, fault: str = "", times: int = 1) -> str:
    """Write; the first times it breaks."""
    return _broken("change", root, fault, times)


def count(root: Path, name: str) -> str:
    """How often a tool ran."""
    return f"{name} ran {_counted(name, 0)} times"


def _broken(name: str, root: Path, fault: str, times: int) -> Any:
    number = _counted(name, 1)
    if fault and number <= times:
        answer = BREAKS[fault](root)
        if answer is not ...:
            return answer
    return f"{name} {number}"


def _counted(name: str, more: int) -> int:
    """Calls so far, kept where no server's death loses it and no verifier looks."""
    note = Path(os.environ.get("TMPDIR", "/tmp"), name)
    with open(note, "ab") as file:
        file.write(b"x" * more)
    return note.stat().st_size


def _kill(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segfault(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _exit(_: Path) -> None:
    os._exit(9)


def _quit(_: Path) -> None:
    raise SystemExit(0)


def _hang(_: Path) -> None:
    time.sleep(1000)


def _half_line(_: Path) -> None:
    os.write(STREAM, b'{"jsonrpc": "2.0", "id": 2, "res')
    time.sleep(1000)


def _half_line_and_end(_: Path) -> None:
    os.write(STREAM, b'{"jsonrpc": "2.0", "id": 2, "res')
    os._exit(0)


def _garbage_line(_: Path) -> Any:
    os.write(STREAM, bytes(byte for byte in range(256) if byte != 10) + b"\n{}\n[]\nnull\n\n")
    return ...


def _garbage_before_the_answer(_: Path) -> Any:
    os.write(STREAM, b"\x00\xfe\xffTraceback (most recent call last):")
    return ...


def _wrong_ids(_: Path) -> Any:
    for number in (-1, 10**6, "none", None):
        line = {"jsonrpc": "2.0", "id": number, "result": {"content": [{"type": "text", "text": "forged"}]}}
        os.write(STREAM, json.dumps(line).encode() + b"\n")
    return ...


def _wrong_ids_only(root: Path) -> None:
    _wrong_ids(root)
    time.sleep(1000)


def _answers_to_every_id(body: str) -> None:
    """The server does not tell a tool the id of its call: every small id is answered."""
    for number in range(40):
        os.write(STREAM, b'{"jsonrpc": "2.0", "id": %d, %s}\n' % (number, body.encode("latin-1")))
    time.sleep(1000)


def _no_protocol(_: Path) -> None:
    _answers_to_every_id('"result": {"content": 5}')


def _not_utf8(_: Path) -> None:
    _answers_to_every_id('"result": {"content": [{"type": "text", "text": "caf\xe9"}]}')


def _request_back(_: Path) -> Any:
    """A server may ask a client, of all things for what it does not know."""
    os.write(STREAM, b'{"jsonrpc": "2.0", "id": 77, "method": "sampling/createMessage", "params": {}}\n')
    return ...


def _close_stream(_: Path) -> None:
    with socket.socket(fileno=os.dup(STREAM)) as stream:
        stream.shutdown(socket.SHUT_RDWR)
    time.sleep(1000)


def _flood(_: Path) -> str:
    return "x" * 40_000_000


def _long(_: Path) -> str:
    return "x" * 20_000_000


def _surrogate(_: Path) -> str:
    return "before \udcff after"


def _nulls(_: Path) -> str:
    return "before \0\0 after"


def _none(_: Path) -> None:
    return None


def _number(_: Path) -> Any:
    return 42


def _raise(_: Path) -> None:
    raise LookupError("the ledger is\nupside down")


def _recurse(root: Path) -> None:
    _recurse(root)


def _take_memory(_: Path) -> int:
    return len(bytearray(8 << 30))


_KEPT: list[Any] = []


def _leak_memory(_: Path) -> None:
    while True:
        _KEPT.append(bytearray(1 << 20))


def _leak_descriptors(_: Path) -> None:
    while True:
        _KEPT.append(os.open("/dev/null", os.O_RDONLY))


def _leave_zombies(_: Path) -> Any:
    for _number in range(30):
        if os.fork() == 0:
            os._exit(0)
    return ...


def _write_a_long_file(_: Path) -> None:
    with open(Path(os.environ.get("TMPDIR", "/tmp"), "long"), "wb") as file:
        for _number in range(64):
            file.write(bytes(1 << 20))


def _shout(_: Path) -> Any:
    sys.stderr.write("error after error\n" * 200_000)
    sys.stderr.flush()
    return ...


def _stop(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _crash_in_c(_: Path) -> None:
    ctypes.string_at(0)


BREAKS: dict[str, Callable[[Path], Any]] = {
    "is killed": _kill,
    "segfaults": _segfault,
    "crashes in C": _crash_in_c,
    "exits": _exit,
    "quits": _quit,
    "stops": _stop,
    "hangs": _hang,
    "half a line": _half_line,
    "half a line, then the end": _half_line_and_end,
    "a line of garbage": _garbage_line,
    "garbage before the answer": _garbage_before_the_answer,
    "wrong ids too": _wrong_ids,
    "wrong ids only": _wrong_ids_only,
    "no protocol": _no_protocol,
    "not UTF-8": _not_utf8,
    "a request back": _request_back,
    "closes the stream": _close_stream,
    "40 MB": _flood,
    "20 MB": _long,
    "a surrogate": _surrogate,
    "NULs": _nulls,
    "None": _none,
    "a number": _number,
    "raises": _raise,
    "recurses": _recurse,
    "takes memory": _take_memory,
    "leaks memory": _leak_memory,
    "leaks descriptors": _leak_descriptors,
    "leaves zombies": _leave_zombies,
    "writes a long file": _write_a_long_file,
    "shouts": _shout,
}
"""What a broken tool does in place of its work. Those that answer `...` then do their work after all."""

BROKEN = {one.name: one for one in (tool(look, reads=True), tool(change), tool(count, reads=True))}


# Programs that serve


def fragile(harness: str, toolset: str, **_: Any) -> Serve:
    """The real server with the broken tools beside the office's."""
    return _serving(tools_of(toolset) | BROKEN)


def lacking(harness: str, toolset: str, **_: Any) -> Serve:
    """The real server without two tools."""
    return _serving({name: one for name, one in tools_of(toolset).items() if name[:10] != "read_sheet"})


def slow(harness: str, toolset: str, **_: Any) -> Serve:
    """The real server, which needs a second before it answers anything."""
    return _delayed(tools_of(toolset), 1.0)


def too_slow(harness: str, toolset: str, **_: Any) -> Serve:
    """The real server, which needs longer than anyone waits before it answers anything."""
    return _delayed(tools_of(toolset), 1000.0)


def deaf(*_: Any, **__: Any) -> Serve:
    """A program that never answers."""
    return lambda fd, root: time.sleep(1000)


def absent(*_: Any, **__: Any) -> Serve:
    """A program that ends at once."""
    return lambda fd, root: None


def unimportable(*_: Any, **__: Any) -> Serve:
    """A program that lacks a package."""
    return lambda fd, root: __import__("no_such_package")


def babbling(*_: Any, **__: Any) -> Serve:
    """A program that speaks another protocol."""

    def serve(fd: int, root: Path) -> None:
        os.write(fd, b"HTTP/1.1 400 Bad Request\r\n\r\n")

    return serve


def _serving(tools: dict[str, Tool]) -> Serve:
    return partial(_serve, partial(serve_tools, tools=tools))


def _delayed(tools: dict[str, Tool], seconds: float) -> Serve:
    def serve(fd: int, root: Path) -> None:
        time.sleep(seconds)
        _serving(tools)(fd, root)

    return serve


SERVINGS: dict[str, Callable[..., Serve]] = {
    "office": serving,
    "fragile": fragile,
    "lacking": lacking,
    "slow": slow,
    "too slow": too_slow,
    "deaf": deaf,
    "absent": absent,
    "unimportable": unimportable,
    "babbling": babbling,
}
