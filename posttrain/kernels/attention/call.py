"""Attention call: operands, mask inputs, and the static properties that kernel selection depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax import Array
from jaxtyping import Float, Int

MASK_BYTES = 256 << 20
"""Maximum size of a materialized mask; beyond it, kernels that compute the mask per block need no memory for it."""


class MaskInputs(NamedTuple):
    """Positions, segments and parents from which the attention mask is computed."""

    q_positions: Int[Array, "B T"]
    k_positions: Int[Array, "B S"]
    q_segments: Int[Array, "B T"]
    k_segments: Int[Array, "B S"]
    q_parents: Int[Array, "B T"] | None
    """Parent segment of the query's segment, as `Batch.parents`; 0 for none."""


class Operands(NamedTuple):
    """Arrays of one attention call."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S Hv"]
    mask_inputs: MaskInputs
    sinks: Float[Array, " N"] | None


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Logit transform and window of one attention call."""

    window: int | None
    scale: float
    soft_cap: float | None


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Static properties of one attention call."""

    platform: str
    rows: int
    num_queries: int
    """Queries of a row on one device."""
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    soft_cap: float | None
    sinks: bool
    parents: bool
    """Some segments have a parent segment."""
    same_tokens: bool
    """Queries and keys are the same tokens in the same order: no KV cache."""
    row_shards: int
    head_shards: int
    token_shards: int
    """Number of devices that split the queries of a row; more than 1 only without a KV cache."""
    tokamax: bool
    """True if the `tokamax` package is installed."""
    compute_capability: float | None
    """GPU compute capability, such as 9.0."""

    @property
    def kind(self) -> Literal["decode", "prefill", "rows"]:
        if self.same_tokens and self.token_shards > 1:
            return "rows"
        if self.num_queries == 1:
            return "decode"
        return "rows" if self.same_tokens else "prefill"

    @property
    def num_logits(self) -> int:
        return self.rows * self.num_heads * self.num_queries * self.num_keys

    @property
    def mask_bytes(self) -> int:
        """Bytes of a materialized mask on the device with the most rows."""
        return -(-self.rows // self.row_shards) * self.num_queries * self.num_keys

    @property
    def split_kv_heads(self) -> int:
        """Number of KV heads after repeating each until they split evenly over devices."""
        return math.lcm(self.num_kv_heads, self.head_shards)

    def mask_refusal(self) -> str | None:
        """Return why a kernel that needs a materialized mask of packed rows (T^2 bytes per row) cannot serve; None if
        it can."""
        if self.mask_bytes <= MASK_BYTES:
            return None
        return f"needs a materialized mask, here of {self.mask_bytes >> 20:,} MiB, maximum {MASK_BYTES >> 20} MiB"

    def rows_refusal(self) -> str | None:
        """Return why a kernel without KV cache support that runs under `jax.shard_map` cannot serve; None if it can."""
        if self.kind != "rows":
            return (
                f"needs packed rows without a KV cache, got {self.num_queries} queries on {self.num_keys} cached keys"
            )
        return self.split_refusal()

    def split_refusal(self) -> str | None:
        """Return why `jax.shard_map` cannot split the call over devices; None if it can."""
        if self.rows % self.row_shards:
            return f"splits rows over devices: the mesh's {self.row_shards} row shards do not divide {self.rows} rows"
        if self.num_heads % self.split_kv_heads:
            heads = f"{self.num_heads} heads in {self.num_kv_heads} groups"
            return f"splits heads over devices: mesh.tensor={self.head_shards} does not divide {heads}"
        return None
