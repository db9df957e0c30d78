"""Cache of a dataset's token sequences by number, stored in a few large arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
Sequences = list[Arrays | None]
"""Sequences of a row, usually one; None for one that is dropped as too long."""

MAX_BYTES = 2**28
"""Maximum bytes of cached sequences per dataset; others are made again at each use."""
CHUNK_TOKENS = 2**18

_UNKNOWN, _LEFT_OUT = -1, -2


class _Field(NamedTuple):
    """Array of all cached sequences, concatenated."""

    name: str
    dtype: np.dtype[np.generic]


class SequenceCache:
    """Cache of `make(number)` for numbers below `count`; a sequence is arrays of one length, or None.

    Cached arrays are read-only views. All sequences must have the same names and types of arrays.
    """

    def __init__(self, make: Callable[[int], Sequences], count: int, *, max_bytes: int = MAX_BYTES) -> None:
        self._make, self._max_bytes = make, max_bytes
        self._chunk_of = np.full(count, _UNKNOWN, np.int32)
        self._starts, self._lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self._parts: dict[int, list[int | None]] = {}
        """Lengths of the sequences, None for dropped ones, of each number with other than one."""
        self._fields: list[_Field] = []
        self._chunks: list[list[np.ndarray]] = []
        self._used, self._num_bytes = 0, 0
        self._lock = threading.Lock()

    def __call__(self, number: int) -> Sequences:
        chunk = int(self._chunk_of[number])
        if chunk == _LEFT_OUT:
            return [None for _ in self._parts.get(number, [None])]
        if chunk == _UNKNOWN:
            made = self._make(number)
            with self._lock:
                self._keep(number, made)
            return made
        start = int(self._starts[number])
        found: Sequences = []
        for length in self._parts.get(number, [int(self._lengths[number])]):
            stop = start + (length or 0)
            arrays = {f.name: kept[start:stop] for f, kept in zip(self._fields, self._chunks[chunk], strict=True)}
            found.append(None if length is None else arrays)
            start = stop
        return found

    @property
    def num_kept(self) -> int:
        """Number of sequences that are not made again, including dropped ones."""
        return int((self._chunk_of != _UNKNOWN).sum())

    def _keep(self, number: int, made: Sequences) -> None:
        if self._chunk_of[number] != _UNKNOWN:
            return
        there = [one for one in made if one is not None]
        if len(made) != 1:
            self._parts[number] = [None if one is None else len(next(iter(one.values()))) for one in made]
        if not there:
            self._chunk_of[number] = _LEFT_OUT
            return
        fields = [_Field(name, array.dtype) for name, array in there[0].items()]
        self._fields = self._fields or fields
        assert fields == self._fields, (fields, self._fields)
        length = sum(len(next(iter(one.values()))) for one in there)
        if not self._chunks or self._used + length > len(self._chunks[-1][0]):
            size = max(CHUNK_TOKENS, length)
            num_bytes = self._num_bytes + size * sum(field.dtype.itemsize for field in fields)
            if num_bytes > self._max_bytes:
                return
            self._chunks.append([np.empty(size, field.dtype) for field in fields])
            self._used, self._num_bytes = 0, num_bytes
        for kept, field in zip(self._chunks[-1], self._fields, strict=True):
            kept[self._used : self._used + length] = np.concatenate([one[field.name] for one in there])
        self._starts[number], self._lengths[number] = self._used, length
        self._used += length
        # Set last: known numbers are read without the lock.
        self._chunk_of[number] = len(self._chunks) - 1
