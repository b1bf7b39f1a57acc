"""`python -m system.harbor.keeper FD`: the process that keeps one of our sandboxes for Harbor, with a single thread.

Orders come in and replies go out as lines of JSON on its stream, one at a time. Between two orders the world is frozen
and nothing is alive: each command, transfer and agent gets a place of its own over it, and whatever it leaves running
ends with it. When the stream ends, in whatever way its other end does, the sandbox goes.

Views are kept apart. From the moment on when tests are brought in, /tests, /logs/verifier and /tmp are fresh folders of
the grader's, so that nothing that an agent planted there is ever looked at. Our own agent sees the world and no more.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from system.child import ChildDied, in_a_child
from system.harbor import jobs
from system.harbor.jobs import END, ERR, FAULT, HEADER, OUT
from system.sandbox import Limits, SandboxError, Serve, View
from system.sandbox.bubblewrap import BubblewrapSandbox

ROOT = Path(__file__).resolve().parents[2]

MODULES = (ROOT / "core", ROOT / "system")
"""What a test script of ours imports. An agent does not see them: they tell how tasks are made."""

SHARED = ("/logs", "/solution", "/runtime")
"""Folders beside the world that agent and grader have together."""
OWN = ("/tmp",)
"""Those that each of them has for itself."""
GRADERS = ("/logs/verifier", "/tests")
"""Those that only the grader keeps; an agent has fresh ones in each of its places."""

KEPT_BYTES = 8 << 20
"""Of what a command prints, the head that is kept, and as much of its errors."""

LATE = 124
"""Exit code of a command that was killed because it was late, as of timeout(1)."""

Order = dict[str, Any]


class Refused(Exception):
    """An order could not be carried out; the text is for the one who gave it."""


class Aborted(Exception):
    """Whoever gave the order does not want its result any more."""


class Keeper:
    """The sandbox of one Harbor environment. Example: `Keeper(stream, order).loop()`.

    Args:
        control: the stream of orders.
        order: the first one: world, scratch, root (where the world is seen), limits.
    """

    def __init__(self, control: socket.socket, order: Order) -> None:
        self._control, self._lines, self._buffer = control, [], bytearray()
        self._root = Path(order["root"])
        self._grading, self._gradings, self._places = False, 0, 0
        limits = Limits(**order["limits"])
        world, scratch = Path(order["world"]).resolve(), Path(order["scratch"]).resolve()
        self._most_bytes = limits.world_bytes
        self._sandbox = BubblewrapSandbox(world, scratch, jobs.idle, limits, self._view())
        self._sandbox.freeze()
        self._exec(
            {"command": "mkdir -p /logs/agent /logs/artifacts", "cwd": "/", "env": {}, "timeout_s": None}
        )

    def loop(self) -> None:
        """Serve orders to their end, then remove the sandbox."""
        acts: dict[str, Callable[[Order], Order]] = {
            "exec": self._exec,
            "put": self._put,
            "get": self._get,
            "play": self._play,
            "agent": self._agent,
        }
        try:
            while (order := self._next()) is not None and order["op"] != "close":
                if order["op"] != "abort":  # one that came after what it was about had ended
                    self._reply(self._tried(acts[order["op"]], order))
        finally:
            self._sandbox.close()
        if order is not None:
            self._reply({"closed": True})

    def _tried(self, act: Callable[[Order], Order], order: Order) -> Order:
        try:
            return act(order)
        except Refused as error:
            return {"refused": str(error)}
        except Aborted:
            return {"aborted": True}
        except SandboxError as error:
            return {"fault": error.cause, "phase": error.phase}
        except OSError as error:
            return {"fault": f"{type(error).__name__}: {error}", "phase": order["op"]}

    def _view(self) -> View:
        self._places += 1
        whose = f"grader-{self._gradings}" if self._grading else "agent"
        graders = whose if self._grading else f"agent-{self._places}"
        named = (
            *((at, "both") for at in SHARED),
            *((at, whose) for at in OWN),
            *((at, graders) for at in GRADERS),
        )
        rooms = {at: name + at.replace("/", "-") for at, name in named}
        return View(root=self._root, rooms=rooms, shown=MODULES if self._grading else ())

    @contextmanager
    def _place(self, serve: Serve, view: View | None = None) -> Iterator[socket.socket]:
        """A place over the world for as long as the block; its stream."""
        self._sandbox.thaw(serve, view or self._view())
        try:
            with self._sandbox.connect() as stream:
                yield stream
        finally:
            self._sandbox.freeze()

    def _agent(self, order: Order) -> Order:
        """The next command is an agent's again."""
        self._grading = False
        return {}

    def _exec(self, order: Order) -> Order:
        """Run a command: its code, the head of what it printed, and how much more that was."""
        environment = self._environment() | order["env"]
        job = partial(jobs.run_command, command=order["command"], cwd=order["cwd"], environment=environment)
        limit_s = order["timeout_s"]
        deadline = None if limit_s is None else time.monotonic() + limit_s
        kept, dropped, code = {OUT: bytearray(), ERR: bytearray()}, 0, None
        with self._place(job) as stream:
            for kind, data in self._frames(stream, deadline):
                if kind == FAULT:
                    raise Refused(data.decode(errors="replace"))
                if kind == END:
                    code = int(data)
                    break
                room = KEPT_BYTES - len(kept[kind])
                kept[kind] += data[:room]
                dropped += len(data[max(0, room) :])
            late = code is None and deadline is not None and time.monotonic() >= deadline
            died = "" if code is not None or late else self._sandbox.died() or "the command's place broke off"
        if died:
            raise Refused(died)
        if late:
            kept[ERR] += f"\nthe command must end within {limit_s:g} s, got killed".encode()
        texts = {name: kept[kind].decode(errors="replace") for name, kind in (("out", OUT), ("err", ERR))}
        return {**texts, "code": LATE if late else code, "dropped": dropped}

    def _environment(self) -> dict[str, str]:
        """The interpreter of the office libraries comes first on the path; its own modules only for the grader."""
        path = [os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"]
        named = {"PATH": os.pathsep.join(dict.fromkeys(path)), "HOME": "/tmp", "TERM": "dumb"}
        return named | ({"PYTHONPATH": os.fspath(ROOT)} if self._grading else {})

    def _frames(self, stream: socket.socket, deadline: float | None) -> Iterator[tuple[bytes, bytes]]:
        """What a job says, until it ends or the deadline comes."""
        buffer = bytearray()
        while self._wait(stream, deadline):
            data = stream.recv(1 << 16)
            if not data:
                return
            buffer += data
            while len(buffer) >= HEADER.size:
                kind, length = HEADER.unpack_from(buffer)
                if len(buffer) < HEADER.size + length:
                    break
                yield kind, bytes(buffer[HEADER.size : HEADER.size + length])
                del buffer[: HEADER.size + length]

    def _put(self, order: Order) -> Order:
        """Take a file or folder of the host in. Tests that come in begin the grading."""
        target = order["target"]
        if not self._grading and (target == "/tests" or target.startswith("/tests/")):
            self._grading, self._gradings = True, self._gradings + 1
        source = Path(order["source"])
        with self._place(partial(jobs.take_in, target=target)) as stream:

            def pack() -> None:
                with _unbroken(), stream.makefile("wb") as outgoing:
                    with tarfile.open(fileobj=outgoing, mode="w|") as archive:
                        if source.is_dir():
                            archive.add(source, arcname=".")
                        else:
                            archive.add(source.resolve(), arcname=jobs.FILE)
                with _unbroken():
                    stream.shutdown(socket.SHUT_WR)
                self._done(stream, f"put {target}")

            _apart(pack)
        return {}

    def _get(self, order: Order) -> Order:
        """Give a file or folder out to the host; nothing that is there is followed."""
        target, what = Path(order["target"]), f"get {order['source']}"
        job = partial(jobs.give_out, source=order["source"], folder=order["folder"])
        with self._place(job) as stream:

            def unpack() -> None:
                self._done(stream, what)
                incoming = cast(BinaryIO, _Bounded(stream, 2 * self._most_bytes))
                with tarfile.open(fileobj=incoming, mode="r|") as archive:
                    for member in filter(jobs.plain, archive):
                        if order["folder"]:
                            archive.extract(member, target, filter="data")
                        else:
                            _write(archive, member, target)

            _apart(unpack)
        return {}

    def _done(self, stream: socket.socket, what: str) -> None:
        """Waits for a job's END; no byte after that frame is read."""
        head = _exactly(stream, HEADER.size)
        if len(head) < HEADER.size:
            raise Refused(f"{what}: {self._sandbox.died() or 'the place broke off'}")
        kind, length = HEADER.unpack(head)
        said = _exactly(stream, length).decode(errors="replace")
        if kind != END:
            raise Refused(f"{what}: {said}")

    def _play(self, order: Order) -> Order:
        """Let our own agent work; it sees the world and the tools, none of the rooms."""
        from system.harbor.player import Player

        player = Player(self._sandbox, order, View(root=self._root))
        try:
            player.start()
            while not player.ended:
                ready = self._watched(player.descriptors())
                player.attend(ready)
            return player.result()
        finally:
            player.close()
            self._sandbox.freeze()

    def _watched(self, descriptors: list[int]) -> list[int]:
        """Which of some descriptors have something; Aborted if the order is taken back."""
        ready, _, _ = select.select([self._control, *descriptors], [], [])
        if self._control in ready:
            self._take_back()
        return [fd for fd in descriptors if fd in ready]

    def _wait(self, stream: socket.socket, deadline: float | None) -> bool:
        """Whether a stream has something before the deadline; Aborted if the order is taken back."""
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._control, stream], [], [], left)
            if self._control in ready:
                self._take_back()
            if stream in ready:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _take_back(self) -> None:
        order = self._next()
        if order is None or order["op"] != "abort":
            self._lines.insert(0, order)
        raise Aborted

    def _next(self) -> Order | None:
        """The next order; None at the end of the stream."""
        if self._lines:
            return self._lines.pop(0)
        while b"\n" not in self._buffer:
            data = self._control.recv(1 << 16)
            if not data:
                return None
            self._buffer += data
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = bytearray(rest)
        return json.loads(line)

    def _reply(self, reply: Order) -> None:
        with _unbroken():
            self._control.sendall(json.dumps(reply).encode() + b"\n")


def _apart(work: Callable[[], None]) -> None:
    """Do something in a fork: what tests say is never in the memory that a later tool server is forked from."""

    def told() -> str:
        try:
            work()
        except (Refused, OSError, tarfile.TarError) as error:
            return " ".join(str(error).split()) or type(error).__name__
        return ""

    try:
        said = in_a_child(told)
    except ChildDied as error:
        said = f"the transfer broke off: {error}"
    if said:
        raise Refused(said)


class _Bounded:
    """A stream to read from that gives so many bytes and no more."""

    def __init__(self, stream: socket.socket, most: int) -> None:
        self._stream, self._left = stream, most

    def read(self, count: int) -> bytes:
        data = _exactly(self._stream, min(count, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise Refused("what is given out must not be larger than the world may be")
        return data


def _exactly(stream: socket.socket, count: int) -> bytes:
    """So many bytes, fewer at the end of the stream."""
    parts = bytearray()
    while len(parts) < count:
        data = stream.recv(min(count - len(parts), 1 << 20))
        if not data:
            break
        parts += data
    return bytes(parts)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = archive.extractfile(member)
    assert source is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as file:
        while data := source.read(1 << 20):
            file.write(data)


@contextmanager
def _unbroken() -> Iterator[None]:
    """The other end may be gone: what it said before that is read where an answer is awaited."""
    try:
        yield
    except (BrokenPipeError, ConnectionResetError):
        pass


def main() -> int:
    """Exit status 0 if the sandbox was kept and removed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    with control, control.makefile("rb", buffering=0) as first:
        order = json.loads(first.readline())
        try:
            keeper = Keeper(control, order)
        except (SandboxError, OSError, ValueError) as error:
            cause = error.cause if isinstance(error, SandboxError) else f"{type(error).__name__}: {error}"
            control.sendall(json.dumps({"fault": cause, "phase": "start"}).encode() + b"\n")
            return 1
        control.sendall(b"{}\n")
        keeper.loop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
