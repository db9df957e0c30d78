"""Forward-pass state: inputs shared by all layers, and values that layers pass on (cache, routing, shared keys)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int

from posttrain.batch import RouterStats
from posttrain.kernels.attention.call import Variant
from posttrain.kernels.attention.dispatch import attention
from posttrain.kernels.attention.joined import HeadLanes, NewHeads
from posttrain.kernels.attention.paged import paged_attention, recent_pages
from posttrain.models.activations import Taps
from posttrain.models.cache import KVCache, PagedCache
from posttrain.models.config import Compute, Rope
from posttrain.models.rope import Tables
from posttrain.models.vision.tower import PlacedImages
from posttrain.tree import pytree, replace


@pytree
class Routing:
    """Routing of all M MoE layers, in order."""

    experts: Int[Array, "M B T k"]
    stats: RouterStats


@dataclass(frozen=True, kw_only=True)
class Context:
    """Inputs of one forward pass, shared by all layers."""

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    parents: Int[Array, "B T"] | None
    """Parent segments, as `Batch.parents`; None with a cache."""
    rope: Mapping[Rope, Tables]
    compute: Compute
    experts: Int[Array, "M B T k"] | None
    """Experts to use per MoE layer; the router chooses if None or negative."""
    layer_inputs: Float[Array, "L B T P"] | None
    """Per-layer token inputs beside the residual stream."""
    token_mesh: Mesh | None
    """Mesh that splits the tokens of the residual stream; None with a cache."""
    taps: Taps | None = None
    """Activations to collect."""
    placed: PlacedImages | None = None
    """Images of the rows, with their features."""
    largest: bool = False
    """Return the largest attention logits."""


class LayerIndex(NamedTuple):
    """Layer indices. Traced if a stage has several repeats, except `slot`."""

    slot: int
    """Index of its block among the blocks of all stages; index into the cache."""
    repeat: int | Array
    layer: int | Array
    moe: int | Array
    """Index among the MoE layers, if it is one."""


class StoredKeys(NamedTuple):
    """Keys and values that attention reads, with their positions and segments."""

    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S Hv"]
    positions: Int[Array, "B S"]
    segments: Int[Array, "B S"]
    q_segments: Int[Array, "B T"]


class StoredPages(NamedTuple):
    """Pages that attention reads in place."""

    slot: int
    pages: Float[Array, "R D P *page"]
    repeat: Int[Array, ""]
    table: Int[Array, "D n W"]
    lengths: Int[Array, "D n"]
    mesh: Mesh | None
    lanes: HeadLanes | None
    """None: keys and values interleaved."""
    new: NewHeads | None
    """Joined heads that the kernel itself stores."""


@dataclass
class ForwardState:
    """Mutable state while the layers of one pass are traced: KV cache, shared keys and values, routing."""

    cache: KVCache | PagedCache | None
    kept: dict[str, StoredKeys] = field(default_factory=dict)
    """Keys and values reused by later layers, by name."""
    routing: list[tuple[RouterStats, Int[Array, "B T k"]]] = field(default_factory=list)
    """Router statistics and experts of each MoE layer."""
    projected: dict[str, Float[Array, "B T _N _H"]] = field(default_factory=dict)
    """Own queries, keys and values by name, before RoPE."""
    largest: Float[Array, "B N"] | None = None
    """Largest attention logit of each head in each row, of the layer that is traced."""

    @property
    def fresh(self) -> bool:
        """Return True if the cache is new (prefill from position 0): attention sees only the tokens of this pass."""
        return isinstance(self.cache, KVCache) and self.cache.fresh


def attend(
    q: Float[Array, "B T N H"],
    stored: StoredKeys | StoredPages,
    context: Context,
    state: ForwardState,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    image_ahead: int = 0,
) -> Float[Array, "B T N Hv"]:
    """Attend to stored keys and values, in rows or in pages."""
    variant = Variant(window=window, scale=scale, soft_cap=soft_cap)
    if isinstance(stored, StoredPages):
        return _attend_to_pages(q, stored, state, sinks, variant)
    # With a cache use "auto": few kernels support one.
    whole = state.cache is None or state.fresh
    images = None
    if image_ahead and context.placed is not None:
        own = context.placed.images
        images = own, own if whole else _by_position(own, context, stored.keys.shape[2])
    attended = attention(
        q,
        stored.keys,
        stored.values,
        q_positions=context.positions,
        k_positions=stored.positions,
        q_segments=stored.q_segments,
        k_segments=stored.segments,
        q_parents=context.parents,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        kernel=context.compute.attention if whole else "auto",
        mesh=context.compute.mesh,
        images=images,
        ahead=image_ahead,
        largest=context.largest,
    )
    state.largest = attended.largest
    return attended.heads


def _by_position(images: Int[Array, "B T"], context: Context, width: int) -> Int[Array, "B S"]:
    """Image of each stored key: an image that is read now is read whole, and of others no query is left."""

    def row(images: Array, places: Array) -> Array:
        return jnp.zeros(width, images.dtype).at[places].set(images, mode="drop")

    return jax.vmap(row)(images, jnp.where(context.segments > 0, context.positions, width))


def store_keys(
    keys: Float[Array, "B K T H"],
    values: Float[Array, "B K T Hv"] | None,
    context: Context,
    state: ForwardState,
    index: LayerIndex,
    *,
    window: int | None,
) -> StoredKeys | StoredPages:
    """Write new keys and values into the cache, if any, and return everything that attention within `window` may read.

    Without `values` the cache holds keys only.
    """
    cache = state.cache
    new = None
    if isinstance(cache, KVCache) and values is not None:
        keys, values = cache.rounded(keys, values)
    if cache is not None:
        # Padding is written out of range, where it is dropped.
        places = jnp.where(context.segments > 0, context.positions, cache.width)
        if isinstance(cache, PagedCache) and cache.layout == "joined":
            new = cache.joined(index.slot, keys, values, places)
        else:
            state.cache = cache = cache.write(index.slot, index.repeat, keys, values, places)
    if cache is None or state.fresh:
        segments = context.segments
        return StoredKeys(keys, keys if values is None else values, context.positions, segments, segments)
    if isinstance(cache, PagedCache) and cache.layout != "gather":
        size = keys.shape[3]
        lanes = None if new is None else HeadLanes(keys=size, start=0 if values is None else size, values=size)
        return _pages(cache, context, index, lanes, new)
    # A cache row holds one sequence, so visibility depends on positions only.
    rows = context.positions.shape[0]
    start = jnp.zeros((rows, 1), jnp.int32)
    if isinstance(cache, PagedCache):
        lengths = context.positions[:, -1].reshape(cache.first.shape) + 1
        window = None if window is None else window + context.positions.shape[1] - 1
        table, first = recent_pages(cache.table(index.slot), lengths, cache.page, window)
        own: dict[str, Any] = {"tables": table[:, :, None], "targets": cache.targets[:, :, :1]}
        cache = replace(cache, **own, windowed=(False,) * len(cache.windowed))
        start = first.reshape(rows, 1)
    stored_keys, stored_values = cache.read(index.slot, index.repeat)
    positions = start + jnp.arange(cache.width, dtype=jnp.int32)[None]
    return StoredKeys(
        stored_keys.astype(keys.dtype),
        (stored_keys if stored_values is None else stored_values).astype(keys.dtype),
        positions,
        jnp.ones_like(positions),
        jnp.ones_like(context.segments),
    )


def _pages(
    cache: PagedCache, context: Context, index: LayerIndex, lanes: HeadLanes | None, new: NewHeads | None
) -> StoredPages:
    pages = cache.keys[index.slot]
    assert pages is not None
    # Each query counts as a row, with the pages of its own row.
    lengths, queries = context.positions.reshape(cache.first.shape[0], -1) + 1, context.positions.shape[1]
    lengths = jnp.minimum(lengths, cache.width)
    table = cache.table(index.slot)
    table = table if queries == 1 or new is not None else jnp.repeat(table, queries, axis=1)
    mesh = context.compute.mesh if cache.mesh is None else cache.mesh
    repeat = jnp.asarray(index.repeat, jnp.int32)
    return StoredPages(index.slot, pages, repeat, table, lengths, mesh, lanes, new)


def _attend_to_pages(
    q: Float[Array, "B T N H"],
    stored: StoredPages,
    state: ForwardState,
    sinks: Float[Array, " N"] | None,
    variant: Variant,
) -> Float[Array, "B T N Hv"]:
    new, pages, outs = stored.new, stored.pages, []
    if new is None:
        each_query = q.reshape(-1, 1, *q.shape[2:])
        of = stored.repeat, stored.table, stored.lengths, stored.mesh
        out, _ = paged_attention(each_query, pages, *of, None, None, sinks, variant)
        return out.reshape(*q.shape[:3], -1)
    # One after another: the kernel writes the position of a query, which the next one reads.
    lengths = stored.lengths.reshape(*stored.table.shape[:2], -1)
    for n in range(q.shape[1]):
        part = NewHeads(new.heads[:, :, n], new.writes[:, n])
        of = stored.repeat, stored.table, lengths[:, :, n], stored.mesh
        out, pages = paged_attention(q[:, n : n + 1], pages, *of, stored.lanes, part, sinks, variant)
        outs.append(out)
    assert isinstance(state.cache, PagedCache)
    state.cache = state.cache.with_pages(stored.slot, pages)
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1)
