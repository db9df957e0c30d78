"""The key-value cache: one row per sequence, indexed by position."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from posttrain.models.config import BlockConfig, LatentAttentionConfig, ModelConfig
from posttrain.tree import pytree, replace, static


@pytree
class KVCache:
    """Keys [R, B, K, H, S] and values [R, B, K, S, H] of each block of the stages' patterns, for its R repeats:
    position p of row b stands at index p of S. So CPUs read both fastest. None: a block that reuses another's, or whose
    values are part of its keys, which then stand as [R, B, K, S, H].

    A position is written before it is first read, so what an earlier sequence left behind never shows.
    """

    keys: tuple[Float[Array, "_R B _K _1 _2"] | None, ...]
    values: tuple[Float[Array, "_R B _K S _H"] | None, ...]
    fresh: bool = static(default=False)
    """All rows begin with the tokens that come, one after the other: attention need not look into the cache for them,
    and padding may be written, since a position is written again before it is read."""

    @property
    def width(self) -> int:
        """Positions of a row; attention reads all of them."""
        return next(array for array in (*self.values, *self.keys) if array is not None).shape[3]

    def write(
        self,
        slot: int,
        repeat: int | Int[Array, ""],
        keys: Float[Array, "B K T H"],
        values: Float[Array, "B K T Hv"] | None,
        positions: Int[Array, "B T"],
    ) -> KVCache:
        def put(stored: tuple[Array | None, ...], new: Array, *, last: bool) -> tuple[Array | None, ...]:
            array = stored[slot]
            assert array is not None
            if self.fresh:  # all places of the layer
                padded = jnp.pad(new, [(0, 0)] * 2 + [(0, self.width - new.shape[2]), (0, 0)]).astype(array.dtype)
                changed = array.at[repeat].set(padded.swapaxes(2, 3) if last else padded)
            else:
                # Row by row: with row numbers among the indices, XLA would bring all rows to every device.
                place = partial(row, last=last)
                changed = jax.vmap(place, in_axes=(1, 0, 0), out_axes=1)(array, new.swapaxes(1, 2), positions)
            return (*stored[:slot], changed, *stored[slot + 1 :])

        def row(array: Array, new: Array, positions: Array, *, last: bool) -> Array:
            places = array.at[repeat, :, :, positions] if last else array.at[repeat, :, positions]
            return places.set(new.astype(array.dtype), mode="drop")

        if values is None:
            return replace(self, keys=put(self.keys, keys, last=False))
        return replace(self, keys=put(self.keys, keys, last=True), values=put(self.values, values, last=False))

    def read(
        self, slot: int, repeat: int | Int[Array, ""]
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"] | None]:
        keys, values = self.keys[slot], self.values[slot]
        assert keys is not None
        return (keys[repeat], None) if values is None else (keys[repeat].swapaxes(2, 3), values[repeat])


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: np.dtype, *, fresh: bool = False) -> KVCache:
    """Zeros for `rows` sequences of up to `length` tokens."""

    keys: list[Array | None] = []
    values: list[Array | None] = []
    for stage in config.stages:
        for block in stage.blocks:
            key, value = _key_size(block), _value_size(block)
            lead = stage.repeats, rows, block.attention.num_kv_heads
            by_position = (length, key) if value is None else (key, length)
            keys.append(None if key is None else jnp.zeros((*lead, *by_position), dtype))
            values.append(None if value is None else jnp.zeros((*lead, length, value), dtype))
    return KVCache(keys=tuple(keys), values=tuple(values), fresh=fresh)


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
