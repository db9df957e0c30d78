"""What the layers of one forward pass share, and what they leave for each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from posttrain.batch import RouterStats
from posttrain.config import AttentionKernel
from posttrain.models.cache import KVCache
from posttrain.models.config import Compute, Rope
from posttrain.models.rope import Tables
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
    rope: Mapping[Rope, Tables]
    compute: Compute
    experts: Int[Array, "M B T k"] | None
    """Experts to use in each mixture-of-experts layer; the router's own choice where they are None or negative."""
    layer_inputs: Float[Array, "L B T P"] | None
    """What each layer gets of the tokens beside the residual stream."""


class Place(NamedTuple):
    """Where a layer stands. Traced where layers are scanned, but for `slot`."""

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


@dataclass
class Tape:
    """What changes while the layers of one pass are traced: the cache, and what layers leave for later."""

    cache: KVCache | None
    kept: dict[str, Stored] = field(default_factory=dict)
    """Keys and values that later layers reuse, by name."""
    routing: list[tuple[RouterStats, Int[Array, "B T k"]]] = field(default_factory=list)
    """Of each mixture-of-experts layer."""


def attention_kernel(context: Context, tape: Tape) -> AttentionKernel:
    """The one that the run chose, for whole rows; with a cache the fastest, since few can read one."""
    return context.compute.attention if tape.cache is None else "auto"


def store(
    keys: Float[Array, "B K T H"], values: Float[Array, "B K T Hv"] | None, context: Context, tape: Tape, place: Place
) -> Stored:
    """New keys and values put into the cache, if there is one, and all that attention may now see.

    Without `values` the cache holds keys only.
    """
    if tape.cache is None:
        segments = context.segments
        return Stored(keys, keys if values is None else values, context.positions, segments, segments)
    cache = tape.cache
    # Padding goes out of range, where it is dropped.
    places = jnp.where(context.segments > 0, context.positions, cache.width)
    tape.cache = cache = cache.write(place.slot, place.repeat, keys, values, places)
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
