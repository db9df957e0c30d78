"""Chunk plan over predicting contexts: contexts with a target come first in each row, the rest is never computed."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from posttrain.batch import HostArray
from posttrain.kernels.logits.vocab_sharding import ONE_DEVICE, VocabSharding
from posttrain.kernels.platform import platform_of

CHUNK_ELEMENTS = 1 << 20
"""Maximum logits of a CPU alive at once: 4 MiB in float32. Value and gradient hold about four such arrays."""

MIN_CHUNK_TOKENS = 128
"""Minimum tokens per chunk of a CPU for large vocabularies: with fewer, reading the head dominates."""

ACCELERATOR_CHUNK_ELEMENTS = 1 << 26
"""Maximum logits of a GPU or TPU alive at once: 256 MiB in float32."""

MIN_ACCELERATOR_TOKENS = 512
"""The same of a GPU or TPU. Devices that split the vocabulary take as many times more tokens at once."""

TILE = 16
"""Rows of a bfloat16 tile of a TPU, which chunks of more tokens are multiples of."""

MAX_GATHERED_TOKENS = 1 << 15
"""Maximum tokens of a chunk over the devices that share the vocabulary: each holds the hidden states of all of them."""


def chunk_length(rows: int, length: int, vocab: int, sharding: VocabSharding = ONE_DEVICE) -> int:
    """Tokens of a row per chunk: as many as fit the devices' limits of elements or make their minimum of tokens.

    At least 1, and at most half a row, so that even a small problem never materializes B x T x V.
    """
    accelerator = sharding.mesh is not None and platform_of(sharding.mesh) != "cpu"
    elements, minimum = CHUNK_ELEMENTS, MIN_CHUNK_TOKENS
    if accelerator:
        elements, minimum = ACCELERATOR_CHUNK_ELEMENTS, MIN_ACCELERATOR_TOKENS
    tokens = max(elements // -(-vocab // sharding.shards), minimum * sharding.shards)
    if sharding.splits:
        tokens = min(tokens, MAX_GATHERED_TOKENS)
    tokens = max(1, tokens // -(-rows // sharding.groups))
    if accelerator and tokens > TILE:
        tokens -= tokens % TILE
    return min(tokens, max(1, (length + 1) // 2))


def predicting(segments: Int[Array | HostArray, "B T"], only: Bool[Array, "B T"] | None = None) -> Bool[Array, "B Tc"]:
    """Mask of the Tc = T - 1 contexts whose next token is in the same sequence and in `only`."""
    counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return jnp.asarray(counts if only is None else counts & only[:, 1:])


class ChunkPlan(NamedTuple):
    """Order in which contexts are computed: predicting contexts of each row first."""

    order: Int[Array, "B T"]
    back: Int[Array, "B T"]
    """Index of each context in `order` (inverse permutation)."""
    num_chunks: Int[Array, ""]
    """Number of chunks with at least one predicting context."""


def chunk_plan(counts: Bool[Array, "B T"], chunk: int) -> ChunkPlan:
    """Build the plan for the contexts in `counts`, padded to whole chunks."""
    length = counts.shape[1]
    padded = jnp.pad(counts, ((0, 0), (0, max(-length % chunk, 1 - length))))
    order = jnp.argsort(~padded, axis=1, stable=True)
    num_chunks = -(-jnp.max(jnp.sum(counts, axis=1), initial=0) // chunk)
    return ChunkPlan(order=order, back=jnp.argsort(order, axis=1), num_chunks=num_chunks)


def scatter_to_tokens(x: Array, plan: ChunkPlan, counts: Bool[Array, "B Tc"]) -> Array:
    """Move context values from plan order to the tokens that they predict; 0 where not in `counts`."""
    x = take_tokens(x, plan.back)[:, : counts.shape[1]]
    rest = (1,) * (x.ndim - 2)
    return jnp.pad(jnp.where(counts.reshape(*counts.shape, *rest), x, 0), ((0, 0), (1, 0), *((0, 0),) * len(rest)))


def take_tokens(x: Array, order: Int[Array, "B C"]) -> Array:
    """Gather along axis 1 by indices that are in bounds."""
    order = order.reshape(*order.shape, *(1 for _ in x.shape[2:]))
    return jnp.take_along_axis(x, order, axis=1, mode="promise_in_bounds")
