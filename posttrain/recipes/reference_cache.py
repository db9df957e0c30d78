"""The reference's log-probabilities of a whole dataset, computed once and kept on disk by what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from posttrain.console import console, progress_bar
from posttrain.data.comparisons import Units, all_rows
from posttrain.reference import model_inputs
from posttrain.trainer import Trainer

VERSION = 1
"""Of the files; another one is another key."""


@dataclass(frozen=True)
class CachedLogps:
    """Log-probabilities of the weighted tokens of every unit, read from disk as they are asked for."""

    values: Float[np.ndarray, " N"]
    starts: Int[np.ndarray, " U"]

    def __call__(self, index: int) -> Float[np.ndarray, " N"]:
        return np.asarray(self.values[self.starts[index] : self.starts[index + 1]])


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/posttrain/reference`, by default below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "posttrain" / "reference"


def with_reference(units: Units, trainer: Trainer, model: Mapping[str, str]) -> Units:
    """The units with log-probabilities of `trainer`'s model as it is now, from the cache if they are there.

    The key is a hash of `model` (what the model is made of) and of every token with its weight.
    """
    folder = cache_folder() / _key(units, model)
    if folder.is_dir():
        console().print(f"reference log-probabilities: read from {folder}", markup=False, soft_wrap=True)
    else:
        _write(folder, *_compute(units, trainer))
    values, starts = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("values", "starts"))
    return replace(units, ref_logps=CachedLogps(values, starts))


def _key(units: Units, model: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps([VERSION, dict(model)], sort_keys=True).encode())
    for index in range(len(units)):
        unit = units(index)
        if unit is not None:
            for name in ("tokens", "loss_weight", "part"):
                digest.update(unit[name].tobytes())
        digest.update(b"|")
    return digest.hexdigest()[:24]


def _compute(units: Units, trainer: Trainer) -> tuple[np.ndarray, np.ndarray]:
    numbers, values = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
    with progress_bar(
        f"reference log-probabilities of {len(units):,} units of {units.rows.name}", len(units)
    ) as advance:
        for batch, unit in all_rows(units):
            counted = np.asarray(batch.loss_weight) > 0
            values.append(trainer.stats(model_inputs(batch)).logps[counted])
            numbers.append(unit[counted])
            advance(len(np.unique(unit[counted])))
    found = np.concatenate(numbers)
    # Units stand in rows whole, their tokens in order.
    ordered = np.concatenate(values)[np.argsort(found, kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(found, minlength=len(units)))])
    return ordered, starts


def _write(folder: Path, values: np.ndarray, starts: np.ndarray) -> None:
    """The folder appears whole or not at all; another process may write the same one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    np.save(partial / "values.npy", values)
    np.save(partial / "starts.npy", starts)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(partial)


def model_key(trainer: Trainer, origin: Mapping[str, str], **more: Any) -> dict[str, str]:
    """What log-probabilities depend on beside the tokens: weights, types, and how the numbers are computed."""
    compute = trainer.model.compute
    facts = {"compute_dtype": compute.dtype.name, "mesh": dict(trainer.mesh.shape), **more}
    return {**origin, **{f"posttrain:{name}": json.dumps(value, sort_keys=True) for name, value in facts.items()}}
