"""Activations times a weight matrix, with a backward pass that XLA:CPU runs at full speed."""

from __future__ import annotations

from functools import partial

import jax
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Float[Array, "*B D"], w: Float[Array, "D F"], dtype: DTypeLike | None = None) -> Float[Array, "*B F"]:
    """x @ w, added up and given in `dtype`, or in that of the operands.

    The default gradient contracts in an order for which XLA:CPU first writes transposed copies of x and of the output's
    gradient, which costs more than the product. The products here are the same; on other platforms nothing changes.
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
    lead = tuple(range(x.ndim - 1))
    dx = lax.dot_general(gradient, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)
    # XLA:CPU writes the first operand transposed: better the narrower one.
    narrow = x.shape[-1] <= gradient.shape[-1]
    pair = (x, gradient) if narrow else (gradient, x)
    dw = lax.dot_general(*pair, ((lead, lead), ((), ())), preferred_element_type=dtype)
    return dx.astype(x.dtype), (dw if narrow else dw.T).astype(w.dtype)


matmul.defvjp(_forward, _backward)
