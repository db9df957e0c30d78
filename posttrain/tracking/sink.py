"""Protocol of sinks, which receive the metrics, tables and samples of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from posttrain.metrics import Sample


@runtime_checkable
class Sink(Protocol):
    """Receiver of host metrics as returned by `to_host`, with any names."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def tables(self, step: int, tables: Mapping[str, np.ndarray]) -> None:
        """Write arrays with too many values for a metric each."""
        ...

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...
