"""The process sandbox: a copy of the world and a forked server with limits; it hides nothing."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

from . import Limits, SandboxError, Serve, kernel, scratch, server_process
from .frozen import DEEPEST, FrozenWorld


class ProcessSandbox(server_process.Connectable):
    """Tools over a copy of the world, as this user, with network: for machines without bubblewrap."""

    kind = "process"

    def __init__(
        self, world: Path, scratch_root: Path, serve: Serve, limits: Limits, *, trial: str = ""
    ) -> None:
        self._world, self._limits, self._serve = world, limits, serve
        self._stream: socket.socket | None = None
        self._server = -1
        self._server_exit: int | None = None
        self._frozen: FrozenWorld | None = None
        self._closed = False
        self._folder = scratch.new_folder(scratch_root, what=self.kind, trial=trial)
        self.root = self._folder / "world"
        try:
            self._start(time.monotonic() + limits.start_s)
            scratch.note(self._folder, "confirmed")
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise SandboxError("start", str(error)) from error
            raise

    def _start(self, deadline: float) -> None:
        shutil.copytree(self._world, self.root, symlinks=True, copy_function=_copy_writable)
        os.chmod(self.root, 0o700)
        (self._folder / "tmp").mkdir()
        kernel.adopt_orphans()
        self._others = set(kernel.children())
        self._start_server(deadline)

    def _start_server(self, deadline: float) -> None:
        temporary = self._folder / "tmp"
        place = server_process.Place(
            root=self.root,
            environment={**server_process.INSIDE, "HOME": f"{temporary}", "TMPDIR": f"{temporary}"},
            enter=functools.partial(_enter, os.getpid()),
            log=self._folder / "server.log",
        )
        self._stream, there = socket.socketpair()
        try:
            self._server = os.fork()
            if self._server == 0:
                server_process.become_server(self._serve, there.fileno(), place, self._limits)
        finally:
            there.close()
        if not server_process.is_up(self._stream, deadline):
            raise SandboxError("start", self.died() or "the tool server was not ready in time")

    def died(self) -> str | None:
        """Why the tool server is no longer alive, in one line, or None while it is."""
        deadline = time.monotonic() + server_process.DYING_S
        while self._server > 0 and self._server_exit is None and time.monotonic() < deadline:
            self._reap_server()
            time.sleep(0.002)
        if self._server_exit is None:
            return None
        said = server_process.last_line(self._folder / "server.log")
        return f"tool server exit {self._server_exit} {said}".strip()

    def restart(self) -> None:
        """Kill the server and everything that it left behind; start another over the world as it now is."""
        if self._frozen is not None or self._closed:
            raise SandboxError("start", "the sandbox is frozen")
        self._kill("start")
        if self._stream is not None:
            self._stream.close()
        self._server_exit = None
        try:
            self._start_server(time.monotonic() + self._limits.start_s)
        except OSError as error:
            raise SandboxError("start", str(error)) from error

    def freeze(self) -> FrozenWorld:
        """Kill the server and everything that it left behind, and confirm it."""
        if self._frozen is None:
            if self._closed:
                raise SandboxError("freeze", "the sandbox is closed")
            self._kill("freeze")
            _open_up(self.root)
            self._frozen = FrozenWorld(lower=self._world, root=self.root)
        return self._frozen

    def thaw(self, serve: Serve | None = None) -> None:
        """Start a server over the copy as it was frozen; left out, the same as before."""
        if self._frozen is None or self._closed:
            raise SandboxError("start", "the sandbox is not frozen")
        self._serve = serve or self._serve
        thawed, self._frozen = self._frozen, None
        try:
            self.restart()
        except SandboxError:
            self._kill("start")
            self._frozen = thawed
            raise

    def close(self) -> None:
        """Kill what is left and remove the copy."""
        if self._closed:
            return
        self._kill("close")
        if self._stream is not None:
            self._stream.close()
        try:
            scratch.remove_folder(self._folder)
        except OSError as error:
            raise SandboxError("close", str(error)) from error
        self._closed = True

    def __enter__(self) -> ProcessSandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _reap_server(self) -> None:
        if self._server > 0 and self._server_exit is None:
            pid, status = os.waitpid(self._server, os.WNOHANG)
            self._server_exit = os.waitstatus_to_exitcode(status) if pid else None

    def _kill(self, phase: str) -> None:
        """Kill the server's group, then, round after round, the orphans that fell to this process (Linux)."""
        if self._server <= 0:
            return
        deadline = time.monotonic() + self._limits.stop_s
        _kill_quietly(self._server, group=True)
        while True:
            self._reap_server()
            left = [pid for pid in kernel.children() if pid not in self._others]
            if self._server_exit is not None:
                for pid in left:
                    _kill_quietly(pid, group=False)
                    os.waitpid(pid, os.WNOHANG)
                if not left:
                    break
            if time.monotonic() > deadline:
                raise SandboxError(phase, f"processes do not die: {[self._server, *left]}")
            time.sleep(0.001)
        self._server = -1


def _open_up(root: Path) -> None:
    """Give back the permissions that the agent took from its own folders and files: they are there, and are read."""
    waiting = [os.fspath(root)]
    while waiting:
        folder = waiting.pop()
        os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.path.count("/") - os.fspath(root).count("/") <= DEEPEST:
                        waiting.append(entry.path)
                elif entry.is_file(follow_symlinks=False) and not os.access(entry.path, os.R_OK):
                    os.chmod(entry.path, 0o600)


def _enter(parent: int) -> None:
    if sys.platform == "linux":
        kernel.die_with_parent(parent)
        kernel.drop_privileges()


def _kill_quietly(pid: int, *, group: bool) -> None:
    try:
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # gone, or (a group) not made yet
        if group:
            _kill_quietly(pid, group=False)


def _copy_writable(source: str, target: str) -> str:
    """Copy a file and let its owner write it: a world in a read-only folder is still edited by the tools."""
    shutil.copyfile(source, target, follow_symlinks=False)
    if not os.path.islink(target):
        os.chmod(target, 0o600)
    return target
