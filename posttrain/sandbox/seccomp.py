"""System call filter (seccomp): no sockets, no signals to other processes and, if wanted, no further processes."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_GET_SECCOMP, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 21, 22, 2
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
CLONE_THREAD = 0x10000
X32_BIT = 0x40000000
"""First number of x86-64's second system call table (x32)."""

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = (
    ("socket", 41, 198),
    ("clone", 56, 220),
    ("fork", 57, None),
    ("vfork", 58, None),
    ("clone3", 435, 435),
    ("kill", 62, 129),
    ("tkill", 200, 130),
    ("tgkill", 234, 131),
    ("rt_sigqueueinfo", 129, 138),
    ("rt_tgsigqueueinfo", 297, 240),
    ("pidfd_send_signal", 424, 424),
    ("prlimit64", 302, 261),
    ("io_uring_setup", 425, 425),
    ("ptrace", 101, 117),
    ("process_vm_writev", 311, 271),
    ("unshare", 272, 97),
    ("setns", 308, 268),
    ("mount", 165, 40),
    ("bpf", 321, 280),
    ("keyctl", 250, 219),
    ("userfaultfd", 323, 282),
)
"""System call numbers of x86-64 and of arm64 (Linux, asm/unistd.h). None: it has no such call."""
SIGNALS = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
"""Calls whose first argument is the process that gets a signal."""
NEVER = {
    **dict.fromkeys(("socket", "ptrace", "process_vm_writev", "unshare", "setns", "mount", "bpf"), errno.EACCES),
    **dict.fromkeys(("keyctl", "userfaultfd", "tkill", "pidfd_send_signal"), errno.EACCES),
    "io_uring_setup": errno.ENOSYS,
}
"""Refused calls with their error. io_uring could open sockets past this filter."""


def is_available() -> bool:
    """Tell whether this kernel filters system calls, and this machine's numbers are known."""
    if sys.platform != "linux" or os.uname().machine not in AUDIT_ARCH:
        return False
    return ctypes.CDLL(None).prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def restrict(*, may_fork: bool) -> None:
    """Install the filter for this process and all that it starts. OSError if the kernel refuses."""
    program = b"".join(struct.pack("<HBBI", *line) for line in _program(os.getpid(), may_fork))
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


def _program(own: int, may_fork: bool) -> list[Line]:
    machine = os.uname().machine
    arch = AUDIT_ARCH[machine]
    columns = {name: x86 if machine == "x86_64" else arm for name, x86, arm in CALLS}
    numbers = {name: number for name, number in columns.items() if number is not None}
    lines: list[Line] = [(LOAD, 0, 0, ARCH_AT), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER_AT)]
    lines += [(AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, KILL)]
    for name, error in NEVER.items():
        lines += [(EQUAL, 0, 1, numbers[name]), _refuse(error)]
    # A process may limit itself; 0 is the caller, as in kill its own group.
    lines += _unless(numbers["prlimit64"], [(EQUAL, 0, 1, 0)], errno.EPERM)
    for name in SIGNALS if not may_fork else ():
        lines += _unless(numbers[name], [(EQUAL, 1, 0, own), (EQUAL, 0, 1, 0)], errno.EPERM)
    if may_fork:
        lines += _unless(numbers["kill"], [(EQUAL, 1, 0, 0xFFFFFFFF)], errno.EPERM)
    else:
        for name in ("fork", "vfork"):
            lines += [(EQUAL, 0, 1, numbers[name]), _refuse(errno.EAGAIN)] if name in numbers else []
        # glibc starts threads with clone where it finds no clone3, whose flags a filter cannot read.
        lines += [(EQUAL, 0, 1, numbers["clone3"]), _refuse(errno.ENOSYS)]
        lines += _unless(numbers["clone"], [(ANY_BIT, 0, 1, CLONE_THREAD)], errno.EAGAIN)
    return [*lines, (RETURN, 0, 0, ALLOW)]


def _unless(number: int, tests: list[Line], error: int) -> list[Line]:
    """Refuse a call, but for first arguments that pass `tests`, whose last line is followed by the permission."""
    inner: list[Line] = [(LOAD, 0, 0, ARGUMENTS_AT), *tests, (RETURN, 0, 0, ALLOW), _refuse(error)]
    return [(EQUAL, 0, len(inner), number), *inner]


def _refuse(error: int) -> Line:
    return (RETURN, 0, 0, ERRNO | error)
