"""Reward functions of a notebook or script in threads of this process, which cannot be killed but are counted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from posttrain.reward.call import CallError, CallResult, call_reward

MAX_ABANDONED = 64
"""Maximum number of abandoned calls of one function that may still be running; beyond it the function is not called."""


class ThreadCaller:
    """Caller that runs each call in a new daemon thread, so that a call that never returns does not keep the process
    alive."""

    def __init__(self, function: Callable[..., Any], name: str):
        self._function, self._name = function, name
        self._abandoned: set[threading.Thread] = set()

    async def prepare(self) -> None:
        """Do nothing: threads start immediately."""

    def finish(self, *, strange: bool) -> None:
        """Do nothing: threads end by themselves."""

    def close(self) -> None:
        """Do nothing: threads end by themselves."""

    @property
    def abandoned(self) -> int:
        """Number of calls past their deadline that are still running."""
        self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
        return len(self._abandoned)

    async def call(self, keywords: Mapping[str, Any], loggers: Sequence[str], count: int) -> CallResult:
        """Call the function. CallError if it fails; on cancellation the thread is abandoned and its coroutine
        cancelled."""
        if self.abandoned >= MAX_ABANDONED:
            raise CallError(
                f"not called: {MAX_ABANDONED} earlier calls have not returned, and threads cannot be killed; "
                "name it as file.py:function, which runs in a child process"
            )
        call = _ThreadCall()
        thread = call.start(lambda: call_reward(self._function, keywords, loggers, count, call.wait), self._name)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._abandoned.add(thread)
            call.cancel()
            raise


class _ThreadCall:
    """Function call in a thread, with its outcome as a future of the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[CallResult] = self._loop.create_future()
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def start(self, work: Callable[[], CallResult], name: str) -> threading.Thread:
        def run() -> None:
            result, failure = None, None
            try:
                result = work()
            except BaseException as error:
                failure = error if isinstance(error, Exception) else CallError(f"{type(error).__name__}: {error}")
            # After a deadline the loop may be closed, and nobody awaits this result.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._settle, result, failure)

        thread = threading.Thread(target=run, daemon=True, name=f"reward {name}")
        thread.start()
        return thread

    def _settle(self, result: CallResult | None, failure: Exception | None) -> None:
        if self.future.done():
            return
        if failure is not None:
            self.future.set_exception(failure)
        else:
            assert result is not None
            self.future.set_result(result)

    def wait(self, made: Awaitable[Any]) -> Any:
        """Run a coroutine to completion in this thread's event loop."""

        async def outcome() -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._inner = asyncio.get_running_loop(), task
            return await made

        return asyncio.run(outcome())

    def cancel(self) -> None:
        if self._inner is not None:
            loop, task = self._inner
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)
