"""Conversion of `num_epochs` to optimiser steps: counted once per run and kept in its folder, estimated by `check`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config import DatasetSection, OfflineSection
from posttrain.data.packing import PackedBatches, Window
from posttrain.data.pipeline import fingerprint, order, token_fingerprint, window_of
from posttrain.data.sources import Sequences, checked_rows
from posttrain.errors import ConfigError
from posttrain.runtime.files import digest, write_whole
from posttrain.stages.inputs import EpochSource, Inputs
from posttrain.tracking.console import progress

Lengths = list[int | None]
"""Tokens of a row's sequences; None for a dropped one."""
FILE = "epochs.json"
"""File in the run's folder: `num_steps` by digest of the count's inputs."""


def read_counts(output: Path) -> dict[str, int]:
    """Read the counts of earlier calls of the run."""
    file = output / FILE
    counts: dict[str, int] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return counts


def write_counts(output: Path, counts: Mapping[str, int]) -> None:
    """Write the counts for later calls of the run; no file without any."""
    if counts:
        write_whole(output / FILE, json.dumps(counts, indent=1))


def with_steps(inputs: Inputs, seed: int, counts: dict[str, int], *, estimate: bool) -> tuple[Inputs, list[str]]:
    """Resolve `num_steps` of the inputs' section; also returns a note if they come from epochs.

    `counts`: counts of the run so far, to which a new one is added. `estimate`: for a large dataset, return only a note
    with an estimate from a sample of its rows, and leave the section unchanged.
    """
    section = inputs.section
    num_epochs = section.epochs
    if num_epochs is None:
        return inputs, []
    passes = f"num_epochs={num_epochs:g}"
    sources = inputs.epoch_sources
    if isinstance(sources, int):
        return _resolved(inputs, section, math.ceil(math.ceil(num_epochs * sources) / section.batch_rows), passes)
    key = _digest(section, num_epochs, seed, sources)
    if key not in counts:
        sampled, whole = sum(len(checked_rows(one.count)) for one in sources), sum(one.count for one in sources)
        estimated = estimate and sampled < whole
        rows = _num_rows(section, num_epochs, seed, sources, sampled=estimated)
        if estimated:
            steps = math.ceil(rows * whole / sampled / section.batch_rows)
            return inputs, [
                f"{passes} is about {steps:,} steps of {section.batch_rows} rows, estimated from {sampled:,} of "
                f"{whole:,} sequences; run counts them all, once"
            ]
        counts[key] = math.ceil(rows / section.batch_rows)
    return _resolved(inputs, section, counts[key], passes)


def _resolved(inputs: Inputs, section: OfflineSection, num_steps: int, passes: str) -> tuple[Inputs, list[str]]:
    try:
        section.check_warmup(num_steps)
    except ValueError as error:
        raise ConfigError(f"{error}, which {passes} makes of the data") from error
    counted = section.model_copy(update={"num_steps": num_steps, "num_epochs": None})
    resolved: Any = inputs
    return replace(resolved, section=counted), [f"{passes} is num_steps={num_steps:,} of {section.batch_rows} rows"]


def _num_rows(
    section: OfflineSection, num_epochs: float, seed: int, sources: Sequence[EpochSource], *, sampled: bool
) -> int:
    """Number of rows that hold `num_epochs` passes over all sequences, or over the sampled ones."""
    datasets = [one.dataset for one in sources]
    lengths: list[list[Lengths]] = [
        _lengths(one, checked_rows(one.count) if sampled else range(one.count)) for one in sources
    ]
    return rows_of_epochs(
        section, datasets, lengths, window=window_of(section, datasets), num_epochs=num_epochs, seed=seed
    )


def _lengths(source: EpochSource, chosen: Sequence[int]) -> list[Lengths]:
    """Tokens of each row's sequences; None for a dropped one."""
    title = f"counting the tokens of {source.rows.name}"
    made = (source.tokenize(index) for index in progress(chosen, title, len(chosen)))
    return [[None if one is None else len(one["tokens"]) for one in of_row] for of_row in made]


def _digest(section: OfflineSection, num_epochs: float, seed: int, sources: Sequence[EpochSource]) -> str:
    """Hash of everything that the count depends on, including as many rows and tokens as a resumed stream compares."""
    data = [
        [fingerprint(of.dataset, of.rows), token_fingerprint(of.rows, of.tokenize), of.count, of.dataset.shuffle]
        for of in sources
    ]
    weights = [of.dataset.weight for of in sources]
    settings: dict[str, Any] = {"num_epochs": num_epochs, "seed": seed, "data": data, "weights": weights}
    settings |= {name: getattr(section, name) for name in ("batch_rows", "row_tokens", "packing", "overlong")}
    return digest(json.dumps(settings, sort_keys=True))


def rows_of_epochs(
    section: OfflineSection,
    datasets: Sequence[DatasetSection],
    lengths: Sequence[Sequence[Lengths]],
    *,
    window: Window,
    num_epochs: float,
    seed: int,
) -> int:
    """Minimum number of rows, in training order, that hold `num_epochs` times the number of sequences.

    `lengths`: tokens of the sequences of each row of each dataset; None for dropped ones. Packs the same stream as
    training, with stand-ins for the tokens.
    """
    import grain

    streams = [
        order(len(of_one), shuffle=dataset.shuffle, seed=seed + number).map(_StandIns(of_one))
        for number, (dataset, of_one) in enumerate(zip(datasets, lengths, strict=True))
    ]
    stream = streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, [one.weight for one in datasets])
    epoch = sum(map(len, lengths))
    wanted = sum(one is not None for draw in range(math.ceil(num_epochs * epoch)) for one in stream[draw])
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

    def __init__(self, lengths: Sequence[Lengths]):
        longest = max((length for of_row in lengths for length in of_row if length is not None), default=0)
        self._lengths, self._zeros = lengths, np.zeros(longest, np.int8)

    def __call__(self, index: int) -> Sequences:
        return [None if length is None else {"tokens": self._zeros[:length]} for length in self._lengths[index]]
