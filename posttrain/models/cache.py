"""The key-value cache: one row per sequence, indexed by position."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from posttrain.models.config import ModelConfig
from posttrain.tree import pytree, replace


@pytree
class KVCache:
    """Keys and values per layer, [B, K, S, H]: position p of row b stands at index p.

    A position is written before it is first read, so what an earlier sequence left behind never shows.
    """

    keys: tuple[Float[Array, "B K S H"], ...]
    values: tuple[Float[Array, "B K S H"], ...]

    @property
    def width(self) -> int:
        """Positions of a row; attention reads all of them."""
        return self.keys[0].shape[2]

    def write(
        self, layer: int, keys: Float[Array, "B T K H"], values: Float[Array, "B T K H"], positions: Int[Array, "B T"]
    ) -> KVCache:
        rows = jnp.arange(positions.shape[0])[:, None]

        def put(stored: Array, new: Array) -> Array:
            return stored.at[rows, :, positions].set(new.astype(stored.dtype), mode="drop")

        return replace(
            self,
            keys=(*self.keys[:layer], put(self.keys[layer], keys), *self.keys[layer + 1 :]),
            values=(*self.values[:layer], put(self.values[layer], values), *self.values[layer + 1 :]),
        )

    def read(self, layer: int) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
        return self.keys[layer], self.values[layer]

    def take(self, rows: Int[Array, " R"], width: int) -> KVCache:
        """A copy of some rows, cut to `width` positions: decoding reads it whole, so short sequences cost little."""
        keys, values = jax.tree.map(lambda stored: stored[rows, :, :width], (self.keys, self.values))
        return KVCache(keys=keys, values=values)

    def put(self, rows: Int[Array, " R"], taken: KVCache) -> KVCache:
        """`taken` back where `take` found it; `rows` must differ."""

        def put(stored: Array, new: Array) -> Array:
            return stored.at[rows, :, : taken.width].set(new, unique_indices=True)

        keys, values = jax.tree.map(put, (self.keys, self.values), (taken.keys, taken.values))
        return replace(self, keys=keys, values=values)

    def insert(
        self, other: KVCache, targets: Int[Array, " N"], sources: Int[Array, " N"], count: Int[Array, ""]
    ) -> KVCache:
        """Row `sources[i]` of `other` into the first positions of row `targets[i]`, for i < `count`."""

        def body(i: Array, cache: tuple[Any, Any]) -> tuple[Any, Any]:
            def put(stored: Array, new: Array) -> Array:
                row = jax.lax.dynamic_slice_in_dim(new, sources[i], 1)
                return jax.lax.dynamic_update_slice_in_dim(stored, row, targets[i], 0)

            # `other` is no longer than this cache, so an update that starts at position 0 fits.
            return jax.tree.map(put, cache, (other.keys, other.values))

        keys, values = jax.lax.fori_loop(0, count, body, (self.keys, self.values))
        return replace(self, keys=keys, values=values)


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: jnp.dtype) -> KVCache:
    """Zeros for `rows` sequences of up to `length` tokens."""
    shapes = [(rows, b.attention.num_kv_heads, length, b.attention.head_dim) for b in config.blocks]
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for shape in shapes),
        values=tuple(jnp.zeros(shape, dtype) for shape in shapes),
    )
