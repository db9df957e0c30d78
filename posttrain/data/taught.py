"""Which teachers speak of a row, and what a cache holds of it, as per-token arrays that are packed like tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch, TopK
from posttrain.config import ConfigError
from posttrain.data.teacher_cache import TeacherCache
from posttrain.imports import did_you_mean
from posttrain.tree import replace


class Taught:
    """Fills `teachers` and `teacher_weights` of batches.

    `column`: of the dataset, says whose a row is. `caches`: one for each teacher, where none is in the training step.
    `outside`: what the last of the teachers say of host rows, where they are neither in the step nor cached.
    """

    def __init__(
        self,
        titles: Sequence[str],
        column: str | None,
        caches: Sequence[TeacherCache] | None,
        outside: Sequence[Callable[[Batch], TopK]] = (),
    ):
        self._outside = tuple(outside)
        self._titles, self._column, self._caches = titles, column, caches
        self._weights = [f"teacher_weight_{n}" for n in range(len(titles))] if column is not None else []
        self._places = [f"teacher_place_{n}" for n in range(len(titles))] if caches is not None else []

    @property
    def names(self) -> list[str]:
        """Of the arrays that `arrays` makes."""
        return [*self._weights, *self._places]

    def arrays(
        self, dataset: int, index: int, row: Mapping[str, Any], sequence: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Of the sequence that row `index` of dataset `dataset` became."""
        made: dict[str, np.ndarray] = {}
        length = len(sequence["tokens"])
        shares = np.ones(1, np.float32)
        if self._column is not None:
            shares = teacher_shares(row, self._column, self._titles)
            made |= {name: np.full(length, s, np.float32) for name, s in zip(self._weights, shares, strict=True)}
        if self._caches is not None:
            for name, cache, share in zip(self._places, self._caches, shares, strict=True):
                # A teacher without a share was not asked.
                made[name] = cache.places(dataset, index, sequence) if share else np.zeros(length, np.int64)
        return made

    def batch(self, batch: Batch, rows: Mapping[str, np.ndarray]) -> Batch:
        """The batch with what teachers say of its tokens."""
        if self._weights:
            batch = replace(batch, teacher_weights=np.stack([rows[name] for name in self._weights], axis=-1))
        if self._caches is not None:
            said = [cache.read(rows[name]) for cache, name in zip(self._caches, self._places, strict=True)]
            batch = replace(batch, teachers=tuple(said))
        return self.ask(batch)

    def ask(self, batch: Batch) -> Batch:
        """The batch with what teachers outside of the step say of the tokens that are theirs."""
        if not self._outside:
            return batch
        first = len(self._titles) - len(self._outside)
        said = [teacher(of_teacher(batch, first + n)) for n, teacher in enumerate(self._outside)]
        return replace(batch, teachers=tuple(said))


def of_teacher(batch: Batch, number: int) -> Batch:
    """The batch with loss only where this teacher counts."""
    if batch.teacher_weights is None:
        return batch
    counts = np.asarray(batch.teacher_weights)[..., number] > 0
    return replace(batch, loss_weight=np.where(counts, batch.loss_weight, 0.0))


def teacher_shares(row: Mapping[str, Any], column: str, titles: Sequence[str]) -> Float[np.ndarray, " N"]:
    """How much each teacher counts for a row: all of one, or shares of several that sum to 1. ConfigError."""
    if column not in row:
        raise ConfigError(f"teacher_column: no column {column!r} among {', '.join(row)}{did_you_mean(column, row)}")
    value = row[column]
    given = {value: 1.0} if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"teacher_column: {column!r} holds a {type(value).__name__}; it must name a teacher or map names to weights"
        )
    for name in given:
        if name not in titles:
            raise ConfigError(
                f"teacher_column: {column!r} names {name!r}{did_you_mean(name, titles)}; there are {', '.join(titles)}"
            )
    # Columns of a table hold every key for every row; null stands for none.
    shares = np.asarray([given.get(title) or 0.0 for title in titles], np.float32)
    if (shares < 0).any() or not shares.sum() > 0:
        raise ConfigError(f"teacher_column: weights must not be negative, and one must be positive; got {dict(given)}")
    return shares / shares.sum()
