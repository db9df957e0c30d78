"""Event loops: a coroutine run from synchronous code, and a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
    """Event loop that runs in a daemon thread from `__enter__` to `__exit__`, which cancels its tasks."""

    def __init__(self, name: str):
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=name, daemon=True)
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop: asyncio.Event | None = None

    def __enter__(self) -> LoopThread:
        self._thread.start()
        self._started.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stop is not None, "entered before"
        self._started.result().call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_TIMEOUT_S)

    def call(self, coroutine: Coroutine[Any, Any, T], watch: Callable[[], None] | None = None) -> T:
        """Run a coroutine in the loop and return its result; its exceptions are raised here.

        `watch`: called in this thread every `WATCH_S` seconds meanwhile; an exception of it cancels the coroutine.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._started.result())
        try:
            while watch is not None and not wait([future], WATCH_S).done:
                watch()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
