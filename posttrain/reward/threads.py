"""Reward functions of a notebook or script in threads of this process, which cannot be killed but are counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.reward.call import CallError, CallResult, call_reward
from posttrain.runtime.threads import ThreadCall

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
        call = ThreadCall[CallResult]()
        name = f"reward {self._name}"
        thread = call.start(lambda: call_reward(self._function, keywords, loggers, count, call.wait), name)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._abandoned.add(thread)
            call.cancel()
            raise
        except RuntimeError as error:
            raise CallError(str(error)) from error
