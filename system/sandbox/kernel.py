"""The Linux calls that Python 3.11 does not offer: namespaces, mounts, privileges, the fate of processes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import struct
import time
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 16384, 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_NS_GET_USERNS = 0xB701

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Leave the namespaces named by the CLONE_ flags for new ones of one's own."""
    _call("unshare", ctypes.c_int(flags))


def setns(fd: int, flag: int) -> None:
    """Join the namespace behind an open /proc/PID/ns file."""
    _call("setns", ctypes.c_int(fd), ctypes.c_int(flag))


def mount(source: str, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2). Raises OSError that names the target."""
    try:
        _call(
            "mount",
            source.encode(),
            os.fsencode(target),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            os.fsencode(options) if options else None,
        )
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({kind or 'remount'} on {target})") from None


def unmount(target: Path) -> None:
    """Detach a mount; it disappears once nobody uses it any more."""
    _call("umount2", os.fsencode(target), ctypes.c_int(MNT_DETACH))


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    _call("prctl", ctypes.c_int(option), *padded)


def die_with_parent(parent: int, deadly: signal.Signals = signal.SIGKILL) -> None:
    """Ask for a signal when the parent thread dies; send it at once if it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, deadly)
    if os.getppid() != parent:
        os.kill(os.getpid(), deadly)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (Linux; elsewhere without effect)."""
    if hasattr(_libc, "prctl"):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def leave_orphans() -> None:
    """Let orphans fall to whoever had them before `adopt_orphans`."""
    if hasattr(_libc, "prctl"):
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def hide_memory() -> None:
    """Forbid processes of the same user to read this one's memory, environment and descriptors."""
    if hasattr(_libc, "prctl"):
        _prctl(_PR_SET_DUMPABLE, 0)


def die_first() -> None:
    """When memory is short, let the kernel end this process and its children before any other."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:  # no such file: nothing to be done
        return


def owning_user_namespace(namespace_fd: int) -> int:
    """Descriptor of the user namespace that owns another namespace."""
    return fcntl.ioctl(namespace_fd, _NS_GET_USERNS)


def enter_private_mounts() -> bool:
    """Give this process mounts of its own; True if that took a user namespace (an ordinary user)."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWNS)
        mount("none", Path("/"), None, MS_REC | MS_PRIVATE)
        return False
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    mount("none", Path("/"), None, MS_REC | MS_PRIVATE)
    return True


def thread_count() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def drop_privileges() -> None:
    """Give up every capability for ever, here and in whatever is executed later."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last capability of this kernel
            break
    header = struct.pack("=Ii", 0x20080522, 0)
    _call("capset", header, bytes(24))


def limit_pids(count: int) -> None:
    """As root: bound the pids of the pid namespace that this process lives in, from Linux 6.14.

    Before that, the same file would set the bound of the whole machine.
    """
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    if release >= (6, 14):
        Path("/proc/sys/kernel/pid_max").write_text(str(max(count, _PID_MAX_MIN)))


_PID_MAX_MIN = 301

# Refused inside a sandbox: io_uring can open sockets past the filter, keyrings and the kernel's log are not
# namespaced, the rest reads or steers other processes or widens the kernel's surface. Numbers: unistd_64.h,
# asm-generic/unistd.h.
_DENIED = {
    "x86_64": (0xC000003E, 41, (101, 103, 248, 249, 250, 298, 310, 311, 321, 323, 425)),
    "aarch64": (0xC00000B7, 198, (116, 117, 217, 218, 219, 241, 270, 271, 280, 282, 425)),
}
# unix, inet, inet6, netlink; vsock would reach the host past the network namespace
_FAMILIES = (1, 2, 10, 16)


def filter_system_calls() -> bool:
    """Refuse (EPERM) the calls above and all socket families but four; False on an unknown machine type."""
    known = _DENIED.get(platform.machine())
    if known is None:
        return False
    architecture, socket_call, denied = known
    load, equal, at_least, give_back = 0x20, 0x15, 0x35, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    program: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (give_back, 0, 0, refuse),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),  # the x32 numbering
        (give_back, 0, 0, refuse),
        *[step for number in denied for step in ((equal, 0, 1, number), (give_back, 0, 0, refuse))],
        (equal, 1, 0, socket_call),
        (give_back, 0, 0, allow),
        (load, 0, 0, 16),
        *[step for family in _FAMILIES for step in ((equal, 0, 1, family), (give_back, 0, 0, allow))],
        (give_back, 0, 0, refuse),
    ]
    code = b"".join(struct.pack("=HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    holder = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    nothing = ctypes.c_ulong(0)
    _call("prctl", ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(2), holder, nothing, nothing)
    return True


def forget_environment(keep: dict[str, str]) -> None:
    """Replace the environment, and blank the block that /proc/PID/environ shows."""
    os.environ.clear()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[47]), int(fields[48])
    except (OSError, ValueError, IndexError):
        start = end = 0
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
    os.environ.update(keep)


def wait_exit(pid: int, deadline: float) -> int | None:
    """Exit code of a child (negative: a signal); None if it still runs at the deadline (monotonic)."""
    handle = os.pidfd_open(pid)
    try:
        if not wait_handle(handle, deadline):
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(handle)


def wait_handle(pidfd: int, deadline: float) -> bool:
    """Whether the process behind a pidfd is dead before the deadline."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))


def children() -> list[int]:
    """Pids of this process's children, zombies included (none where there is no /proc)."""
    own = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{own}/children").read_text().split()]
    except OSError:
        pass
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            try:
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            if parent == own:
                found.append(int(name))
    return found
