"""The sandbox: programs of models do no harm, end at their deadline with all that they started, and leave nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from posttrain.sandbox.run import PROGRAM, Result, missing_protections, run, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's protections")


def python(source: str, **changes: Any) -> Result:
    return run_python(source, **{"timeout_s": 20.0, **changes})


def needs(protection: str) -> None:
    if any(protection in line for line in missing_protections()):
        pytest.skip(f"this kernel has no protection: {protection}")


def mounts_are_read_only() -> bool:
    return "Errno 30" in python("import os; os.chmod('..', 0o777)").stderr


def processes(marker: str) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker in file.read_bytes().decode(errors="replace"):
                found.append(int(file.parent.name))
    return found


@pytest.mark.parametrize(
    ("source", "code", "stdout", "stderr"),
    [
        ("print(input() + open('a/b.txt').read())", 0, "in, data", ""),
        ("import sys; sys.exit(203)", 203, "", ""),
        ("1/0", 1, "", 'Traceback (most recent call last):\n  File "main.py", line 1, in <module>'),
        ("import os; os.abort()", -6, "", ""),
        ("import ctypes; ctypes.string_at(0)", -11, "", ""),
        ("import os; os.kill(os.getpid(), 9)", -9, "", ""),
        ("bytearray(1 << 30)", 1, "", "MemoryError"),
        ("open('x', 'wb').write(bytes(1 << 22))", 1, "", "File too large"),
        ("import threading as t; a = t.Thread(target=print, args=(7,)); a.start(); a.join()", 0, "7", ""),
        ("import sys; print(sys.argv, __name__)", 0, "['main.py', 'one'] __main__", ""),
        (
            "import os; print(sorted(os.environ))",
            0,
            "['HOME', 'LANG', 'PATH', 'PYTHONDONTWRITEBYTECODE', 'TMPDIR']",
            "",
        ),
    ],
)
def test_a_program_and_its_end(source: str, code: int, stdout: str, stderr: str) -> None:
    found = python(source, argv=["one"], stdin="in\n", files={"a/b.txt": b", data"}, memory_mib=512, file_mib=1)
    assert (found.code, found.timed_out, found.stdout.strip()) == (code, False, stdout), found.stderr
    assert stderr in found.stderr and (stderr or not found.stderr)


@pytest.mark.parametrize(
    "source",
    [
        "import socket; socket.socket()",
        "import urllib.request as u; u.urlopen('http://127.0.0.1:9')",
    ],
)
def test_no_network(source: str) -> None:
    """Red without the filter: the refusal is the kernel's EACCES, not that of a port where nobody listens."""
    needs("network")
    assert "Errno 13" in python(source).stderr


def test_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    needs("files")
    secret = tmp_path / "secret.txt"
    secret.write_text("gold")
    for source in (
        f"open({str(secret)!r})",
        f"open({str(secret)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os; os.unlink({str(secret)!r})",
        "open('/proc/1/environ')",
        "import os; os.listdir('/tmp')",
    ):
        found = python(source).stderr
        assert "Errno 13" in found or "Errno 30" in found, source
    assert secret.read_text() == "gold" and list(tmp_path.iterdir()) == [secret]


@pytest.mark.parametrize(
    ("patch", "mounts"),
    [
        ("pass", True),
        ("s.MOUNT_SETATTR = 9999", True),
        ("s._mount_read_only = lambda _: False", False),
        ("s._enter_namespaces = lambda: False", False),
    ],
)
def test_nothing_of_other_files_and_processes_changes(
    patch: str, mounts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On old kernels and without mounts or namespaces as well: Landlock has no right for modes, owners, times and
    attributes; as the same user priorities could be set too."""
    mounts = mounts and mounts_are_read_only()
    program = f"{PROGRAM}import posttrain.sandbox.supervisor as s; {patch}; "
    monkeypatch.setattr("posttrain.sandbox.run.PROGRAM", program)
    if lacks := python("").missing:
        pytest.skip(f"this kernel has no protection: {lacks}")
    file, me = tmp_path / "other.txt", os.getpid()
    file.write_text("gold")
    file.chmod(0o640)
    os.utime(file, (5, 5))
    before = os.stat(file), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), os.sched_getscheduler(0)
    at = repr(str(file))
    lines = [
        f"os.chmod({at}, 0o6777)",
        f"os.chmod({at}, 0o777, dir_fd=os.open('.', 0))",
        f"os.utime({at}, (1, 1))",
        f"os.chown({at}, 1, 1)",
        f"os.setxattr({at}, 'user.x', b'1')",
        f"os.setpriority(os.PRIO_USER, {os.getuid()}, 19)",
        f"os.sched_setaffinity({me}, {{0}})",
        f"os.sched_setscheduler({me}, os.SCHED_IDLE, os.sched_param(0))",
        "os.memfd_create('x')",
        "l = ctypes.CDLL(None, use_errno=True); assert l.shmget(0, 4096, 0o1600) >= 0",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        f"fcntl.fcntl(0, fcntl.F_SETOWN, {me})",
    ]
    ways = "import ctypes, fcntl, os, socket\ndef done(line):\n    try: exec(line)\n    except BaseException: return\n"
    found = python(f"{ways}    print(line)\nfor line in {lines}: done(line)\nprint('end')").stdout.splitlines()
    assert [line for line in found if "chmod" not in line and "utime" not in line] == ["end"]
    # Refused, or without effect, in its own folder too.
    own = python("import os; open('a', 'w').close(); os.chmod('a', 0o755); print(os.access('a', os.X_OK))").stdout
    assert len(found) == (1 if mounts else 4) and own == f"{mounts}\n"
    assert python("import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39)").code == -31
    after = os.stat(file), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), os.sched_getscheduler(0)
    assert after == before and os.listxattr(file) == []


def test_programs_that_copy_and_unpack_files_go_on() -> None:
    source = (
        "import asyncio, os, shutil, tarfile, tempfile, zipfile\n"
        "open('a', 'w').write('x'); shutil.copy2('a', 'b'); os.sched_setaffinity(0, os.sched_getaffinity(0))\n"
        "with zipfile.ZipFile('z', 'w') as z: z.write('a'); z.extractall('c')\n"
        "with tarfile.open('t', 'w') as t: t.add('a')\n"
        "tarfile.open('t').extractall('d'); shutil.copytree('c', 'e')\n"
        "with tempfile.TemporaryDirectory() as f: asyncio.run(asyncio.sleep(0, print(open('e/a').read())))\n"
    )
    found = python(source)
    assert (found.stdout, found.code) == ("x\n", 0), found.stderr


def test_programs_make_programs_and_run_them() -> None:
    """What compilers do: an executable file, which may not become that of another user."""
    if not mounts_are_read_only():
        pytest.skip("this kernel refuses mounts")
    commands = "chmod +x a && ./a; chmod 6777 a .; chmod 777 .."
    found = run(["sh", "-c", commands], files={"a": "#!/bin/sh\necho ran\n"}, timeout_s=20.0, may_fork=True)
    assert found.stdout == "ran\n" and found.stderr.count("Read-only file system") == found.stderr.count("\n") == 1
    suid = "import os; print(os.statvfs('.').f_flag & os.ST_NOSUID > 0, os.statvfs('.').f_flag & os.ST_RDONLY)"
    assert python(suid).stdout == "True 0\n"


@pytest.mark.parametrize(
    "source", ["import os; os.fork()", "import os; os.kill(os.getppid(), 9)", "import os; os.kill(-1, 15)"]
)
def test_no_further_process_and_no_signal_to_others(source: str) -> None:
    needs("processes")
    assert "Errno 11" in (stderr := python(source).stderr) or "Errno 1]" in stderr


def test_what_it_starts_ends_with_it() -> None:
    """Red without the namespace and the loop that kills orphans: each of the three leaves a process in a session of
    its own."""
    start = "import subprocess; subprocess.Popen(['sleep', '{}'], start_new_session=True)"
    assert python(start.format("4711.1"), may_fork=True).code == 0
    assert python(start.format("4711.2") + "\nwhile True: pass", may_fork=True, timeout_s=0.5).timed_out
    found = run(["sh", "-c", "setsid sleep 4711.3 & exit 4"], timeout_s=20.0, may_fork=True)
    assert found.code == 4
    assert not processes("4711.")


def test_a_fork_bomb_ends_at_the_deadline() -> None:
    start = time.monotonic()
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert python(bomb, timeout_s=0.3, may_fork=True, memory_mib=128).timed_out
    assert python(bomb, timeout_s=0.3).timed_out
    assert time.monotonic() - start < 10.0


def test_output_is_bounded_and_folders_are_removed() -> None:
    before = set(Path(tempfile.gettempdir()).glob("posttrain-sandbox-*"))
    found = python("while True: print('x' * 1000)", timeout_s=0.3, output_kib=3)
    assert found.timed_out and found.code is None and len(found.stdout) == 3 * 1024
    deep = "import os\nfor _ in range(60): os.mkdir('d' * 99); os.chdir('d' * 99)\nos.mkdir('e', 0); print('ok')"
    assert python(deep).stdout == "ok\n"
    assert set(Path(tempfile.gettempdir()).glob("posttrain-sandbox-*")) <= before
    with pytest.raises(ValueError, match=r"'../x' lies outside of the scratch folder"):
        python("", files={"../x": ""})


def test_several_at_once_and_commands() -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: python(f"print({number})").stdout, range(8)))
    assert found == [f"{number}\n" for number in range(8)]
    assert run(["echo", "a b"], timeout_s=20.0).stdout == "a b\n"
    gone = run(["no-such-program"], timeout_s=20.0)
    assert (gone.code, gone.stderr) == (127, "no-such-program: No such file or directory\n")
    assert os.getcwd() != gone.stdout
