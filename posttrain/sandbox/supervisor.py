"""Supervisor process: runs one program, confined if wanted, and kills it with all that it started at its end.
`posttrain.sandbox.run` starts it in a new interpreter per program: imports here cost each of them, so they are few."""

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import resource
import signal
import struct
import sys
import time

from posttrain.sandbox import kernel

TYPE_CHECKING = False  # without the import of typing
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 24, 36
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
CAPABILITY_VERSION, LAST_CAPABILITY = 0x20080522, 40
CLONE_NEWNS, MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 0x20000, 442, -100, 0x8000
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
READ_ONLY, NO_SETUID, NO_DEVICES = 1, 2, 4
MOUNT_FLAGS = {
    b"ro": READ_ONLY, b"nosuid": NO_SETUID, b"nodev": NO_DEVICES, b"noexec": 8, b"noatime": 0x400, b"nodiratime": 0x800,
    b"relatime": 0x200000,
}  # fmt: skip
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
OPEN_FILES = 256
POLL_S = (0.0005, 0.01)
KILL_TIMEOUT_S = 5.0
MIB = 2**20


def main() -> None:
    """Run the job in the file of the descriptor that the command line names, and write its outcome to the job's
    descriptor; the program's process returns at its end."""
    with open(int(sys.argv[1]), "rb") as file:
        job = marshal.load(file)
    report = job["report"]
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != job["parent"]:
        os._exit(1)
    namespaces = job["confined"] and _enter_namespaces()
    job["read_only"] = read_only = namespaces and _mount_read_only(job["folder"])
    end = time.monotonic() + job["timeout_s"]
    code_of, code_to = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(report)
        os.close(code_of)
        _start(job, code_to if namespaces else None)
        return
    os.close(code_to)
    status = _wait(pid, end, stopped)
    if status is None:
        _kill(pid)
    _kill_orphans()
    code = None if status is None else os.waitstatus_to_exitcode(status)
    if namespaces and code == 0:
        code = int(os.read(code_of, 16))
    missing = [name for name, there in _protections(namespaces, read_only, job["may_fork"]).items() if not there]
    os.write(report, marshal.dumps({"code": code, "timed_out": status is None, "missing": missing}))
    os._exit(0)


def _protections(namespaces: bool, read_only: bool, may_fork: bool) -> dict[str, bool]:
    """Tell which protections a program has, by the names of `posttrain.sandbox.run.UNPROTECTED`."""
    calls = kernel.has_seccomp()
    own_signals = calls and (not may_fork or kernel.landlock_version() >= kernel.SCOPES_VERSION)
    return {
        "network": namespaces or calls,
        "files": kernel.landlock_version() > 0,
        "truncation": read_only or kernel.landlock_version() >= kernel.TRUNCATE_VERSION,
        "modes": read_only or calls,
        "memory": calls,
        "priorities": namespaces or calls,
        "processes": namespaces or own_signals,
    }


def _enter_namespaces() -> bool:
    """Make the next child the first process of namespaces without network, whose end kills all processes in them."""
    if sys.platform != "linux":
        return False
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC):
        return False
    for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        try:
            with open(f"/proc/self/{file}", "w", encoding="ascii") as opened:
                opened.write(text)
        except OSError:  # some systems grant namespaces without rights in them; programs then see no name of their user
            break
    return True


def _mount_read_only(folder: str) -> bool:
    """Make all files but those of a folder read-only for this process and its children, modes and times as well, and
    setuid without effect. False where mounts are refused."""
    path = os.fsencode(folder)
    if ctypes.CDLL(None).unshare(CLONE_NEWNS) or _mount(None, b"/", MS_REC | MS_PRIVATE) or _mount(path, path, MS_BIND):
        return False
    everywhere = struct.pack("<QQQQ", READ_ONLY | NO_SETUID, 0, 0, 0)
    inside = struct.pack("<QQQQ", NO_SETUID | NO_DEVICES, READ_ONLY, 0, 0)
    if kernel.call(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, everywhere, len(everywhere)):
        return _remount_each(path)  # before Linux 5.12
    if kernel.call(MOUNT_SETATTR, AT_FDCWD, path, 0, inside, len(inside)):
        raise OSError(ctypes.get_errno(), f"sandbox: {folder} cannot be made writable")
    return True


def _remount_each(folder: bytes) -> bool:
    with open("/proc/self/mountinfo", "rb") as file:
        mounts = [line.split()[4:6] for line in file.read().splitlines()]
    for escaped, options in mounts:
        path = escaped.decode("unicode_escape").encode("latin-1")
        kept = sum(flag for name, flag in MOUNT_FLAGS.items() if name in options.split(b","))
        added = NO_SETUID | (NO_DEVICES if path == folder else READ_ONLY)
        if _mount(None, path, MS_REMOUNT | MS_BIND | kept | added) not in (0, errno.ENOENT, errno.EINVAL, errno.EACCES):
            return False  # those that no path leads to are left
    return True


def _mount(source: bytes | None, path: bytes, flags: int) -> int:
    """Mount, and return the error's number or 0."""
    failed = ctypes.CDLL(None, use_errno=True).mount(source, path, None, ctypes.c_ulong(flags), None)
    return ctypes.get_errno() if failed else 0


def _wait(pid: int, end: float, stopped: list[int]) -> int | None:
    """Wait for a child; None at the deadline or after a signal."""
    pause = POLL_S[0]
    while not stopped and time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(pause)
        pause = min(pause * 1.5, POLL_S[1])
    return None


def _kill(pid: int) -> None:
    """Kill a process and its group."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _kill_orphans() -> None:
    """Kill all descendants; without namespaces they become children of this process as their parents die."""
    end = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < end:
        for child in _children():
            _kill(child)
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(POLL_S[0])
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Process ids of this process's children."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        pass
    found = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                found += [int(name)] if int(file.read().rpartition(")")[2].split()[1]) == os.getpid() else []
        except (OSError, ValueError, IndexError):
            continue
    return found


def _start(job: dict[str, Any], code_to: int | None) -> None:
    """Run the program in this process; if this is the first of a namespace, below it, and write its exit code."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if code_to is not None:
        if pid := os.fork():
            while (found := os.wait())[0] != pid:
                pass
            os.write(code_to, str(os.waitstatus_to_exitcode(found[1])).encode())
            os._exit(0)
        os.close(code_to)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    if job["peer"] is not None:
        from posttrain.sandbox import peer  # noqa: F401  its file cannot be read later
    try:
        if job["confined"]:
            _confine(job)
    except OSError as error:
        print(f"sandbox: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    _execute(job)


def _confine(job: dict[str, Any]) -> None:
    os.chdir(job["folder"])
    limits = {
        resource.RLIMIT_AS: job["memory_mib"] * MIB,
        resource.RLIMIT_FSIZE: job["file_mib"] * MIB,
        resource.RLIMIT_CPU: int(job["timeout_s"]) + 1,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        if sys.platform == "linux" or kind != resource.RLIMIT_AS:
            resource.setrlimit(kind, (limit, limit))
    if kernel.landlock_version():
        python = [sys.prefix, sys.base_prefix, sys.exec_prefix, *(one for one in sys.path if "-packages" in one)]
        kernel.restrict_files(read=[*SYSTEM, *python, *DEVICES], write=[job["folder"], "/dev/null"])
    if sys.platform == "linux":
        for capability in range(LAST_CAPABILITY + 1):
            _prctl(PR_CAPBSET_DROP, capability)
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
        ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())
    if kernel.has_seccomp():
        kernel.restrict_calls(may_fork=job["may_fork"], read_only=job["read_only"])


def _execute(job: dict[str, Any]) -> None:
    """Become the command, or run the Python file as `python FILE` would, without the start of another interpreter."""
    argv = job["argv"]
    if job["python"] is None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and commands would inherit that
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    file = job["python"]
    sys.argv = [file, *argv]
    sys.path.insert(0, job["folder"])
    sys.excepthook = _print_own_frames
    module = type(sys)("__main__")
    module.__dict__.update(__file__=file, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    with open(file, "rb") as opened:
        text = opened.read()
    if job["peer"] is None:
        exec(compile(text, file, "exec"), module.__dict__)
        return
    from posttrain.sandbox.peer import Modules, Peer

    read, write, modules = job["peer"]
    other = Peer(read, write, serves=modules is None)
    if modules is not None:
        sys.meta_path.insert(0, Modules(other, modules))
        module.__dict__.update(other.namespace("", text.decode(errors="replace")))
    exec(compile(text, file, "exec"), module.__dict__)
    if modules is None:
        other.serve(module.__dict__)


def _print_own_frames(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Print a traceback from the program's first frame on."""
    import traceback

    here = frames
    while here is not None:
        if here.tb_frame.f_code.co_filename == __file__:
            frames = here.tb_next
        here = here.tb_next
    traceback.print_exception(kind, error, frames)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
