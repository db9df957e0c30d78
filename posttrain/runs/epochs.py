"""Conversion of `num_epochs` to optimiser steps: counted once per run and kept in its folder, estimated by `check`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.config import DatasetSection, OfflineSection
from posttrain.data.epochs import rows_of_epochs
from posttrain.data.pipeline import fingerprint, row_tokenizer, token_fingerprint, window_of
from posttrain.data.sources import Rows, checked_rows
from posttrain.errors import ConfigError
from posttrain.stages.inputs import Inputs
from posttrain.stages.pairs import PairInputs
from posttrain.stages.sequences import SequenceInputs
from posttrain.tracking.console import progress

FILE = "epochs.json"
"""File in the run's folder: `num_steps` by digest of the count's inputs."""


@dataclass(frozen=True)
class _Source:
    """Sequences (or pairs) of one dataset by number."""

    dataset: DatasetSection
    rows: Rows
    count: int
    tokenize: Callable[[int], Any]


def read_counts(output: Path) -> dict[str, int]:
    """Read the counts of earlier calls of the run."""
    file = output / FILE
    counts: dict[str, int] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return counts


def write_counts(output: Path, counts: Mapping[str, int]) -> None:
    """Write the counts for later calls of the run; no file without any."""
    if counts:
        partial = (output / FILE).with_suffix(".tmp")
        partial.write_text(json.dumps(counts, indent=1), encoding="utf-8")
        partial.rename(output / FILE)


def with_steps(inputs: Inputs, seed: int, counts: dict[str, int], *, estimate: bool) -> tuple[Inputs, list[str]]:
    """Resolve `num_steps` of the inputs' section; also returns a note if they come from epochs.

    `counts`: counts of the run so far, to which a new one is added. `estimate`: for a large dataset, return only a note
    with an estimate from a sample of its rows, and leave the section unchanged.
    """
    section = inputs.section
    if not isinstance(section, OfflineSection) or section.num_steps is not None:
        return inputs, []
    num_epochs = 1.0 if section.num_epochs is None else section.num_epochs
    passes = f"num_epochs={num_epochs:g}"
    if isinstance(inputs, SequenceInputs) and inputs.prompts is not None:
        # Each sample has its own row.
        rows = math.ceil(num_epochs * len(inputs.prompts.examples))
        return _resolved(inputs, section, math.ceil(rows / section.batch_rows), passes)
    sources = _sources(inputs)
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


def _sources(inputs: Inputs) -> list[_Source]:
    if isinstance(inputs, PairInputs):
        units = inputs.units
        return [_Source(inputs.section.dataset, units.rows, len(units), units)]
    assert isinstance(inputs, SequenceInputs)
    section = inputs.section
    data = zip(section.datasets, [(inputs.rows, inputs.renderer), *inputs.mixed], strict=True)
    return [_Source(of, rows, len(rows), row_tokenizer(section, of, rows, render)) for of, (rows, render) in data]


def _num_rows(
    section: OfflineSection, num_epochs: float, seed: int, sources: Sequence[_Source], *, sampled: bool
) -> int:
    """Number of rows that hold `num_epochs` passes over all sequences, or over the sampled ones."""
    datasets = [one.dataset for one in sources]
    lengths = [_lengths(one, checked_rows(one.count) if sampled else range(one.count)) for one in sources]
    return rows_of_epochs(
        section, datasets, lengths, window=window_of(section, datasets), num_epochs=num_epochs, seed=seed
    )


def _lengths(source: _Source, chosen: Sequence[int]) -> list[int | None]:
    """Tokens of each sequence; None for a dropped one."""
    title = f"counting the tokens of {source.rows.name}"
    made = (source.tokenize(index) for index in progress(chosen, title, len(chosen)))
    return [None if one is None else len(one["tokens"]) for one in made]


def _digest(section: OfflineSection, num_epochs: float, seed: int, sources: Sequence[_Source]) -> str:
    """Hash of everything that the count depends on, including as many rows and tokens as a resumed stream compares."""
    data = [
        [fingerprint(of.dataset, of.rows), token_fingerprint(of.rows, of.tokenize), of.count, of.dataset.shuffle]
        for of in sources
    ]
    weights = [of.dataset.weight for of in sources]
    settings: dict[str, Any] = {"num_epochs": num_epochs, "seed": seed, "data": data, "weights": weights}
    settings |= {name: getattr(section, name) for name in ("batch_rows", "row_tokens", "packing", "overlong")}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
