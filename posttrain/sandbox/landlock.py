"""File access limits by the kernel's Landlock: folders to read and execute, folders to write, nothing else."""

from __future__ import annotations

import ctypes
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
PR_SET_NO_NEW_PRIVS = 38
O_PATH = 0o10000000


def version() -> int:
    """Version of the kernel's Landlock; 0 without."""
    return max(call(CREATE_RULESET, None, 0, 1), 0) if sys.platform == "linux" else 0


def restrict(*, read: Sequence[str], write: Sequence[str]) -> None:
    """Limit this process and all that it starts: read and execute below `read`, everything below `write`.

    Paths that do not exist are left out. OSError if the kernel refuses.
    """
    known = version()
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
