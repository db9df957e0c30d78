"""Grouped matrix products: one per group of rows, for MoE experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Float, Int

from posttrain.config import GroupedKernel
from posttrain.errors import ConfigError
from posttrain.kernels.platform import installed, log_choice, tokamax_library

Sizes: TypeAlias = Int[Array, " E"]
Saved: TypeAlias = tuple[Float[Array, "M D"], Float[Array, "E D F"], Sizes]
Gradients: TypeAlias = tuple[Float[Array, "M D"], Float[Array, "E D F"], None]

LANES = 128
"""Columns of a TPU's tile, to which the last dimension of an array is padded."""


def grouped_matmul(
    x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Sizes, *, kernel: GroupedKernel, platform: str
) -> Float[Array, "M F"]:
    """x[m] @ w[e] for the rows m of group e, accumulated in float32; rows are sorted by group.

    Rows beyond the last group do not enter, and are undefined in the result and in the gradient of x: mask them once,
    before and after all products of a layer.

    `platform`: of the devices that run it. Raises ConfigError if an explicit `kernel` cannot serve. TPU and GPU kernels
    work on one device's rows: under a mesh of several devices call them inside `jax.shard_map`.
    """
    call = GroupedMatmulCall(platform=platform, dtype=str(x.dtype), tokamax=installed("tokamax"))
    name = select(kernel, call)
    log_choice("grouped matmul", name, f"{w.shape[0]} groups", call.platform)
    if name == "megablox":
        return megablox(call.platform == "cpu", x, w, group_sizes)
    return KERNELS[name](x, w, group_sizes)


def reads_stacks(kernel: GroupedKernel, platform: str, dtype: str) -> bool:
    """True if `stacked_matmul` serves: where `grouped_matmul` selects megablox."""
    return select(kernel, GroupedMatmulCall(platform=platform, dtype=dtype, tokamax=installed("tokamax"))) == "megablox"


def stacked_matmul(
    x: Float[Array, "M D"],
    stack: Float[Array, "L E D F"],
    layer: Int[Array, ""],
    group_sizes: Sizes,
    *,
    platform: str,
) -> Float[Array, "M F"]:
    """`grouped_matmul` with the matrices stack[layer], by megablox and without a gradient.

    The kernel reads them where they lie. A slice of the stack would be copied first: a kernel's operand is an array.
    """
    layers, groups, width, outputs = stack.shape
    log_choice("grouped matmul", "megablox", f"{groups} groups in each of {layers} layers", platform)
    w = stack.reshape(layers * groups, width, outputs)
    # XLA stores a matrix by columns where rows would need padding; transposed, it is an operand as it lies.
    by_columns = outputs % LANES > 0 and width % LANES == 0
    tiles = _tiles(x, group_sizes, width, outputs)
    out = gmm(
        _padded(x, tiles),
        w.swapaxes(1, 2) if by_columns else w,
        group_sizes,
        x.dtype,
        tiles,
        # The kernel reads the matrix of group - group_offset.
        group_offset=-layer * groups,
        transpose_rhs=by_columns,
        interpret=platform == "cpu",
    )
    return out[: x.shape[0]]


@dataclass(frozen=True, kw_only=True)
class GroupedMatmulCall:
    """Inputs of kernel selection."""

    platform: str
    dtype: str
    tokamax: bool
    """True if the `tokamax` package is installed."""


def choose(call: GroupedMatmulCall) -> str:
    """Select the kernel for "auto"."""
    if call.platform == "cpu":
        return "buckets"
    preferred = {"tpu": "megablox", "gpu": "tokamax"}.get(call.platform, "ragged_dot")
    return preferred if refusal(preferred, call) is None else "ragged_dot"


def select(kernel: str, call: GroupedMatmulCall) -> str:
    """Validate or select the kernel. Raises ConfigError listing the alternatives if the requested kernel cannot
    serve."""
    if kernel == "auto":
        return choose(call)
    names = get_args(GroupedKernel)
    if kernel not in names:
        raise ConfigError(f"grouped matmul: unknown kernel {kernel!r}; use one of {', '.join(names)}")
    reason = refusal(kernel, call)
    if reason is not None:
        others = ", ".join(name for name in names if refusal(name, call) is None)
        raise ConfigError(f"grouped matmul: kernel {kernel!r} {reason}; use {others}")
    return kernel


def refusal(kernel: str, call: GroupedMatmulCall) -> str | None:
    """Return why a kernel cannot serve; None if it can."""
    if kernel == "megablox":
        if call.platform not in ("cpu", "tpu"):
            return f"runs on TPU (interpreted on CPU), got {call.platform}"
        if call.dtype not in ("float32", "bfloat16"):
            return f"supports float32 and bfloat16, got {call.dtype}"
    if kernel == "tokamax":
        if not call.tokamax:
            return "is not installed: pip install 'posttrain[kernels]'"
        if call.platform != "gpu":
            return f"runs on GPU, got {call.platform}"
    return None


def reference(x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Sizes) -> Float[Array, "M F"]:
    """Reference implementation: every row times every group's matrix, then select."""
    groups = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
    every = jnp.einsum("md,edf->emf", x, w, preferred_element_type=jnp.float32)
    chosen = jax.nn.one_hot(groups, w.shape[0], axis=0)
    return jnp.sum(every * chosen[..., None], axis=0).astype(x.dtype)


def ragged_dot(x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Sizes) -> Float[Array, "M F"]:
    """`jax.lax.ragged_dot`. On CPU it costs as much as the reference."""
    return lax.ragged_dot(x, w, group_sizes, preferred_element_type=jnp.float32).astype(x.dtype)


# --- buckets ---------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def buckets(x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Sizes) -> Float[Array, "M F"]:
    """Split each group into buckets of a fixed number of rows, the last one partly empty; one product per bucket.

    Any group size works, empty groups cost nothing, and only operands and result are held in memory.
    """
    plan = _Buckets(x, w, group_sizes)

    def step(i: Array, out: Array) -> Array:
        return plan.put(out, i, jnp.dot(plan.take(x_more, i), w[plan.group[i]], preferred_element_type=jnp.float32))

    x_more = plan.widened(x)
    out = lax.fori_loop(0, plan.count, step, jnp.zeros((x_more.shape[0], w.shape[2]), x.dtype))
    return out[: x.shape[0]]


def _buckets_forward(x: Array, w: Array, group_sizes: Array) -> tuple[Array, Saved]:
    return buckets(x, w, group_sizes), (x, w, group_sizes)


def _buckets_backward(saved: Saved, d_out: Array) -> Gradients:
    x, w, group_sizes = saved
    plan = _Buckets(x, w, group_sizes)
    x_more, d_more = plan.widened(x), plan.widened(d_out)

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dx, dw = carry
        group, d = plan.group[i], plan.take(d_more, i)
        dx = plan.put(dx, i, jnp.einsum("mf,df->md", d, w[group], preferred_element_type=jnp.float32))
        # Rows of other groups are zero in `d`.
        added = jnp.einsum("md,mf->df", plan.take(x_more, i), d, preferred_element_type=jnp.float32)
        return dx, dw.at[group].add(added)

    dx, dw = lax.fori_loop(0, plan.count, step, (jnp.zeros_like(x_more), jnp.zeros(w.shape)))
    return dx[: x.shape[0]], dw.astype(w.dtype), None


buckets.defvjp(_buckets_forward, _buckets_backward)


class _Buckets:
    """Rows per bucket: `size` rows starting at `first`, of which the first `filled` belong to its group."""

    MAX_ROWS = 128
    MIN_ROWS = 16

    def __init__(self, x: Array, w: Array, group_sizes: Array):
        rows, groups = x.shape[0], w.shape[0]
        mean = -(-rows // groups)
        self.size = max(self.MIN_ROWS, min(self.MAX_ROWS, 1 << (mean - 1).bit_length()))
        per_group = -(-group_sizes // self.size)
        ends = jnp.cumsum(per_group)
        self.count = ends[-1]
        numbers = jnp.arange(-(-rows // self.size) + groups)
        self.group = jnp.minimum(jnp.searchsorted(ends, numbers, side="right"), groups - 1)
        before = (numbers - (ends - per_group)[self.group]) * self.size
        self.first = (jnp.cumsum(group_sizes) - group_sizes)[self.group] + before
        self.filled = jnp.minimum(group_sizes[self.group] - before, self.size)

    def widened(self, x: Array) -> Array:
        """Pad rows so that the last bucket fits."""
        return jnp.pad(x, ((0, self.size), (0, 0)))

    def take(self, x: Array, i: Array) -> Array:
        block = lax.dynamic_slice_in_dim(x, self.first[i], self.size)
        return jnp.where((jnp.arange(self.size) < self.filled[i])[:, None], block, 0)

    def put(self, x: Array, i: Array, block: Array) -> Array:
        # Zeros after the filled rows land in rows that later buckets overwrite or no group owns.
        return lax.dynamic_update_slice_in_dim(x, block.astype(x.dtype), self.first[i], axis=0)


# --- megablox --------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def megablox(
    interpret: bool, x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Sizes
) -> Float[Array, "M F"]:
    """Megablox TPU kernel from JAX Pallas."""
    return _megablox_forward(interpret, x, w, group_sizes)[0]


def _megablox_forward(interpret: bool, x: Array, w: Array, group_sizes: Array) -> tuple[Array, Saved]:
    tiles = _tiles(x, group_sizes, w.shape[1], w.shape[2])
    out = gmm(_padded(x, tiles), w, group_sizes, x.dtype, tiles, interpret=interpret)
    return out[: x.shape[0]], (x, w, group_sizes)


def _megablox_backward(interpret: bool, saved: Saved, d_out: Array) -> Gradients:
    x, w, group_sizes = saved
    tiles = _tiles(x, group_sizes, w.shape[2], w.shape[1])
    dx = gmm(_padded(d_out, tiles), w, group_sizes, x.dtype, tiles, transpose_rhs=True, interpret=interpret)
    tiles = _tiles(x, group_sizes, w.shape[1], w.shape[2])
    dw = tgmm(_padded(x, tiles).T, _padded(d_out, tiles), group_sizes, w.dtype, tiles, interpret=interpret)
    return dx[: x.shape[0]], dw, None


megablox.defvjp(_megablox_forward, _megablox_backward)


def _tiles(x: Array, group_sizes: Array, contracted: int, kept: int) -> tuple[int, int, int]:
    """Tile sizes (rows, contracted, kept): operands and result of a tile fit twice in a TPU's vector memory."""
    rows = 512 if x.shape[0] >= 512 * group_sizes.shape[0] else 128
    most = 1024 if x.dtype.itemsize == 2 else 512
    return rows, min(most, -(-contracted // LANES) * LANES), min(most, -(-kept // LANES) * LANES)


def _padded(x: Array, tiles: tuple[int, int, int]) -> Array:
    return jnp.pad(x, ((0, -x.shape[0] % tiles[0]), (0, 0)))


# --- tokamax ---------------------------------------------------------------------------------------------------------


def tokamax_ragged_dot(
    x: Float[Array, "M D"],
    w: Float[Array, "E D F"],
    group_sizes: Sizes,
    *,
    implementation: str | tuple[str, ...] = ("mosaic", "triton"),
) -> Float[Array, "M F"]:
    """Ragged dot of tokamax, an optional dependency imported only here. Raises without a fused implementation."""
    out: Array = tokamax_library().ragged_dot(x, w, group_sizes, implementation=implementation)
    return out


KERNELS: Mapping[str, Callable[[Array, Array, Array], Array]] = {
    "reference": reference,
    "ragged_dot": ragged_dot,
    "buckets": buckets,
    "tokamax": tokamax_ragged_dot,
}
