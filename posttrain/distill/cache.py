"""Teacher cache on disk: records of top-k logits of fixed length, found by the content of their sequences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, UInt8

from posttrain.batch import NO_ID, TopK
from posttrain.data.sources import Sequences
from posttrain.data.unit_cache import UnitCache, UnitValues, json_digest, unit_key
from posttrain.errors import ConfigError
from posttrain.kernels.logits.softmax import NO_LOGIT
from posttrain.runtime.files import write_whole

# Ids take as many bits as the vocabulary needs with one code more, for `NO_ID`. -logp = 32 (u / 4095)^2 is exact to
# 1e-4 nat for probable ids. Both tails and the log-probability of the token itself are float16.


FORMAT = 3
"""Version of the record format. 1 had no code for `NO_ID`; 2 found records by the number of the row."""
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


SHARD_SEQUENCES = 256
"""Sequences that a stop loses at most."""
DESCRIPTION = "cache.json"


class CacheFolder:
    """Folder of one teacher's records, with a folder in it for each kind of them.

    `identity`: the kind, as JSON types: the teacher's weights, precision, k, temperature, vocabulary. A value of None
    is unknown.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.folder = folder
        self.identity = {**identity, "record_format": FORMAT}
        self.format = RecordFormat(identity["vocab_size"], identity["top_k"])

    def create(self) -> UnitCache:
        """Records of this kind, which are none at first."""
        folder = self.folder / json_digest(self.identity)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / DESCRIPTION).exists():
            write_whole(folder / DESCRIPTION, json.dumps(self.identity, indent=1, sort_keys=True))
        return UnitCache(folder)

    def open(self) -> UnitCache:
        """Records of this kind. ConfigError if there are none, or of several teachers where it is unknown."""
        files = sorted(self.folder.glob(f"*/{DESCRIPTION}"))
        if not files:
            raise ConfigError(
                f"cache: {self.folder} is empty; write it with posttrain distill --cache, or write_cache() in Python"
            )
        known = {file.parent: json.loads(file.read_text(encoding="utf-8")) for file in files}
        differing = {folder: self._differing(one) for folder, one in known.items()}
        fitting = [folder for folder, names in differing.items() if not names]
        if len(fitting) > 1:
            names = sorted({name for folder in fitting for name in known[folder] if self.identity.get(name) is None})
            raise ConfigError(
                f"cache: {self.folder} has records of {len(fitting)} states of {', '.join(names)}; put the teacher's "
                "folder where the configuration names it, or delete the others"
            )
        if not fitting:
            nearest = min(differing, key=lambda folder: len(differing[folder]))
            changes = ", ".join(
                f"{name}={known[nearest].get(name)!r}, and now it is {self.identity.get(name)!r}"
                for name in differing[nearest]
            )
            raise ConfigError(
                f"cache: {nearest} was written with {changes}; restore it, or write it anew with posttrain distill "
                "--cache"
            )
        return UnitCache(fitting[0])

    def _differing(self, other: Mapping[str, Any]) -> list[str]:
        """Names of what differs from another kind; nothing unknown does."""
        names = {**self.identity, **other}
        known = (name for name in names if name not in self.identity or self.identity[name] is not None)
        return [name for name in known if self.identity.get(name) != other.get(name)]


class TeacherCache:
    """One teacher's records on disk, by sequence."""

    def __init__(self, units: UnitCache, form: RecordFormat):
        self.units, self.format = units, form

    def places(self, sequences: Sequences) -> list[Int[np.ndarray, " T"] | None]:
        """Record number of each token of a row's sequences, from 1; 0 without a record. ConfigError for a sequence that
        has none."""
        all_places: list[Int[np.ndarray, " T"] | None] = []
        for sequence in sequences:
            if sequence is None:
                all_places.append(None)
                continue
            start = self.units.start(unit_key(sequence))
            if start is None:
                raise ConfigError(f"cache: {self.units.folder} {NO_RECORDS}")
            counts = sequence["loss_weight"] > 0
            places = np.zeros(len(counts), np.int64)
            places[counts] = start + 1 + np.arange(np.count_nonzero(counts))
            all_places.append(places)
        return all_places

    def read(self, places: Int[np.ndarray, "B T"]) -> TopK:
        """Decode the records of tokens; entries of tokens without a record are arbitrary."""
        wanted = np.nonzero(places)
        records = np.empty((0, self.format.num_bytes), np.uint8)
        if len(wanted[0]):
            records = self.units.read(places[wanted] - 1)

        def spread(x: np.ndarray) -> np.ndarray:
            whole = np.zeros((*places.shape, *x.shape[1:]), x.dtype)
            whole[wanted] = x
            return whole

        topk: TopK = jax.tree.map(spread, self.format.decode(records))
        return topk


NO_RECORDS = (
    "has no records of this text: the row, its pictures, or how it is rendered changed since; posttrain distill "
    "--cache scores what is new"
)


def unknown_rows(units: UnitCache, rows: Iterable[int], tokenize: Callable[[int], Sequences]) -> list[int]:
    """Rows with a sequence that has no records."""
    return [row for row in rows if any(one is not None and unit_key(one) not in units for one in tokenize(row))]


def write_records(
    cache: TeacherCache,
    rows: Iterable[int],
    tokenize: Callable[[int], Sequences],
    score: Callable[[Sequence[Mapping[str, np.ndarray]]], Iterator[TopK]],
    advance: Callable[[int], None],
) -> None:
    """Write the records of these rows' sequences that have none, shard by shard. `score` gives each sequence's [N, k]
    records of its tokens with loss."""
    units, new = cache.units, dict[bytes, Mapping[str, np.ndarray]]()

    def write() -> None:
        scored = zip(new, score(list(new.values())), strict=True)
        units.write([UnitValues(key, cache.format.encode(topk)) for key, topk in scored])
        new.clear()

    for row in rows:
        for sequence in tokenize(row):
            if sequence is not None and (key := unit_key(sequence)) not in units:
                new[key] = sequence
        if len(new) >= SHARD_SEQUENCES:
            write()
        advance(1)
    if new:
        write()
