"""Teacher top-k: the most probable tokens of each position, in chunks over T, for distillation elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from posttrain.batch import TopK
from posttrain.kernels.logits.layout import (
    VocabSharding,
    chunk_length,
    chunk_plan,
    head_function,
    scatter_to_tokens,
    take_tokens,
)
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
    mesh: Mesh | None = None,
) -> TopK:
    """Top-k of the distribution of each token; zeros for the first token of a row and tokens outside `only`.

    `temperature`: of `scaled_tail`, that of the divergence that the result is used for. The head runs on at most one
    chunk of the tokens in `only` at a time.
    """
    rows, length = tokens.shape
    sharding = VocabSharding.of(mesh)
    chunk = chunk_length(rows, length, vocab_size, sharding)
    counts = jnp.ones((rows, length - 1), bool) if only is None else jnp.asarray(only[:, 1:])
    plan = chunk_plan(counts, chunk)
    pad = plan.order.shape[1] - (length - 1)
    contexts, targets = (
        jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2))) for x in (hidden[:, :-1], tokens[:, 1:])
    )

    shape = jax.ShapeDtypeStruct((rows, chunk, hidden.shape[2]), hidden.dtype)
    head, parameters = head_function(logits_of, shape, sharding)

    def chunk_top_k(index: Array) -> TopK:
        order = jax.lax.dynamic_slice_in_dim(plan.order, index * chunk, chunk, axis=1)
        logits = head.logits(sharding.gathered(take_tokens(contexts, order)), parameters)
        return _best(logits, sharding.gathered(take_tokens(targets, order)), k, temperature, sharding)

    def body(index: Array, result: TopK) -> TopK:
        def write(total: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(total, sharding.rows(new), index * chunk, axis=1)

        return jax.tree.map(write, result, chunk_top_k(index))

    shapes = jax.eval_shape(chunk_top_k, jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros((rows, plan.order.shape[1], *s.shape[2:]), s.dtype), shapes)
    result = jax.lax.fori_loop(0, plan.num_chunks, body, zeros)
    return jax.tree.map(lambda x: scatter_to_tokens(x, plan, counts), result)


def _best(
    logits: Float[Array, "B C V"], targets: Int[Array, "B C"], k: int, temperature: float, sharding: VocabSharding
) -> TopK:
    log_p = jax.nn.log_softmax(jnp.maximum(logits, NO_LOGIT), axis=-1)
    best, ids = sharding.top_k(log_p, k)
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
