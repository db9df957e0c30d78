"""Rewards in child processes: whatever some samples make a function do costs one time-out and only their values."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.errors import ConfigError, RunError
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.reward.types import Rewards
from posttrain.reward.worker import Limits
from posttrain.runtime.event_loop import run_async
from tests.often import often
from tests.rl.helpers import groups

FUNCTIONS = '''
import asyncio, ctypes, math, os, signal, subprocess, sys, tempfile, time

def act(text):
    """What a sample makes the function do, and its value."""
    if text == "hang":
        while True: pass
    if text == "sleep":
        time.sleep(60)
    if text == "segfault":
        ctypes.string_at(0)
    if text == "exit":
        sys.exit(3)
    if text == "quit":
        os._exit(4)
    if text in ("parent", "its group"):
        send = os.kill if text == "parent" else lambda pid, number: os.killpg(os.getpgid(pid), number)
        send(os.getppid(), signal.SIGKILL)
    if text == "raise":
        raise KeyError(text)
    if text == "fork" and os.fork() == 0:
        time.sleep(60)
    if text == "return":
        os.fork()
    if text == "detach":
        subprocess.Popen(["sleep", "60"], start_new_session=True)
    if text == "allocate":
        bytearray(1 << 30)
    if text == "bomb":
        while True: os.fork()
    if text == "write":
        tempfile.NamedTemporaryFile(delete=False).write(bytes(1 << 21))
    return {"nan": math.nan, "inf": math.inf, "word": "2"}.get(text, float(len(text)))

def strange(completions, **_):
    if "short" in completions:
        return []
    return [act(text) for text in completions]

async def waits(completions):
    await asyncio.sleep(60 if "hang" in completions else 0)
    return [1.0] * len(completions)

calls = 0

def counts(completions, log_metric, log_extra, step=0):
    global calls
    calls += 1
    log_metric("calls", calls)
    log_extra("upper", [text.upper() for text in completions])
    return [float("jax" in sys.modules)] * len(completions)

def process(completions):
    return [float(os.getpid())] * len(completions)

def folder(completions, log_extra):
    log_extra("folder", [tempfile.mkdtemp()] * len(completions))
    return [1.0] * len(completions)

class Object:
    def __reduce__(self):
        return os.mkdir, (tempfile.gettempdir() + "/made",)

def forges(completions):
    """Writes what its samples say to all sockets, as code of a model in this process can."""
    import pickle, socket, stat
    for text in completions:
        data = pickle.dumps(([1.0], Object())) if text == "pickle" else text.encode()
        for number in range(3, 64):
            try:
                if data and stat.S_ISSOCK(os.fstat(number).st_mode):
                    os.write(number, len(data).to_bytes(8, "little") + data)
            except OSError:
                pass
    return [1.0] * len(completions)

def second(trajectories, answer):
    return [float(t.text == a) for t, a in zip(trajectories, answer)]
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "strange.py"
    file.write_text(FUNCTIONS)
    return file


def reward(file: Path, name: str, **changes: Any) -> Reward:
    fields: dict[str, Any] = {"function": functions()[name], "weight": 1.0, "timeout_s": 60.0}
    return Reward(**fields | {"isolated": (f"{file}:{name}", str(file.parent))} | changes)


def functions() -> dict[str, Any]:
    """As the parent knows them: their names and signatures."""
    namespace: dict[str, Any] = {}
    exec(FUNCTIONS, namespace)
    return namespace


def descendants(root: int) -> set[int]:
    """Process ids below one, zombies left out."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def eventually(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


@contextlib.contextmanager
def scoring(*rewards: Reward) -> Iterator[Callable[[Sequence[str]], Rewards]]:
    """Scores of one group of texts."""
    rubric = Rubric(rewards)
    with rubric.running():
        yield lambda texts: run_async(rubric.score(groups([texts], [{"prompt": "p", "answer": "a"}])))


BAD = [
    "hang",
    "sleep",
    "segfault",
    "exit",
    "quit",
    "parent",
    "its group",
    "raise",
    "nan",
    "inf",
    "word",
    "short",
    "allocate",
    "bomb",
    "write",
]
ODD = ["fork", "return", "detach"]
"""Samples that start a process and have a value nevertheless."""
LIMITS = Limits(memory_mib=900, file_mib=1, cpu_s=0)
CLEAN = [f"clean{'.' * (index % 7)}" for index in range(28)]


def test_strange_samples_cost_one_time_out_and_no_other_value(file: Path) -> None:
    texts = [*CLEAN[:20], *BAD, *ODD, *CLEAN[20:]]
    timeout_s = 3.0
    with scoring(reward(file, "strange", timeout_s=timeout_s, limits=LIMITS), reward(file, "process")) as score:
        clean = score(CLEAN)
        before = descendants(os.getpid())
        start = time.monotonic()
        found = score(texts)
        took = time.monotonic() - start
        assert took < 2 * timeout_s - 0.5, "one time-out, not two"
        values = found.parts_PG["strange"][0]
        right = [math.nan if text in BAD else float(len(text)) for text in texts]
        np.testing.assert_array_equal(values, right)
        kinds = {texts[error.sample]: (error.kind, error.error) for error in found.errors}
        assert kinds.keys() == set(BAD)
        assert {text for text, (kind, _) in kinds.items() if kind == "timeout"} == {"hang", "sleep"}
        assert kinds["hang"][1] == "no answer within 3 s" and kinds["quit"][1] == "its process exited with code 4"
        assert kinds["parent"][1] == kinds["its group"][1] == "the parent of its process was killed"
        assert kinds["segfault"][1] == "its process was ended by SIGSEGV"
        assert (
            f"sys.exit(3) is called ({file}:" in kinds["exit"][1] and f"KeyError: 'raise' ({file}:" in kinds["raise"][1]
        )
        assert kinds["bomb"][1] == "its process started more than 64 processes and was killed"
        assert kinds["allocate"][1].startswith("MemoryError") and "File too large" in kinds["write"][1]
        assert kinds["nan"][1] == "a value must be a finite number or None, got nan"
        assert kinds["short"][1] == "must return one value per completion, got 0 for 1"
        # One worker of each function and the server; no process that a sample has left, in another session neither.
        assert eventually(lambda: len(descendants(os.getpid())) <= len(before))
        again = score(CLEAN)
        np.testing.assert_array_equal(again.parts_PG["strange"], clean.parts_PG["strange"])
        assert clean.parts_PG["process"][0, 0] == found.parts_PG["process"][0, 0] == again.parts_PG["process"][0, 0]
    assert eventually(lambda: not descendants(os.getpid()) & before)


@pytest.mark.thorough
@pytest.mark.parametrize("name", often(("strange", "waits"), "strange"))
def test_more_samples_hang_than_are_scored_at_once(file: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("posttrain.reward.rubric.MAX_ALONE", 3)
    texts = ["hang"] * 7 + CLEAN[:3]
    with scoring(reward(file, name, timeout_s=2.0)) as score:
        start = time.monotonic()
        found = score(texts)
        assert time.monotonic() - start < 3.5, "one time-out, not two"
        assert np.isnan(found.total_PG[0]).tolist() == [True] * 7 + [False] * 3
        assert {error.kind for error in found.errors} == {"timeout"}


def test_a_worker_keeps_its_module_and_has_no_jax(file: Path) -> None:
    with scoring(reward(file, "counts"), reward(file, "second")) as score:
        for step in (1, 2):
            found = score(["a", "bb"])
            assert found.metrics["rewards/counts/calls"].value() == step and found.extras == {"upper": ["A", "BB"]}
            assert found.parts_PG["counts"].tolist() == [[0.0, 0.0]]
            assert found.parts_PG["second"].tolist() == [[1.0, 0.0]]


@pytest.mark.thorough
def test_cpu_seconds_of_a_call(file: Path) -> None:
    """Red without the limit: the sample would hang until the time-out."""
    with scoring(reward(file, "strange", limits=Limits(memory_mib=0, file_mib=0, cpu_s=1))) as score:
        found = score(["hang"])
    (error,) = found.errors
    assert (error.sample, error.error) == (0, "its process was ended by SIGXCPU")


def test_temporary_files_go_with_their_process(file: Path) -> None:
    with scoring(reward(file, "folder")) as score:
        (made,) = {Path(one) for one in score(["a"]).extras["folder"]}
        assert made.is_dir()
    assert eventually(lambda: not made.parent.parent.exists()) and made.parent.parent.name.startswith("posttrain-")


def test_a_clean_step_costs_little(file: Path) -> None:
    """Beside what the function does; the first call waits for the imports."""
    texts = ["x" * 100] * 64
    with scoring(reward(file, "strange")) as score:
        score(texts)
        took = []
        for _ in range(20):
            start = time.monotonic()
            score(texts)
            took.append(time.monotonic() - start)
    assert min(took) < 0.02


def test_values_instead_of_errors(file: Path) -> None:
    with scoring(reward(file, "strange", on_error=-1.5, weight=2.0)) as score:
        found = score(["aa", "nan", "raise", "b"])
    assert found.total_PG.tolist() == [[4.0, -3.0, -3.0, 2.0]]
    assert [(error.sample, error.kind) for error in found.errors] == [(1, "error"), (2, "error")]


FORGED = ["pickle", "[", "1e", "[" * 9999, "[[[[NaN]], [], {}, {}], 0]", '[[[1.0], [[7, "x"]], {}, {}], 0]']


def test_replies_are_plain_values(file: Path) -> None:
    """Nothing that a worker sends becomes an object in the trainer; what is no result is an error of its sample."""
    with scoring(reward(file, "forges")) as score:
        for text in FORGED:
            found = score([text])
            assert [error.sample for error in found.errors] == [0], text
            assert "sent something else than a result" in found.errors[0].error
        assert score([""]).total_PG.tolist() == [[1.0]]


def test_arguments_that_no_process_can_read(file: Path) -> None:
    match = "reward counts: its arguments cannot be sent to a child.*isolate: thread"
    with scoring(reward(file, "counts", args={"step": lambda: 0})) as score, pytest.raises(ConfigError, match=match):
        score(["a"])


def test_a_file_that_is_gone(file: Path) -> None:
    gone = file.with_name("gone.py")
    match = f"the child process of {gone}:counts cannot import: .*no file"
    with scoring(reward(gone, "counts")) as score, pytest.raises(RunError, match=match):
        score(["a"])


PARENT = """
import json, sys, time
from pathlib import Path
from tests.reward.test_processes import reward, scoring
with scoring(reward(Path(sys.argv[1]), "strange", timeout_s=60.0)) as score:
    score(["a"])
    print("ready", flush=True)
    score(["fork", "detach", "hang"])
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_outlives_a_killed_parent(file: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(file)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        assert eventually(lambda: len(descendants(parent.pid)) >= 5)  # server, keeper, worker, its fork and its program
        below = descendants(parent.pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))
