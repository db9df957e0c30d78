"""Limits of user code that a conversation waits for: a deadline for each call, and a maximum of concurrent calls."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any

MAX_ABANDONED = 64
"""Maximum number of abandoned calls that may still be running; beyond it no further call is made."""


class LimitExceeded(Exception):
    """Call that was not made or not waited for; the message is one line."""


class Limits:
    """Deadline and concurrency of calls to functions and coroutines of the user.

    Functions run in daemon threads, which are used again, so that a blocking one does not stop the event loop; one past
    its deadline cannot be killed and is abandoned, a coroutine is cancelled.
    """

    def __init__(self, *, timeout_s: float, concurrency: int):
        self._timeout_s, self._concurrency = timeout_s, concurrency
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._idle: list[_Worker] = []
        self._abandoned: list[_Worker] = []

    async def call(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call a function and await its result if that is awaitable. LimitExceeded past the deadline."""
        async with self._semaphore():
            deadline = asyncio.timeout(self._timeout_s)
            try:
                async with deadline:
                    if inspect.iscoroutinefunction(function):
                        return await function(*args, **keywords)
                    result = await self._in_thread(lambda: function(*args, **keywords))
                    return await result if inspect.isawaitable(result) else result
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise LimitExceeded(f"no answer within {self._timeout_s:g} s") from error

    @property
    def abandoned(self) -> int:
        """Number of calls past their deadline that are still running."""
        self._abandoned = [worker for worker in self._abandoned if worker.busy]
        return len(self._abandoned)

    def close(self) -> None:
        """End the idle threads."""
        for worker in self._idle:
            worker.end()
        self._idle = []

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._concurrency)
        return self._slots[1]

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        if self.abandoned >= MAX_ABANDONED:
            raise LimitExceeded(
                f"not called: {MAX_ABANDONED} earlier calls have not returned, threads cannot be killed"
            )
        worker = self._idle.pop() if self._idle else _Worker()
        try:
            result = await worker.run(work)
        except asyncio.CancelledError:
            if worker.busy:
                worker.end()  # once the call has returned
            (self._abandoned if worker.busy else self._idle).append(worker)
            raise
        except BaseException:
            self._idle.append(worker)
            raise
        self._idle.append(worker)
        return result


class _Worker:
    """Daemon thread that runs one call after the other."""

    def __init__(self) -> None:
        self.busy = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="environment").start()

    def run(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def outcome() -> None:
            result, failure = None, None
            try:
                result = work()
            except BaseException as error:
                raises = isinstance(error, Exception) and not isinstance(error, StopIteration)
                failure = error if raises else RuntimeError(f"{type(error).__name__}: {error}")
            self.busy = False
            # After a deadline the loop may be closed, and nobody awaits this result.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, future, result, failure)

        self.busy = True
        self._work.put(outcome)
        return future

    def end(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _settle(future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)
