"""Host batches taken apart again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from posttrain.batch import Batch


def sequences(batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The (tokens, loss_weight) of each sequence of a host batch, row by row."""
    for tokens, segments, weight in zip(batch.tokens, batch.segments, batch.loss_weight, strict=True):
        for segment in range(1, int(np.max(segments)) + 1):
            here = segments == segment
            yield tokens[here], weight[here]


def efficiency(batch: Batch) -> float:
    """Share of tokens that are not padding."""
    return float(np.mean(np.asarray(batch.segments) > 0))
