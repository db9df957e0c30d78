"""The two compiled programs of the native engine, prefill and decode; each shape is compiled once."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Bool, Float, Int

from posttrain.config import ROW_AXES
from posttrain.mesh import row_shards
from posttrain.models.cache import KVCache, empty_cache
from posttrain.models.config import ModelConfig
from posttrain.models.context import Routing
from posttrain.models.decoder import Decoder, decoding_config
from posttrain.rollout.sampling import Sampling, TopLogps, sample, score, top_width
from posttrain.tree import pytree
from posttrain.weights.state import ModelWeights, Weights


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The weights in use: references to a model's arrays, never copies."""

    source: ModelWeights
    arrays: Weights
    version: int
    layout: Hashable
    """What compiled programs depend on."""

    @classmethod
    def of(cls, source: ModelWeights, arrays: Weights, version: int) -> Loaded:
        layout = frozenset((path, w.shape, w.dtype, _devices(w)) for path, w in arrays.items())
        return cls(source=source, arrays=arrays, version=version, layout=(nnx.graphdef(source.model), layout))


def _devices(array: Array) -> Hashable:
    """On one device every sharding is the same, whatever its type."""
    devices = array.sharding.device_set
    return array.sharding if len(devices) > 1 else frozenset(devices)


@pytree
class Prompts:
    """The prompts of one prefill call, without their last tokens: N of up to T tokens, for up to S slots."""

    tokens: Int[Array, "N T"]
    lengths: Int[Array, " N"]
    slots: Int[Array, " S"]
    sources: Int[Array, " S"]
    """`slots[i]` gets row `sources[i]`, for i < `count`."""
    count: Int[Array, ""]
    scored: Scored | None
    """None where no request wants log-probabilities of its prompt."""


@pytree
class Scored:
    targets: Int[Array, "N T"]
    """The token after each of the prompt's."""
    temperature: Float[Array, " N"]


@pytree
class Prefilled:
    """What a prefill call returns beside the cache."""

    experts: Int[Array, "N T M k"] | None
    logps: Float[Array, "N T"] | None
    """Of `Scored.targets`."""


@pytree
class Rows:
    """The sequences of one decode call; R rows, which need not be all slots."""

    slots: Int[Array, " R"]
    """Where in the cache each row lives: rising, so that with all slots row r is slot r."""
    tokens: Int[Array, " R"]
    """The newest token, whose keys and values are not in the cache yet."""
    positions: Int[Array, " R"]
    ends: Int[Array, " R"]
    """First position that the sample may not take."""
    active: Bool[Array, " R"]
    sampling: Sampling
    stop_ids: Int[Array, "R E"]
    """-1 where there are fewer than E."""


@pytree
class Chunk:
    """What one decode call sampled: the first `counts[r]` steps of row r."""

    tokens: Int[Array, "steps R"]
    logps: Float[Array, "steps R"]
    kept_logps: Float[Array, "steps R"]
    counts: Int[Array, " R"]
    top: TopLogps | None
    """None where all rows are plain."""
    experts: Int[Array, "steps R M k"] | None
    """Of the token that each step read, which is the one before the token it sampled."""


def prefill(model: Decoder, cache: KVCache, prompts: Prompts, *, record: bool) -> tuple[KVCache, Prefilled]:
    """Run prompts through the decoder and copy their keys and values to every slot that wants them."""
    rows, length = prompts.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    segments = (positions < prompts.lengths[:, None]).astype(jnp.int32)
    model = model.for_decoding()
    empty = empty_cache(model.config, rows, length, model.compute.dtype)
    hidden, filled, routing = model.forward(prompts.tokens, positions, segments, empty)
    assert filled is not None
    beside = Prefilled(
        experts=_recorded(routing) if record else None,
        logps=None if prompts.scored is None else _prompt_logps(model, hidden, prompts.scored),
    )
    return cache.insert(filled, prompts.slots, prompts.sources, prompts.count), beside


def _prompt_logps(model: Decoder, hidden: Float[Array, "N T D"], scored: Scored) -> Float[Array, "N T"]:
    rows, length = scored.targets.shape
    temperature = jnp.repeat(scored.temperature, length)
    flat = hidden.reshape(rows * length, -1), scored.targets.reshape(-1)
    return score(model.logits, *flat, temperature, vocab_size=model.config.vocab_size).reshape(rows, length)


def _recorded(routing: Routing | None) -> Int[Array, "B T M k"]:
    """The chosen experts, small and by token."""
    assert routing is not None
    return jnp.moveaxis(routing.experts, 0, 2).astype(jnp.int16)


def decode(
    model: Decoder, cache: KVCache, rows: Rows, stop_at: Int[Array, ""], *, width: int, steps: int, record: bool
) -> tuple[KVCache, Chunk]:
    """Sample up to `steps` tokens of every active row; pause when no more than `stop_at` rows are active.

    Works on a small copy of the rows' caches, `width` positions of each: read whole at every token, that costs less
    than reading slices of the large one. Every active row must have `steps` positions left below `width`, or reach
    its end.
    """
    model = model.for_decoding()
    num_rows = rows.tokens.shape[0]
    whole = num_rows == cache.rows and width == cache.width
    near = cache if whole else cache.take(rows.slots, width)

    def active_left(carry: tuple[Any, ...]) -> Array:
        step, active = carry[0], carry[1]
        return (step < steps) & (jnp.sum(active) > stop_at)

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, active, tokens, positions, near, tally, chunk = carry
        ones = jnp.ones((num_rows, 1), jnp.int32)
        hidden, near, routing = model.forward(tokens[:, None], positions[:, None], ones, near)
        drawn = sample(model.logits(hidden)[:, 0], positions + 1, rows.sampling, tally)
        new = drawn.tokens
        tally = None if tally is None else tally.count(new, active)
        chunk = Chunk(
            tokens=chunk.tokens.at[step].set(new),
            logps=chunk.logps.at[step].set(drawn.logps),
            kept_logps=chunk.kept_logps.at[step].set(drawn.kept_logps),
            counts=chunk.counts + active,
            top=jax.tree.map(lambda stored, x: stored.at[step].set(x), chunk.top, drawn.top),
            experts=None if chunk.experts is None else chunk.experts.at[step].set(_recorded(routing)[:, 0]),
        )
        tokens, positions = jnp.where(active, new, tokens), jnp.where(active, positions + 1, positions)
        stopped = jnp.any(new[:, None] == rows.stop_ids, axis=-1)
        return step + 1, active & ~stopped & (positions + 1 < rows.ends), tokens, positions, near, tally, chunk

    tally = rows.sampling.tally(model.config.vocab_size)
    chunk = _empty_chunk(model.config, (steps, num_rows), top=tally is not None, record=record)
    carry = (jnp.int32(0), rows.active, rows.tokens, rows.positions, near, tally, chunk)
    *_, near, _, chunk = jax.lax.while_loop(active_left, body, carry)
    return near if whole else cache.put(rows.slots, near), chunk


def _empty_chunk(config: ModelConfig, lead: tuple[int, int], *, top: bool, record: bool) -> Chunk:
    width = top_width(config.vocab_size)
    return Chunk(
        tokens=jnp.zeros(lead, jnp.int32),
        logps=jnp.zeros(lead, jnp.float32),
        kept_logps=jnp.zeros(lead, jnp.float32),
        counts=jnp.zeros(lead[1], jnp.int32),
        top=TopLogps(tokens=jnp.zeros((*lead, width), jnp.int32), logps=jnp.zeros((*lead, width))) if top else None,
        experts=jnp.zeros((*lead, len(config.mixtures), config.mixtures[0].top_k), jnp.int16) if record else None,
    )


class Programs:
    """Compiled programs by what they were compiled for. `record`: they also return the routing of what they read."""

    def __init__(self, *, record: bool) -> None:
        self._record = record
        self._compiled: dict[Hashable, Any] = {}
        self.compile_s = 0.0

    def __len__(self) -> int:
        return len(self._compiled)

    def prefill(self, loaded: Loaded, cache: KVCache, prompts: Prompts) -> tuple[KVCache, Prefilled]:
        function = partial(prefill, record=self._record)
        return self._call(("prefill", prompts.tokens.shape, prompts.scored is None), function, loaded, cache, prompts)

    def decode(
        self, loaded: Loaded, cache: KVCache, rows: Rows, stop_at: int, *, width: int, steps: int
    ) -> tuple[KVCache, Chunk]:
        function = partial(decode, width=width, steps=steps, record=self._record)
        return self._call(
            ("decode", rows.stop_ids.shape, rows.sampling.processors is None, width, steps),
            function,
            loaded,
            cache,
            rows,
            np.int32(stop_at),
        )

    def _call(self, key: Hashable, function: Callable[..., Any], loaded: Loaded, cache: KVCache, *args: Any) -> Any:
        key = (key, loaded.layout)
        if key not in self._compiled:
            start = time.perf_counter()
            source = loaded.source  # not `loaded`, whose arrays would live as long as the program

            def bound(weights: Weights, cache: KVCache, *args: Any) -> Any:
                return function(source.bind(weights), cache, *args)

            placed = jax.tree.map(lambda x: x.sharding, cache)
            program = jax.jit(bound, donate_argnums=1, out_shardings=(placed, None))
            self._compiled[key] = program.lower(loaded.arrays, cache, *args).compile()
            self.compile_s += time.perf_counter() - start
        return self._compiled[key](loaded.arrays, cache, *args)


def empty_slots(loaded: Loaded, slots: int, length: int) -> KVCache:
    """An empty cache where the weights are: slots over the data axes, heads over `tensor`, where they divide."""
    model = loaded.source.model
    cache = empty_cache(decoding_config(model.config), slots, length, model.compute.dtype)
    placement = next(iter(loaded.arrays.values())).sharding
    return jax.tree.map(lambda x: jax.device_put(x, _cache_sharding(placement, x.shape)), cache)


def _cache_sharding(weights: Sharding, shape: Sequence[int]) -> Sharding:
    if not isinstance(weights, NamedSharding):
        return weights
    slots = ROW_AXES if shape[1] % row_shards(weights.mesh) == 0 else None
    heads = "tensor" if shape[2] % weights.mesh.shape["tensor"] == 0 else None
    return NamedSharding(weights.mesh, PartitionSpec(None, slots, heads))
