"""Coroutines from synchronous code, also where an event loop runs already, as in a notebook."""

from __future__ import annotations

import asyncio
from pathlib import Path

from posttrain.runtime.run_async import run_async

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
