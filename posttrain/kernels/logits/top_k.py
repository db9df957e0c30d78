"""The most probable tokens of each place, in chunks over T: what a teacher says for a student elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.batch import TopK
from posttrain.kernels.logits.chunks import along, chunk_length, of_tokens, plan_of
from posttrain.kernels.logits.softmax import NO_LOGIT


def top_k(
    logits_of: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    *,
    k: int,
    temperature: float,
    vocab_size: int,
    only: Bool[Array, "B T"] | None = None,
) -> TopK:
    """Of the distribution that each token was drawn from; zeros for the first of a row and what is not in `only`.

    `temperature`: of `scaled_tail`, the one of the divergence that the result is for. The head works on no more than a
    chunk of the tokens in `only`.
    """
    rows, length = tokens.shape
    chunk = chunk_length(rows, length, vocab_size)
    counts = jnp.ones((rows, length - 1), bool) if only is None else jnp.asarray(only[:, 1:])
    plan = plan_of(counts, chunk)
    pad = plan.order.shape[1] - (length - 1)
    contexts, targets = (
        jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2))) for x in (hidden[:, :-1], tokens[:, 1:])
    )

    def of_chunk(index: Array) -> TopK:
        order = jax.lax.dynamic_slice_in_dim(plan.order, index * chunk, chunk, axis=1)
        return _best(logits_of(along(contexts, order)).astype(jnp.float32), along(targets, order), k, temperature)

    def body(index: Array, found: TopK) -> TopK:
        def put(all_of_them: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(all_of_them, new, index * chunk, axis=1)

        return jax.tree.map(put, found, of_chunk(index))

    shapes = jax.eval_shape(of_chunk, jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros((rows, plan.order.shape[1], *s.shape[2:]), s.dtype), shapes)
    found = jax.lax.fori_loop(0, plan.num_chunks, body, zeros)
    return jax.tree.map(lambda x: of_tokens(x, plan, counts), found)


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
