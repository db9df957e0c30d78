"""Matrix product of activations and weights with a backward pass that XLA:CPU runs at full speed."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

from posttrain.kernels.platform import platform_of


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Float[Array, "*B D"], w: Float[Array, "D F"], dtype: DTypeLike | None = None) -> Float[Array, "*B F"]:
    """x @ w, accumulated and returned in `dtype`, or in the operands' dtype.

    For the default gradient XLA:CPU first writes transposed copies of x and of the output's gradient, which costs more
    than the product. This backward pass computes the same products; other platforms are unaffected.
    """
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)


def _forward(
    x: Float[Array, "*B D"], w: Float[Array, "D F"], dtype: DTypeLike | None
) -> tuple[Float[Array, "*B F"], tuple[Float[Array, "*B D"], Float[Array, "D F"]]]:
    return matmul(x, w, dtype), (x, w)


def _backward(
    dtype: DTypeLike | None, saved: tuple[Float[Array, "*B D"], Float[Array, "D F"]], gradient: Float[Array, "*B F"]
) -> tuple[Float[Array, "*B D"], Float[Array, "D F"]]:
    x, w = saved
    dx = lax.dot_general(gradient, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)
    # XLA:CPU transposes the first operand: pass the narrower one first.
    if x.shape[-1] <= gradient.shape[-1]:
        dw = _over_tokens(x, gradient, dtype)
    elif platform_of(None) == "cpu":
        dw = _turned(gradient, x, dtype)
    else:
        dw = _over_tokens(gradient, x, dtype).T
    return dx.astype(x.dtype), dw.astype(w.dtype)


def _over_tokens(x: Float[Array, "*B D"], y: Float[Array, "*B F"], dtype: DTypeLike | None) -> Float[Array, "D F"]:
    tokens = tuple(range(x.ndim - 1))
    return lax.dot_general(x, y, ((tokens, tokens), ((), ())), preferred_element_type=dtype)


def _turned(x: Float[Array, "*B D"], y: Float[Array, "*B F"], dtype: DTypeLike | None) -> Float[Array, "F D"]:
    """Same product, transposed: transposes x first, then multiplies. Without the barriers XLA merges both into one
    product with y, the wider one, as its transposed operand, which the YNN library does not support."""
    first = lax.optimization_barrier(jnp.moveaxis(x, -1, 0))
    tokens = tuple(range(x.ndim - 1))
    along = tuple(n + 1 for n in tokens), tokens
    return lax.optimization_barrier(lax.dot_general(first, y, (along, ((), ())), preferred_element_type=dtype)).T


matmul.defvjp(_forward, _backward)
