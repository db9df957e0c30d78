"""What is asked of an attention kernel, as far as the choice of one depends on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax import Array
from jaxtyping import Float, Int

MASK_BYTES = 256 << 20
"""Of a written mask at most: beyond, blocks that make their part of it as they go need no more memory with length."""


class Places(NamedTuple):
    """Where queries and keys stand in their sequences."""

    q_positions: Int[Array, "B T"]
    k_positions: Int[Array, "B S"]
    q_segments: Int[Array, "B T"]
    k_segments: Int[Array, "B S"]
    q_parents: Int[Array, "B T"] | None
    """The segment that the query's own goes on from, as `Batch.parents`; 0 where there is none."""


class Operands(NamedTuple):
    """The arrays of one call."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S Hv"]
    places: Places
    sinks: Float[Array, " N"] | None


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The logits and the mask of one call."""

    window: int | None
    scale: float
    soft_cap: float | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """Static facts of one call."""

    platform: str
    rows: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    soft_cap: float | None
    sinks: bool
    parents: bool
    """Segments go on from others."""
    same_tokens: bool
    """Queries and keys are the same tokens, in the same order: no cache."""
    row_shards: int
    head_shards: int
    tokamax: bool
    """The package is installed."""
    compute_capability: float | None
    """Of a GPU, such as 9.0."""

    @property
    def kind(self) -> Literal["decode", "prefill", "rows"]:
        if self.num_queries == 1:
            return "decode"
        return "rows" if self.same_tokens else "prefill"

    @property
    def num_logits(self) -> int:
        return self.rows * self.num_heads * self.num_queries * self.num_keys

    @property
    def mask_bytes(self) -> int:
        """Of a mask that is written out, on the device that has most of it."""
        return -(-self.rows // self.row_shards) * self.num_queries * self.num_keys

    @property
    def split_kv_heads(self) -> int:
        """Key heads after each is repeated as often as it takes to split them over the devices."""
        return math.lcm(self.num_kv_heads, self.head_shards)

    def refusal_of_mask(self) -> str | None:
        """Why a kernel does not serve that wants the mask of packed rows written out, which takes T^2 bytes a row."""
        if self.mask_bytes <= MASK_BYTES:
            return None
        return f"takes a written mask, here of {self.mask_bytes >> 20:,} MiB, more than {MASK_BYTES >> 20}"

    def refusal_of_rows(self) -> str | None:
        """Why a kernel does not serve that knows no cache and that we split over devices ourselves."""
        if self.kind != "rows":
            return f"takes whole rows without a cache, got {self.num_queries} queries on {self.num_keys} cached keys"
        return self.refusal_of_split()

    def refusal_of_split(self) -> str | None:
        """Why the call cannot be split over devices by us."""
        if self.rows % self.row_shards:
            return f"gives each device its rows: the mesh's {self.row_shards} parts do not divide {self.rows} rows"
        if self.num_heads % self.split_kv_heads:
            heads = f"{self.num_heads} heads in {self.num_kv_heads} groups"
            return f"gives each device its heads: mesh.tensor={self.head_shards} does not divide {heads}"
        return None
