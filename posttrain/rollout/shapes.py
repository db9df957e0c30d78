"""The few shapes that programs are compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
        step, context = (4, self._width(end)) if start else (2, 0)
        tokens = bucket(end - start, 2 * BLOCK if start else BLOCK, min(PROMPT_CHUNK, self.longest), step)
        return PromptShape(self._prompt_rows(tokens), tokens, context)

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
        """All that can occur."""
        ends = [min(BLOCK << i, self.longest) for i in range(self.longest.bit_length())]
        starts = {self.prompt(0, min(end, PROMPT_CHUNK)) for end in ends}
        later = {self.prompt(BLOCK, BLOCK + tokens) for tokens in ends if BLOCK + tokens <= self.longest}
        widths = {self._width(end) for end in ends}
        wider = {shape._replace(context=width) for shape in later for width in widths if width >= shape.context}
        yield from sorted(starts | wider)

    def decodes(self, tail: bool) -> Iterator[DecodeShape]:
        widths = {self._width(min(BLOCK << i, self.longest)) for i in range(self.longest.bit_length())}
        yield from (DecodeShape(rows, width) for rows in self.sizes(tail) for width in sorted(widths))

    def _prompt_rows(self, tokens: int) -> int:
        return min(self.slots, -(-PROMPT_CHUNK // (tokens * self.lanes)))

    def _width(self, positions: int) -> int:
        return bucket(positions, MIN_WIDTH, self.longest)


def bucket(length: int, smallest: int, largest: int, step: int = 2) -> int:
    """The smallest of smallest, step x smallest, ... that holds `length`, cut at `largest`.

    >>> [bucket(n, 16, 100) for n in (1, 16, 17, 70)]
    [16, 16, 32, 100]
    """
    assert length <= largest, (length, largest)
    size = smallest
    while size < length:
        size *= step
    return min(size, largest)
