"""Platform facts for kernel selection, devices and installed packages, and forms of programs that XLA runs at full
speed: on CPU matrix products, values computed once and unstacked layers, on TPU operands that are written."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped

T = TypeVar("T")

LOGGER = logging.getLogger("posttrain.kernels")


def platform_of(mesh: Mesh | None) -> str:
    """Return `cpu`, `gpu` or `tpu`: the platform of the mesh's devices.

    None: of the devices that the program is traced for (`traced_for`), outside of one the default backend.
    """
    if mesh is not None:
        return str(mesh.devices.flat[0].platform)
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else str(device.platform)


def traced_for(mesh: Mesh | AbstractMesh | None, function: Callable[..., T]) -> Callable[..., T]:
    """Trace `function` for the mesh's devices, which need not be there: JAX's TPU kernels, too, ask for their kind.

    None: for the default device.
    """
    if mesh is None:
        return function

    @functools.wraps(function)
    def traced(*args: Any) -> T:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return traced


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Limits of one device."""

    platform: str
    memory: int
    """Bytes that programs can use."""
    memory_bandwidth: float
    """Bytes per second."""
    flops: float
    """bfloat16 operations per second."""
    wire: float
    """Bytes per second that the device sends to its neighbours."""
    host: float
    """Bytes per second between the device and its host's memory, by the nominal rate of PCIe."""
    between: float = 0.0
    """Bytes per second that the device sends to other slices (DCN): its share of the host's network; 0: no slices."""
    dollars_per_hour: float | None
    """Price as of `plan.machine.PRICES_OF`; None: no price."""
    kinds: tuple[str, ...] = ()
    """Names of the device as JAX has them."""
    torus: int = 1
    """Dimensions of the torus of a slice, over which `wire` is spread."""
    hop_s: float = 0.0
    """Seconds to a neighbour."""

    def sum_seconds(self, size: int, devices: int) -> float:
        """Seconds of the sum of `size` bytes over devices along one dimension of the torus, in both directions: as many
        hops as devices, then 2 (n - 1) / n of the bytes (How to Scale Your Model, section 3)."""
        return devices * self.hop_s + 2 * (devices - 1) / devices * size * self.torus / self.wire


CHIPS = {
    "v5e": Chip(
        platform="tpu",
        memory=int(15.75 * 2**30),
        memory_bandwidth=819e9,
        flops=197e12,
        wire=200e9,
        host=16e9,
        between=3.125e9,
        dollars_per_hour=1.20,
        kinds=("TPU v5 lite", "TPU v5e"),
        torus=2,
        hop_s=1e-6,
    ),
    "v5p": Chip(
        platform="tpu",
        memory=int(95.74 * 2**30),
        memory_bandwidth=2765e9,
        flops=459e12,
        wire=600e9,
        host=16e9,
        between=6.25e9,
        dollars_per_hour=4.20,
        kinds=("TPU v5", "TPU v5p"),
        torus=3,
        hop_s=1e-6,
    ),
    "v6e": Chip(
        platform="tpu",
        memory=int(31.24 * 2**30),
        memory_bandwidth=1640e9,
        flops=918e12,
        wire=448e9,
        host=32e9,
        between=12.5e9,
        dollars_per_hour=2.70,
        kinds=("TPU v6 lite", "TPU v6e"),
        torus=2,
        hop_s=1e-6,
    ),
    "h100": Chip(
        platform="gpu",
        memory=int(0.92 * 80 * 2**30),
        memory_bandwidth=3350e9,
        flops=989e12,
        wire=450e9,
        host=64e9,
        dollars_per_hour=3.00,
    ),
    "h200": Chip(
        platform="gpu",
        memory=int(0.92 * 140 * 2**30),
        memory_bandwidth=4800e9,
        flops=989e12,
        wire=450e9,
        host=64e9,
        dollars_per_hour=None,
    ),
    "cpu": Chip(
        platform="cpu",
        memory=16 * 2**30,
        memory_bandwidth=20e9,
        flops=0.2e12,
        wire=5e9,
        host=20e9,
        dollars_per_hour=None,
    ),
}
"""Chips by name: limits of data sheets, memory as the compiler or JAX reports it; a hop of 1 us as in How to Scale Your
Model (jax-ml.github.io/scaling-book)."""


def chip_of(device: Any) -> Chip | None:
    """Facts of a TPU; None for other devices."""
    return next((chip for chip in CHIPS.values() if device.device_kind in chip.kinds), None)


def compute_capability(mesh: Mesh | None) -> float | None:
    """GPU compute capability of the mesh's devices or the default device, such as 9.0; None without a GPU."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return float(device.compute_capability) if device.platform == "gpu" else None


def has_fp8(mesh: Mesh | None) -> bool:
    """Return True if the devices support fp8 natively; others emulate it with integers."""
    capability = compute_capability(mesh)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return "TPU7" in device.device_kind if capability is None else capability >= 8.9


@functools.cache
def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def tokamax_library() -> Any:
    """Import `tokamax`, an optional dependency."""
    flags = importlib.import_module("absl.flags")
    library = importlib.import_module("tokamax")
    if not flags.FLAGS.is_parsed():
        # On its first call tokamax would parse the program's command line and reject unknown flags.
        flags.FLAGS(sys.argv[:1])
    return library


@functools.cache
def log_choice(operation: str, kernel: str, kind: str, platform: str) -> None:
    """Log the selected kernel once per combination, however often it is traced."""
    LOGGER.info("%s: kernel %r for %s on %s", operation, kernel, kind, platform)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning once, however often a program is traced."""
    LOGGER.warning(message)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Float[Array, "*B D"], w: Float[Array, "D F"], dtype: DTypeLike | None = None) -> Float[Array, "*B F"]:
    """x @ w, accumulated and returned in `dtype`, or in the operands' dtype.

    For the default gradient XLA:CPU first writes transposed copies of x and of the output's gradient, which costs more
    than the product. This backward pass computes the same products; other platforms are unaffected.
    """
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)


def _matmul_forward(
    x: Float[Array, "*B D"], w: Float[Array, "D F"], dtype: DTypeLike | None
) -> tuple[Float[Array, "*B F"], tuple[Float[Array, "*B D"], Float[Array, "D F"]]]:
    return matmul(x, w, dtype), (x, w)


def _matmul_backward(
    dtype: DTypeLike | None, saved: tuple[Float[Array, "*B D"], Float[Array, "D F"]], gradient: Float[Array, "*B F"]
) -> tuple[Float[Array, "*B D"], Float[Array, "D F"]]:
    x, w = saved
    if platform_of(None) == "gpu" and w.dtype.itemsize == 2:
        # A float32 gradient times 16-bit weights would be a TF32 product, at half the speed of what TPUs do anyway.
        gradient = gradient.astype(w.dtype)
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


matmul.defvjp(_matmul_forward, _matmul_backward)


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


def _unstacked(stack: Shaped[Array, "R ..."], opaque_zero: Int[Array, ""]) -> tuple[list[Shaped[Array, ...]], Array]:
    return _parts(stack, opaque_zero), opaque_zero


def _restacked(opaque_zero: Int[Array, ""], gradients: list[Float[Array, ...]]) -> tuple[Float[Array, "R ..."], None]:
    stack = jnp.zeros((len(gradients), *gradients[0].shape), gradients[0].dtype)
    for place, gradient in enumerate(gradients):
        stack = jax.lax.dynamic_update_index_in_dim(stack, gradient, opaque_zero + place, 0)
    return stack, None


_parts.defvjp(_unstacked, _restacked)


@jax.custom_vjp
def written(x: Array) -> Array:
    """The array, written to memory before it is read; its gradient is not."""
    return lax.optimization_barrier(x)


@jax.custom_vjp
def written_gradients(x: Array, y: Array) -> tuple[Array, Array]:
    """The arrays, with gradients that are written to memory before they are read."""
    return x, y


written.defvjp(lambda x: (written(x), None), lambda _, gradient: (gradient,))
written_gradients.defvjp(lambda x, y: ((x, y), None), lambda _, gradients: lax.optimization_barrier(gradients))
