"""What runs in a container of another machine: `inside serve ORDER` and `inside freeze ORDER`.

serve: the tool server as it is forked elsewhere, its stream carried over the standard input and output.
freeze: everything that came after the world is killed, round after round, and the world goes out as a parcel.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import Limits, SandboxError, Serve, kernel, parcel, server_process

CODE, WORLD, UID = "/opt/bartleby", "/world", 1000
_CHUNK = 1 << 16


def order_of(serve: Serve) -> dict[str, Any]:
    """A tool server by name, as JSON, for a place that no fork reaches.

    That is its `order`, {"target": "module:function", "arguments": {...}} with a function that gives the server, or
    the name of a plain function.

    Raises:
        SandboxError: it has neither.
    """
    order = getattr(serve, "order", None)
    if isinstance(order, Mapping):
        return dict(order)
    module, name = getattr(serve, "__module__", ""), getattr(serve, "__qualname__", "")
    if getattr(sys.modules.get(module), name, None) is not serve:
        cause = f"the tool server must have an order or be a function of a module, got {serve!r}"
        raise SandboxError("start", cause)
    return {"target": f"{module}:{name}"}


def ordered(order: Mapping[str, Any]) -> Serve:
    """The tool server that an order means."""
    module, _, name = order["target"].partition(":")
    found = getattr(importlib.import_module(module), name)
    return found(**order["arguments"]) if "arguments" in order else found


def serve(order: Mapping[str, Any]) -> int:
    """Fork the tool server, carry its stream until it is dead, exit as it did."""
    run = ordered(order)
    ours, theirs = socket.socketpair()
    limits = Limits(**order["limits"])
    log = Path(CODE if os.access(CODE, os.W_OK) else "/tmp", f"server-{os.getpid()}.log")
    place = server_process.Place(
        root=Path(WORLD),
        environment={**server_process.INSIDE, "HOME": "/tmp"},
        enter=functools.partial(_enter, limits.processes, os.getpid()),
        log=log,
    )
    pid = os.fork()
    if pid == 0:
        server_process.become_server(run, theirs.fileno(), place, limits)
    theirs.close()
    threading.Thread(target=_carry_in, args=(ours,), daemon=True).start()
    while data := ours.recv(_CHUNK):
        _write(data)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(server_process.last_line(log), file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


def _enter(processes: int, parent: int) -> None:
    """Become an ordinary user without any way back, who ends with the process that carries the stream."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(UID, UID, UID)
        os.setresuid(UID, UID, UID)
    kernel.die_with_parent(parent)
    kernel.drop_privileges()
    kernel.filter_system_calls()
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def _carry_in(stream: socket.socket) -> None:
    try:
        while data := os.read(0, _CHUNK):
            stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)
    except OSError:  # the server is dead; its end is noticed where it is read
        return


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def freeze(order: Mapping[str, Any]) -> int:
    """Kill, say what is left (nothing), send the world."""
    left = kill(order["spared"], time.monotonic() + order["seconds"])
    _write(json.dumps({"left": left}).encode() + b"\n")
    if left or not order["world"]:
        return 0
    entries, contents = parcel.pack(WORLD)
    _write(parcel.listing(entries))
    for chunk in contents:
        _write(chunk)
    return 0


def kill(spared: Mapping[str, str], deadline: float) -> list[str]:
    """Kill all but this process and those spared, until there are none; pids of those that do not die.

    A process may fork while the list is read: only a round that finds nobody ends this. Root first kills all of the
    tools' user at one blow, which no fork escapes.
    """
    if os.geteuid() == 0 and (pid := os.fork()):
        os.waitpid(pid, 0)
    elif os.geteuid() == 0:
        try:
            os.setresuid(UID, UID, UID)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    while True:
        found = parcel.processes()
        left = [pid for pid, start in found.items() if spared.get(pid) != start]
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:  # not ours to kill: told at the end
                continue
        time.sleep(0.002)


def main(verb: str, order: str) -> int:
    """Do what is asked."""
    return {"serve": serve, "freeze": freeze}[verb](json.loads(order))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
