"""Soft penalty of overlong completions, to be added to another reward. DAPO, arXiv:2503.14476 eq. 13."""

from __future__ import annotations

from collections.abc import Sequence


def penalty(
    completion_tokens: Sequence[Sequence[int]], *, max_tokens: int, buffer_tokens: int, **_: object
) -> list[float]:
    """0 up to `max_tokens` - `buffer_tokens` tokens, then a line down to -1 at `max_tokens`, and -1 beyond.

    >>> penalty([[7] * 60, [7] * 90, [7] * 120], max_tokens=100, buffer_tokens=20)
    [0.0, -0.5, -1.0]
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens} must be from 1 to max_tokens={max_tokens}")
    free = max_tokens - buffer_tokens
    return [max(min(free - len(tokens), 0) / buffer_tokens, -1.0) for tokens in completion_tokens]
