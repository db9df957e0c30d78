"""Threads for code of users: one daemon thread per call, which cannot be killed but does not keep the process alive,
and a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ThreadCall(Generic[T]):
    """Function call in a new daemon thread, with its outcome as a future of the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def start(self, work: Callable[[], T], name: str) -> threading.Thread:
        """Call `work` in a thread of that name. Its exceptions are the future's; SystemExit and the like become
        RuntimeError."""

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                raises = isinstance(error, Exception) and not isinstance(error, StopIteration)
                self._settle(self._fail, error if raises else RuntimeError(f"{type(error).__name__}: {error}"))
            else:
                self._settle(self._succeed, result)

        thread = threading.Thread(target=run, daemon=True, name=name)
        thread.start()
        return thread

    def wait(self, made: Awaitable[T]) -> T:
        """Run a coroutine to completion in an event loop of this thread."""

        async def outcome() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._inner = asyncio.get_running_loop(), task
            return await made

        return asyncio.run(outcome())

    def cancel(self) -> None:
        """Cancel the coroutine that `wait` runs, if any; other code goes on."""
        if self._inner is not None:
            loop, task = self._inner
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        # After a deadline the loop may be closed, and nobody awaits this result.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(settle, outcome)

    def _succeed(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _fail(self, failure: Any) -> None:
        if not self.future.done():
            self.future.set_exception(failure)


class LoopThread:
    """Daemon thread with an event loop that outlives those of its callers, for coroutines that share connections and
    for code that might block its loop. It starts with the first call."""

    def __init__(self, name: str):
        self._name, self._lock = name, threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, made: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and await its result. Cancelling the await cancels the coroutine, and does not
        wait for it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(made, self._started()))

    def call(self, made: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the thread from code without an event loop. TimeoutError past the timeout."""
        future = asyncio.run_coroutine_threadsafe(made, self._started())
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    def close(self, timeout_s: float) -> None:
        """Cancel what runs and end the thread; code that blocks the loop past the timeout is left behind."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout_s)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), daemon=True, name=self._name)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, then cancel its tasks and close it."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
