"""What the layers of one forward pass share, and what they leave for each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int

from posttrain.batch import RouterStats
from posttrain.kernels.attention import Variant, attention, ragged_paged_attention
from posttrain.models.cache import KVCache
from posttrain.models.config import Compute, Rope
from posttrain.models.pages import PagedCache
from posttrain.models.rope import Tables
from posttrain.models.taps import Taps
from posttrain.tree import pytree


@pytree
class Routing:
    """Of all M mixture-of-experts layers, in order."""

    experts: Int[Array, "M B T k"]
    stats: RouterStats


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every layer of one forward pass shares."""

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    parents: Int[Array, "B T"] | None
    """As `Batch.parents`; None with a cache."""
    rope: Mapping[Rope, Tables]
    compute: Compute
    experts: Int[Array, "M B T k"] | None
    """Experts to use in each mixture-of-experts layer; the router's own choice where they are None or negative."""
    layer_inputs: Float[Array, "L B T P"] | None
    """What each layer gets of the tokens beside the residual stream."""
    taps: Taps | None = None
    """What layers hand out beside their results."""


class Place(NamedTuple):
    """Where a layer stands. Traced where a stage has several repeats, but for `slot`."""

    slot: int
    """In the cache: the number of its block among the blocks of all stages."""
    repeat: int | Array
    layer: int | Array
    moe: int | Array
    """Its number among the mixture-of-experts layers, if it is one."""


class Stored(NamedTuple):
    """Keys and values as attention reads them, and which positions and segments they are of."""

    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S Hv"]
    positions: Int[Array, "B S"]
    segments: Int[Array, "B S"]
    q_segments: Int[Array, "B T"]


class StoredPages(NamedTuple):
    """Where ragged paged attention finds keys and values: its arguments."""

    pages: Float[Array, "R D P S K2 H"]
    repeat: Int[Array, ""]
    table: Int[Array, "D n W"]
    lengths: Int[Array, "D n"]
    mesh: Mesh | None


@dataclass
class Tape:
    """What changes while the layers of one pass are traced: the cache, and what layers leave for later."""

    cache: KVCache | PagedCache | None
    kept: dict[str, Stored] = field(default_factory=dict)
    """Keys and values that later layers reuse, by name."""
    routing: list[tuple[RouterStats, Int[Array, "B T k"]]] = field(default_factory=list)
    """Of each mixture-of-experts layer."""
    projected: dict[str, Float[Array, "B T _N _H"]] = field(default_factory=dict)
    """The layer's own queries, keys and values by name, before RoPE."""

    @property
    def fresh(self) -> bool:
        """Whether the cache is for rows that begin here: attention sees but the tokens of this pass."""
        return isinstance(self.cache, KVCache) and self.cache.fresh


def attend(
    q: Float[Array, "B T N H"],
    stored: Stored | StoredPages,
    context: Context,
    tape: Tape,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attention to what a layer has stored, in rows or in pages."""
    variant = Variant(window=window, scale=scale, soft_cap=soft_cap)
    if isinstance(stored, StoredPages):
        assert sinks is None, "ragged paged attention knows no sinks"
        return ragged_paged_attention(q, *stored, variant)
    # With a cache the fastest: few can read one.
    whole = tape.cache is None or tape.fresh
    return attention(
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
    )


def store(
    keys: Float[Array, "B K T H"], values: Float[Array, "B K T Hv"] | None, context: Context, tape: Tape, place: Place
) -> Stored | StoredPages:
    """New keys and values put into the cache, if there is one, and all that attention may now see.

    Without `values` the cache holds keys only.
    """
    cache = tape.cache
    if cache is not None:
        # Padding goes out of range, where it is dropped.
        places = jnp.where(context.segments > 0, context.positions, cache.width)
        tape.cache = cache = cache.write(place.slot, place.repeat, keys, values, places)
    if cache is None or tape.fresh:
        segments = context.segments
        return Stored(keys, keys if values is None else values, context.positions, segments, segments)
    if isinstance(cache, PagedCache) and cache.together:
        return _pages(cache, context, place)
    stored_keys, stored_values = cache.read(place.slot, place.repeat)
    # A cache row holds one sequence, so position alone decides what a query sees.
    rows = context.positions.shape[0]
    positions = jnp.broadcast_to(jnp.arange(cache.width, dtype=jnp.int32), (rows, cache.width))
    return Stored(
        stored_keys.astype(keys.dtype),
        (stored_keys if stored_values is None else stored_values).astype(keys.dtype),
        positions,
        jnp.ones_like(positions),
        jnp.ones_like(context.segments),
    )


def _pages(cache: PagedCache, context: Context, place: Place) -> StoredPages:
    pages = cache.keys[place.slot]
    assert pages is not None and context.positions.shape[1] == 1, "one token at a time"
    lengths = context.positions.reshape(cache.first.shape) + 1
    return StoredPages(pages, jnp.asarray(place.repeat, jnp.int32), cache.table, lengths, cache.mesh)
