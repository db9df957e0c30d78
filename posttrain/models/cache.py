"""KV cache with one row per sequence, indexed by position."""

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
    """KV cache: keys [R, B, K, H, S] and values [R, B, K, S, H] per block of the stages' patterns and its R repeats.

    Position p of row b is stored at index p of S. This layout is the fastest to read on CPU. None: the block reuses
    another's keys and values, or its values are part of its keys (latent attention), stored as [R, B, K, S, H].

    Each position is written before it is read, so stale values of an earlier sequence are never visible.
    """

    keys: tuple[Float[Array, "_R B _K _1 _2"] | None, ...]
    values: tuple[Float[Array, "_R B _K S _H"] | None, ...]
    fresh: bool = static(default=False)
    """Prefill from position 0 in every row: attention uses the new keys and values only, and padding may be written,
    since each position is overwritten before it is read."""

    @property
    def width(self) -> int:
        """Positions per row; attention reads all of them."""
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
            if self.fresh:  # all positions of the layer
                padded = jnp.pad(new, [(0, 0)] * 2 + [(0, self.width - new.shape[2]), (0, 0)]).astype(array.dtype)
                changed = array.at[repeat].set(padded.swapaxes(2, 3) if last else padded)
            else:
                # Row by row: with row numbers among the indices, XLA would gather all rows on every device.
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
    """Allocate zeros for `rows` sequences of up to `length` tokens."""

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
