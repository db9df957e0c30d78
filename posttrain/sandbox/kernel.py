"""Limits by the kernel. Landlock: folders to read and execute, folders to write, nothing else. Seccomp: no sockets, no
signals to others, no changes of priorities, no memory beyond the limits and, if wanted, no further processes and no
changes of modes, times and owners."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

TYPE_CHECKING = False  # without the import of typing
if TYPE_CHECKING:
    from collections.abc import Sequence

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls; their numbers are the same on all architectures."""
PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
RIGHTS_BY_VERSION = (0, (1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1, (1 << 15) - 1, (1 << 16) - 1)
"""All rights that each version of the interface knows; later ones know the last."""
SCOPES_VERSION, SCOPES = 6, 3
"""First version that bounds abstract Unix sockets and signals to processes with the same limits."""
TRUNCATE_VERSION = 3
"""First version that bounds truncation."""
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
O_PATH = 0o10000000

PR_SET_NO_NEW_PRIVS, PR_GET_SECCOMP, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 21, 22, 2
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
CLONE_THREAD = 0x10000
X32_BIT = 0x40000000
"""First number of x86-64's second system call table (x32)."""

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
"""System call numbers of x86-64 and arm64 (Linux, asm/unistd.h), for rules of their own. None: it has no such call."""
SIGNALS = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
"""Calls whose first argument is the process that gets a signal."""
OWN = ("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
"""Calls that a process may make for itself alone, as process 0."""
REFUSED: dict[int, dict[str, tuple[int | None, int | None]]] = {
    errno.EACCES: {
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "process_madvise": (440, 440),
        "pidfd_getfd": (438, 438),
        "unshare": (272, 97),
        "setns": (308, 268),
        "mount": (165, 40),
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "keyctl": (250, 219),
        "userfaultfd": (323, 282),
        # memory that no limit counts and that outlives its process
        "shmget": (29, 194),
        "semget": (64, 190),
        "msgget": (68, 186),
        "mq_open": (240, 180),
    },
    errno.EPERM: {
        "setpriority": (141, 140),
        "ioprio_set": (251, 30),
    },
    errno.ENOSYS: {
        # It could open sockets past this filter.
        "io_uring_setup": (425, 425),
        # Flags of clone3 stand in memory, which a filter cannot read; libraries go on with clone.
        "clone3": (435, 435),
        "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
    },
}
"""Calls that are refused, by the error that they return."""
METADATA: dict[int, dict[str, tuple[int | None, int | None]]] = {
    errno.EPERM: {
        "chown": (92, None),
        "fchown": (93, 55),
        "lchown": (94, None),
        "fchownat": (260, 54),
        "file_setattr": (469, 469),
    },
    errno.ENOTSUP: {
        "setxattr": (188, 5),
        "lsetxattr": (189, 6),
        "fsetxattr": (190, 7),
        "setxattrat": (463, 463),
        "removexattr": (197, 14),
        "lremovexattr": (198, 15),
        "fremovexattr": (199, 16),
        "removexattrat": (466, 466),
    },
    0: {
        "chmod": (90, None),
        "fchmod": (91, 52),
        "fchmodat": (268, 53),
        "fchmodat2": (452, 452),
        "utime": (132, None),
        "utimes": (235, None),
        "futimesat": (261, None),
        "utimensat": (280, 88),
    },
}
"""Calls without effect where files outside of the scratch folder are not mounted read-only: Landlock knows no right for
them, and paths cannot be read here. By the error that they return; 0: none, so that programs that copy files go on."""
OWNERS = {"fcntl": (8, 15), "ioctl": (0x8901, 0x8902)}
"""Commands that give a descriptor an owner: F_SETOWN, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP."""
SOCK_TYPE, SOCK_STREAM = 0xF, 1
CLONE_NEW = 0x7E020000
"""Flags of clone for new namespaces, in which a process would have all rights."""


def has_seccomp() -> bool:
    """Tell whether this kernel filters system calls, and this machine's numbers are known."""
    if sys.platform != "linux" or os.uname().machine not in AUDIT_ARCH:
        return False
    return ctypes.CDLL(None).prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def restrict_calls(*, may_fork: bool, read_only: bool) -> None:
    """Install the filter for this process and all that it starts. OSError if the kernel refuses.

    `read_only`: files outside of the scratch folder are mounted so.
    """
    program = b"".join(struct.pack("<HBBI", *line) for line in _program(os.getpid(), may_fork, read_only))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    if prctl(PR_SET_NO_NEW_PRIVS, 1, None, 0, 0) or prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp: the filter is refused")


Line = tuple[int, int, int, int]
"""Instruction of the filter: code, lines to skip if true and if false, operand."""


def _program(own: int, may_fork: bool, read_only: bool) -> list[Line]:
    machine = os.uname().machine
    arch = AUDIT_ARCH[machine]
    column = 0 if machine == "x86_64" else 1
    numbers = {name: found for name, pair in CALLS.items() if (found := pair[column]) is not None}
    lines: list[Line] = [(LOAD, 0, 0, ARCH_AT), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER_AT)]
    lines += [(AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, KILL)]
    for error, calls in (*REFUSED.items(), *(() if read_only else METADATA.items())):
        for pair in calls.values():
            if (number := pair[column]) is not None:
                lines += [(EQUAL, 0, 1, number), _refuse(error)]
    lines += [(EQUAL, 0, 1, numbers["socket"]), _refuse(errno.EACCES)]
    # Datagrams could be sent from a pair to other sockets of the machine.
    lines += _unless(numbers["socketpair"], [(AND, 0, 0, SOCK_TYPE), (EQUAL, 0, 1, SOCK_STREAM)], errno.EACCES, at=1)
    for name in OWN:
        lines += _unless(numbers[name], [(EQUAL, 0, 1, 0)], errno.EPERM)
    # The owner of a descriptor gets its signals.
    for name, commands in OWNERS.items():
        tests = [(EQUAL, len(commands) - place, 0, command) for place, command in enumerate(commands)]
        lines += _unless(numbers[name], tests, errno.EPERM, at=1)
    for name in SIGNALS if not may_fork else ():
        lines += _unless(numbers[name], [(EQUAL, 1, 0, own), (EQUAL, 0, 1, 0)], errno.EPERM)
    if may_fork:
        lines += _unless(numbers["kill"], [(EQUAL, 1, 0, 0xFFFFFFFF)], errno.EPERM)
        lines += _unless(numbers["clone"], [(ANY_BIT, 1, 0, CLONE_NEW)], errno.EPERM)
    else:
        for name in ("fork", "vfork"):
            lines += [(EQUAL, 0, 1, numbers[name]), _refuse(errno.EAGAIN)] if name in numbers else []
        lines += _unless(numbers["clone"], [(ANY_BIT, 0, 1, CLONE_THREAD)], errno.EAGAIN)
    return [*lines, (RETURN, 0, 0, ALLOW)]


def _unless(number: int, tests: list[Line], error: int, at: int = 0) -> list[Line]:
    """Refuse a call, but for arguments at a place that pass `tests`, whose last line is followed by the permission."""
    inner: list[Line] = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * at), *tests, (RETURN, 0, 0, ALLOW), _refuse(error)]
    return [(EQUAL, 0, len(inner), number), *inner]


def _refuse(error: int) -> Line:
    return (RETURN, 0, 0, ERRNO | error)


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 without."""
    return max(call(CREATE_RULESET, None, 0, 1), 0) if sys.platform == "linux" else 0


def restrict_files(*, read: Sequence[str], write: Sequence[str]) -> None:
    """Limit this process and all that it starts: read and execute below `read`, everything below `write`.

    Paths that do not exist are left out. OSError if the kernel refuses.
    """
    known = landlock_version()
    rights = RIGHTS_BY_VERSION[min(known, len(RIGHTS_BY_VERSION) - 1)]
    attributes = struct.pack("<QQQ", rights, 0, SCOPES if known >= SCOPES_VERSION else 0)
    ruleset = call(CREATE_RULESET, attributes, 8 if known < 4 else 16 if known < SCOPES_VERSION else 24, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock: no ruleset")
    for paths, allowed in ((read, EXECUTE | READ_FILE | READ_DIR), (write, rights)):
        for path in paths:
            _allow(ruleset, path, allowed & rights)
    if ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or call(RESTRICT_SELF, ruleset, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "landlock: the limits are refused")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rule = struct.pack("<Qi", rights if os.path.isdir(path) else rights & ON_FILES, descriptor)
    failed = call(ADD_RULE, ruleset, PATH_BENEATH, rule, 0) < 0
    os.close(descriptor)
    if failed:
        raise OSError(ctypes.get_errno(), f"landlock: no rule for {path}")


def call(number: int, *arguments: int | bytes | None) -> int:
    """Result of a system call; negative: an error, which `ctypes.get_errno` tells."""
    system = ctypes.CDLL(None, use_errno=True).syscall
    system.restype = ctypes.c_long
    made = [ctypes.c_long(one) if isinstance(one, int) else ctypes.c_char_p(one) for one in arguments]
    result: int = system(ctypes.c_long(number), *made)
    return result
