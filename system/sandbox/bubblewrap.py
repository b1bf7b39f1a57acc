"""The bubblewrap sandbox: bwrap makes a place and holds it, a fork of this process joins it and serves."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import resource
import select
import shutil
import signal
import site
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from . import Limits, SandboxError, Serve, View, frozen, kernel, scratch, server_process

_UID = 1000
_HOLDER = ("/bin/sh", "-c", "echo; while read order; do kill -9 -1; echo; done")
"""What bwrap runs: says that the place is ready, then waits until this process closes its input. A line is the order
to kill everything else in the place, all at once; it is answered by a line."""


class BubblewrapSandbox(server_process.Connectable):
    """No network, no host files but the system and the interpreter, an overlay on the world, one kill.

    bwrap starts a shell that waits; the server is a fork of this process that joins the shell's namespaces,
    so it costs no new interpreter. The diff lies on a size-limited tmpfs that is mounted in this process's
    own mount namespace: nothing reaches the disk, and nothing outlives the process. (Before Linux 6.6 a tmpfs
    cannot hold overlay's marks for an ordinary user; there the diff lies in the scratch folder, without limit.)
    """

    kind = "bubblewrap"

    def __init__(
        self,
        world: Path,
        scratch_root: Path,
        serve: Serve,
        limits: Limits,
        view: View | None = None,
        *,
        trial: str = "",
    ) -> None:
        self._world, self._limits, self._serve, self._sees = world, limits, serve, view or View()
        self.root = self._sees.root
        self._stream: socket.socket | None = None
        self._bwrap = self._server = self._init = self._hold = self._told = self._child = -1
        self._server_exit: int | None = None
        self._frozen: frozen.FrozenWorld | None = None
        self._closed = self._on_tmpfs = False
        if (threads := kernel.thread_count()) != 1:
            raise SandboxError("start", f"the calling process must have one thread, got {threads}")
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError("start", "bwrap not found")
        self._folder = scratch.new_folder(scratch_root, what=self.kind, trial=trial)
        try:
            self._start(bwrap, time.monotonic() + limits.start_s)
            scratch.note(self._folder, "confirmed")
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise SandboxError("start", str(error)) from error
            raise

    def _start(self, bwrap: str, deadline: float) -> None:
        kernel.enter_private_mounts()
        kernel.adopt_orphans()
        self._mount_scratch()
        self._start_place(bwrap, deadline)

    def _start_place(self, bwrap: str, deadline: float) -> None:
        self._mount_world()
        self._child = self._start_bwrap(bwrap, deadline)
        self._init = os.pidfd_open(self._child)
        self._start_server(deadline)

    def _mount_scratch(self) -> None:
        """Upper, work and merged folder, and the rooms, on one tmpfs."""
        options = f"size={self._limits.world_bytes},nr_inodes=16384,mode=0700"
        kernel.mount("tmpfs", self._folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        self._on_tmpfs = frozen.can_hold_marks(self._folder)
        if not self._on_tmpfs:
            kernel.unmount(self._folder)
        for name in ("upper", "work", "merged", "rooms"):
            (self._folder / name).mkdir()

    def _mount_world(self) -> None:
        upper, work, merged = (self._folder / name for name in ("upper", "work", "merged"))
        layers = zip(("lowerdir", "upperdir", "workdir"), (self._world, upper, work))
        options = ",".join(f"{name}={_escape(path)}" for name, path in layers)
        kernel.mount("overlay", merged, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options + ",userxattr")

    def _start_bwrap(self, bwrap: str, deadline: float) -> int:
        """Start bwrap and wait until its place is complete; the pid of the place's first process."""
        log = os.open(self._folder / "bwrap.log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        hold, self._hold = os.pipe()
        self._told, ready_there = os.pipe()
        info, info_there = os.pipe()
        try:
            view = _view(os.fspath(self._folder.parent), self._limits.tmp_bytes, self._rooms())
            arguments = [bwrap, *view, *self._binds(), "--chdir", os.fspath(self.root)]
            arguments += ["--remount-ro", "/", "--info-fd", "3", "--", *_HOLDER]
            wiring = [(hold, 0), (ready_there, 1), (log, 2), (info_there, 3)]
            # Above 3 first: a later dup2 must not overwrite an earlier source.
            lifted = [(_above(source), target) for source, target in wiring]
            actions = [(os.POSIX_SPAWN_DUP2, source, target) for source, target in lifted]
            self._bwrap = os.posix_spawn(bwrap, arguments, server_process.INSIDE, file_actions=actions)
            for source, _ in lifted:
                os.close(source)
        finally:
            for fd in (log, hold, ready_there, info_there):
                os.close(fd)
        try:
            said = _read(self._told, deadline)
            if not said:
                late = f"bwrap was not ready within {self._limits.start_s:g} s"
                cause = late if time.monotonic() >= deadline else "bwrap ended at once"
                raise SandboxError("start", server_process.last_line(self._folder / "bwrap.log") or cause)
            told = _read(info, deadline)
            try:
                return json.loads(told)["child-pid"]
            except (ValueError, TypeError, KeyError):
                raise SandboxError("start", f"bwrap must name its child, got {told[:40]!r}") from None
        finally:
            os.close(info)

    def _rooms(self) -> list[str]:
        """bwrap's arguments for the folders that this view has beside the world."""
        binds = []
        for path, name in self._sees.rooms.items():
            (self._folder / "rooms" / name).mkdir(exist_ok=True)
            binds += ["--bind", os.fspath(self._folder / "rooms" / name), path]
        return binds

    def _binds(self) -> list[str]:
        binds = ["--bind", os.fspath(self._folder / "merged"), os.fspath(self.root)]
        for path in self._sees.shown:
            binds += ["--ro-bind", os.fspath(path), os.fspath(path)]
        return binds

    def _start_server(self, deadline: float) -> None:
        spaces = {
            name: os.open(f"/proc/{self._child}/ns/{name}", os.O_RDONLY) for name in ("user", "pid", *_JOINED)
        }
        spaces["owner"] = kernel.owning_user_namespace(spaces["pid"])
        place = server_process.Place(
            root=self.root,
            environment={**server_process.INSIDE, "HOME": "/tmp"},
            enter=functools.partial(_join, spaces, self._limits.processes),
            log=self._folder / "server.log",
        )
        self._stream, there = socket.socketpair()
        try:
            pid = _fork_into(spaces["pid"])
            if pid == 0:
                server_process.become_server(self._serve, there.fileno(), place, self._limits)
            self._server = pid
        finally:
            there.close()
            for fd in spaces.values():
                os.close(fd)
        if not server_process.is_up(self._stream, deadline):
            raise SandboxError("start", self.died() or "the tool server was not ready in time")

    def died(self) -> str | None:
        """Why the tool server is no longer alive, in one line, or None while it is."""
        if self._server > 0 and self._server_exit is None:
            self._server_exit = kernel.wait_exit(self._server, time.monotonic() + server_process.DYING_S)
        if self._server_exit is None:
            return None
        said = server_process.last_line(self._folder / "server.log")
        return f"tool server exit {self._server_exit} {said}".strip()

    def restart(self) -> None:
        """Kill the server and all that it started; start another in the same place, over the world as it now is."""
        if self._frozen is not None or self._closed:
            raise SandboxError("start", "the sandbox is frozen")
        if kernel.wait_handle(self._init, 0.0):
            raise SandboxError("start", "everything in the sandbox is dead")
        deadline = time.monotonic() + self._limits.start_s
        if self._server > 0 and self._server_exit is None:
            os.kill(self._server, signal.SIGKILL)
            if kernel.wait_exit(self._server, deadline) is None:
                raise SandboxError("start", f"the tool server {self._server} does not die")
        if self._stream is not None:
            self._stream.close()
        self._server, self._server_exit = -1, None
        try:
            os.write(self._hold, b"\n")
            answered = bool(_read(self._told, deadline))
        except BrokenPipeError:
            answered = False
        if not answered:
            dead = kernel.wait_handle(self._init, time.monotonic() + server_process.DYING_S)
            what = (
                "everything in the sandbox is dead" if dead else "what the tool server started does not die"
            )
            raise SandboxError("start", what)
        while True:
            try:
                return self._start_server(deadline)
            except OSError as error:  # the killed may take a while to leave room for a process
                if time.monotonic() > deadline or kernel.wait_handle(self._init, 0.0):
                    raise SandboxError("start", str(error)) from error
            time.sleep(0.01)

    def freeze(self) -> frozen.FrozenWorld:
        """Kill everything inside, confirm it, seal the diff."""
        if self._frozen is None:
            if self._closed:
                raise SandboxError("freeze", "the sandbox is closed")
            self._kill("freeze")
            try:
                kernel.unmount(self._folder / "merged")
                if self._on_tmpfs:
                    kernel.mount("none", self._folder, None, kernel.MS_REMOUNT | kernel.MS_RDONLY)
            except OSError as error:
                raise SandboxError("freeze", str(error)) from error
            self._frozen = frozen.FrozenWorld(lower=self._world, upper=self._folder / "upper")
        return self._frozen

    def thaw(self, serve: Serve | None = None, view: View | None = None) -> None:
        """Start a server over the world as it was frozen; nothing else of what ran before comes back.

        Args:
            serve: what to run; left out, the same as before.
            view: what is seen inside from now on; left out, the same as before.
        """
        if self._frozen is None or self._closed:
            raise SandboxError("start", "the sandbox is not frozen")
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError("start", "bwrap not found")
        self._serve, self._sees = serve or self._serve, view or self._sees
        self.root = self._sees.root
        if self._stream is not None:
            self._stream.close()
        self._server, self._server_exit, self._stream = -1, None, None
        thawed, self._frozen = self._frozen, None
        try:
            if self._on_tmpfs:
                flags = kernel.MS_REMOUNT | kernel.MS_NOSUID | kernel.MS_NODEV
                kernel.mount("none", self._folder, None, flags)
            self._start_place(bwrap, time.monotonic() + self._limits.start_s)
        except BaseException as error:
            with suppress(SandboxError):  # what does not die now is told by `close`
                self.freeze()
            self._frozen = thawed
            if isinstance(error, OSError):
                raise SandboxError("start", str(error)) from error
            raise

    def close(self) -> None:
        """Kill everything inside, confirm it, remove mounts and folder."""
        if self._closed:
            return
        self._kill("close")
        if self._stream is not None:
            self._stream.close()
        for mounted in (self._folder / "merged", self._folder):
            try:
                kernel.unmount(mounted)
            except OSError:  # not mounted (yet, or any more); what stays makes the removal below fail
                continue
        try:
            scratch.remove_folder(self._folder)
        except OSError as error:
            raise SandboxError("close", str(error)) from error
        self._closed = True

    def __enter__(self) -> BubblewrapSandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _kill(self, phase: str) -> None:
        """Kill the first process of the pid namespace; the kernel lets it go only after every other one.

        Waiting for that process is therefore waiting for all, whatever they forked and however they hid.
        """
        deadline = time.monotonic() + self._limits.stop_s
        if self._init >= 0:
            try:
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            except ProcessLookupError:
                pass
        elif self._bwrap > 0:
            os.kill(self._bwrap, signal.SIGKILL)
        if self._server > 0 and self._server_exit is None:
            self._server_exit = kernel.wait_exit(self._server, deadline)
            if self._server_exit is None:
                raise SandboxError(phase, f"the tool server {self._server} does not die")
        if self._bwrap > 0:
            if kernel.wait_exit(self._bwrap, deadline) is None:
                raise SandboxError(phase, f"bwrap {self._bwrap} does not die")
            self._bwrap = -1
        if self._init >= 0:
            if not kernel.wait_handle(self._init, deadline):
                raise SandboxError(phase, "processes in the sandbox do not die")
            os.close(self._init)
            self._init = -1
        for fd in (self._hold, self._told):
            if fd >= 0:
                os.close(fd)
        self._hold = self._told = -1


_JOINED = {
    "ipc": kernel.CLONE_NEWIPC,
    "uts": kernel.CLONE_NEWUTS,
    "net": kernel.CLONE_NEWNET,
    "mnt": kernel.CLONE_NEWNS,
}


def _join(spaces: dict[str, int], processes: int) -> None:
    """Enter the place's namespaces, its innermost user namespace last, and drop what entering them gives.

    The kernel does not hold root to a number of processes; root limits the pids of the place instead.
    """
    if os.geteuid() == 0:
        kernel.limit_pids(processes)
    kernel.setns(spaces["owner"], kernel.CLONE_NEWUSER)
    for name, flag in _JOINED.items():
        kernel.setns(spaces[name], flag)
    if not os.path.sameopenfile(spaces["owner"], spaces["user"]):
        kernel.setns(spaces["user"], kernel.CLONE_NEWUSER)
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    kernel.drop_privileges()
    kernel.filter_system_calls()


def _fork_into(pid_namespace: int) -> int:
    """Fork a child that lives in a pid namespace: 0 in the child, its pid here.

    root sets its own children's namespace for a moment. An ordinary user could not set it back, and could
    then start no thread: there a child in between does it, dies, and leaves the grandchild to this process.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        try:
            kernel.setns(own, kernel.CLONE_NEWPID)
        except PermissionError:
            return _fork_twice_into(pid_namespace)
        kernel.setns(pid_namespace, kernel.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                kernel.setns(own, kernel.CLONE_NEWPID)
        return pid
    finally:
        os.close(own)


def _fork_twice_into(pid_namespace: int) -> int:
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            kernel.setns(pid_namespace, kernel.CLONE_NEWPID)
            pid = os.fork()
        except OSError as error:
            os.write(write, f"0 {error}".encode())
            os._exit(1)
        if pid == 0:
            os.close(read)
            os.close(write)
            return 0
        os.write(write, str(pid).encode())
        os._exit(0)
    os.close(write)
    said = os.read(read, 4096).decode()
    os.close(read)
    os.waitpid(between, 0)
    number, _, cause = said.partition(" ")
    if not number or number == "0":
        raise SandboxError("start", cause or "the process that should start the tool server died")
    return int(number)


def _view(scratch_root: str, tmp_bytes: int, rooms: list[str]) -> list[str]:
    """bwrap's arguments for what is visible, but for the world itself.

    The rooms come before the system's folders: an interpreter may lie below /tmp, which may be a room.

    /proc is read-only: started by root, the tools are root to the kernel's settings in /proc/sys, whatever
    their number inside.
    """
    sizes = ["--size", str(tmp_bytes), "--tmpfs", "/tmp", "--size", str(tmp_bytes), "--tmpfs", "/dev/shm"]
    namespaces = ["user", "ipc", "pid", "net", "uts", "cgroup-try"]
    return [
        *[f"--unshare-{name}" for name in namespaces],
        *("--disable-userns", "--die-with-parent", "--new-session", "--uid", str(_UID), "--gid", str(_UID)),
        *("--hostname", "world", "--proc", "/proc", "--remount-ro", "/proc"),
        *("--dev", "/dev", *sizes, "--remount-ro", "/dev"),
        *rooms,
        *_system(scratch_root),
    ]


@functools.cache
def _system(scratch_root: str) -> tuple[str, ...]:
    """The system's folders, the interpreter's, nothing of the user's, even where that lies in them."""
    shown: list[str] = []
    for folder in (
        "/usr",
        "/bin",
        "/sbin",
        "/lib",
        "/lib32",
        "/lib64",
        "/libx32",
        "/nix/store",
        "/gnu/store",
    ):
        if os.path.islink(folder):
            shown += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            shown += ["--ro-bind", folder, folder]
    for file in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "alternatives"):
        if os.path.exists(f"/etc/{file}"):
            shown += ["--ro-bind", f"/etc/{file}", f"/etc/{file}"]
    repository = os.path.realpath(Path(__file__).parents[2])
    for hidden in (os.path.realpath(os.path.expanduser("~")), repository, scratch_root):
        if hidden.startswith("/usr/") and os.path.isdir(hidden):
            shown += ["--tmpfs", hidden, "--remount-ro", hidden]
    for path in _interpreter():
        shown += ["--ro-bind", path, path]
    return tuple(shown)


def _interpreter() -> Iterator[str]:
    """The interpreter's programs and libraries, its environment's, and every folder of installed packages."""
    prefixes = dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix))
    parts = ("bin", "lib", "lib64", "pyvenv.cfg")
    wanted = [os.path.join(prefix, part) for prefix in prefixes for part in parts]
    packages = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    wanted += [path for path in packages if os.path.basename(path) in ("site-packages", "dist-packages")]
    seen: list[str] = ["/usr", "/lib", "/bin"]
    for path in wanted:
        covered = any(path == other or path.startswith(other + "/") for other in seen)
        if os.path.exists(path) and not covered:
            seen.append(path)
            yield path


def _escape(path: Path) -> str:
    """A path as an overlay mount option."""
    return "".join("\\" + c if c in "\\:," else c for c in os.fspath(path))


def _above(fd: int) -> int:
    """A copy of a descriptor above the first few."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)


def _read(fd: int, deadline: float) -> bytes:
    """What a pipe holds, waiting for the first of it; b"" at its end or at the deadline."""
    poller = select.poll()
    poller.register(fd, select.POLLIN | select.POLLHUP)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        return b""
    return os.read(fd, 65536)
