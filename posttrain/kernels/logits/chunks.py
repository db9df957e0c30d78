"""Which tokens of a row count, and in which chunks they are computed: of each row those that count come first."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from posttrain.batch import HostArray

CHUNK_ELEMENTS = 1 << 20
"""Logits alive at once, in elements: 4 MiB in float32. Value and gradient hold about four such arrays."""

MIN_CHUNK_TOKENS = 128
"""Tokens of all rows in a chunk of a large vocabulary: with fewer, reading the head takes longer than using it."""


def chunk_length(rows: int, length: int, vocab: int) -> int:
    """Tokens of a row per chunk: as many as fit `CHUNK_ELEMENTS` or make `MIN_CHUNK_TOKENS`, at least 1.

    At most half a row, so that even a small problem never holds all of B x T x V.
    """
    tokens = max(CHUNK_ELEMENTS // vocab, MIN_CHUNK_TOKENS)
    return max(1, min(tokens // rows, (length + 1) // 2))


def predicting(segments: Int[Array | HostArray, "B T"], only: Bool[Array, "B T"] | None = None) -> Bool[Array, "B Tc"]:
    """Which of the Tc = T - 1 contexts count: those whose next token is in `only`, and of their sequence."""
    counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return jnp.asarray(counts if only is None else counts & only[:, 1:])


class Plan(NamedTuple):
    """Contexts in the order in which they are computed: of each row first those that count."""

    order: Int[Array, "B T"]
    back: Int[Array, "B T"]
    """Where each context stands in `order`."""
    num_chunks: Int[Array, ""]
    """How many chunks hold any that counts."""


def plan_of(counts: Bool[Array, "B T"], chunk: int) -> Plan:
    """For contexts of which some count, in whole chunks."""
    length = counts.shape[1]
    padded = jnp.pad(counts, ((0, 0), (0, max(-length % chunk, 1 - length))))
    order = jnp.argsort(~padded, axis=1, stable=True)
    num_chunks = -(-jnp.max(jnp.sum(counts, axis=1), initial=0) // chunk)
    return Plan(order=order, back=jnp.argsort(order, axis=1), num_chunks=num_chunks)


def of_tokens(x: Array, plan: Plan, counts: Bool[Array, "B Tc"]) -> Array:
    """What is known of contexts in the plan's order, at the tokens that they predict; 0 where these do not count."""
    x = along(x, plan.back)[:, : counts.shape[1]]
    rest = (1,) * (x.ndim - 2)
    return jnp.pad(jnp.where(counts.reshape(*counts.shape, *rest), x, 0), ((0, 0), (1, 0), *((0, 0),) * len(rest)))


def along(x: Array, order: Int[Array, "B C"]) -> Array:
    """Of each row the places in this order, all of which exist."""
    order = order.reshape(*order.shape, *(1 for _ in x.shape[2:]))
    return jnp.take_along_axis(x, order, axis=1, mode="promise_in_bounds")
