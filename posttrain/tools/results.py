"""Results of tools as text: size limit, and texts of failed calls."""

from __future__ import annotations

import json
from typing import Any


class FailedCall(str):
    """Text of a call that failed: the model reads it as any other result, and environments count it."""

    __slots__ = ()


def failed(reason: str, max_chars: int) -> FailedCall:
    """Make the text of a failed call, one line of at most `max_chars` characters."""
    return FailedCall(cut(f"Error: {' '.join(reason.split())}", max_chars))


def result_text(value: Any, max_chars: int) -> str:
    """Convert the result of a tool: a string as it is, everything else to JSON, cut to `max_chars` characters.

    TypeError or ValueError for a value that has no form in JSON.
    """
    if isinstance(value, str):
        return cut(value, max_chars)
    return cut(json.dumps(value, ensure_ascii=False, allow_nan=False), max_chars)


def cut(text: str, max_chars: int) -> str:
    """Cut a text to `max_chars` characters, followed by a line that says so. Text that is no Unicode is replaced."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {max_chars} of {len(text)} characters]"
