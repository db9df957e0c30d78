"""Teacher targets of rows: weights, cache places and aligned tokens as per-token arrays packed like tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch, TopK, teacher_batch
from posttrain.data.columns import no_column
from posttrain.data.sources import Sequences
from posttrain.distill.cache import TeacherCache
from posttrain.distill.cross_tokenizer import Aligned, Aligner, aligned_sequences, teacher_rows
from posttrain.errors import ConfigError, did_you_mean
from posttrain.tree import replace


class TeacherTargets:
    """Fills `teachers` and `teacher_weights` of batches.

    `column`: dataset column that assigns rows to teachers. `caches`: one per teacher; None: teachers are loaded.
    `outside`: top-k functions of the teachers outside the training step, which are the last ones. `aligners`: aligners
    of the cross-tokenizer teachers, by teacher number. `blind`: why each teacher reads no pictures; None: it does.
    """

    def __init__(
        self,
        titles: Sequence[str],
        column: str | None,
        caches: Sequence[TeacherCache] | None,
        outside: Sequence[Callable[[Batch], TopK]] = (),
        aligners: Mapping[int, Aligner] | None = None,
        blind: Sequence[str | None] = (),
    ):
        self._blind = blind
        self._outside, self._aligners = tuple(outside), aligners or {}
        self._titles, self._column, self._caches = titles, column, caches
        weighted = column is not None or self._aligners
        self._weights = [f"teacher_weight_{n}" for n in range(len(titles))] if weighted else []
        self._places = [f"teacher_place_{n}" for n in range(len(titles))] if caches is not None else []

    def lengths(self, row_tokens: int) -> dict[str, int]:
        """Length of each array of `arrays` in a row of `row_tokens` student tokens."""
        lengths = dict.fromkeys([*self._weights, *self._places], row_tokens)
        for n, aligner in self._aligners.items():
            if self._caches is None:
                lengths |= {f"covered_{n}": row_tokens} | dict.fromkeys(_of_teacher(n), aligner.row_tokens)
            elif aligner.shared is not None:
                lengths[f"covered_{n}"] = row_tokens
        return lengths

    @property
    def tokens(self) -> tuple[str, ...]:
        """Names of the arrays that are teacher token sequences."""
        return () if self._caches is not None else tuple(_of_teacher(n)[0] for n in self._aligners)

    def arrays(self, dataset: int, row: Mapping[str, Any], sequences: Sequences) -> Sequences:
        """Target arrays of a tokenised row of dataset `dataset`."""
        shares = np.ones(1, np.float32)
        if self._column is not None:
            shares = teacher_shares(row, self._column, self._titles)
        if any(one is not None and "images" in one for one in sequences):
            self._check_sight(shares)
        aligned = {n: aligner.align(dataset, row, sequences) for n, aligner in self._aligners.items()}
        nothing = [None if s is None else np.zeros(len(s["tokens"]), np.int64) for s in sequences]
        places = []
        for n, cache in enumerate(self._caches or ()):
            parts = aligned_sequences(sequences, aligned[n]) if n in aligned else sequences
            # The cache has no record of a row in which the teacher has no share.
            places.append(cache.places(parts) if shares[n] else nothing)
        result: Sequences = []
        for number, sequence in enumerate(sequences):
            if sequence is None:
                result.append(None)
                continue
            mine = {n: match for n, of_row in aligned.items() if (match := of_row[number]) is not None}
            arrays = self._weights_of(shares, len(sequence["tokens"]), mine)
            for name, of_row in zip(self._places, places, strict=True):
                at = of_row[number]
                assert at is not None
                arrays[name] = at
            result.append(arrays)
        return result

    def _check_sight(self, shares: Float[np.ndarray, " N"]) -> None:
        """ConfigError for a row of pictures that a teacher with a share in it would not see."""
        for n, reason in enumerate(self._blind):
            if reason is not None and (self._column is None or shares[n] > 0):
                raise ConfigError(
                    f"the row has pictures, and teacher {self._titles[n]} reads none as the student does: {reason}; "
                    "give a teacher of the same images, or remove the row"
                )

    def _weights_of(
        self, shares: Float[np.ndarray, " N"], length: int, aligned: Mapping[int, Aligned]
    ) -> dict[str, np.ndarray]:
        """Teacher weights of a sequence of `length` tokens, and its alignment with teachers of other tokens."""
        result: dict[str, np.ndarray] = {}
        where = [np.ones(length, bool)] * len(shares)
        for n, aligner in self._aligners.items():
            match = aligned[n]
            where[n] = match.covered != 0
            if self._caches is None:
                keep = np.int32(shares[n] > 0)
                arrays = (match.covered * keep, match.tokens, match.scored * keep)
                result |= dict(zip((f"covered_{n}", *_of_teacher(n)), arrays, strict=True))
            elif aligner.shared is not None:
                result[f"covered_{n}"] = match.covered
        for n, name in enumerate(self._weights):
            result[name] = np.where(where[n], shares[n], np.float32(0))
        return result

    def batch(self, batch: Batch, rows: Mapping[str, np.ndarray]) -> Batch:
        """Add teacher weights and targets to a batch."""
        if self._weights:
            batch = replace(batch, teacher_weights=np.stack([rows[name] for name in self._weights], axis=-1))
        if self._caches is not None:
            topk = [cache.read(rows[name]) for cache, name in zip(self._caches, self._places, strict=True)]
            for n, aligner in self._aligners.items():
                if aligner.shared is not None:
                    topk[n] = aligner.grouped(topk[n], rows[f"covered_{n}"])
            batch = replace(batch, teachers=tuple(topk))
        return self.score(batch, rows)

    def score(self, batch: Batch, rows: Mapping[str, np.ndarray] | None = None) -> Batch:
        """Add the targets of teachers outside the training step (own devices or server).

        `rows`: the packed arrays, which teachers with other tokens need.
        """
        if not self._outside:
            return batch
        first = len(self._titles) - len(self._outside)
        topk = [self._top_k_of(first + n, teacher, batch, rows) for n, teacher in enumerate(self._outside)]
        return replace(batch, teachers=tuple(topk))

    def score_samples(self, batch: Batch, samples: Sequence[Aligned]) -> Batch:
        """Add the targets of a cross-tokenizer teacher to sampled rows; `samples` in the order of the rows."""
        ((number, aligner),) = self._aligners.items()
        covered = np.zeros(batch.shape, np.int32)
        covered[np.asarray(batch.segments) > 0] = np.concatenate([sample.covered for sample in samples])
        tokens, scored = _of_teacher(number)
        theirs = teacher_rows(samples, aligner.row_tokens)
        rows = {"tokens": np.asarray(batch.tokens), f"covered_{number}": covered, scored: theirs["scored"]}
        rows |= {tokens + name.removeprefix("tokens"): x for name, x in theirs.items() if name != "scored"}
        return self.score(replace(batch, teacher_weights=(covered != 0).astype(np.float32)[..., None]), rows)

    def _top_k_of(
        self, number: int, teacher: Callable[[Batch], TopK], batch: Batch, rows: Mapping[str, np.ndarray] | None
    ) -> TopK:
        if number not in self._aligners:
            return teacher(teacher_batch(batch, number))
        assert rows is not None, "cross-tokenizer teachers of samples need score_samples"
        tokens, scored = _of_teacher(number)
        theirs = Batch(
            tokens=rows[tokens],
            positions=rows[f"{tokens}_positions"],
            segments=rows[f"{tokens}_segments"],
            loss_weight=(rows[scored] != 0).astype(np.float32),
        )
        mine, its = (rows["tokens"], rows[f"covered_{number}"]), (rows[tokens], rows[scored])
        return self._aligners[number].place(teacher(theirs), mine, its)


def _of_teacher(number: int) -> tuple[str, str]:
    """Array names of a teacher's own tokens and of its alignment."""
    return f"teacher_tokens_{number}", f"teacher_scored_{number}"


def teacher_shares(row: Mapping[str, Any], column: str, titles: Sequence[str]) -> Float[np.ndarray, " N"]:
    """Teacher weights of a row, which sum to 1. ConfigError for an unknown teacher or bad weights."""
    if column not in row:
        raise ConfigError(f"teacher_column: {no_column(column, row)}")
    value = row[column]
    weights = {value: 1.0} if isinstance(value, str) else value
    if not isinstance(weights, Mapping):
        raise ConfigError(
            f"teacher_column: {column!r} holds a {type(value).__name__}; it must name a teacher or map names to weights"
        )
    for name in weights:
        if name not in titles:
            raise ConfigError(
                f"teacher_column: {column!r} names {name!r}{did_you_mean(name, titles)}; there are {', '.join(titles)}"
            )
    # Columns of a table hold every key for every row; null stands for none.
    shares = np.asarray([weights.get(title) or 0.0 for title in titles], np.float32)
    if (shares < 0).any() or not shares.sum() > 0:
        raise ConfigError(
            f"teacher_column: weights must not be negative, and one must be positive; got {dict(weights)}"
        )
    return shares / shares.sum()
