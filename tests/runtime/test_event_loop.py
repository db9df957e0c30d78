"""Coroutines from synchronous code, also in a notebook, and calls into the event loop of another thread."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from posttrain.runtime import event_loop
from posttrain.runtime.event_loop import LoopThread, run_async

PACKAGE = Path(__file__).resolve().parents[2] / "posttrain"


async def answer() -> int:
    await asyncio.sleep(0)
    return 7


def test_with_and_without_a_running_loop() -> None:
    async def cell() -> int:
        return run_async(answer())

    assert run_async(answer()) == asyncio.run(cell()) == 7


def test_results_are_not_represented() -> None:
    """As in `asyncio.run`, on the way back to the former handler of SIGINT."""

    asked = []

    class Batch:
        def __repr__(self) -> str:
            asked.append(self)
            return "a long text"

    async def batch() -> Batch:
        return Batch()

    assert isinstance(run_async(batch()), Batch) and not asked


def test_nothing_else_begins_a_loop() -> None:
    """`asyncio.run` raises in a notebook's cell; `runtime` has what works there."""
    users = [path for path in PACKAGE.rglob("*.py") if "asyncio.run(" in path.read_text(encoding="utf-8")]
    assert {path.parent.name for path in users} == {"runtime"}


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
    monkeypatch.setattr(event_loop, "WATCH_S", 0.01)
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
