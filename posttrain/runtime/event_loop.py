"""Event loops: a coroutine run from synchronous code, and a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, in a separate thread if this thread already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in a task without a result: asyncio sets the handler of SIGINT back by way of an error with the
    task's `repr`, which formats all of a step's arrays and samples (14 ms for 256 samples of 512 tokens)."""
    results: list[T] = []

    async def keep() -> None:
        results.append(await coroutine)

    asyncio.run(keep())
    return results[0]


CLOSE_TIMEOUT_S = 60.0
"""Seconds that the tasks have to end after they were cancelled; the thread of others is left behind as a daemon."""
WATCH_S = 0.5
"""Seconds between two looks of a watchdog."""


class LoopThread:
    """Daemon thread with an event loop that outlives those of its callers, for coroutines that share connections and
    for code that might block its loop. It starts with the first call, or on entering it as a context, whose exit closes
    it."""

    def __init__(self, name: str):
        self._name, self._lock = name, threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self._retired = False

    def __enter__(self) -> LoopThread:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(CLOSE_TIMEOUT_S)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._start()[0]

    @property
    def thread(self) -> threading.Thread:
        return self._start()[1]

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and await its result. Cancelling the await cancels the coroutine, and does not
        wait for it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def call(
        self,
        coroutine: Coroutine[Any, Any, T],
        watch: Callable[[], None] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Run a coroutine in the thread from code without an event loop, and return its result; its exceptions are
        raised here. TimeoutError past the timeout.

        `watch`: called in this thread every `WATCH_S` seconds meanwhile; an exception of it cancels the coroutine.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            while watch is not None and not wait([future], WATCH_S).done:
                watch()
            return future.result(timeout_s)
        finally:
            future.cancel()

    def close(self, timeout_s: float) -> None:
        """Cancel what runs and end the thread; code that blocks the loop past the timeout is left behind."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            loop, thread = running
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout_s)

    def retire(self) -> None:
        """End the thread once the coroutines that are in it have ended."""
        if self._retired:
            return
        self._retired, loop = True, self.loop

        async def drain() -> None:
            while len(tasks := asyncio.all_tasks()) > 1:
                await asyncio.wait(tasks - {asyncio.current_task()})
            loop.stop()

        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: loop.create_task(drain()))

    def _start(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        with self._lock:
            if self._running is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_serve, args=(loop,), daemon=True, name=self._name)
                self._running = loop, thread
                thread.start()
            return self._running


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
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
