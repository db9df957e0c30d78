"""Log-probabilities and entropies in chunks over T: no array of size B x T x V, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from posttrain.batch import HostArray, TokenStats

CHUNK_ELEMENTS = 1 << 20
"""Logits alive at once, in elements: 4 MiB in float32. Value and gradient hold about four such arrays."""

MIN_CHUNK_TOKENS = 128
"""Tokens of all rows in a chunk of a large vocabulary: with fewer, reading the head takes longer than using it."""

RESIDUALS = "token_stats"
"""Name of what the backward pass finds saved: two numbers per token."""


def chunk_length(rows: int, length: int, vocab: int) -> int:
    """Tokens of a row per chunk: as many as fit `CHUNK_ELEMENTS` or make `MIN_CHUNK_TOKENS`, at least 1.

    At most half a row, so that even a small problem never holds all of B x T x V.
    """
    tokens = max(CHUNK_ELEMENTS // vocab, MIN_CHUNK_TOKENS)
    return max(1, min(tokens // rows, (length + 1) // 2))


def token_stats(
    logits_of: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    hidden: Float[Array, "B T D"],
    tokens: Int[Array | HostArray, "B T"],
    segments: Int[Array | HostArray, "B T"],
    *,
    temperature: float,
    vocab_size: int,
) -> TokenStats:
    """Log-probability and entropy of every token under softmax(logits / temperature), in float32.

    The only place of the package that shifts: `hidden[:, t - 1]` predicts `tokens[:, t]`. Position 0, the first token
    of each sequence and padding get 0. `logits_of` is the model's head; the backward pass makes its logits anew.
    """
    rows, length = tokens.shape
    chunk = chunk_length(rows, length, vocab_size)
    pad = -(length - 1) % chunk
    context = jnp.pad(hidden[:, :-1], ((0, 0), (0, pad), (0, 0)))
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, pad)))

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(RESIDUALS))
    def body(_: None, inputs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        return None, _chunk_stats(logits_of(inputs[0]).astype(jnp.float32) / temperature, inputs[1])

    _, (logps, entropy) = jax.lax.scan(body, None, (split(context), split(targets)))

    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, : length - 1]
        return jnp.pad(jnp.where(same, x, 0.0), ((0, 0), (1, 0)))

    return TokenStats(logps=join(logps), entropy=join(entropy))


def token_stats_reference(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], segments: Int[Array, "B T"], *, temperature: float
) -> TokenStats:
    """The slow twin of `token_stats`: whole logits at once, textbook formulas, gradients by the library."""
    log_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32) / temperature, axis=-1)
    logps = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    pad = ((0, 0), (1, 0))
    return TokenStats(
        logps=jnp.pad(jnp.where(same, logps, 0.0), pad), entropy=jnp.pad(jnp.where(same, entropy, 0.0), pad)
    )


@jax.custom_vjp
def _chunk_stats(
    logits: Float[Array, "B C V"], targets: Int[Array, "B C"]
) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
    return _chunk_forward(logits, targets)[0]


def _chunk_forward(logits: Float[Array, "B C V"], targets: Int[Array, "B C"]) -> tuple[Any, Any]:
    # Everything is relative to the largest logit: a nearly certain token then has an exact log-prob and entropy.
    top = jnp.max(logits, axis=-1)
    relative = logits - top[..., None]
    exps = jnp.exp(relative)
    norm = jnp.sum(exps, axis=-1)
    log_norm = jnp.log(norm)
    logps = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - top - log_norm
    entropy = log_norm - jnp.sum(_times(exps, relative), axis=-1) / norm
    saved = checkpoint_name((top + log_norm, entropy), RESIDUALS)
    return (logps, entropy), (logits, targets, *saved)


def _chunk_backward(residuals: Any, cotangents: Any) -> tuple[Float[Array, "B C V"], None]:
    """d logp = onehot - p; d entropy = -p (log p + entropy)."""
    logits, targets, log_z, entropy = residuals
    d_logps, d_entropy = (x[..., None] for x in cotangents)
    log_probs = logits - log_z[..., None]
    probs = jnp.exp(log_probs)
    onehot = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    grad = d_logps * (onehot - probs) - d_entropy * (_times(probs, log_probs) + probs * entropy[..., None])
    return grad, None


def _times(p: Float[Array, "B C V"], log_p: Float[Array, "B C V"]) -> Float[Array, "B C V"]:
    """p log p, and 0 where p is 0: a head that masks part of its vocabulary gives logits of -inf."""
    # `p` itself is that 0. A constant would be lifted out of the loop over chunks, as one more array of their size.
    return jnp.where(p > 0, p * log_p, p)


_chunk_stats.defvjp(_chunk_forward, _chunk_backward)
