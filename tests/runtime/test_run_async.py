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


def test_nothing_else_begins_a_loop() -> None:
    """`asyncio.run` raises in a notebook's cell; `runtime` has what works there."""
    users = [path for path in PACKAGE.rglob("*.py") if "asyncio.run(" in path.read_text(encoding="utf-8")]
    assert {path.parent.name for path in users} == {"runtime"}
