"""Arrays of the optimizer in 16 and 8 bits, rounded stochastically: bfloat16, and blocks of codes with a scale each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Shaped, UInt

from posttrain.config import MomentType
from posttrain.tree import pytree

BLOCKS = (64, 32, 16, 8)
"""Sizes of a block, the largest one that divides the input dimension: whole tiles of a TPU's memory."""

SIGNED_LEVELS, POSITIVE_LEVELS = 127, 255
"""Largest code of a signed array (int8) and of one without negative numbers (uint8)."""

WORD = 1 << 16


@pytree
class Blocks:
    """8-bit codes with a float32 scale for each block of consecutive inputs (arXiv:2110.02861).

    With the largest magnitude s of a block, a signed code c is s sign(c) (c / 127)^2, a positive one s (c / 255)^4. So
    codes of the first moment and of the root of the second are squares, and reach down to 127^-2 and 255^-2 of the
    largest. No positive number gets the code 0, whose root would be divided by (arXiv:2309.01507).
    """

    codes: Shaped[Array, "*L in out"]
    scales: Float[Array, "*L blocks out"]


Moment = Array | Blocks


def empty_moment(parameter: Any, kind: MomentType, *, signed: bool) -> Moment:
    """Moment of a parameter [*L, in, out] at 0. Without a block size that divides its inputs, int8 is bfloat16."""
    if kind != "int8":
        return jnp.zeros(parameter.shape, jnp.dtype(kind))
    *lead, inputs, outputs = parameter.shape
    size = next((size for size in BLOCKS if inputs % size == 0), None)
    if size is None:
        return jnp.zeros(parameter.shape, jnp.bfloat16)
    codes = jnp.zeros(parameter.shape, jnp.int8 if signed else jnp.uint8)
    return Blocks(codes=codes, scales=jnp.zeros((*lead, inputs // size, outputs), jnp.float32))


def moment_value(moment: Moment) -> Float[Array, ...]:
    """Numbers of a moment in float32."""
    if not isinstance(moment, Blocks):
        return moment.astype(jnp.float32)
    codes = _in_blocks(moment.codes.astype(jnp.float32), moment.scales)
    if moment.codes.dtype == jnp.int8:
        values = jnp.sign(codes) * jnp.square(codes / SIGNED_LEVELS)
    else:
        values = jnp.square(jnp.square(codes / POSITIVE_LEVELS))
    return (values * moment.scales[..., None, :]).reshape(moment.codes.shape)


def stored_moment(value: Float[Array, ...], like: Moment, bits: UInt[Array, ...]) -> Moment:
    """Store a moment as `like` is. `bits`: random numbers below 2^16, unused by float32."""
    if isinstance(like, Blocks):
        return _encoded(value, like, bits)
    return value if like.dtype == jnp.float32 else stochastic_bfloat16(value, bits)


def stochastic_bfloat16(x: Float[Array, ...], bits: UInt[Array, ...]) -> Float[Array, ...]:
    """Round float32 to one of the two nearest bfloat16 numbers, to the nearer one more often: E[rounded] = x.

    arXiv:2010.06192. `bits`: random numbers below 2^16. NaN and infinities stay.
    """
    raised = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits
    cut = jax.lax.bitcast_convert_type(raised & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


def random_words(key: Array, shape: tuple[int, ...]) -> tuple[UInt[Array, ...], UInt[Array, ...]]:
    """Two arrays of random numbers below 2^16, the same for any sharding."""
    words = jax.random.bits(key, shape, jnp.uint32)
    return words & jnp.uint32(WORD - 1), words >> 16


def to_nearest(shape: tuple[int, ...]) -> UInt[Array, ...]:
    """Numbers in place of random ones that round to the nearest."""
    return jnp.full(shape, WORD // 2, jnp.uint32)


def _encoded(value: Float[Array, ...], like: Blocks, bits: UInt[Array, ...]) -> Blocks:
    blocks, words = _in_blocks(value, like.scales), _in_blocks(bits, like.scales)
    sizes = jnp.abs(blocks)
    scales = jnp.max(sizes, axis=-2)
    shares = sizes / jnp.where(scales > 0, scales, 1.0)[..., None, :]
    if like.codes.dtype == jnp.int8:
        below = jnp.floor(jnp.minimum(SIGNED_LEVELS * jnp.sqrt(shares), SIGNED_LEVELS - 1))
        part = (shares * SIGNED_LEVELS**2 - below**2) / (2 * below + 1)
        codes = (below + _up(part, words)) * jnp.sign(blocks)
    else:
        below = jnp.floor(jnp.minimum(POSITIVE_LEVELS * jnp.sqrt(jnp.sqrt(shares)), POSITIVE_LEVELS - 1))
        part = (shares * float(POSITIVE_LEVELS**4) - below**4) / ((below + 1) ** 4 - below**4)
        codes = jnp.maximum(below + _up(part, words), blocks > 0)
    return Blocks(codes=codes.reshape(value.shape).astype(like.codes.dtype), scales=scales)


def _up(part: Float[Array, ...], bits: UInt[Array, ...]) -> Bool[Array, ...]:
    """True with the probability `part`."""
    return bits.astype(jnp.float32) < part * WORD


def _in_blocks(x: Shaped[Array, ...], scales: Float[Array, "*L blocks out"]) -> Shaped[Array, ...]:
    """Reshape [*L, in, out] to [*L, blocks, size, out]."""
    *lead, inputs, outputs = x.shape
    return x.reshape(*lead, scales.shape[-2], inputs // scales.shape[-2], outputs)
