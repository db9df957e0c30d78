"""Sequences to rows: first-fit packing with positions and segments; unpacked is one sequence per row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from posttrain.batch import Batch
from posttrain.config import ConfigError
from posttrain.data.format import Example

Overlong = Literal["truncate", "drop", "error"]


def fit_to_row(example: Example, row_tokens: int, overlong: Overlong) -> Example | None:
    """The example if a row holds it; else as `overlong` says: its beginning, `None`, or `ConfigError`.

    A cut example of which no token with loss remains is left out as well.
    """
    length = len(example.tokens)
    if length <= row_tokens:
        return example
    if overlong == "error":
        raise ConfigError(
            f"it has {length} tokens, more than row_tokens={row_tokens}; "
            "raise row_tokens, or set overlong to truncate or drop"
        )
    if overlong == "truncate" and example.loss_mask[:row_tokens].any():
        return Example(example.tokens[:row_tokens], example.loss_mask[:row_tokens])
    return None


def pack(
    examples: Any, *, row_tokens: int, window_rows: int, packing: bool, more: Mapping[str, int] | None = None
) -> Any:
    """A grain `IterDataset` of rows from one of examples, dicts with `tokens`, `loss_weight` and what `more` names.

    First-fit in windows of `window_rows` rows: a sequence goes to the first row that has room; when none has, the
    window is emitted and the next begins. The order of sequences decides everything, so a stream can be resumed.
    `more`: with the length of a row, which for other than the student's tokens may be another.
    """
    import grain.experimental

    return grain.experimental.FirstFitPackIterDataset(
        examples,
        length_struct={**dict.fromkeys(("tokens", "loss_weight"), row_tokens), **(more or {})},
        num_packing_bins=window_rows,
        shuffle_bins=False,
        max_sequences_per_bin=None if packing else 1,
    )


def sequence(example: Example) -> dict[str, np.ndarray]:
    """An example as the packer takes it."""
    return {"tokens": example.tokens.astype(np.int32), "loss_weight": example.loss_mask.astype(np.float32)}


def to_batch(rows: Mapping[str, np.ndarray]) -> Batch:
    """The packer's stacked rows as a host `Batch`."""
    return Batch(
        tokens=rows["tokens"],
        positions=rows["tokens_positions"],
        segments=rows["tokens_segment_ids"],
        loss_weight=rows["loss_weight"],
    )


def pad_rows(rows: Mapping[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
    """The same rows with empty ones after them: no segment, no loss."""
    missing = num_rows - len(rows["tokens"])
    return {name: np.pad(array, ((0, missing), (0, 0))) for name, array in rows.items()}
