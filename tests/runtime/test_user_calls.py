"""Calls of code that users write: what hangs costs its own call alone, if it blocks or waits, and however often."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from posttrain.errors import RunError
from posttrain.runtime import user_calls
from posttrain.runtime.user_calls import CallTimeout, UserCalls

COUNT = 128


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def hang_sometimes(release: threading.Event) -> Callable[[int], int]:
    def answer(number: int) -> int:
        return -1 if number % 10 == 0 and release.wait() else number

    return answer


async def outcomes(calls: UserCalls, function: Callable[..., Any], numbers: Iterable[int]) -> list[int]:
    """Numbers of the calls that were answered; the others have passed their deadlines."""
    found = await asyncio.gather(*(calls.call(function, number) for number in numbers), return_exceptions=True)
    assert all(isinstance(one, int | CallTimeout) for one in found), found
    return [one for one in found if isinstance(one, int)]


def test_calls_are_answered_however_many_hang(release: threading.Event) -> None:
    """Red with a maximum of hung calls: after 64 nothing is answered any more."""
    calls = UserCalls("env.fn", timeout_s=2.0, concurrency=COUNT)
    for numbers in ([*range(0, 700, 10), 1, 2], [n for n in range(COUNT) if n % 10]):
        assert asyncio.run(outcomes(calls, hang_sometimes(release), numbers)) == [n for n in numbers if n % 10]
    assert calls.hung == 70
    release.set()


class Game:
    """Environment with a loop of its own: its lock belongs to the event loop of its first call."""

    def __init__(self, number: int, release: threading.Event):
        self.number, self.release, self.lock = number, release, asyncio.Lock()
        self.threads: set[str] = set()

    async def reply(self) -> int:
        async with self.lock:
            if self.number % 10 == 0:
                self.release.wait()
            await asyncio.sleep(0.01)
        return self.number


def test_coroutines_that_block_their_loop(release: threading.Event) -> None:
    """The loop that waits goes on, deadlines hold, and beside a blocking coroutine others have their answers."""
    calls = UserCalls("env.fn", timeout_s=1.0, concurrency=COUNT)
    games = [Game(number, release) for number in range(30)]
    late = 0.0

    async def watch() -> None:
        nonlocal late
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            late = max(late, time.monotonic() - before)

    async def step() -> list[Any]:
        watcher = asyncio.create_task(watch())
        found = await asyncio.gather(*(calls.call(game.reply) for game in games), return_exceptions=True)
        watcher.cancel()
        return found

    for _ in range(2):
        start = time.monotonic()
        found = asyncio.run(step())
        assert time.monotonic() - start < 2.8, "one time-out, not three"
        assert [one for one in found if isinstance(one, int)] == [n for n in range(30) if n % 10]
        assert sum(isinstance(one, CallTimeout) for one in found) == 3
    assert late < 0.9, "a coroutine of the user has stopped the loop that waits"
    calls.close()


def test_well_behaved_coroutines_share_a_loop_across_runs() -> None:
    calls = UserCalls("env.fn", timeout_s=5.0)
    game = Game(1, threading.Event())
    seen: set[int] = set()

    async def where(_: int) -> int:
        seen.add(threading.get_ident())
        return await game.reply()

    for _ in range(2):
        assert asyncio.run(outcomes(calls, where, range(8))) == [1] * 8
    assert len(seen) == 1 and threading.get_ident() not in seen
    calls.close()


def test_endless_python_code_is_interrupted() -> None:
    """Of a thread and of an event loop: it would take the interpreter from the trainer for the rest of the run."""

    def spin(number: int) -> None:
        while True:
            pass

    async def spin_in_loop(number: int) -> None:
        spin(number)

    before = threading.active_count()
    for function in (spin, spin_in_loop):
        calls = UserCalls("env.fn", timeout_s=0.1)
        assert asyncio.run(outcomes(calls, function, range(2))) == []
        calls.close()
    deadline = time.monotonic() + 10.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_coroutine_that_is_ended_before_it_begins_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event loop, and no coroutine that was never awaited: warnings about them are errors here."""
    reached: list[str] = []
    calls, run = UserCalls("env.fn", timeout_s=5.0), asyncio.run

    async def answer() -> None:
        await asyncio.sleep(0)
        reached.append("answer")

    def ended(coroutine: Any) -> Any:
        thread = threading.current_thread()
        assert isinstance(thread, user_calls._ThreadCall)
        other = threading.Thread(target=thread.end)
        other.start()
        other.join()
        reached.append("loop")
        return run(coroutine)

    async def call() -> None:
        task = asyncio.ensure_future(calls.call(lambda: user_calls.wait_here(answer())))
        await asyncio.wait({task}, timeout=0.2)
        task.cancel()

    monkeypatch.setattr(asyncio, "run", ended)
    run(call())
    calls.close()
    gc.collect()
    assert reached == ["loop"]


@pytest.mark.parametrize("kind", ["thread", "loop", "awaitable"])
def test_code_that_exits_is_an_error_of_its_call(kind: str) -> None:
    def leave(number: int) -> int:
        raise SystemExit(number)

    async def leave_loop(number: int) -> int:
        return leave(number)

    calls = UserCalls("env.fn", timeout_s=5.0)
    function = {"thread": leave, "loop": leave_loop, "awaitable": lambda number: leave_loop(number)}[kind]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            asyncio.run(calls.call(function, 3))
    calls.close()


def test_too_many_hung_calls_warn_and_then_end_the_run(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_calls, "HUNG", user_calls._HungThreads())
    monkeypatch.setattr(user_calls, "MAX_HUNG", 100)
    calls = UserCalls("tool look_up", timeout_s=0.01)

    async def many(count: int) -> None:
        await asyncio.gather(*(calls.call(release.wait) for _ in range(count)), return_exceptions=True)

    asyncio.run(many(100))
    with pytest.raises(RunError, match=r"tool look_up: 100 calls hang .* and resume the run"):
        asyncio.run(calls.call(release.wait))
    (line,) = caplog.messages
    assert "tool look_up: 64 calls hang past their deadlines" in line
