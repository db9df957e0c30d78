"""Muon: momentum orthogonalised matrix by matrix, with the matrices of a stack spread over the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, repeat
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float

from posttrain.config import Muon
from posttrain.mesh import param_spec
from posttrain.weights.state import Parameter

Polynomial = tuple[float, float, float]
"""Coefficients a, b, c of a s + b s^3 + c s^5, applied to singular values."""

NEWTON_SCHULZ: Polynomial = (3.4445, -4.7750, 2.0315)
"""Coefficients of the original Muon, https://kellerjordan.github.io/posts/muon/."""

SAFETY = 1.01
"""Room of the Polar Express polynomials above a singular value of 1, for rounding."""
POLAR_EXPRESS: Sequence[Polynomial] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""Minimax polynomials for singular values from 1e-3 to 1, arXiv:2505.16932, Algorithm 1; the last one is repeated."""

EPS = 1e-7


def polynomials(iteration: str, count: int) -> tuple[float, list[Polynomial]]:
    """Factor of the Frobenius norm to divide by first, and the polynomials to apply one after the other."""
    if iteration == "newton_schulz":
        return 1.0, [NEWTON_SCHULZ] * count
    *first, last = POLAR_EXPRESS
    safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in first]
    return SAFETY, list(islice((*safe, *repeat(last, count)), count))


def orthogonalized(x: Float[Array, "*L m n"], iteration: str, count: int) -> Float[Array, "*L m n"]:
    """Nearest matrices U V^T to x = U S V^T with orthonormal rows or columns, by matrix products alone.

    0 stays 0. Products are of the smaller dimension squared.
    """
    wide = x.swapaxes(-2, -1) if x.shape[-2] > x.shape[-1] else x
    factor, steps = polynomials(iteration, count)
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True))
    wide = wide / jnp.maximum(factor * norm, EPS)
    for a, b, c in steps:
        gram = wide @ wide.swapaxes(-2, -1)
        wide = a * wide + (b * gram + c * (gram @ gram)) @ wide
    return wide.swapaxes(-2, -1) if x.shape[-2] > x.shape[-1] else wide


def update_scale(scale: str, inputs: int, outputs: int) -> float:
    """Factor of the orthogonal update of a matrix [inputs, outputs], see `Muon.scale`."""
    if scale == "rms":
        return 0.2 * math.sqrt(max(inputs, outputs))
    return math.sqrt(max(1.0, outputs / inputs))


def scale_by_muon(section: Muon, parameters: Mapping[str, Parameter]) -> optax.GradientTransformation:
    """Momentum of each matrix, orthogonalised and scaled; weight decay and rate are left to others."""
    trace = optax.trace(section.momentum, nesterov=section.nesterov)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        momentum, state = trace.update(updates, state, params)
        arrays = {path: x for path, x in momentum.items() if is_array(x)}
        done = {path: _direction(x, path, parameters[path], section) for path, x in arrays.items()}
        return {**momentum, **done}, state

    return optax.GradientTransformation(trace.init, update)


def is_array(x: Any) -> bool:
    """Tell an array from what optax has in place of one that belongs to another group."""
    return isinstance(x, Array | jax.ShapeDtypeStruct)


def _direction(x: Float[Array, "*L m n"], path: str, parameter: Parameter, section: Muon) -> Float[Array, "*L m n"]:
    def one(matrices: Float[Array, "*E m n"]) -> Float[Array, "*E m n"]:
        inputs, outputs = (parameter.heads.get(dim, 1) if section.per_head else 1 for dim in parameter.dims[-2:])
        *lead, m, n = matrices.shape
        parts = matrices.reshape(*lead, inputs, m // inputs, outputs, n // outputs).swapaxes(-3, -2)
        done = orthogonalized(parts, section.iteration, section.num_iterations)
        done = done * update_scale(section.scale, m // inputs, n // outputs)
        return done.swapaxes(-3, -2).reshape(matrices.shape)

    return _each_layer(one, x, path, parameter)


def _each_layer(
    one: Callable[[Array], Array], x: Float[Array, "*L m n"], path: str, parameter: Parameter
) -> Float[Array, "*L m n"]:
    """Apply a function of whole matrices to each layer. Layers are spread over the devices of the program's mesh, also
    over those that hold copies; experts stay where they are. Each device sends its parts of the other devices' layers
    and gets them back, so that no device has more than its share of whole matrices, and none computes another's."""
    mesh, stacked = jax.sharding.get_abstract_mesh(), "layers" in parameter.dims
    own = ("expert",) if "expert" in parameter.dims else ()
    axes = () if mesh.empty else tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in own)
    layers = x if stacked else x[None]
    if not axes:
        done = jax.lax.map(one, layers)
    else:
        count, devices = layers.shape[0], math.prod(mesh.shape[axis] for axis in axes)
        spec = PartitionSpec(axes, *own)
        padded = jnp.pad(layers, ((0, -count % devices), *((0, 0) for _ in layers.shape[1:])))
        spread = jax.shard_map(lambda part: jax.lax.map(one, part), mesh=mesh, in_specs=spec, out_specs=spec)
        done = spread(padded)[:count]
    done = done if stacked else done[0]
    return done if not axes else jax.lax.with_sharding_constraint(done, param_spec(mesh, path, parameter.dims, x.shape))
