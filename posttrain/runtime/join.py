"""Processes of one run: launched on this machine, joined, and ended together, all by the error of one."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO, Any

from posttrain.errors import LOST, ConfigError, OutsideError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Variables of a process that is started by hand: address and port of the first one, number of processes, its own."""
NOTICE_S, JOIN_S = 15, 300
"""Wait for all processes to start until a notice, and the longest."""
OWN_WORDS_S, LAST_WORDS_S = 2, 5
"""Wait of a process for its own error when another has failed, and of the first process for the others to end."""
GRACE_S = 15
"""Time in which launched processes end by themselves after one has failed; they are killed after it."""
_FAILURE = "posttrain/failure"
_POLL_MS = 500
_POLL_S = 0.05

Describe = Callable[[BaseException], tuple[str, int]]
"""Message and exit code of an error."""


@dataclass(frozen=True, kw_only=True)
class ProcessLayout:
    """Number of processes; and of this one with the first one's address, unless JAX finds these by itself."""

    count: int
    index: int | None = None
    address: str | None = None


def process_layout() -> ProcessLayout:
    """Find out how many processes the environment has: from its variables, Slurm, Open MPI, a TPU slice, or a job of
    Kubernetes. ConfigError for variables that do not fit, and where a cluster does not tell.

    Nothing waits here: without any of these there is one process.
    """
    given = {name: os.environ[name] for name in (ADDRESS, COUNT, INDEX) if os.environ.get(name)}
    if given.get(COUNT) == "1":
        return ProcessLayout(count=1)
    if given:
        if missing := [name for name in (ADDRESS, COUNT, INDEX) if name not in given]:
            raise ConfigError(f"{', '.join(given)}: set {', '.join(missing)} as well, or {COUNT}=1 for one process")
        if not (given[COUNT].isdecimal() and given[INDEX].isdecimal() and int(given[INDEX]) < int(given[COUNT])):
            raise ConfigError(f"{INDEX}={given[INDEX]} must be a number from 0 and below {COUNT}={given[COUNT]}")
        return ProcessLayout(count=int(given[COUNT]), index=int(given[INDEX]), address=given[ADDRESS])
    cluster = _cluster()
    if cluster is None:
        return ProcessLayout(count=1)
    try:
        return ProcessLayout(count=cluster.get_process_count())
    except Exception as error:
        raise ConfigError(
            f"{cluster.__name__}: cannot tell the number of processes ({type(error).__name__}: {error}); "
            f"set {ADDRESS}, {COUNT} and {INDEX}, or {COUNT}=1 for one process"
        ) from error


def _cluster() -> Any:
    """The cluster that JAX detects; None: this host is alone."""
    from jax._src.clusters import ClusterEnv

    return next((c for c in ClusterEnv._cluster_types if _may_be_here(c) and c.is_env_present()), None)


def _may_be_here(cluster: Any) -> bool:
    """Exclude clusters on hosts where JAX's question for them fails, or waits for minutes."""
    name = cluster.__name__
    if name == "K8sCluster":
        # JAX asks the server for the job, which only an indexed one has.
        return "JOB_COMPLETION_INDEX" in os.environ
    if name in ("GceTpuCluster", "GkeTpuCluster"):
        from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

        wanted = running_in_cloud_tpu_vm and "tpu" in os.environ.get("JAX_PLATFORMS", "tpu")
        # JAX looks up what the environment lacks; a single host elsewhere, such as in a notebook, has no such server.
        named = "MEGASCALE_NUM_SLICES" in os.environ or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
        return wanted and (named or _metadata_answers())
    return not cluster.opt_in_only_method


def _metadata_answers() -> bool:
    """Tell whether Google Cloud's metadata server is there, which describes a TPU slice."""
    address = os.environ.get("GCE_METADATA_IP", "metadata.google.internal"), 80
    try:
        socket.create_connection(address, timeout=2).close()
    except OSError:
        return False
    return True


@contextmanager
def joined(describe: Describe) -> Iterator[None]:
    """Run the block in all processes of the environment; without others nothing changes.

    The first error of one is printed by all, and ends them within seconds even while they wait for each other: the
    caller must pass its exit code to `leave`. Raises ConfigError, and OutsideError if they do not come together.
    """
    found = process_layout()
    if found.count == 1:
        if os.environ.get("JAX_PLATFORMS"):  # JAX is imported for it only where someone has chosen a platform
            from posttrain.runtime import processes

            processes.initialize_pathways()
        yield
        return
    _initialize(found)
    group = _Group(describe)
    try:
        yield
    except BaseException as error:
        group.end_with(error)
        raise
    group.close()


def check_alone(command: str) -> None:
    """ConfigError for a command of one process where the environment has several."""
    if (found := process_layout()).count > 1:
        raise ConfigError(
            f"{command} runs in one process, and this is one of {found.count}; run it on one host, with {COUNT}=1"
        )


def tell(goes_on: Callable[[], str]) -> None:
    """Set what is said of the same command where another process vanishes, such as: resumes after step 5."""
    _Group.goes_on = staticmethod(goes_on)


def leave(code: int | str | None) -> None:
    """End a process whose run has failed, without the wait for the others at its exit; no effect otherwise."""
    if _Group.failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _initialize(found: ProcessLayout) -> None:
    import jax

    # Its handler of SIGTERM would replace that of the training loop, which stops all processes after the same step.
    jax.config.update("jax_enable_preemption_service", False)
    own: dict[str, Any] = {}
    if found.address is not None:
        own = {"coordinator_address": found.address, "num_processes": found.count, "process_id": found.index}
        own["cluster_detection_method"] = "deactivate"
    # Beyond its own limit JAX aborts the process, which tells nobody what to do.
    timers = [threading.Timer(JOIN_S, _give_up, (found,)), threading.Timer(NOTICE_S, _notice, (found,))]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        jax.distributed.initialize(initialization_timeout=2 * JOIN_S, **own)
    except (RuntimeError, ValueError, OSError) as error:
        raise OutsideError(f"{_apart(found)}: {' '.join(str(error).split())[:200]}", LOST) from error
    finally:
        for timer in timers:
            timer.cancel()


def _notice(found: ProcessLayout) -> None:
    print(f"waiting for {found.count} processes of the run; {COUNT}=1 for one alone", file=sys.stderr, flush=True)


def _give_up(found: ProcessLayout) -> None:
    _end_with(f"error: {_apart(found)}, after {JOIN_S} s", LOST)


def _apart(found: ProcessLayout) -> str:
    return (
        f"the run has {found.count} processes, which did not come together; start the same command on every host, or "
        f"set {COUNT}=1 for one alone"
    )


class _Group:
    """The others of a run: a thread ends this process when one of them fails."""

    failed = False
    """True in a process whose failure ends the run."""
    goes_on: Callable[[], str] = staticmethod(lambda: "resumes")
    """Words for the same command after an end, such as: resumes after step 5."""

    def __init__(self, describe: Describe) -> None:
        from posttrain.runtime import processes

        self._describe, self._processes, self._store = describe, processes, processes.store()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="other processes", daemon=True)
        self._thread.start()
        # Kept, for C has no reference to it.
        self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._before_abort)
        self._signal = ctypes.CDLL(None).signal
        self._signal(signal.SIGABRT, self._on_abort)

    def _before_abort(self, number: int) -> None:
        """End with a line where JAX aborts since another process is gone; its client has a hook for that, which cannot
        be a Python function. Other aborts go on: the client's thread still brings the store's answers then."""
        answered = threading.Event()
        threading.Thread(target=self._ask, args=(answered,), daemon=True).start()
        if not answered.wait(OWN_WORDS_S + 1):
            _end_with(_vanished("JAX's lines above say how it noticed"), LOST)
        self._signal(signal.SIGABRT, None)
        signal.raise_signal(signal.SIGABRT)

    def _ask(self, answered: threading.Event) -> None:
        if _try(partial(self._store.key_value_set, f"{_FAILURE}/asked/{self._processes.index()}", "", True)):
            answered.set()

    def end_with(self, error: BaseException) -> None:
        """Tell the others, unless they raise the same; the first process, which has the store, waits for them."""
        if isinstance(error, self._processes.SameEverywhere):
            self.close()
            return
        text, code = self._describe(error)
        failure = {"index": self._processes.index(), "text": text, "code": code}
        first = _try(partial(self._store.key_value_set, _FAILURE, json.dumps(failure)))
        if not first and code == LOST:
            # Another process has failed first: the thread tells why.
            self._thread.join(OWN_WORDS_S + LAST_WORDS_S)
        self.close()
        self._leave_word()
        _Group.failed = True
        if self._processes.index() == 0:
            end = time.monotonic() + LAST_WORDS_S
            for other in range(1, self._processes.count()):
                left_ms = max(1, int(1000 * (end - time.monotonic())))
                _try(partial(self._store.blocking_key_value_get, f"{_FAILURE}/{other}", left_ms))

    def close(self) -> None:
        self._over.set()
        self._signal(signal.SIGABRT, None)
        # A thread that waits in C++ when the interpreter ends aborts the process.
        self._thread.join()

    def _watch(self) -> None:
        failure = None
        while failure is None and not self._over.is_set():
            failure = self._failure_of_another()
        # The main thread may be about to raise the same.
        if failure is None or self._over.wait(OWN_WORDS_S):
            return
        self._leave_word()
        _end_with(failure["text"], failure["code"])

    def _failure_of_another(self) -> dict[str, Any] | None:
        """Wait a moment for a failure; None if there is none."""
        try:
            failure: dict[str, Any] = json.loads(self._store.blocking_key_value_get(_FAILURE, _POLL_MS))
        except Exception as error:
            if str(error).startswith("DEADLINE_EXCEEDED"):
                return None
            return {"text": _vanished(" ".join(str(error).split())[:200]), "code": LOST}
        return {**failure, "text": f"process {failure['index']} of {self._processes.count()}: {failure['text']}"}

    def _leave_word(self) -> None:
        _try(partial(self._store.key_value_set, f"{_FAILURE}/{self._processes.index()}", "ended"))


def _vanished(reason: str) -> str:
    from posttrain.runtime.processes import peer

    return f"error: {peer()} has vanished ({reason}); the same command {_Group.goes_on()}"


def _end_with(text: str, code: int) -> None:
    print(text, file=sys.stderr, flush=True)
    os._exit(code)


def _try(call: Callable[[], object]) -> bool:
    """Call a store that may be gone, or have the key; returns False then."""
    try:
        call()
    except Exception:
        return False
    return True


def launch(command: Sequence[str], *, num_processes: int, cpu_devices: int) -> int:
    """Run a command of `posttrain` in processes on this machine's CPU; returns the first exit code that is not 0.

    `cpu_devices`: devices of each process. Signals go to all of them. Standard error of every process but the first is
    prefixed with its number, and standard output, where only the first one writes, is dropped. ConfigError for another
    command than `run`, the only one that takes several processes.
    """
    if not command or command[0] != "run":
        raise ConfigError(f"launch: {' '.join(command) or 'no command'}: give run with its configuration")
    address = f"localhost:{_free_port()}"
    children = []
    with ExitStack() as stack:
        for index in range(num_processes):
            own = {ADDRESS: address, COUNT: str(num_processes), INDEX: str(index)}
            more = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cpu_devices)}
            children.append(stack.enter_context(_child(command, index, {**os.environ, **more, **own})))
        stack.enter_context(_forwarded(children))
        return _wait(children)


@contextmanager
def _child(command: Sequence[str], index: int, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a session of its own, which a terminal's Ctrl-C does not reach; it is killed at the end."""
    child = subprocess.Popen(
        [sys.executable, "-m", "posttrain", *command],
        env=environment,
        stdout=None if index == 0 else subprocess.DEVNULL,
        stderr=None if index == 0 else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    reader = threading.Thread(target=_prefix, args=(child.stderr, index)) if child.stderr is not None else None
    if reader is not None:
        reader.start()
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if reader is not None:
            reader.join()


def _prefix(lines: IO[str], index: int) -> None:
    for line in lines:
        print(f"[{index}] {line}", end="", file=sys.stderr, flush=True)


@contextmanager
def _forwarded(children: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Send SIGINT and SIGTERM on to all children that run."""

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen[str]]) -> int:
    """Wait for all; after the first failure only for `GRACE_S`. Returns its exit code, 128 + N after signal N."""
    code, end = 0, float("inf")
    while True:
        codes = [child.poll() for child in children]
        if code == 0 and (failed := [one for one in codes if one]):
            code, end = failed[0], time.monotonic() + GRACE_S
        if None in codes and time.monotonic() > end:
            lost, found = next((number, one) for number, one in enumerate(codes) if one)
            how = f"signal {-found}" if found < 0 else f"exit code {found}"
            what = f"process {lost} of {len(children)} has ended by {how}, and others still wait for it"
            print(f"error: {what}: they are killed; the same command resumes", file=sys.stderr)
        if None not in codes or time.monotonic() > end:
            return code if code >= 0 else 128 - code
        time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port
