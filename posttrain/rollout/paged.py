"""The paged cache on the device: blocks, copied into rows for a dispatch and back after it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Float, Int

from posttrain.config import ROW_AXES
from posttrain.mesh import row_shards
from posttrain.models.cache import KVCache, empty_cache
from posttrain.models.config import ModelConfig
from posttrain.rollout.blocks import BLOCK, lanes_of
from posttrain.tree import pytree


@pytree
class Pool:
    """P blocks of keys and values in each of D lanes, [R, D, P, K, BLOCK, H]. A lane is a shard of the data axes: its
    rows use its blocks only, so that decoding needs no communication between lanes.

    Fields as in `KVCache`.
    """

    keys: tuple[Float[Array, "_R D P _K 16 _H"] | None, ...]
    values: tuple[Float[Array, "_R D P _K 16 _H"] | None, ...]

    def gather(self, table: Int[Array, "D n W"]) -> KVCache:
        """Rows of W blocks each. Attention reads every row whole at every token: blocks next to each other cost a
        copy now and nothing then."""

        def lane(blocks: Array, table: Array) -> Array:
            repeats, _, heads, _, size = blocks.shape
            rows = blocks[:, table].swapaxes(2, 3)
            return rows.reshape(repeats, table.shape[0], heads, -1, size)

        def gathered(stored: Array) -> Array:
            rows = jax.vmap(lane, in_axes=(1, 0), out_axes=1)(stored, table)
            return rows.reshape(stored.shape[0], -1, *rows.shape[3:])

        return KVCache(keys=jax.tree.map(gathered, self.keys), values=jax.tree.map(gathered, self.values))

    def scatter(self, rows: KVCache, first: Int[Array, "D n"], targets: Int[Array, "D n M"]) -> Pool:
        """Blocks `first`, `first` + 1, ... of each row into the blocks `targets`, which differ within a lane; what is
        out of range is left out."""
        lanes, per_lane, count = targets.shape
        indices = first[:, :, None] + jnp.arange(count)[None, None]

        def lane(blocks: Array, rows: Array, indices: Array, targets: Array) -> Array:
            repeats, _, heads, size, head_dim = blocks.shape
            split = rows.reshape(repeats, per_lane, heads, -1, size, head_dim)
            places = jnp.minimum(indices, split.shape[3] - 1)
            new = jax.vmap(lambda row, places: row[:, :, places], in_axes=(1, 0), out_axes=1)(split, places)
            return blocks.at[:, targets].set(new.swapaxes(2, 3), mode="drop")

        def scattered(stored: Array, new: Array) -> Array:
            new = new.reshape(new.shape[0], lanes, per_lane, *new.shape[2:])
            return jax.vmap(lane, in_axes=(1, 1, 0, 0), out_axes=1)(stored, new, indices, targets)

        return Pool(
            keys=jax.tree.map(scattered, self.keys, rows.keys), values=jax.tree.map(scattered, self.values, rows.values)
        )


def empty_pool(config: ModelConfig, dtype: jnp.dtype, placement: Sharding, *, lanes: int, blocks: int) -> Pool:
    """Zeros where the weights are: lanes over the data axes, heads over `tensor` where they divide."""
    like = jax.eval_shape(lambda: empty_cache(config, lanes * blocks, BLOCK, dtype))

    def zeros(rows: jax.ShapeDtypeStruct) -> Array:
        repeats, _, heads, size, head_dim = rows.shape
        shape = (repeats, lanes, blocks, heads, size, head_dim)
        return jnp.zeros(shape, rows.dtype, device=_pool_sharding(placement, shape))

    return Pool(keys=jax.tree.map(zeros, like.keys), values=jax.tree.map(zeros, like.values))


def num_lanes(placement: Sharding, slots: int) -> int:
    """See `lanes_of`."""
    return lanes_of(slots, row_shards(placement.mesh) if isinstance(placement, NamedSharding) else 1)


def _pool_sharding(weights: Sharding, shape: Sequence[int]) -> Sharding:
    if not isinstance(weights, NamedSharding):
        return weights
    lanes = ROW_AXES if shape[1] == row_shards(weights.mesh) else None
    heads = "tensor" if shape[3] % weights.mesh.shape["tensor"] == 0 else None
    return NamedSharding(weights.mesh, PartitionSpec(None, lanes, None, heads))
