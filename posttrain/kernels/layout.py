"""How arrays lie in a program: what XLA:CPU would else compute again for every reader, or compile for every layer."""

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


def computed_once(make: Callable[[], T], always: Bool[Array, ""], mesh: Mesh | None) -> T:
    """The value of `make`, which on a CPU lies in memory for all its readers.

    XLA:CPU else fuses it into each of them and computes it there again, which costs more than a branch unless it is of
    a few numbers. `always`: True, of which the compiler must not know that it is.
    """
    if platform_of(mesh) != "cpu":
        return make()
    make = jax.jit(make)  # traced once
    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(make))
    value: T = jax.lax.cond(always, make, lambda: nothing)
    return value


def layers_of(stack: Shaped[Array, "R ..."], nought: Int[Array, ""]) -> list[Shaped[Array, ...]]:
    """The parts of a stack in order; their gradients are written into one array.

    `nought`: 0, of which the compiler must not know that it is. With places that it knows XLA:CPU makes kernels for
    each part, in place of kernels for all of them.
    """
    return [stack[0]] if len(stack) == 1 else _parts(stack, nought)


@jax.custom_vjp
def _parts(stack: Shaped[Array, "R ..."], nought: Int[Array, ""]) -> list[Shaped[Array, ...]]:
    return [jax.lax.dynamic_index_in_dim(stack, nought + place, keepdims=False) for place in range(len(stack))]


def _forward(stack: Shaped[Array, "R ..."], nought: Int[Array, ""]) -> tuple[list[Shaped[Array, ...]], Array]:
    return _parts(stack, nought), nought


def _backward(nought: Int[Array, ""], gradients: list[Float[Array, ...]]) -> tuple[Float[Array, "R ..."], None]:
    stack = jnp.zeros((len(gradients), *gradients[0].shape), gradients[0].dtype)
    for place, gradient in enumerate(gradients):
        stack = jax.lax.dynamic_update_index_in_dim(stack, gradient, nought + place, 0)
    return stack, None


_parts.defvjp(_forward, _backward)
