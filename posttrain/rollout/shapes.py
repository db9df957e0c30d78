"""The few shapes that programs are compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from posttrain.rollout.blocks import BLOCK, blocks_for
from posttrain.rollout.scheduler import PROMPT_CHUNK

MIN_WIDTH = 128
ROWS_STEP = 4
MIN_ROWS = 8
"""A tail of few samples is decoded in slots / 4, slots / 16, ... rows, not below 8: each size is one more program."""


class PromptShape(NamedTuple):
    """Of a prefill call."""

    rows: int
    """Of a lane."""
    tokens: int
    context: int
    """Positions that its rows see; 0: they start a sequence and see but themselves."""


class DecodeShape(NamedTuple):
    rows: int
    """Of a lane."""
    width: int


@dataclass(frozen=True)
class Shapes:
    """Of an engine with so many slots in each of its lanes."""

    slots: int
    lanes: int
    max_length: int
    steps: int

    @property
    def longest(self) -> int:
        return BLOCK * blocks_for(self.max_length)

    def prompt(self, start: int, end: int) -> PromptShape:
        """For the positions from `start` to `end` of a sequence."""
        length = end - start
        tokens = next(size for size in self._prompt_sizes(later=start > 0) if size >= length)
        return PromptShape(self._prompt_rows(tokens), tokens, self._width(end) if start else 0)

    def decode(self, running: int, positions: int, *, tail: bool) -> DecodeShape:
        """For rows of up to so many positions, `running` in the fullest lane. `tail`: see `sizes`."""
        return DecodeShape(min(size for size in self.sizes(tail) if size >= running), self._width(positions))

    def sizes(self, tail: bool) -> list[int]:
        """Rows of a lane that decoding may use, falling: all slots; for a tail of few samples also a quarter, ...

        >>> Shapes(256, 1, 64, 32).sizes(True), Shapes(6, 1, 64, 32).sizes(True)
        ([256, 64, 16], [6])
        """
        sizes = [self.slots]
        while tail and sizes[-1] // ROWS_STEP >= MIN_ROWS:
            sizes.append(sizes[-1] // ROWS_STEP)
        return sizes

    def prompts(self) -> Iterator[PromptShape]:
        """All that `prompt` gives for what a request may have to read, each once."""
        longest = self.max_length - 2  # the last token is never read, the one before it by decoding
        for later in (False, True):
            shortest = 1
            for tokens in self._prompt_sizes(later=later):
                end = shortest + later * BLOCK
                for width in self._widths(end, longest) if later else [0] * (end <= longest):
                    yield PromptShape(self._prompt_rows(tokens), tokens, width)
                shortest = tokens + 1

    def decodes(self, tail: bool) -> Iterator[DecodeShape]:
        """All that `decode` gives, each once."""
        yield from (DecodeShape(rows, w) for rows in self.sizes(tail) for w in self._widths(1, self.max_length - 1))

    def _prompt_sizes(self, *, later: bool) -> Sequence[int]:
        """Tokens of a row: those at the start of a sequence, or those of its later pieces."""
        smallest, step = (2 * BLOCK, 4) if later else (BLOCK, 2)
        return buckets(smallest, min(PROMPT_CHUNK, self.longest), step)

    def _widths(self, shortest: int, longest: int) -> Sequence[int]:
        """Of rows of `shortest` to `longest` positions."""
        if shortest > longest:
            return ()
        low, high = self._width(shortest), self._width(longest)
        return [width for width in buckets(MIN_WIDTH, self.longest) if low <= width <= high]

    def _prompt_rows(self, tokens: int) -> int:
        return min(self.slots, -(-PROMPT_CHUNK // (tokens * self.lanes)))

    def _width(self, positions: int) -> int:
        return next(width for width in buckets(MIN_WIDTH, self.longest) if width >= positions)


@cache
def buckets(smallest: int, largest: int, step: int = 2) -> Sequence[int]:
    """smallest, step x smallest, ..., and `largest` last.

    >>> buckets(16, 100), buckets(128, 100)
    ((16, 32, 64, 100), (100,))
    """
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= step
    return (*sizes, largest)
