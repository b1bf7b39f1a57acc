"""Numbers of the system calls that the attacks try (unistd_64.h, asm-generic/unistd.h)."""

from __future__ import annotations

import platform

_NUMBERS: dict[str, tuple[int, int]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "setns": (308, 268),
    "clone": (56, 220),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "sethostname": (170, 161),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "iopl": (172, 0),
}


def number(name: str) -> int:
    """The number of a call on this machine."""
    return _NUMBERS[name][platform.machine() == "aarch64"]
