"""The most probable tokens of each place, in chunks over T: what a teacher says for a student elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from posttrain.batch import TopK
from posttrain.kernels.divergence import NO_LOGIT
from posttrain.kernels.token_stats import chunk_length


def top_k(
    logits_of: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    *,
    k: int,
    temperature: float,
    vocab_size: int,
) -> TopK:
    """Of the distribution that each token was drawn from; the first of a row has none, and gets zeros.

    `temperature`: of `scaled_tail`, the one of the divergence that the result is for.
    """
    rows, length = tokens.shape
    chunk = chunk_length(rows, length, vocab_size)
    pad = -(length - 1) % chunk

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0) for _ in x.shape[2:])))
        return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)

    def of_chunk(inputs: tuple[Array, Array]) -> TopK:
        return _best(logits_of(inputs[0]).astype(jnp.float32), inputs[1], k, temperature)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1).reshape(rows, -1, *x.shape[3:])[:, : length - 1]
        return jnp.pad(x, ((0, 0), (1, 0), *((0, 0) for _ in x.shape[2:])))

    return jax.tree.map(join, jax.lax.map(of_chunk, (split(hidden[:, :-1]), split(tokens[:, 1:]))))


def _best(logits: Float[Array, "B C V"], targets: Int[Array, "B C"], k: int, temperature: float) -> TopK:
    log_p = jax.nn.log_softmax(jnp.maximum(logits, NO_LOGIT), axis=-1)
    best, ids = jax.lax.top_k(log_p, k)
    rows, places = (x[..., None] for x in jnp.indices(targets.shape))
    others = log_p.at[rows, places, ids].set(NO_LOGIT)
    tail = jax.nn.logsumexp(others, axis=-1)
    return TopK(
        ids=ids,
        logps=best,
        tail=tail,
        scaled_tail=tail if temperature == 1.0 else jax.nn.logsumexp(others / temperature, axis=-1),
        token_logps=jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0],
    )
