"""Teacher cache on disk: records of top-k logits of fixed length, in shards of rows, each written atomically."""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, UInt8

from posttrain.batch import NO_ID, TopK
from posttrain.errors import ConfigError
from posttrain.kernels.logits.softmax import NO_LOGIT
from posttrain.runtime.files import write_whole

# Ids take as many bits as the vocabulary needs with one code more, for `NO_ID`. -logp = 32 (u / 4095)^2 is exact to
# 1e-4 nat for probable ids. Both tails and the log-probability of the token itself are float16.


FORMAT = 2
"""Version of the record format. 1 had no code for `NO_ID`."""
LOGP_BITS = 12
LOWEST = -32.0
"""Lower log-probabilities and tails are kept as this one."""


@dataclass(frozen=True)
class RecordFormat:
    """Byte layout of records of `k` ids of a vocabulary."""

    vocab_size: int
    k: int

    @property
    def id_bits(self) -> int:
        return self.vocab_size.bit_length()

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.k, self.id_bits) + _num_bytes(self.k, LOGP_BITS) + 6

    def encode(self, topk: TopK) -> UInt8[np.ndarray, "N bytes"]:
        """Encode arrays [N, k] and [N]. Ids beyond the vocabulary decode as `NO_ID`."""
        steps = (1 << LOGP_BITS) - 1
        lost = np.clip(-np.asarray(topk.logps, np.float64), 0.0, -LOWEST)
        logps = np.rint(np.sqrt(lost / -LOWEST) * steps).astype(np.uint32)
        scalars = np.stack([topk.tail, topk.scaled_tail, topk.token_logps], axis=1)
        halves = np.maximum(scalars, LOWEST).astype("<f2").view(np.uint8)
        codes = np.minimum(np.asarray(topk.ids), self.vocab_size)
        return np.concatenate([_pack(codes, self.id_bits), _pack(logps, LOGP_BITS), halves], axis=1)

    def decode(self, records: UInt8[np.ndarray, "*B bytes"]) -> TopK:
        """Decode records. All-zero records are empty; their values must not be used."""
        shape = records.shape[:-1]
        flat = records.reshape(-1, self.num_bytes)
        ends = np.cumsum([_num_bytes(self.k, self.id_bits), _num_bytes(self.k, LOGP_BITS)])
        ids, logps, halves = np.split(flat, ends, axis=1)
        steps = (1 << LOGP_BITS) - 1
        scalars = np.ascontiguousarray(halves).view("<f2").astype(np.float32).reshape(*shape, 3)
        logps_of_ids = LOWEST * np.square(_unpack(logps, LOGP_BITS, self.k).astype(np.float32) / steps)
        codes = _unpack(ids, self.id_bits, self.k)
        known = codes < self.vocab_size
        # An impossible outcome of no name is no outcome: the student's probability of it is 0, too.
        logps_of_ids = np.where(known | (logps_of_ids > LOWEST), logps_of_ids, np.float32(NO_LOGIT))
        return TopK(
            ids=np.where(known, codes, np.int32(NO_ID)).reshape(*shape, self.k),
            logps=logps_of_ids.reshape(*shape, self.k),
            tail=scalars[..., 0],
            scaled_tail=scalars[..., 1],
            token_logps=scalars[..., 2],
        )


def _num_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _pack(values: np.ndarray, bits: int) -> UInt8[np.ndarray, "N bytes"]:
    """The lowest `bits` of each value, one after the other."""
    wide = np.ascontiguousarray(values.astype(">u4")).view(np.uint8).reshape(*values.shape, 4)
    return np.packbits(np.unpackbits(wide, axis=-1)[..., -bits:].reshape(len(values), -1), axis=-1)


def _unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    single = np.unpackbits(packed, axis=-1, count=count * bits).reshape(-1, count, bits)
    wide = np.pad(single, ((0, 0), (0, 0), (32 - bits, 0)))
    return np.packbits(wide, axis=-1).reshape(-1, count * 4).view(">u4").astype(np.int32)


SHARD_ROWS = 256
"""Rows that a stop loses at most."""
OPEN_SHARDS = 128
"""Maximum number of memory-mapped files, far below the limit of open files of a process."""
DESCRIPTION = "cache.json"

Row = Sequence[Mapping[str, np.ndarray] | None]
"""Sequences of a row with `tokens` and `loss_weight`; None for one without teacher targets."""


class CacheFolder:
    """Cache folder of one teacher and one dataset.

    `identity` describes it: teacher, its precision, data, k, temperature, vocabulary. ConfigError where there is
    something else.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], num_rows: int):
        self.folder = folder
        self.identity = {**identity, "record_format": FORMAT, "num_rows": num_rows, "shard_rows": SHARD_ROWS}
        self.num_rows = num_rows
        self.format = RecordFormat(identity["vocab_size"], identity["top_k"])

    @property
    def shards(self) -> range:
        return range(-(-self.num_rows // SHARD_ROWS))

    def rows(self, shard: int) -> range:
        return range(shard * SHARD_ROWS, min((shard + 1) * SHARD_ROWS, self.num_rows))

    def missing(self) -> list[int]:
        """Shards that are not written yet."""
        return [shard for shard in self.shards if not self._index(shard).exists()]

    def unfit(self, tokenize: Callable[[int], Row]) -> list[int]:
        """Shards that are missing, or whose rows have changed in the dataset."""
        return [shard for shard in self.shards if not self._is_of(shard, tokenize)]

    def _is_of(self, shard: int, tokenize: Callable[[int], Row]) -> bool:
        if not self._index(shard).exists():
            return False
        return np.array_equal(np.load(self._index(shard))["digests"], row_digests(map(tokenize, self.rows(shard))))

    def claim(self) -> None:
        """Claim the folder for writing, or resume. ConfigError for another identity."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / DESCRIPTION
        if file.exists():
            self.check()
        else:
            write_whole(file, json.dumps(self.identity, indent=1, sort_keys=True))

    def check(self) -> None:
        """Check the identity of the folder. ConfigError if it differs or is missing."""
        file = self.folder / DESCRIPTION
        if not file.exists():
            raise ConfigError(f"cache: {self.folder} is empty; write it with posttrain distill --cache")
        before = json.loads(file.read_text(encoding="utf-8"))
        for name, value in self.identity.items():
            if value is not None and before.get(name) != value:
                raise ConfigError(
                    f"cache: {self.folder} was written with {name}={before.get(name)!r}, and now it is {value!r}; "
                    "restore it, or give another folder"
                )

    def write(self, shard: int, records: np.ndarray, rows: Sequence[Row]) -> None:
        """Write the records of a shard in the order of its rows, then its index, which marks it as complete."""
        assert records.dtype == np.uint8 and records.shape[1] == self.format.num_bytes
        counts = np.asarray([sum(np.count_nonzero(s["loss_weight"]) for s in row if s is not None) for row in rows])
        assert counts.sum() == len(records) and len(counts) == len(self.rows(shard))
        self._index(shard).unlink(missing_ok=True)
        np.save(self._records(shard), records)
        index = io.BytesIO()
        np.savez(index, counts=counts, digests=row_digests(rows))
        write_whole(self._index(shard), index.getvalue())

    def _records(self, shard: int) -> Path:
        return self.folder / f"{shard:06d}.npy"

    def _index(self, shard: int) -> Path:
        return self.folder / f"{shard:06d}.index.npz"


class TeacherCache:
    """One teacher's cache of several datasets, by row. ConfigError for another identity or missing shards."""

    def __init__(self, datasets: Sequence[CacheFolder]):
        self.format = datasets[0].format
        self._datasets = datasets
        self._digests, self._starts, files, sizes = [], [], [], []
        begin = 0
        for cache in datasets:
            cache.check()
            if left := cache.missing():
                raise ConfigError(
                    f"cache: {cache.folder} lacks {len(left)} of {len(cache.shards)} shards; go on with posttrain "
                    "distill --cache"
                )
            indices = [np.load(cache._index(shard)) for shard in cache.shards]
            self._digests.append(np.concatenate([index["digests"] for index in indices]))
            counts = np.concatenate([index["counts"] for index in indices])
            self._starts.append(begin + np.concatenate([[0], np.cumsum(counts)]))
            files += [cache._records(shard) for shard in cache.shards]
            sizes += [int(index["counts"].sum()) for index in indices]
            begin += int(counts.sum())
        self._shard_starts = np.concatenate([[0], np.cumsum(sizes)])
        self._shard = functools.lru_cache(OPEN_SHARDS)(lambda number: np.load(files[number], mmap_mode="r"))

    def places(self, dataset: int, row: int, sequences: Row) -> list[Int[np.ndarray, " T"] | None]:
        """Record number of each token, from 1; 0 without a record. ConfigError for a row that has changed."""
        if row_digest(sequences) != self._digests[dataset][row]:
            raise ConfigError(
                f"cache: its tokens are not those that {self._datasets[dataset].folder} was written for; write it anew "
                "with posttrain distill --cache"
            )
        all_places: list[Int[np.ndarray, " T"] | None] = []
        first = self._starts[dataset][row] + 1
        for sequence in sequences:
            counts = np.zeros(0, bool) if sequence is None else sequence["loss_weight"] > 0
            places = np.zeros(len(counts), np.int64)
            places[counts] = first + np.arange(np.count_nonzero(counts))
            first += np.count_nonzero(counts)
            all_places.append(None if sequence is None else places)
        return all_places

    def read(self, places: Int[np.ndarray, "B T"]) -> TopK:
        """Decode the records of tokens; entries of tokens without a record are arbitrary."""
        wanted = np.nonzero(places)
        at = places[wanted] - 1
        shard_of = np.searchsorted(self._shard_starts, at, side="right") - 1
        records = np.empty((len(at), self.format.num_bytes), np.uint8)
        for shard in np.unique(shard_of):
            inside = shard_of == shard
            records[inside] = self._shard(int(shard))[at[inside] - self._shard_starts[shard]]

        def spread(x: np.ndarray) -> np.ndarray:
            whole = np.zeros((*places.shape, *x.shape[1:]), x.dtype)
            whole[wanted] = x
            return whole

        topk: TopK = jax.tree.map(spread, self.format.decode(records))
        return topk


def row_digests(rows: Iterable[Row]) -> np.ndarray:
    """Hash each row."""
    return np.asarray([row_digest(row) for row in rows], np.uint64)


def row_digest(row: Row) -> np.uint64:
    """Hash the tokens and loss masks of a row's sequences, and the digests of their pictures; 0 for a row without
    teacher targets."""
    hashed = hashlib.sha256()
    for sequence in row:
        if sequence is not None:
            hashed.update(np.ascontiguousarray(sequence["tokens"], "<i4").tobytes())
            hashed.update(np.packbits(sequence["loss_weight"] > 0).tobytes())
            hashed.update(sequence["files"].astype("<i8").tobytes() if "files" in sequence else b"")
    return np.frombuffer(hashed.digest()[:8], "<u8")[0] if any(one is not None for one in row) else np.uint64(0)


def write_shards(
    cache: CacheFolder,
    shards: Iterable[int],
    tokenize: Callable[[int], Row],
    score: Callable[[Sequence[Mapping[str, np.ndarray]]], Iterator[TopK]],
    advance: Callable[[int], None],
) -> None:
    """Write these shards. `score` gives each sequence's [N, k] records of its tokens with loss."""
    cache.claim()
    for shard in shards:
        rows = [tokenize(row) for row in cache.rows(shard)]
        there = [sequence for row in rows for sequence in row if sequence is not None]
        parts = [cache.format.encode(topk) for topk in score(there)]
        empty = np.zeros((0, cache.format.num_bytes), np.uint8)
        cache.write(shard, np.concatenate([empty, *parts]), rows)
        advance(len(rows))
