"""Cache on disk of values that a model gave to units of text (sequences, pairs), each found by its content, shared
between runs: reference log-probabilities, and records of teachers."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from posttrain.runtime import processes
from posttrain.runtime.files import digest

NOT_READ = ("unit", "source", "patches", "margins", "ref_logps")
"""Arrays of a unit that do not decide what a model says of it: numbers of its rows, and patches, of which `files` has
the digests of the pictures."""
OPEN_SHARDS = 128
"""Maximum number of memory-mapped files, far below the limit of open files of a process."""


class UnitValues(NamedTuple):
    """Values of one unit."""

    key: bytes
    """Digest of all that the model reads of it, see `unit_key`."""
    values: Shaped[np.ndarray, "N ..."]


def unit_key(unit: Mapping[str, np.ndarray]) -> bytes:
    """Digest of all that a model reads of a unit, and of where its values are asked: every array by name, type and
    content, of its pictures the digests. 128 bits."""
    hashed = hashlib.blake2b(digest_size=16)
    for name in sorted(unit.keys() - NOT_READ):
        array = np.ascontiguousarray(unit[name])
        hashed.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        hashed.update(array.tobytes())
    return hashed.digest()


def json_digest(value: Any) -> str:
    """Digest of a value of JSON types, for names of folders and files."""
    return digest(json.dumps(value, sort_keys=True), 24)


class UnitCache:
    """Values of units in a folder, in shards that are written whole; what a killed run has written stays.

    The folder stands for the model and its computation. Values are numbered over all shards that this process has seen.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._starts: dict[bytes, int] = {}
        self._files: list[Path] = []
        self._shard_starts = np.zeros(1, np.int64)
        self._values = functools.lru_cache(OPEN_SHARDS)(lambda number: np.load(self._files[number], mmap_mode="r"))
        for shard in sorted(folder.glob("shard-*")):
            self._add(shard)

    def __contains__(self, key: bytes) -> bool:
        return key in self._starts

    def start(self, key: bytes) -> int | None:
        """Number of the first value of a unit; None for an unknown one."""
        return self._starts.get(key)

    def read(self, numbers: Int[np.ndarray, " N"]) -> Shaped[np.ndarray, "N ..."]:
        """Values by their numbers, at least one."""
        shards = np.searchsorted(self._shard_starts, numbers, side="right") - 1
        values: np.ndarray | None = None
        for shard in np.unique(shards):
            here = shards == shard
            part = self._values(int(shard))[numbers[here] - self._shard_starts[shard]]
            values = np.empty((len(numbers), *part.shape[1:]), part.dtype) if values is None else values
            values[here] = part
        assert values is not None
        return values

    def write(self, units: Sequence[UnitValues]) -> None:
        """Write a shard of units, the same of all processes of the run, by the first of them."""
        self._add(Path(processes.agreed(lambda: str(_write_shard(self.folder, units)))))

    def is_complete(self, data: str) -> bool:
        """Tell whether all units of `data`, a digest of what makes them, were known to a run."""
        return processes.agreed((self.folder / f"seen-{data}").exists)

    def mark_complete(self, data: str) -> None:
        """Remember that all units of `data` are known."""
        if processes.writes():
            (self.folder / f"seen-{data}").touch()

    def _add(self, shard: Path) -> None:
        with np.load(shard / "index.npz") as index:
            keys, ends = (index[name] for name in ("keys", "ends"))
        begin = int(self._shard_starts[-1])
        for key, start in zip(keys, [0, *ends[:-1]], strict=True):
            self._starts[key.tobytes()] = begin + int(start)
        self._files.append(shard / "values.npy")
        self._shard_starts = np.append(self._shard_starts, begin + int(ends[-1]))


def _write_shard(folder: Path, units: Sequence[UnitValues]) -> Path:
    """Write a shard atomically; another run may write the same one."""
    values = np.concatenate([one.values for one in units])
    index = {
        "keys": np.frombuffer(b"".join(one.key for one in units), np.uint8).reshape(len(units), -1),
        "ends": np.cumsum([len(one.values) for one in units]),
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
