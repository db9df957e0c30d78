"""Shape buckets that programs are compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from posttrain.rollout.blocks import BLOCK, blocks_for
from posttrain.rollout.scheduler import MIN_SHARED, PROMPT_CHUNK
from posttrain.rollout.types import SamplingParams

MIN_WIDTH = 128
ROWS_STEP = 4
MIN_ROWS = 8
"""A tail of few samples is decoded in slots / 4, slots / 16, ... rows, not below 8: each size is one more program."""


class Range(NamedTuple):
    """Range of positions, both ends included."""

    shortest: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected requests, for which `warm_up` compiles."""

    params: SamplingParams
    shortest: int = 1
    """Tokens of the shortest prompt."""
    longest: int | None = None
    """Tokens of the longest prompt; None: any that fits."""

    def reads(self, max_length: int, *, rereads: bool) -> Range:
        """Range of the prefill length, with `rereads` including tokens sampled earlier. Decoding computes the newest
        token."""
        sampled = self.params.max_tokens - 1 if rereads else 0
        return Range(max(1, self.shortest - 1), min(self._longest(max_length) - 1 + sampled, max_length - 2))

    def positions(self, steps: int, max_length: int) -> Range:
        """Range of a row's length at the end of a dispatch."""
        max_tokens = self.params.max_tokens
        return Range(
            self.shortest - 1 + min(steps, max_tokens),
            min(self._longest(max_length) + max_tokens, max_length) - 1,
        )

    def _longest(self, max_length: int) -> int:
        return max_length - 1 if self.longest is None else self.longest


class PromptShape(NamedTuple):
    """Shape of a prefill call."""

    rows: int
    """Rows in each lane."""
    tokens: int
    context: int
    """Cached positions that its rows attend to; 0: rows start a sequence."""


class DecodeShape(NamedTuple):
    rows: int
    """Rows in each lane."""
    width: int


@dataclass(frozen=True)
class Shapes:
    """Shape buckets of an engine with `slots` in each lane."""

    slots: int
    lanes: int
    max_length: int
    steps: int

    @property
    def longest(self) -> int:
        return BLOCK * blocks_for(self.max_length)

    def prompt(self, start: int, end: int) -> PromptShape:
        """Shape of the prefill of positions `start` to `end` of a sequence."""
        length = end - start
        tokens = next(size for size in self._prompt_sizes(later=start > 0) if size >= length)
        return PromptShape(self._prompt_rows(tokens), tokens, self._width(end) if start else 0)

    def decode(self, running: int, positions: int, *, tail: bool) -> DecodeShape:
        """Shape of decoding rows of up to so many positions, `running` in the fullest lane. `tail`: see `sizes`."""
        return DecodeShape(min(size for size in self.sizes(tail) if size >= running), self._width(positions))

    def sizes(self, tail: bool) -> list[int]:
        """Numbers of rows per lane that decoding is compiled for, falling: all slots; with `tail` also a quarter, ...

        >>> Shapes(256, 1, 64, 32).sizes(True), Shapes(6, 1, 64, 32).sizes(True)
        ([256, 64, 16], [6])
        """
        sizes = [self.slots]
        while tail and sizes[-1] // ROWS_STEP >= MIN_ROWS:
            sizes.append(sizes[-1] // ROWS_STEP)
        return sizes

    def prompts(self, reads: Range) -> Iterator[PromptShape]:
        """Distinct shapes of `prompt` for pieces of so many positions. A piece starts with the sequence, or at a block
        after at least `MIN_SHARED` cached positions."""
        for later in (False, True):
            shortest = 1
            for tokens in self._prompt_sizes(later=later):
                for width in (
                    self._contexts(shortest, tokens, reads) if later else [0] * _meets(shortest, tokens, reads)
                ):
                    yield PromptShape(self._prompt_rows(tokens), tokens, width)
                shortest = tokens + 1

    def decodes(self, positions: Range, *, tail: bool) -> Iterator[DecodeShape]:
        """Distinct shapes of `decode` for batches whose longest row has so many positions."""
        yield from (DecodeShape(rows, width) for rows in self.sizes(tail) for width in self._widths(*positions))

    def _contexts(self, shortest: int, longest: int, reads: Range) -> Sequence[int]:
        """Context widths of later prefill pieces of `shortest` to `longest` tokens."""
        end = max(MIN_SHARED + shortest, reads.shortest)
        if longest >= PROMPT_CHUNK:
            # Not the last piece of its prompt.
            end = min(end, MIN_SHARED + PROMPT_CHUNK)
        return self._widths(end, reads.longest)

    def _prompt_sizes(self, *, later: bool) -> Sequence[int]:
        """Row lengths of first pieces of a sequence, or of later ones."""
        smallest, step = (2 * BLOCK, 4) if later else (BLOCK, 2)
        return length_buckets(smallest, min(PROMPT_CHUNK, self.longest), step)

    def _widths(self, shortest: int, longest: int) -> Sequence[int]:
        """Width buckets of rows of `shortest` to `longest` positions."""
        if shortest > longest:
            return ()
        low, high = self._width(shortest), self._width(longest)
        return [width for width in length_buckets(MIN_WIDTH, self.longest) if low <= width <= high]

    def _prompt_rows(self, tokens: int) -> int:
        return min(self.slots, -(-PROMPT_CHUNK // (tokens * self.lanes)))

    def _width(self, positions: int) -> int:
        return next(width for width in length_buckets(MIN_WIDTH, self.longest) if width >= positions)


def _meets(shortest: int, longest: int, reads: Range) -> bool:
    """Return whether the first prefill piece may have `shortest` to `longest` tokens."""
    return shortest <= min(reads.longest, PROMPT_CHUNK) and min(reads.shortest, PROMPT_CHUNK) <= longest


@cache
def length_buckets(smallest: int, largest: int, step: int = 2) -> Sequence[int]:
    """smallest, step x smallest, ..., and `largest` last.

    >>> buckets(16, 100), buckets(128, 100)
    ((16, 32, 64, 100), (100,))
    """
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= step
    return (*sizes, largest)
