"""What keeps code of the model from killing the tool server, which runs as the same user beside it.

A filter of system calls (seccomp) refuses every call that reaches another process by its number where that is the
server's. Landlock's signal scope (from Linux 6.12) refuses signals to any process outside, whatever the way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable
from typing import NamedTuple

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER_MODE = 22, 38, 2
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_SCOPES = 0b11  # abstract sockets and signals
_SCOPES_SINCE = 6  # version of Landlock
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # where the filter finds them
_X32 = 0x40000000


class _Calls(NamedTuple):
    """Numbers of system calls on one type of machine (unistd_64.h, asm-generic/unistd.h)."""

    architecture: int
    by_pid: tuple[int, ...]
    "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open: the first argument names the target."
    own_only: tuple[int, ...]
    "prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr: 0 there means the caller."
    own_only_second: tuple[int, ...]
    "setpriority ioprio_set: the same in the second argument."
    never: tuple[int, ...]
    "pidfd_send_signal pidfd_getfd ptrace process_vm_writev"
    fcntl: int
    ioctl: int


_MACHINES = {
    "x86_64": _Calls(
        0xC000003E,
        (62, 200, 234, 129, 297, 434),
        (302, 203, 144, 142, 314),
        (141, 251),
        (424, 438, 101, 311),
        72,
        16,
    ),
    "aarch64": _Calls(
        0xC00000B7,
        (129, 130, 131, 138, 240, 434),
        (261, 122, 119, 118, 274),
        (140, 30),
        (424, 438, 117, 271),
        25,
        29,
    ),
}
_OWNER_COMMANDS = (8, 15)  # F_SETOWN F_SETOWN_EX: who gets the signals of a descriptor
_OWNER_REQUESTS = (0x8901, 0x8902)  # FIOSETOWN SIOCSPGRP: the same

_libc = ctypes.CDLL(None, use_errno=True)


def shield() -> Callable[[], None]:
    """Give what a child of this process calls before it executes anything: nothing in it can then reach this process.

    Nor the two processes that hold a sandbox open (1 and 2 there), nor the parent of this one. It may still signal
    itself and what it starts. Where the kernel has neither means it does nothing.
    """
    groups = {pid for pid in (os.getpgrp(), _group_of(os.getppid())) if pid > 0}
    program = _program(sorted({1, 2, os.getpid(), os.getppid()} - {0}), sorted(groups))

    def put_on() -> None:
        nothing = ctypes.c_ulong(0)
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), nothing, nothing, nothing)
        _leave_scope()
        if program:
            buffer = ctypes.create_string_buffer(program, len(program))
            holder = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
            _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER_MODE), holder, nothing, nothing)

    return put_on


def _leave_scope() -> None:
    syscall = _libc.syscall
    version = syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < _SCOPES_SINCE:
        return
    rules = struct.pack("=QQQ", 0, 0, _SCOPES)
    size = ctypes.c_size_t(len(rules))
    made = syscall(ctypes.c_long(_LANDLOCK_CREATE), rules, size, ctypes.c_uint(0))
    if made >= 0:
        syscall(ctypes.c_long(_LANDLOCK_RESTRICT), ctypes.c_int(made), ctypes.c_uint(0))
        os.close(made)


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:  # in another pid namespace, or gone
        return 0


def _program(processes: list[int], groups: list[int]) -> bytes:
    """Write the filter that guards these: steps of (operation, jump if true, jump if false, constant)."""
    calls = _MACHINES.get(platform.machine())
    if calls is None:
        return b""
    named = {-1, *processes, *(-pid for pid in (*processes, *groups))}
    targets = [number & 0xFFFFFFFF for number in sorted(named)]
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, calls.architecture),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for number in calls.never:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    for number in calls.by_pid:
        steps += _when(number, _FIRST, targets, _REFUSE, _ALLOW)
    for number in calls.own_only:
        steps += _when(number, _FIRST, [0], _ALLOW, _REFUSE)
    for number in calls.own_only_second:
        steps += _when(number, _SECOND, [0], _ALLOW, _REFUSE)
    steps += _when(calls.fcntl, _SECOND, _OWNER_COMMANDS, _REFUSE, _ALLOW)
    steps += _when(calls.ioctl, _SECOND, _OWNER_REQUESTS, _REFUSE, _ALLOW)
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _when(
    number: int, argument: int, values: list[int] | tuple[int, ...], then: int, otherwise: int
) -> list[tuple[int, int, int, int]]:
    """Decide one call by an argument: `then` if it is one of the values, else `otherwise`."""
    tests = [step for value in values for step in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, then))]
    body = [(_LOAD, 0, 0, argument), *tests, (_RETURN, 0, 0, otherwise)]
    return [(_EQUAL, 0, len(body), number), *body]
