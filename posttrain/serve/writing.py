"""Writing of answers beside the event loop: texts of tokens and JSON, in threads of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
WRITERS = ThreadPoolExecutor(4, "answers")
"""Threads apart from those in which requests are read: a few large requests must not hold up the answers of others."""
DEPTH = 6
"""Levels of an answer that are written value by value: each choice, and in it its log-probabilities."""


class Json(str):
    """Text that is JSON, of a part of an answer: objects of thousands of log-probabilities would hold up all threads
    whenever Python looks through its objects for garbage."""


async def written(work: Callable[..., T], *arguments: Any) -> T:
    """Result of some work on an answer, which may take long."""
    return await asyncio.get_running_loop().run_in_executor(WRITERS, lambda: work(*arguments))


def encoded(value: Any) -> str:
    """JSON of an answer. It is written in pieces: `json.dumps` of a large value holds up all threads until its end."""
    return "".join(_pieces(value, DEPTH))


def event(value: Any) -> str:
    """Server-sent event of a JSON value."""
    return f"data: {encoded(value)}\n\n"


def _pieces(value: Any, depth: int) -> list[str]:
    if isinstance(value, Json):
        return [value]
    if depth and value and isinstance(value, Mapping):
        inner = [[f"{json.dumps(key, ensure_ascii=False)}:", *_pieces(one, depth - 1)] for key, one in value.items()]
        brackets = "{}"
    elif depth and value and isinstance(value, list | tuple):
        inner = [_pieces(one, depth - 1) for one in value]
        brackets = "[]"
    else:
        return [json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))]
    pieces = [brackets[0]]
    for number, one in enumerate(inner):
        pieces += [",", *one] if number else one
    return [*pieces, brackets[1]]
