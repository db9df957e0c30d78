"""Epochs in optimiser steps: number of packed rows that hold `num_epochs` passes over the data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from posttrain.config import DatasetSection, OfflineSection
from posttrain.data.packing import Arrays
from posttrain.data.pipeline import order
from posttrain.data.windows import PackedBatches, Window


def rows_of_epochs(
    section: OfflineSection,
    datasets: Sequence[DatasetSection],
    lengths: Sequence[Sequence[int | None]],
    *,
    window: Window,
    num_epochs: float,
    seed: int,
) -> int:
    """Minimum number of rows, in training order, that hold `num_epochs` times the number of sequences.

    `lengths`: tokens of each sequence of each dataset; None for dropped ones. Packs the same stream as training, with
    stand-ins for the tokens.
    """
    import grain

    streams = [
        order(len(of_one), shuffle=dataset.shuffle, seed=seed + number).map(_StandIns(of_one))
        for number, (dataset, of_one) in enumerate(zip(datasets, lengths, strict=True))
    ]
    stream = streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, [one.weight for one in datasets])
    epoch = sum(map(len, lengths))
    wanted = sum(stream[draw] is not None for draw in range(math.ceil(num_epochs * epoch)))
    if not section.packing:
        return wanted
    packed = PackedBatches(stream, epoch=epoch, window=window, batch_rows=1, lengths={"tokens": section.row_tokens})
    rows = held = 0
    while held < wanted:
        held += int(next(packed)["tokens_segments"].max())
        rows += 1
    return rows


class _StandIns:
    """Arrays of the given lengths by number, without tokens."""

    def __init__(self, lengths: Sequence[int | None]):
        longest = max((length for length in lengths if length is not None), default=0)
        self._lengths, self._zeros = lengths, np.zeros(longest, np.int8)

    def __call__(self, index: int) -> Arrays | None:
        length = self._lengths[index]
        return None if length is None else {"tokens": self._zeros[:length]}
