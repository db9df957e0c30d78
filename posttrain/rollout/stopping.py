"""Stop strings: find the token that first completes one, and cut the text before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

NOT_A_CHARACTER = "\ufffd"
"""Replacement character that a tokenizer decodes an incomplete character to."""


def text_of(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], ends: Sequence[int], stops: Sequence[str]
) -> str:
    """The text of a sample, without the stop token at its end, and without the first stop string and what follows."""
    return before_stop(decode(tokens[:-1] if tokens and tokens[-1] in ends else tokens), stops)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it.

    >>> before_stop("one. two; three", (";", "."))
    'one'
    """
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def first_completed(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], num_new: int, stops: Sequence[str]
) -> int | None:
    """The number of tokens after which one of `stops` first stands in the text; None if none does.

    The tokens before the `num_new` last ones hold no stop string, so only their tail is decoded again: as much as holds
    the longest stop string's number of characters, where pieces of characters do not count.
    """
    old = len(tokens) - num_new
    start, back = old, 1
    longest = max(map(len, stops))
    while start > 0 and len(decode(tokens[start:old]).replace(NOT_A_CHARACTER, "")) < longest:
        start = max(0, old - back)
        back *= 2

    def complete(end: int) -> bool:
        text = decode(tokens[start:end])
        return any(stop in text for stop in stops)

    if not complete(len(tokens)):
        return None
    return next((end for end in range(old + 1, len(tokens)) if complete(end)), len(tokens))
