"""The key-value cache: one row per sequence, indexed by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from posttrain.models.config import BlockConfig, LatentAttentionConfig, ModelConfig
from posttrain.tree import pytree, replace, static


@pytree
class KVCache:
    """Keys and values of each block of the stages' patterns, [R, B, K, S, H] for its R repeats: position p of row b
    stands at index p. None: a block that reuses another's, or whose values are part of its keys.

    A position is written before it is first read, so what an earlier sequence left behind never shows.
    """

    keys: tuple[Float[Array, "_R B _K S _H"] | None, ...]
    values: tuple[Float[Array, "_R B _K S _H"] | None, ...]
    fresh: bool = static(default=False)
    """All rows begin with the tokens that come, one after the other: attention need not look into the cache for them,
    and padding may be written, since a position is written again before it is read."""

    @property
    def width(self) -> int:
        """Positions of a row; attention reads all of them."""
        return next(keys for keys in self.keys if keys is not None).shape[3]

    def write(
        self,
        slot: int,
        repeat: int | Int[Array, ""],
        keys: Float[Array, "B K T H"],
        values: Float[Array, "B K T Hv"] | None,
        positions: Int[Array, "B T"],
    ) -> KVCache:
        def put(stored: tuple[Array | None, ...], new: Array) -> tuple[Array | None, ...]:
            array = stored[slot]
            assert array is not None
            if self.fresh:  # all places of the layer
                padded = jnp.pad(new, [(0, 0)] * 2 + [(0, array.shape[3] - new.shape[2]), (0, 0)])
                return (*stored[:slot], array.at[repeat].set(padded.astype(array.dtype)), *stored[slot + 1 :])
            # Row by row: with row numbers among the indices, XLA would bring all rows to every device.
            changed = jax.vmap(row, in_axes=(1, 0, 0), out_axes=1)(array, new.swapaxes(1, 2), positions)
            return (*stored[:slot], changed, *stored[slot + 1 :])

        def row(array: Array, new: Array, positions: Array) -> Array:
            return array.at[repeat, :, positions].set(new.astype(array.dtype), mode="drop")

        return replace(
            self, keys=put(self.keys, keys), values=self.values if values is None else put(self.values, values)
        )

    def read(
        self, slot: int, repeat: int | Int[Array, ""]
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"] | None]:
        keys, values = self.keys[slot], self.values[slot]
        assert keys is not None
        return keys[repeat], None if values is None else values[repeat]


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: np.dtype, *, fresh: bool = False) -> KVCache:
    """Zeros for `rows` sequences of up to `length` tokens."""

    def zeros(size: Callable[[BlockConfig], int | None]) -> tuple[Any, ...]:
        return tuple(
            None
            if size(block) is None
            else jnp.zeros((stage.repeats, rows, block.attention.num_kv_heads, length, size(block)), dtype)
            for stage in config.stages
            for block in stage.blocks
        )

    return KVCache(keys=zeros(_key_size), values=zeros(_value_size), fresh=fresh)


def _key_size(block: BlockConfig) -> int | None:
    attention = block.attention
    if isinstance(attention, LatentAttentionConfig):
        return attention.kv_rank + attention.rope_dim
    return None if attention.reuses is not None else attention.head_dim


def _value_size(block: BlockConfig) -> int | None:
    attention = block.attention
    if isinstance(attention, LatentAttentionConfig) or attention.reuses is not None:
        return None
    return attention.head_dim
