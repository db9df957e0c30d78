"""XLA:CPU program layout: compute shared values once, and unstack layers without one kernel per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Shaped

from posttrain.kernels.platform import platform_of

T = TypeVar("T")


def computed_once(make: Callable[[], T], opaque_true: Bool[Array, ""], mesh: Mesh | None) -> T:
    """Materialize the value of `make` once on CPU for all its readers.

    XLA:CPU would otherwise fuse and recompute it in each reader, which costs more than a branch unless it is tiny.
    `opaque_true`: a True value that the compiler cannot constant-fold.
    """
    if platform_of(mesh) != "cpu":
        return make()
    make = jax.jit(make)  # traced once
    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(make))
    value: T = jax.lax.cond(opaque_true, make, lambda: nothing)
    return value


def unstack_layers(stack: Shaped[Array, "R ..."], opaque_zero: Int[Array, ""]) -> list[Shaped[Array, ...]]:
    """Unstack layer parameters; their gradients are written into one array.

    `opaque_zero`: a 0 that the compiler cannot constant-fold. With constant indices XLA:CPU compiles a kernel per layer
    instead of one for all layers.
    """
    return [stack[0]] if len(stack) == 1 else _parts(stack, opaque_zero)


@jax.custom_vjp
def _parts(stack: Shaped[Array, "R ..."], opaque_zero: Int[Array, ""]) -> list[Shaped[Array, ...]]:
    return [jax.lax.dynamic_index_in_dim(stack, opaque_zero + place, keepdims=False) for place in range(len(stack))]


def _forward(stack: Shaped[Array, "R ..."], opaque_zero: Int[Array, ""]) -> tuple[list[Shaped[Array, ...]], Array]:
    return _parts(stack, opaque_zero), opaque_zero


def _backward(opaque_zero: Int[Array, ""], gradients: list[Float[Array, ...]]) -> tuple[Float[Array, "R ..."], None]:
    stack = jnp.zeros((len(gradients), *gradients[0].shape), gradients[0].dtype)
    for place, gradient in enumerate(gradients):
        stack = jax.lax.dynamic_update_index_in_dim(stack, gradient, opaque_zero + place, 0)
    return stack, None


_parts.defvjp(_forward, _backward)
