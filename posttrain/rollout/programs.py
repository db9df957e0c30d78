"""Programs of the native engine, prefill and decode, and the buckets of shapes that they are compiled for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int

from posttrain.batch import ImageFeatures
from posttrain.kernels.platform import platform_of, traced_for
from posttrain.mesh import by_rows, devices_of, mesh_of_arrays
from posttrain.models.adapter import choose_slots
from posttrain.models.cache import KVCache, empty_cache
from posttrain.models.decoder import Decoder
from posttrain.models.vision.tower import ImageInputs, ImagePatches
from posttrain.rollout.blocks import BLOCK, blocks_for
from posttrain.rollout.decode_weights import DecodeLayout, DecodeWeights, DecodeWeightsCache, Loaded
from posttrain.rollout.decoding import DecodedTokens, DecodeRows, decode, recorded
from posttrain.rollout.paged import Pool
from posttrain.rollout.sampling import TopLogps, score
from posttrain.rollout.scheduler import MIN_SHARED, PROMPT_CHUNK
from posttrain.rollout.speculative import SpeculativeRows, speculate
from posttrain.rollout.types import SamplingParams
from posttrain.rollout.vision import PromptFeatures, encode
from posttrain.runtime.xla import Recent, compile_options
from posttrain.tree import pytree, replace, static

MAX_COMPILERS = 8
"""Programs that are compiled at once; each takes host memory meanwhile."""


@pytree
class PromptPieces:
    """Pieces of prompts, up to T tokens in each of N = D n rows, those of lane 0 first."""

    tokens: Int[Array, "N T"]
    starts: Int[Array, " N"]
    """Positions of the first tokens, each at the start of a block."""
    lengths: Int[Array, " N"]
    context: Int[Array, "D n G W"] | None
    """The blocks of each row before its start, see `Pool`. None: all rows start at 0."""
    targets: Int[Array, "D n G M"]
    """The blocks that get the keys and values; out of range where there is none to write."""
    scored: ScoredPrompts | None
    """None where no request wants log-probabilities of its prompt."""
    adapters: Int[Array, " N"] | None
    """Adapter slot of each row; -1: none. None in an engine without adapters."""
    images: PromptFeatures | None = None
    """None where no piece has images, nor stands behind some that its positions depend on."""


@pytree
class ScoredPrompts:
    targets: Int[Array, "N T"]
    """The token after each of the prompt's."""
    temperature: Float[Array, " N"]
    top: bool = static()
    """Return the most probable tokens at each place too."""


@pytree
class Prefilled:
    """Results of a prefill call beside the pool."""

    experts: Int[Array, "N T M k"] | None
    logps: Float[Array, "N T"] | None
    """Log-probabilities of `ScoredPrompts.targets`."""
    top: TopLogps | None
    """Most probable tokens at their places; None unless requested."""
    hidden: Float[Array, "N W D"] | None
    """Hidden states of each piece's last tokens, the latest last; None without a block drafter."""


def prefill(
    model: Decoder, pool: Pool, prompts: PromptPieces, *, record: bool, window: int, mesh: Mesh | None
) -> tuple[Pool, Prefilled]:
    """Run pieces of prompts through the decoder, over what the pool holds of them, and put them into it. `window`:
    hidden states to return of each piece.

    The decoder is one of `Decoder.for_decoding`, here and in `decode`.
    """
    rows, length = prompts.tokens.shape
    prompts = by_rows(prompts, mesh)
    choose_slots(model, prompts.adapters)
    offsets = jnp.arange(length, dtype=jnp.int32)[None]
    positions = prompts.starts[:, None] + offsets
    segments = (offsets < prompts.lengths[:, None]).astype(jnp.int32)
    if prompts.context is None:
        empty = empty_cache(model.config, rows, length, model.compute.dtype, fresh=True)
        near = by_rows(replace(empty, kind=pool.kind), mesh, dim=1)
    else:
        near = pool.gather(prompts.context)
    placed = turned = None
    if (images := prompts.images) is not None:
        assert model.tower is not None
        rows_of = jnp.where(images.images > 0, offsets + 1, 0)
        encoded = ImageFeatures(features=images.features, deeper=images.deeper)
        placed = model.tower.placed(encoded, rows_of, images.images)
        turned = ImageInputs.turned(images.rope_positions)
    hidden, filled, routing = model.forward(prompts.tokens, positions, segments, near, images=turned, placed=placed)
    assert isinstance(filled, KVCache)
    logps, top = (None, None) if prompts.scored is None else _prompt_logps(model, hidden, prompts.scored, mesh)
    last = _last_states(hidden, prompts.lengths, window) if window else None
    beside = Prefilled(experts=recorded(routing) if record else None, logps=logps, top=top, hidden=last)
    first = (prompts.starts // BLOCK).reshape(prompts.targets.shape[:2])
    return pool.scatter(filled, first, prompts.targets, mesh), beside


def _last_states(hidden: Float[Array, "N T D"], lengths: Int[Array, " N"], window: int) -> Float[Array, "N W D"]:
    """Hidden states of the last tokens of each row; of shorter ones the first token's stand in before it."""
    places = lengths[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None]
    return jnp.take_along_axis(hidden, jnp.maximum(places, 0)[..., None], axis=1)


def _prompt_logps(
    model: Decoder, hidden: Float[Array, "N T D"], scored: ScoredPrompts, mesh: Mesh | None
) -> tuple[Float[Array, "N T"], TopLogps | None]:
    rows, length = scored.targets.shape
    temperature = jnp.repeat(scored.temperature, length)
    flat = hidden.reshape(rows * length, -1), scored.targets.reshape(-1)
    found = score(model.logits, *flat, temperature, vocab_size=model.config.vocab_size, top=scored.top, mesh=mesh)
    shaped: tuple[Array, TopLogps | None] = jax.tree.map(lambda x: x.reshape(rows, length, *x.shape[1:]), found)
    return shaped


_ENGINES = Recent[dict[Hashable, Any]](1)
"""Compiled programs of all equal engines so far."""

Inputs: TypeAlias = PromptPieces | DecodeRows | SpeculativeRows | ImagePatches


class Side(NamedTuple):
    """Weights of a model and its pool; of arrays, or of shapes to lower programs only."""

    loaded: Loaded
    pool: Pool


class Programs:
    """Compiled programs by what they were compiled for: ahead of time, or each at its first use.

    `record`: they also return the routing of what they read. `drafts`: tokens drafted by `speculate`, whose sides are
    the model's and the draft model's, if there is one. `window`: hidden states that `prefill` returns of each piece.
    """

    def __init__(self, *, steps: int, record: bool, drafts: int, window: int) -> None:
        self._functions: dict[type[Inputs], Callable[..., Any]] = {
            PromptPieces: _of_one(partial(prefill, record=record, window=window)),
            DecodeRows: _of_one(partial(decode, steps=steps, record=record)),
            ImagePatches: _of_one(encode),
            SpeculativeRows: partial(speculate, length=drafts, steps=steps, record=record),
        }
        self._compiled: dict[Hashable, Any] = {}
        self._settings = steps, record, drafts, window
        self._shared: dict[int, dict[Hashable, Any]] = {}
        """Programs of equal engines, by the layout of weights."""
        self._weights = DecodeWeightsCache()
        self.compile_s = 0.0
        self.num_late = 0
        """Compiled at their first use."""

    def __len__(self) -> int:
        return len(self._compiled)

    def prefill(self, loaded: Loaded, pool: Pool, prompts: PromptPieces) -> tuple[Pool, Prefilled]:
        (pool,), prefilled = self._run([Side(loaded, pool)], prompts)
        return pool, prefilled

    def encode(self, loaded: Loaded, pool: Pool, images: ImagePatches) -> tuple[Pool, ImageFeatures]:
        (pool,), found = self._run([Side(loaded, pool)], images)
        return pool, found

    def decode(self, loaded: Loaded, pool: Pool, rows: DecodeRows, stop_at: np.int32) -> tuple[Pool, DecodedTokens]:
        (pool,), chunk = self._run([Side(loaded, pool)], rows, stop_at)
        return pool, chunk

    def speculate(
        self, sides: Sequence[Side], call: SpeculativeRows, stop_at: np.int32
    ) -> tuple[tuple[Pool, ...], DecodedTokens]:
        pools, chunk = self._run(sides, call, stop_at)
        return pools, chunk

    def _run(self, sides: Sequence[Side], inputs: Inputs, *rest: np.int32) -> tuple[tuple[Pool, ...], Any]:
        key, weights = _key(sides, inputs), self._arguments(sides)
        if self._known(key, sides[0]) is None:
            start = time.perf_counter()
            self._keep(key, sides[0], self._lower(sides, weights, inputs).compile())
            self.compile_s += time.perf_counter() - start
            self.num_late += 1
        result: tuple[tuple[Pool, ...], Any] = self._compiled[key](weights, _pools(sides), inputs, *rest)
        return result

    @property
    def layout_bytes(self) -> int:
        """Bytes that a device holds of weights made for sampling, while samples run."""
        return self._weights.own_bytes

    def layout_of(self, loaded: Loaded) -> DecodeLayout:
        """Layout of weights that may be shapes, with the program that makes it."""
        return self._weights.layout_of(loaded)

    def arrays(self) -> list[Array]:
        """Arrays prepared from the weights."""
        return self._weights.arrays()

    def rest(self) -> None:
        """Drop the arrays prepared from the weights, while no sample runs."""
        self._weights.forget()

    def compile(self, calls: Sequence[tuple[Sequence[Side], Inputs]], advance: Callable[[int], None]) -> None:
        """The programs for inputs of these shapes, traced one by one and compiled side by side. `advance(1)` after
        each."""
        start = time.perf_counter()
        with ThreadPoolExecutor(max_workers=min(MAX_COMPILERS, os.cpu_count() or 1)) as threads:
            waiting: dict[Future[Any], tuple[Hashable, Side]] = {}
            begun: set[Hashable] = set()
            for sides, inputs in calls:
                key = _key(sides, inputs)
                if key in begun or self._known(key, sides[0]) is not None:
                    advance(1)
                else:
                    begun.add(key)
                    waiting[threads.submit(self._lower(sides, self._arguments(sides), inputs).compile)] = key, sides[0]
            for done in as_completed(waiting):
                self._keep(*waiting[done], done.result())
                advance(1)
        self.rest()
        self.compile_s += time.perf_counter() - start

    def _known(self, key: Hashable, side: Side) -> Any:
        """Compiled program; None if neither this engine nor an equal one has it. `side`: the first one of the call."""
        layout = side.loaded.layout
        if key not in self._compiled:
            if layout not in self._shared:
                leaves, tree = jax.tree.flatten(side.pool)
                blocks = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
                precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
                self._shared[layout] = _ENGINES.of((layout, self._settings, tree, blocks, precision), dict)
            if key in self._shared[layout]:
                self._compiled[key] = self._shared[layout][key]
        return self._compiled.get(key)

    def _keep(self, key: Hashable, side: Side, program: Any) -> None:
        self._compiled[key] = self._shared[side.loaded.layout][key] = program

    def lower(self, sides: Sequence[Side], inputs: Inputs) -> jax.stages.Lowered:
        """Lower the program for these inputs, of sides that may be shapes."""
        return self._lower(sides, tuple(self._weights.shapes(side.loaded) for side in sides), inputs)

    def _arguments(self, sides: Sequence[Side]) -> tuple[DecodeWeights, ...]:
        return tuple(self._weights.of(side.loaded) for side in sides)

    def _lower(self, sides: Sequence[Side], weights: tuple[DecodeWeights, ...], inputs: Inputs) -> jax.stages.Lowered:
        function, pools = self._functions[type(inputs)], _pools(sides)
        placed = jax.tree.map(lambda x: x.sharding, pools)
        placement = jax.tree.leaves(placed)[0]
        mesh = mesh_of_arrays(placement)
        models_of = [self._weights.model_of(side.loaded) for side in sides]

        def bound(weights: tuple[DecodeWeights, ...], pools: tuple[Pool, ...], *args: Any) -> Any:
            models = tuple(model_of(own) for model_of, own in zip(models_of, weights, strict=True))
            return function(models, pools, *args, mesh=mesh)

        reads = isinstance(inputs, PromptPieces | ImagePatches)
        bound.__name__ = "encode" if isinstance(inputs, ImagePatches) else "prefill" if reads else "decode"
        devices = devices_of(placement)
        program = jax.jit(
            traced_for(devices, bound),
            donate_argnums=1,
            out_shardings=(placed, None),
            compiler_options=compile_options(platform_of(devices)),
        )
        return program.lower(weights, pools, inputs, *[] if reads else [np.int32(0)])


def _of_one(function: Callable[..., tuple[Pool, Any]]) -> Callable[..., tuple[tuple[Pool, ...], Any]]:
    def of_one(models: tuple[Decoder], pools: tuple[Pool], *args: Any, mesh: Mesh | None) -> Any:
        pool, result = function(models[0], pools[0], *args, mesh=mesh)
        return (pool,), result

    return of_one


def _pools(sides: Sequence[Side]) -> tuple[Pool, ...]:
    return tuple(side.pool for side in sides)


def _key(sides: Sequence[Side], inputs: Inputs) -> Hashable:
    leaves, tree = jax.tree.flatten(inputs)
    return tree, tuple(leaf.shape for leaf in leaves), tuple(side.loaded.layout for side in sides)


MIN_WIDTH = 128
ROWS_STEP = 4
MIN_ROWS = 8
"""A tail of few samples is decoded in slots / 4, slots / 16, ... rows, not below 8: each size is one more program."""


class Range(NamedTuple):
    """Range of positions, both ends included."""

    shortest: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected requests, for which `warm_up` compiles."""

    params: SamplingParams
    shortest: int = 1
    """Tokens of the shortest prompt."""
    longest: int | None = None
    """Tokens of the longest prompt; None: any that fits."""

    def reads(self, max_length: int, *, rereads: bool) -> Range:
        """Range of the prefill length, with `rereads` including tokens sampled earlier. Decoding computes the newest
        token."""
        sampled = self.params.max_tokens - 1 if rereads else 0
        return Range(max(1, self.shortest - 1), min(self._longest(max_length) - 1 + sampled, max_length - 2))

    def positions(self, steps: int, max_length: int) -> Range:
        """Range of a row's length at the end of a dispatch."""
        max_tokens = self.params.max_tokens
        return Range(
            self.shortest - 1 + min(steps, max_tokens),
            min(self._longest(max_length) + max_tokens, max_length) - 1,
        )

    def _longest(self, max_length: int) -> int:
        return max_length - 1 if self.longest is None else self.longest


class PromptShape(NamedTuple):
    """Shape of a prefill call."""

    rows: int
    """Rows in each lane."""
    tokens: int
    context: int
    """Cached positions that its rows attend to; 0: rows start a sequence."""


class DecodeShape(NamedTuple):
    rows: int
    """Rows in each lane."""
    width: int


@dataclass(frozen=True)
class Shapes:
    """Shape buckets of an engine with `slots` in each lane."""

    slots: int
    lanes: int
    max_length: int
    steps: int

    @property
    def longest(self) -> int:
        return BLOCK * blocks_for(self.max_length)

    def prompt(self, start: int, end: int) -> PromptShape:
        """Shape of the prefill of positions `start` to `end` of a sequence."""
        length = end - start
        # Longer than a chunk where images are that are read at once.
        sizes = *self._prompt_sizes(later=start > 0), *length_buckets(PROMPT_CHUNK, self.longest)
        tokens = next(size for size in sizes if size >= length)
        return PromptShape(self._prompt_rows(tokens), tokens, self._width(end) if start else 0)

    def decode(self, running: int, positions: int, *, tail: bool) -> DecodeShape:
        """Shape of decoding rows of up to so many positions, `running` in the fullest lane. `tail`: see `sizes`."""
        return DecodeShape(min(size for size in self.sizes(tail) if size >= running), self._width(positions))

    def sizes(self, tail: bool) -> list[int]:
        """Numbers of rows per lane that decoding is compiled for, falling: all slots; with `tail` also a quarter, ...

        >>> Shapes(256, 1, 64, 32).sizes(True), Shapes(6, 1, 64, 32).sizes(True)
        ([256, 64, 16], [6])
        """
        sizes = [self.slots]
        while tail and sizes[-1] // ROWS_STEP >= MIN_ROWS:
            sizes.append(sizes[-1] // ROWS_STEP)
        return sizes

    def prompts(self, reads: Range) -> Iterator[PromptShape]:
        """Distinct shapes of `prompt` for pieces of so many positions. A piece starts with the sequence, or at a block
        after at least `MIN_SHARED` cached positions."""
        for later in (False, True):
            shortest = 1
            for tokens in self._prompt_sizes(later=later):
                for width in (
                    self._contexts(shortest, tokens, reads) if later else [0] * _meets(shortest, tokens, reads)
                ):
                    yield PromptShape(self._prompt_rows(tokens), tokens, width)
                shortest = tokens + 1

    def decodes(self, positions: Range, *, tail: bool) -> Iterator[DecodeShape]:
        """Distinct shapes of `decode` for batches whose longest row has so many positions."""
        yield from (DecodeShape(rows, width) for rows in self.sizes(tail) for width in self._widths(*positions))

    def _contexts(self, shortest: int, longest: int, reads: Range) -> Sequence[int]:
        """Context widths of later prefill pieces of `shortest` to `longest` tokens."""
        end = max(MIN_SHARED + shortest, reads.shortest)
        if longest >= PROMPT_CHUNK:
            # Not the last piece of its prompt.
            end = min(end, MIN_SHARED + PROMPT_CHUNK)
        return self._widths(end, reads.longest)

    def _prompt_sizes(self, *, later: bool) -> Sequence[int]:
        """Row lengths of first pieces of a sequence, or of later ones."""
        smallest, step = (2 * BLOCK, 4) if later else (BLOCK, 2)
        return length_buckets(smallest, min(PROMPT_CHUNK, self.longest), step)

    def _widths(self, shortest: int, longest: int) -> Sequence[int]:
        """Width buckets of rows of `shortest` to `longest` positions."""
        if shortest > longest:
            return ()
        low, high = self._width(shortest), self._width(longest)
        return [width for width in length_buckets(MIN_WIDTH, self.longest) if low <= width <= high]

    def _prompt_rows(self, tokens: int) -> int:
        return min(self.slots, -(-PROMPT_CHUNK // (tokens * self.lanes)))

    def _width(self, positions: int) -> int:
        return next(width for width in length_buckets(MIN_WIDTH, self.longest) if width >= positions)


def _meets(shortest: int, longest: int, reads: Range) -> bool:
    """Return whether the first prefill piece may have `shortest` to `longest` tokens."""
    return shortest <= min(reads.longest, PROMPT_CHUNK) and min(reads.shortest, PROMPT_CHUNK) <= longest


@cache
def length_buckets(smallest: int, largest: int, step: int = 2) -> Sequence[int]:
    """smallest, step x smallest, ..., and `largest` last.

    >>> length_buckets(16, 100), length_buckets(128, 100)
    ((16, 32, 64, 100), (100,))
    """
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= step
    return (*sizes, largest)
