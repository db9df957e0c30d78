"""Drawing tokens: truncation by bisection instead of a sort, then an inverse CDF of two levels, one uniform per row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, UInt32

ONE_BITS = 0x3F800000
"""float32 1.0 as an integer; among non-negative floats the order of the bits is the order of the values."""
ROUNDS = ONE_BITS.bit_length()


def sample(
    logits: Float[Array, "S V"],
    keys: UInt32[Array, "S 2"],
    positions: Int[Array, " S"],
    temperature: Float[Array, " S"],
    top_k: Int[Array, " S"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"],
) -> tuple[Int[Array, " S"], Float[Array, " S"], Float[Array, " S"]]:
    """Tokens, their log-probabilities before truncation, and the log of the kept probability mass.

    Each row is a function of its own arguments alone. Order as in Hugging Face: temperature, top-k, top-p, min-p, each
    over what the one before it kept; tokens of equal probability are kept or dropped together. Temperature 0 is greedy.
    """
    scaled = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    shifted = scaled - jnp.max(scaled, axis=-1, keepdims=True)
    probs = jnp.exp(shifted)  # not normalised: the most probable token has 1
    total = jnp.sum(probs, axis=-1)

    sampled = temperature > 0
    truncated = sampled & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    kept, kept_logps = jax.lax.cond(
        jnp.any(truncated),
        lambda: _truncate(probs, total, truncated, top_k, top_p, min_p),
        lambda: (probs, jnp.zeros_like(total)),
    )
    drawn = _inverse_cdf(kept, uniforms(keys, positions))
    tokens = jnp.where(sampled, drawn, jnp.argmax(scaled, axis=-1)).astype(jnp.int32)
    logps = jnp.take_along_axis(shifted, tokens[:, None], axis=-1)[:, 0] - jnp.log(total)
    return tokens, logps, kept_logps


def uniforms(keys: UInt32[Array, "S 2"], positions: Int[Array, " S"]) -> Float[Array, " S"]:
    """One number in [0, 1) per row, 24 bits of Threefry with the row's key at the token's position as the counter."""

    def words(key: Array, position: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position))

    bits = jax.vmap(words)(keys, positions)[:, 0]
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _truncate(
    probs: Float[Array, "S V"],
    total: Float[Array, " S"],
    truncated: Bool[Array, " S"],
    top_k: Int[Array, " S"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"],
) -> tuple[Float[Array, "S V"], Float[Array, " S"]]:
    """`probs` with zeros where it is cut, and the log of the share that is left.

    A token stays if fewer than k tokens, and less than p of what top-k kept, are more probable than it.
    """
    count_limit = jnp.where(truncated & (top_k > 0), top_k.astype(jnp.float32), jnp.inf)
    cut_k = _bisect(probs, jnp.ones_like(probs), count_limit)
    inside_k = jnp.where(probs >= cut_k[:, None], probs, 0.0)
    mass_limit = jnp.where(truncated & (top_p < 1), top_p * jnp.sum(inside_k, axis=-1), jnp.inf)
    cut_p = _bisect(inside_k, inside_k, mass_limit)
    cut = jnp.maximum(cut_p, jnp.where(truncated, min_p, 0.0))
    kept = jnp.where(inside_k >= cut[:, None], inside_k, 0.0)
    return kept, jnp.where(truncated, jnp.log(jnp.sum(kept, axis=-1) / total), 0.0)


def _bisect(probs: Float[Array, "S V"], weights: Float[Array, "S V"], limit: Float[Array, " S"]) -> Float[Array, " S"]:
    """The smallest float32 t in [0, 1] where the weight of the tokens with probability above t is less than `limit`."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high + 1) // 2
        threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
        fits = jnp.sum(jnp.where(probs > threshold[:, None], weights, 0.0), axis=-1) < limit
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    low = jnp.full(limit.shape, -1, jnp.int32)  # never fits, or is not asked
    high = jnp.full(limit.shape, ONE_BITS, jnp.int32)  # always fits: nothing is above 1
    _, high = jax.lax.fori_loop(0, ROUNDS, halve, (low, high))
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def _inverse_cdf(probs: Float[Array, "S V"], u: Float[Array, " S"]) -> Int[Array, " S"]:
    """The first token whose cumulated mass exceeds u times the whole; never one of mass 0."""
    rows, vocab = probs.shape
    size = 1 << max(0, round(np.log2(vocab) / 2))
    blocks = jnp.pad(probs, ((0, 0), (0, -vocab % size))).reshape(rows, -1, size)
    masses = jnp.sum(blocks, axis=-1)
    cumulated = jnp.cumsum(masses, axis=-1)
    target = u * cumulated[:, -1]
    block = _first_above(cumulated, masses, target)[:, None]
    rest = target - jnp.take_along_axis(cumulated - masses, block, axis=-1)[:, 0]
    inside = jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    return block[:, 0] * size + _first_above(jnp.cumsum(inside, axis=-1), inside, rest)


def _first_above(
    cumulated: Float[Array, "S N"], masses: Float[Array, "S N"], target: Float[Array, " S"]
) -> Int[Array, " S"]:
    """The first entry of positive mass with cumulated mass above the target; by rounding there may be none: the last.

    Cumulated sums of floats may fall by one unit in the last place, so an entry of mass 0 is excluded by its mass.
    """
    positive = masses > 0
    above = positive & (cumulated > target[:, None])
    last = masses.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    return jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last)


def sample_reference(
    logits: np.ndarray, u: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[int, float, float]:
    """The slow twin of `sample` for one row, with its uniform given: a full sort in float64."""
    scaled = logits.astype(np.float64) / (temperature if temperature > 0 else 1.0)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if temperature == 0:
        token = int(np.argmax(scaled))
        return token, float(np.log(probs[token])), 0.0
    order = np.argsort(-probs, kind="stable")
    kept = probs[order]
    if top_k > 0:
        kept[top_k:] = 0.0
    if top_p < 1:
        above = np.cumsum(kept) - kept
        kept[above >= top_p * kept.sum()] = 0.0
    kept[kept < min_p * kept[0]] = 0.0
    mass = kept.sum()
    restored = np.zeros_like(probs)
    restored[order] = kept
    token = int(np.argmax(np.cumsum(restored) > u * mass))
    return token, float(np.log(probs[token])), float(np.log(min(mass, 1.0)))
