"""Records of a teacher's top-k for one token, of fixed length: packed ids, 12-bit log-probabilities, float16 tails."""

# Ids take as many bits as the vocabulary needs with one code more, for `NO_ID`. -logp = 32 (u / 4095)^2 is exact to
# 1e-4 nat for probable ids. Both tails and the log-probability of the token itself are float16.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from posttrain.batch import NO_ID, TopK
from posttrain.kernels.logits.softmax import NO_LOGIT

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
        found = LOWEST * np.square(_unpack(logps, LOGP_BITS, self.k).astype(np.float32) / steps)
        codes = _unpack(ids, self.id_bits, self.k)
        known = codes < self.vocab_size
        # An impossible outcome of no name is no outcome: the student's probability of it is 0, too.
        found = np.where(known | (found > LOWEST), found, np.float32(NO_LOGIT))
        return TopK(
            ids=np.where(known, codes, np.int32(NO_ID)).reshape(*shape, self.k),
            logps=found.reshape(*shape, self.k),
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
