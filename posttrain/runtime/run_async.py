"""Running a coroutine from synchronous code, also inside a notebook, whose event loop is already running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
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
