"""Calls of code that users write, each with a deadline: functions in threads, coroutines in event loops of their own.
Neither holds up the loop that waits. A thread cannot be killed: past its deadline it is left behind, and Python code in
it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from posttrain.errors import RunError
from posttrain.runtime.event_loop import LoopThread

T = TypeVar("T")
LOGGER = logging.getLogger("posttrain.runtime")

MAX_HUNG = 16384
"""Maximum number of threads of this process that hang past a deadline; with one more the run ends. Each takes about
40 KiB of memory."""
WARN_HUNG = 64
"""Number of hung threads at which a warning comes, and again whenever it has doubled."""
START_SHARE, MAX_START_S = 0.25, 2.0
"""Share of the deadline, and seconds, after which a coroutine that has not begun is moved from a blocked event loop."""
CLOSE_S = 1.0
"""Seconds that coroutines have to end at the end of a run."""


class CallTimeout(Exception):
    """Call past its deadline; the message is one line."""


class CallInterrupted(BaseException):
    """Raised within Python code that runs past its deadline."""


class UserCalls:
    """Calls of the functions and coroutine functions of one field, such as `env.fn`.

    Coroutines share an event loop, and with it their connections, until one blocks it. From then on each object whose
    methods are called has an event loop of its own, and each function one for each call.
    """

    def __init__(self, name: str, *, timeout_s: float | None, concurrency: int | None = None):
        """`timeout_s`: deadline of a call; None: it ends when the await is cancelled. `concurrency`: maximum number of
        concurrent calls."""
        self._name, self._timeout_s, self._concurrency = name, timeout_s, concurrency
        self._start_s = MAX_START_S if timeout_s is None else min(MAX_START_S, START_SHARE * timeout_s)
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._hung: set[threading.Thread] = set()
        self._shared: LoopThread | None = LoopThread(name)
        self._own: dict[int, LoopThread] = {}

    @property
    def hung(self) -> int:
        """Number of threads that run past a deadline."""
        self._hung = {thread for thread in self._hung if thread.is_alive()}
        return len(self._hung)

    async def call(self, function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Any:
        """Call a function, and await its result if that is awaitable. CallTimeout past the deadline; RunError if too
        many calls have hung."""

        async def called() -> Any:
            owner = getattr(function, "__self__", None)
            if inspect.iscoroutinefunction(function):
                return await self._in_loop(owner, lambda: function(*args, **keywords))
            result = await self._in_thread(lambda: function(*args, **keywords))
            return await self._in_loop(owner, lambda: result) if inspect.isawaitable(result) else result

        return await self.bound(called)

    async def bound(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Await what `begin` makes, which is not of the user and runs in this event loop, within the same limits."""
        async with self._slot():
            deadline = asyncio.timeout(self._timeout_s)
            try:
                async with deadline:
                    return await begin()
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise CallTimeout(f"no answer within {self._timeout_s:g} s") from error

    def release(self, owner: object) -> None:
        """End the event loop of an object, if it has one, after its coroutines."""
        loop = self._own.pop(id(owner), None)
        if loop is not None:
            loop.retire()

    def close(self) -> None:
        """Cancel coroutines, and end their event loops."""
        for loop in (self._shared, *self._own.values()):
            if loop is not None:
                loop.close(CLOSE_S)
        self._own = {}

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._concurrency is None:
            yield
            return
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._concurrency)
        async with self._slots[1]:
            yield

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        call = _ThreadCall(work, self._name)
        try:
            call.start()
        except RuntimeError as error:
            raise RunError(self._many(f"no thread can be started ({error})")) from error
        try:
            return await call.future
        except asyncio.CancelledError:
            call.end()
            self._leave(call)
            raise

    async def _in_loop(self, owner: object, make: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            loop = self._loop_of(owner)
            call = _LoopCall(loop, make)
            if self._shared is None and owner is None:
                loop.retire()
            try:
                await asyncio.wait({call.future}, timeout=self._start_s)
                if call.future.done() or not call.withdraw():
                    return await call.future
            except asyncio.CancelledError:
                if call.blocks():
                    self._isolate(loop, owner)
                    self._leave(loop.thread)
                    interrupt(loop.thread)
                call.cancel()
                raise
            self._isolate(loop, owner)

    def _loop_of(self, owner: object) -> LoopThread:
        if self._shared is not None:
            return self._shared
        return LoopThread(self._name) if owner is None else self._own.setdefault(id(owner), LoopThread(self._name))

    def _isolate(self, loop: LoopThread, owner: object) -> None:
        """Take no further calls into a blocked event loop."""
        if loop is self._shared:
            self._shared = None
            LOGGER.warning(
                f"{self._name}: a coroutine blocks its event loop, so that others beside it wait: await in it, or make "
                "it a plain function; each object has an event loop of its own from here on"
            )
        if self._own.get(id(owner)) is loop:
            del self._own[id(owner)]
        loop.retire()

    def _leave(self, thread: threading.Thread) -> None:
        """Count a thread that is left behind. RunError if there are too many."""
        self._hung.add(thread)
        count = HUNG.add(thread)
        if count > MAX_HUNG:
            raise RunError(self._many(f"{MAX_HUNG} calls hang past their deadlines"))
        if HUNG.warns():
            LOGGER.warning(
                f"{self._name}: {self.hung} calls hang past their deadlines, {count} in this process; their threads "
                "cannot be killed: give what they wait for a time-out of its own"
            )

    def _many(self, why: str) -> str:
        return (
            f"{self._name}: {why}, and threads cannot be killed; give what they wait for a time-out of its own, and "
            "resume the run, which begins without them"
        )


class _HungThreads:
    """Threads of this process that run past a deadline."""

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()
        self._warned, self._lock = WARN_HUNG // 2, threading.Lock()

    def add(self, thread: threading.Thread) -> int:
        """Add a thread; returns how many there are."""
        with self._lock:
            self._threads.add(thread)
            if len(self._threads) > min(2 * self._warned, MAX_HUNG):
                self._threads = {one for one in self._threads if one.is_alive()}
            return len(self._threads)

    def warns(self) -> bool:
        """Tell whether a warning is due."""
        with self._lock:
            due = len(self._threads) >= 2 * self._warned
            self._warned = len(self._threads) if due else self._warned
            return due


HUNG = _HungThreads()


def wait_here(made: Awaitable[T]) -> T:
    """Run a coroutine to completion in the thread of the call under way, whose end cancels it."""
    thread = threading.current_thread()
    assert isinstance(thread, _ThreadCall), "called by UserCalls"
    return thread.wait(made)


def interrupt(thread: threading.Thread) -> None:
    """Raise `CallInterrupted` in a thread as soon as it runs Python code."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(CallInterrupted))


class _ThreadCall(threading.Thread):
    """Daemon thread of one call, with its outcome as a future of the running loop."""

    def __init__(self, work: Callable[[], Any], name: str):
        super().__init__(daemon=True, name=name)
        self._loop, self._work = asyncio.get_running_loop(), work
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self._lock = threading.Lock()
        self._waits = self._ended = False
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def run(self) -> None:
        result, failure = None, None
        with contextlib.suppress(CallInterrupted):
            try:
                result = self._work()
            except BaseException as error:
                failure = _ordinary(error)
            _tell(self._loop, self.future, result, failure)

    def wait(self, made: Awaitable[T]) -> T:
        async def outcome() -> T:
            task = asyncio.current_task()
            assert task is not None
            with self._lock:
                self._inner = asyncio.get_running_loop(), task
                if self._ended:
                    task.cancel()
            return await made

        try:
            with self._lock:
                self._waits = True  # an interrupt from before arrives here, none afterwards
        except CallInterrupted:
            if inspect.iscoroutine(made):
                made.close()
            raise
        return asyncio.run(outcome())

    def end(self) -> None:
        """Cancel the coroutine that `wait` runs, also before it begins, else interrupt the function."""
        with self._lock:
            self._ended = True
            if not self._waits:
                interrupt(self)
            if self._inner is None:
                return
            loop, task = self._inner
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(task.cancel)


class _LoopCall:
    """Call of a coroutine in the event loop of another thread, with its outcome as a future of the running loop."""

    def __init__(self, thread: LoopThread, make: Callable[[], Awaitable[Any]]):
        self._loop, self._make = asyncio.get_running_loop(), make
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self._begun = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._inner = thread.loop
        self._inner.call_soon_threadsafe(self._begin)

    def withdraw(self) -> bool:
        """Take the right to begin the call; False if it has begun, or was withdrawn."""
        return self._begun.acquire(blocking=False)

    def blocks(self) -> bool:
        """Tell whether its coroutine runs at this moment, and so holds up its event loop."""
        return self._task is not None and asyncio.current_task(self._inner) is self._task

    def cancel(self) -> None:
        if not self.withdraw() and self._task is not None:
            with contextlib.suppress(RuntimeError):
                self._inner.call_soon_threadsafe(self._task.cancel)

    def _begin(self) -> None:
        self._task = self._inner.create_task(self._run())

    async def _run(self) -> None:
        if not self.withdraw():
            return
        result, failure = None, None
        try:
            result = await self._make()
        except BaseException as error:
            failure = _ordinary(error)
        _tell(self._loop, self.future, result, failure)


def _ordinary(error: BaseException) -> Exception:
    """Exception that a future can hold and that ends no event loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any, failure: Exception | None) -> None:
    def settle() -> None:
        if future.done():
            return
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)

    # After a deadline the loop may be closed, and nobody awaits this outcome.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)
