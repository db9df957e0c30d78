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
from posttrain.data.pipeline import fingerprint, token_fingerprint
from posttrain.errors import ConfigError
from posttrain.runtime import processes
from posttrain.runtime.files import cache_folder, digest
from posttrain.tracking.console import console, progress_bar
from posttrain.train.trainer import Trainer

VERSION = 2
"""Version of the file format; part of the key."""

SHARD_BATCHES = 32
"""Batches per shard, the most that a killed run computes again."""

ALL = "all"
"""File that marks a folder in which every unit is scored."""


class _Scored(NamedTuple):
    """Log-probabilities of one unit."""

    number: int
    text: np.uint64
    """Hash of its tokens, their weights, and the sizes of its pictures' files."""
    logps: Float[np.ndarray, " N"]


class _CachedRow(NamedTuple):
    text: np.uint64
    values: np.ndarray
    start: int
    stop: int


class CachedLogps:
    """Log-probabilities of the weighted tokens of units, read from disk on access."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._places: dict[int, _CachedRow] = {}
        for shard in sorted(folder.glob("shard-*")):
            self.add(shard)

    def add(self, shard: Path) -> None:
        values = np.load(shard / "values.npy", mmap_mode="r")
        with np.load(shard / "index.npz") as index:
            numbers, texts, ends = (index[name] for name in ("numbers", "texts", "ends"))
        for number, text, start, stop in zip(numbers, texts, [0, *ends[:-1]], ends, strict=True):
            self._places[int(number)] = _CachedRow(text, values, int(start), int(stop))

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __call__(self, index: int, unit: PairExample) -> Float[np.ndarray, " N"]:
        """NaN for a unit that was not scored. ConfigError where the unit was another text."""
        place = self._places.get(index)
        if place is None:
            return np.full(int((unit["loss_weight"] > 0).sum()), np.nan, np.float32)
        if place.text != _text(unit):
            raise ConfigError(
                f"the reference's log-probabilities in {self.folder} are of another text or picture: the dataset has "
                "changed since; delete the folder"
            )
        return np.asarray(place.values[place.start : place.stop])


def with_reference(
    units: PairExamples, trainer: Trainer, model: Mapping[str, str], stage: Path, *, seed: int, num_steps: int
) -> PairExamples:
    """Training units with log-probabilities of `trainer`'s current model, for the units that `num_steps` will read.

    `stage`: folder of the stage. The cache key is a hash of `model` (see `model_key`) and of the dataset; the text of
    each unit is compared as well.
    """
    stream = ComparisonBatches(units, seed=seed)
    seen = f"seen-{_digest([stream.state()['identity'], num_steps])}"
    batches = (stream.numbered() for _ in range(num_steps))
    return _with(units, trainer, _folder(units, model, stage), batches, num_steps * units.section.batch_rows, seen)


def with_reference_of_all(units: PairExamples, trainer: Trainer, model: Mapping[str, str], stage: Path) -> PairExamples:
    """Evaluation units with log-probabilities of `trainer`'s current model. `stage`: folder of the stage."""
    return _with(units, trainer, _folder(units, model, stage), all_rows(units), len(units), ALL)


def check_scored(batch: Batch) -> Batch:
    """Return the batch. RuntimeError if it has a unit that was not scored."""
    assert batch.ref_logps is not None
    if np.isnan(batch.ref_logps).any():
        raise RuntimeError(
            "the reference did not score all that the run sees; delete its cache, or use reference: live"
        )
    return batch


def _folder(units: PairExamples, model: Mapping[str, str], stage: Path) -> Path:
    section = units.section
    data = {
        "dataset": fingerprint(units.dataset, units.rows),
        "tokens": token_fingerprint(units.rows, units.as_sequences),
        **({"pictures": units.pictures.fingerprint} if units.renderer.tokenizer.has_images else {}),
        "rows": [units.kind, units.weigh_prompts, units.share_prompts, section.row_tokens, section.overlong],
    }
    # Several hosts may have caches of their own, of which one lacks what another has.
    cache = cache_folder("reference") if processes.count() == 1 else stage / "reference"
    return cache / _digest([VERSION, dict(model), data])


def _with(
    units: PairExamples, trainer: Trainer, folder: Path, batches: Iterable[NumberedRows], total: int, seen: str
) -> PairExamples:
    if processes.writes():
        folder.mkdir(parents=True, exist_ok=True)
    processes.wait_for_all(str(folder))
    known = CachedLogps(folder)
    if processes.agreed(lambda: (folder / ALL).exists() or (folder / seen).exists()):
        console().print(f"reference log-probabilities: read from {folder}", markup=False, soft_wrap=True)
    else:
        with progress_bar(f"reference log-probabilities of {units.rows.name}", total) as advance:
            for count in _score(units, trainer, known, batches):
                advance(count if seen == ALL else units.section.batch_rows)
        if processes.writes():
            (folder / seen).touch()
    return replace(units, ref_logps=known)


def _score(units: PairExamples, trainer: Trainer, known: CachedLogps, batches: Iterable[NumberedRows]) -> Iterator[int]:
    """Score the missing units, shard by shard; yields the number of units of each batch."""
    found: dict[int, _Scored] = {}
    started, passed, missing = 0, 0, set(range(len(units)))
    for rows in batches:
        numbers = np.unique(rows.units[np.asarray(rows.batch.segments) > 0])
        if any(int(n) not in known and int(n) not in found for n in numbers):
            logps = np.asarray(trainer.stats(model_inputs(rows.batch)).logps)
            found |= {one.number: one for one in _scored(units, rows, logps) if one.number not in known}
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


def _scored(units: PairExamples, rows: NumberedRows, logps: Float[np.ndarray, "B T"]) -> Iterator[_Scored]:
    weight, segments = (np.asarray(x) for x in (rows.batch.loss_weight, rows.batch.segments))
    for row, numbers in enumerate(rows.units):
        for number in np.unique(numbers[segments[row] > 0]):
            here = (numbers == number) & (segments[row] > 0)
            values = logps[row][here & (weight[row] > 0)]
            unit = units(int(number))
            assert unit is not None
            yield _Scored(int(number), _text(unit), values)


def _text(unit: PairExample) -> np.uint64:
    hashed = hashlib.blake2b(unit["tokens"].astype(np.int32).tobytes(), digest_size=8)
    hashed.update(unit["loss_weight"].astype(np.float32).tobytes())
    hashed.update(unit["files"].astype(np.int64).tobytes() if "files" in unit else b"")
    return np.frombuffer(hashed.digest(), np.uint64)[0]


def _digest(value: Any) -> str:
    return digest(json.dumps(value, sort_keys=True), 24)


def _write(folder: Path, scored: list[_Scored]) -> Path:
    """Write a shard, the same of all processes of the run, by the first of them."""
    return Path(processes.agreed(lambda: str(_write_shard(folder, scored))))


def _write_shard(folder: Path, scored: list[_Scored]) -> Path:
    """Write a shard atomically; another run may write the same one."""
    values = np.concatenate([one.logps for one in scored])
    index = {
        "numbers": np.asarray([one.number for one in scored]),
        "texts": np.asarray([one.text for one in scored], np.uint64),
        "ends": np.cumsum([len(one.logps) for one in scored]),
    }
    name = digest(b"".join(x.tobytes() for x in (values, *index.values())))
    partial, shard = Path(tempfile.mkdtemp(dir=folder, prefix=".shard-")), folder / f"shard-{name}"
    np.save(partial / "values.npy", values)
    np.savez(partial / "index.npz", numbers=index["numbers"], texts=index["texts"], ends=index["ends"])
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
