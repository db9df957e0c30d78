"""Reference log-probabilities of a run's data on disk: computed once per model and data, shared between runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from posttrain import __version__
from posttrain.batch import Batch, model_inputs
from posttrain.data.pair_examples import ComparisonBatches, NumberedRows, PairExample, PairExamples, all_rows
from posttrain.data.unit_cache import UnitCache, UnitValues, json_digest, unit_key
from posttrain.runtime import processes
from posttrain.runtime.files import cache_folder
from posttrain.tracking.console import console, progress_bar
from posttrain.train.trainer import Trainer

VERSION = 3
"""Version of the file format; part of the key."""

SHARD_BATCHES = 32
"""Batches per shard, the most that a killed run computes again."""


@dataclass(frozen=True)
class CachedLogps:
    """Log-probabilities of the weighted tokens of units by their content, read from disk on access."""

    cache: UnitCache

    def __call__(self, index: int, unit: PairExample) -> Float[np.ndarray, " N"]:
        """NaN for a unit that was not scored."""
        count, start = int((unit["loss_weight"] > 0).sum()), self.cache.start(unit_key(unit))
        if start is None or not count:
            return np.full(count, np.nan, np.float32)
        return self.cache.read(np.arange(start, start + count))


def with_reference(
    units: PairExamples, trainer: Trainer, model: Mapping[str, str], stage: Path, *, seed: int, num_steps: int
) -> PairExamples:
    """Training units with log-probabilities of `trainer`'s current model, for the units that `num_steps` will read.

    `stage`: folder of the stage. The cache's folder is named by a hash of `model` (see `model_key`), and a unit in it
    by its content: units that another dataset or an earlier state of this one had are not scored again.
    """
    stream = ComparisonBatches(units, seed=seed)
    seen = json_digest([stream.state()["identity"], num_steps])
    batches = (stream.numbered() for _ in range(num_steps))
    return _with(units, trainer, _folder(units, model, stage), batches, num_steps * units.section.batch_rows, seen)


def with_reference_of_all(units: PairExamples, trainer: Trainer, model: Mapping[str, str], stage: Path) -> PairExamples:
    """Evaluation units with log-probabilities of `trainer`'s current model. `stage`: folder of the stage."""
    section = units.section
    data: dict[str, Any] = {
        **units.identity,
        "rendering": dict(units.renderer.tokenizer.identity),
        "rows": [repr(units.dataset), units.kind, units.weigh_prompts, units.share_prompts],
        "fit": [section.row_tokens, section.overlong, section.packing, section.batch_rows],
    }
    return _with(units, trainer, _folder(units, model, stage), all_rows(units), None, json_digest(data))


def check_scored(batch: Batch) -> Batch:
    """Return the batch. RuntimeError if it has a unit that was not scored."""
    assert batch.ref_logps is not None
    if np.isnan(batch.ref_logps).any():
        raise RuntimeError(
            "the reference did not score all that the run sees; delete its cache, or use reference: live"
        )
    return batch


def _folder(units: PairExamples, model: Mapping[str, str], stage: Path) -> Path:
    tokenizer = units.renderer.tokenizer
    # What the model sees of a picture depends on how it is resized and scaled; the family's functions are code.
    policy = tokenizer.identity.get("images")
    # Several hosts may have caches of their own, of which one lacks what another has.
    cache = cache_folder("reference") if processes.count() == 1 else stage / "reference"
    return cache / json_digest([VERSION, dict(model), policy])


def _with(
    units: PairExamples, trainer: Trainer, folder: Path, batches: Iterable[NumberedRows], total: int | None, seen: str
) -> PairExamples:
    """Units with what is known of them, of which those in `batches` are scored unless all of `seen`, a digest of what
    makes them, were known before. `total`: rows of all batches; None: one pass over the units."""
    if processes.writes():
        folder.mkdir(parents=True, exist_ok=True)
    processes.wait_for_all(str(folder))
    known = UnitCache(folder)
    if known.is_complete(seen):
        console().print(f"reference log-probabilities: read from {folder}", markup=False, soft_wrap=True)
    else:
        with progress_bar(f"reference log-probabilities of {units.rows.name}", total or len(units)) as advance:
            for count in _score(units, trainer, known, batches):
                advance(count if total is None else units.section.batch_rows)
        known.mark_complete(seen)
    return replace(units, ref_logps=CachedLogps(known))


def _score(units: PairExamples, trainer: Trainer, known: UnitCache, batches: Iterable[NumberedRows]) -> Iterator[int]:
    """Score the missing units, shard by shard; yields the number of units of each batch."""
    scored: dict[bytes, UnitValues] = {}
    keys: dict[int, bytes] = {}
    started, passed, missing = 0, 0, set(range(len(units)))
    for rows in batches:
        numbers = np.unique(rows.units[np.asarray(rows.batch.segments) > 0])
        keys |= {int(n): unit_key(_unit(units, int(n))) for n in numbers if int(n) not in keys}
        if any(keys[int(n)] not in known and keys[int(n)] not in scored for n in numbers):
            logps = np.asarray(trainer.stats(model_inputs(rows.batch)).logps)
            scored |= {one.key: one for one in _values_of(keys, rows, logps) if one.key not in known}
            started += 1
        if started == SHARD_BATCHES:
            known.write(list(scored.values()))
            scored, started = {}, 0
        yield len(numbers)
        passed += len(numbers)
        missing -= set(numbers.tolist())
        # Later epochs have no new units.
        if passed >= len(units) and all(units(number) is None for number in missing):
            break
    if scored:
        known.write(list(scored.values()))


def _values_of(keys: Mapping[int, bytes], rows: NumberedRows, logps: Float[np.ndarray, "B T"]) -> Iterator[UnitValues]:
    weight, segments = (np.asarray(x) for x in (rows.batch.loss_weight, rows.batch.segments))
    for row, numbers in enumerate(rows.units):
        for number in np.unique(numbers[segments[row] > 0]):
            here = (numbers == number) & (segments[row] > 0)
            yield UnitValues(keys[int(number)], logps[row][here & (weight[row] > 0)])


def _unit(units: PairExamples, number: int) -> PairExample:
    unit = units(number)
    assert unit is not None
    return unit


def model_key(trainer: Trainer, origin: Mapping[str, str], **more: Any) -> dict[str, str]:
    """Cache key of log-probabilities beside the tokens: weights, dtypes, and computation, that of this version."""
    compute = trainer.model.compute
    facts = {
        "compute_dtype": compute.dtype.name,
        "mesh": dict(trainer.mesh.shape),
        "version": __version__,
        **more,
    }
    return {**origin, **{f"posttrain:{name}": json.dumps(value, sort_keys=True) for name, value in facts.items()}}
