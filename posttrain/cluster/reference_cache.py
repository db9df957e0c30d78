"""Reference log-probabilities of a run's data on disk: computed once per model and data, shared between runs."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch, model_inputs
from posttrain.data.pair_examples import ComparisonBatches, NumberedRows, PairExample, PairExamples, all_rows
from posttrain.data.pipeline import fingerprint
from posttrain.runtime import processes
from posttrain.runtime.files import cache_folder, digest
from posttrain.tracking.console import console, progress_bar
from posttrain.train.trainer import Trainer

VERSION = 3
"""Version of the file format; part of the key."""

SHARD_BATCHES = 32
"""Batches per shard, the most that a killed run computes again."""

NOT_READ = ("unit", "source", "patches", "margins", "ref_logps")
"""Arrays of a unit that do not decide its log-probabilities: numbers of its rows, and patches, of which `files` has the
digests of the pictures."""


class _Scored(NamedTuple):
    """Log-probabilities of one unit."""

    key: bytes
    """Digest of all that the model reads of it, see `unit_key`."""
    logps: Float[np.ndarray, " N"]


class _CachedRow(NamedTuple):
    values: np.ndarray
    start: int
    stop: int


class CachedLogps:
    """Log-probabilities of the weighted tokens of units by their content, read from disk on access."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._places: dict[bytes, _CachedRow] = {}
        for shard in sorted(folder.glob("shard-*")):
            self.add(shard)

    def add(self, shard: Path) -> None:
        values = np.load(shard / "values.npy", mmap_mode="r")
        with np.load(shard / "index.npz") as index:
            keys, ends = (index[name] for name in ("keys", "ends"))
        for key, start, stop in zip(keys, [0, *ends[:-1]], ends, strict=True):
            self._places[key.tobytes()] = _CachedRow(values, int(start), int(stop))

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __call__(self, index: int, unit: PairExample) -> Float[np.ndarray, " N"]:
        """NaN for a unit that was not scored."""
        place = self._places.get(unit_key(unit))
        if place is None:
            return np.full(int((unit["loss_weight"] > 0).sum()), np.nan, np.float32)
        return np.asarray(place.values[place.start : place.stop])


def with_reference(
    units: PairExamples, trainer: Trainer, model: Mapping[str, str], stage: Path, *, seed: int, num_steps: int
) -> PairExamples:
    """Training units with log-probabilities of `trainer`'s current model, for the units that `num_steps` will read.

    `stage`: folder of the stage. The cache's folder is named by a hash of `model` (see `model_key`), and a unit in it
    by its content: units that another dataset or an earlier state of this one had are not scored again.
    """
    stream = ComparisonBatches(units, seed=seed)
    seen = f"seen-{_digest([stream.state()['identity'], num_steps])}"
    batches = (stream.numbered() for _ in range(num_steps))
    return _with(units, trainer, _folder(units, model, stage), batches, num_steps * units.section.batch_rows, seen)


def with_reference_of_all(units: PairExamples, trainer: Trainer, model: Mapping[str, str], stage: Path) -> PairExamples:
    """Evaluation units with log-probabilities of `trainer`'s current model. `stage`: folder of the stage."""
    section = units.section
    data: dict[str, Any] = {
        "dataset": fingerprint(units.dataset, units.rows),
        **({"pictures": units.pictures.fingerprint} if units.renderer.tokenizer.has_images else {}),
        "rows": [repr(units.dataset), units.kind, units.weigh_prompts, units.share_prompts],
        "fit": [section.row_tokens, section.overlong, section.packing, section.batch_rows],
    }
    return _with(units, trainer, _folder(units, model, stage), all_rows(units), None, f"all-{_digest(data)}")


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
    policy = [tokenizer.images.model_type, repr(tokenizer.images.settings)] if tokenizer.has_images else []
    # Several hosts may have caches of their own, of which one lacks what another has.
    cache = cache_folder("reference") if processes.count() == 1 else stage / "reference"
    return cache / _digest([VERSION, dict(model), policy])


def _with(
    units: PairExamples, trainer: Trainer, folder: Path, batches: Iterable[NumberedRows], total: int | None, seen: str
) -> PairExamples:
    """Units with what is known of them, of which those in `batches` are scored unless the file `seen` says that they
    were. `total`: rows of all batches; None: one pass over the units."""
    if processes.writes():
        folder.mkdir(parents=True, exist_ok=True)
    processes.wait_for_all(str(folder))
    known = CachedLogps(folder)
    if processes.agreed(lambda: (folder / seen).exists()):
        console().print(f"reference log-probabilities: read from {folder}", markup=False, soft_wrap=True)
    else:
        with progress_bar(f"reference log-probabilities of {units.rows.name}", total or len(units)) as advance:
            for count in _score(units, trainer, known, batches):
                advance(count if total is None else units.section.batch_rows)
        if processes.writes():
            (folder / seen).touch()
    return replace(units, ref_logps=known)


def _score(units: PairExamples, trainer: Trainer, known: CachedLogps, batches: Iterable[NumberedRows]) -> Iterator[int]:
    """Score the missing units, shard by shard; yields the number of units of each batch."""
    found: dict[bytes, _Scored] = {}
    keys: dict[int, bytes] = {}
    started, passed, missing = 0, 0, set(range(len(units)))
    for rows in batches:
        numbers = np.unique(rows.units[np.asarray(rows.batch.segments) > 0])
        keys |= {int(n): unit_key(_unit(units, int(n))) for n in numbers if int(n) not in keys}
        if any(keys[int(n)] not in known and keys[int(n)] not in found for n in numbers):
            logps = np.asarray(trainer.stats(model_inputs(rows.batch)).logps)
            found |= {one.key: one for one in _scored(keys, rows, logps) if one.key not in known}
            started += 1
        if started == SHARD_BATCHES:
            known.add(_write(known.folder, list(found.values())))
            found, started = {}, 0
        yield len(numbers)
        passed += len(numbers)
        missing -= set(numbers.tolist())
        # Later epochs have no new units.
        if passed >= len(units) and all(units(number) is None for number in missing):
            break
    if found:
        known.add(_write(known.folder, list(found.values())))


def _scored(keys: Mapping[int, bytes], rows: NumberedRows, logps: Float[np.ndarray, "B T"]) -> Iterator[_Scored]:
    weight, segments = (np.asarray(x) for x in (rows.batch.loss_weight, rows.batch.segments))
    for row, numbers in enumerate(rows.units):
        for number in np.unique(numbers[segments[row] > 0]):
            here = (numbers == number) & (segments[row] > 0)
            values = logps[row][here & (weight[row] > 0)]
            yield _Scored(keys[int(number)], values)


def _unit(units: PairExamples, number: int) -> PairExample:
    unit = units(number)
    assert unit is not None
    return unit


def unit_key(unit: PairExample) -> bytes:
    """Digest of all that a unit's log-probabilities depend on beside the model: every array by name, type and content,
    of its pictures the digests. 128 bits."""
    hashed = hashlib.blake2b(digest_size=16)
    for name in sorted(unit.keys() - NOT_READ):
        array = np.ascontiguousarray(unit[name])
        hashed.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        hashed.update(array.tobytes())
    return hashed.digest()


def _digest(value: Any) -> str:
    return digest(json.dumps(value, sort_keys=True), 24)


def _write(folder: Path, scored: list[_Scored]) -> Path:
    """Write a shard, the same of all processes of the run, by the first of them."""
    return Path(processes.agreed(lambda: str(_write_shard(folder, scored))))


def _write_shard(folder: Path, scored: list[_Scored]) -> Path:
    """Write a shard atomically; another run may write the same one."""
    values = np.concatenate([one.logps for one in scored])
    index = {
        "keys": np.frombuffer(b"".join(one.key for one in scored), np.uint8).reshape(len(scored), -1),
        "ends": np.cumsum([len(one.logps) for one in scored]),
    }
    name = digest(b"".join(x.tobytes() for x in (values, *index.values())))
    partial, shard = Path(tempfile.mkdtemp(dir=folder, prefix=".shard-")), folder / f"shard-{name}"
    np.save(partial / "values.npy", values)
    np.savez(partial / "index.npz", keys=index["keys"], ends=index["ends"])
    try:
        partial.rename(shard)
    except OSError:
        if not shard.is_dir():
            raise
        shutil.rmtree(partial)
    return shard


def model_key(trainer: Trainer, origin: Mapping[str, str], **more: Any) -> dict[str, str]:
    """Cache key of log-probabilities beside the tokens: weights, dtypes, and computation."""
    compute = trainer.model.compute
    facts = {"compute_dtype": compute.dtype.name, "mesh": dict(trainer.mesh.shape), **more}
    return {**origin, **{f"posttrain:{name}": json.dumps(value, sort_keys=True) for name, value in facts.items()}}
