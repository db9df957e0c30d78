"""Calls into the event loop of another thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from posttrain.runtime import loop_thread
from posttrain.runtime.loop_thread import LoopThread


async def where() -> str:
    return threading.current_thread().name


def test_calls_and_their_failures() -> None:
    async def fail() -> None:
        raise KeyError("no such sample")

    with LoopThread("rollouts") as thread:
        assert thread.call(where()) == "rollouts"
        with pytest.raises(KeyError, match="no such sample"):
            thread.call(fail())
        assert thread.call(where(), lambda: None) == "rollouts"


def test_a_watchdog_cancels_what_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "WATCH_S", 0.01)
    ended: list[str] = []

    async def hang(name: str) -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.append(name)

    async def begin() -> None:
        tasks.append(asyncio.ensure_future(hang("task")))
        await asyncio.sleep(0)

    def give_up() -> None:
        raise TimeoutError("nothing came")

    tasks: list[asyncio.Future[None]] = []
    with LoopThread("rollouts") as thread:
        thread.call(begin())
        with pytest.raises(TimeoutError, match="nothing came"):
            thread.call(hang("call"), give_up)
        assert tasks
    assert sorted(ended) == ["call", "task"], "the end of the thread cancels what is left"
