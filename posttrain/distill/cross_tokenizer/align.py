"""Two tokenizations of one text, side by side: where their tokens begin together, and how much of the text that covers.

Everything is counted in bytes: tokens of byte-level vocabularies may end inside of a character.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int


class Group(NamedTuple):
    """Tokens `one[0]..one[1]` and `other[0]..other[1]` (stops not included) that have the same text."""

    one: tuple[int, int]
    other: tuple[int, int]

    @property
    def single(self) -> bool:
        """True for one token on each side."""
        return self.one[1] - self.one[0] == 1 == self.other[1] - self.other[0]


def groups(one: Int[np.ndarray, " N1"], other: Int[np.ndarray, " M1"]) -> list[Group]:
    """Split into the smallest groups. Both are rising byte bounds: start of the first token, end of each token.

    >>> groups(np.asarray([0, 3, 5, 9]), np.asarray([0, 5, 7, 9]))
    [Group(one=(0, 2), other=(0, 1)), Group(one=(2, 3), other=(1, 3))]
    """
    common = np.intersect1d(one, other)
    # A token without text belongs to the group before it.
    places = [np.searchsorted(bounds, common, side="right") - 1 for bounds in (one, other)]
    pairs = [list(zip(found[:-1].tolist(), found[1:].tolist(), strict=True)) for found in places]
    return [Group(a, b) for a, b in zip(*pairs, strict=True)]


@dataclass(frozen=True)
class Run:
    """Consecutive tokens with loss, such as an answer."""

    first: int
    """Position of its first token."""
    bounds: Int[np.ndarray, " N1"]
    text: bytes
    end: int | None
    """Position of its stop token; None if the sequence is cut before it."""


def runs(
    tokens: Sequence[int], mask: Bool[np.ndarray, " T"], pieces: Sequence[bytes], stop_ids: Collection[int]
) -> list[Run]:
    """Find the runs of a sequence. `pieces`: bytes of each token id. Text after the last stop token of a run is cut."""
    found = []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        ends = [place for place in range(start, stop) if tokens[place] in stop_ids]
        texts = [pieces[token] for token in tokens[start : ends[-1] if ends else stop]]
        bounds = np.cumsum([0, *map(len, texts)])
        found.append(Run(start, bounds, b"".join(texts), ends[-1] if ends else None))
    return found


class Pairs(NamedTuple):
    """Places in two sequences where tokens of the same text begin, rising."""

    one: Int[np.ndarray, " N"]
    other: Int[np.ndarray, " N"]
    one_stop: Int[np.ndarray, " N"]
    """Position after the group's last token."""
    other_stop: Int[np.ndarray, " N"]
    same_text: int
    """Bytes of the first sequence's runs that the other has as well."""
    single: int
    """Bytes of `same_text` in groups of one token on each side."""
    text: int
    """All bytes of the first sequence's runs."""


def pair(one: Sequence[Run], other: Sequence[Run]) -> Pairs:
    """Align the runs of both sequences in order. Text that only one of two runs has gets no pair."""
    places: list[tuple[int, int, int, int]] = []
    same_text = single = 0
    for a, b in zip(one, other, strict=False):
        shift = _shift(a.text, b.text)
        if shift is None:
            continue
        found = groups(a.bounds, b.bounds + shift)
        places += [(a.first + g.one[0], b.first + g.other[0], a.first + g.one[1], b.first + g.other[1]) for g in found]
        same_text += min(len(a.text), len(b.text) + shift) - max(0, shift)
        single += sum(int(a.bounds[g.one[1]] - a.bounds[g.one[0]]) for g in found if g.single)
        if a.end is not None and b.end is not None and len(a.text) == len(b.text) + shift:
            places.append((a.end, b.end, a.end + 1, b.end + 1))
    one_at, other_at, one_stop, other_stop = np.asarray(places, np.int64).reshape(-1, 4).T
    return Pairs(one_at, other_at, one_stop, other_stop, same_text, single, sum(len(run.text) for run in one))


def _shift(one: bytes, other: bytes) -> int | None:
    """Offset of `other` in `one`, negative if it begins before; None if they do not overlap unambiguously.

    Templates put text before an answer, and first tokens of plain texts have no loss: the ends are looked at first.
    Rows that are too short cut both texts.
    """
    if one.endswith(other) or other.endswith(one):
        return len(one) - len(other)
    for longer, shorter, sign in ((one, other, 1), (other, one, -1)):
        at = longer.find(shorter)
        if shorter and at >= 0:
            return sign * at if at == longer.rfind(shorter) else None
    found = [sign * at for sign, a, b in ((1, one, other), (-1, other, one)) for at in _overlaps(a, b)]
    return found[0] if len(found) == 1 else None


def _overlaps(one: bytes, other: bytes) -> list[int]:
    """Offsets in `one` whose suffix begins `other`, with at least half of the shorter text in common."""
    least = -(-min(len(one), len(other)) // 2)
    starts = range(max(len(one) - len(other), 0) + 1, len(one) - least + 1) if least else ()
    return [at for at in starts if other.startswith(one[at:])]
