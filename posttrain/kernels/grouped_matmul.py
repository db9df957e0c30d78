"""One matrix product per group of rows: the experts of a mixture."""

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


def grouped_matmul(
    x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Sizes, *, kernel: GroupedKernel, platform: str
) -> Float[Array, "M F"]:
    """x[m] @ w[e] for the rows m of group e, accumulated in float32; rows stand by group, those after the last yield 0.

    `platform`: of the devices that it runs on. `kernel` other than "auto" raises ConfigError where it cannot serve.
    Kernels of TPU and GPU work on one device's rows: under a mesh of several they are called inside `jax.shard_map`.
    """
    request = Request(platform=platform, dtype=str(x.dtype), tokamax=installed("tokamax"))
    name = select(kernel, request)
    log_choice("grouped matmul", name, f"{w.shape[0]} groups", request.platform)
    if name == "megablox":
        return megablox(request.platform == "cpu", x, w, group_sizes)
    return KERNELS[name](x, w, group_sizes)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the choice depends on."""

    platform: str
    dtype: str
    tokamax: bool
    """The package is installed."""


def choose(request: Request) -> str:
    """The kernel of "auto"."""
    if request.platform == "cpu":
        return "buckets"
    preferred = {"tpu": "megablox", "gpu": "tokamax"}.get(request.platform, "ragged_dot")
    return preferred if refusal(preferred, request) is None else "ragged_dot"


def select(kernel: str, request: Request) -> str:
    """The kernel to run. ConfigError where the one that is asked for cannot serve, with those that can."""
    if kernel == "auto":
        return choose(request)
    names = get_args(GroupedKernel)
    if kernel not in names:
        raise ConfigError(f"grouped matmul: no kernel {kernel!r}; use one of {', '.join(names)}")
    reason = refusal(kernel, request)
    if reason is not None:
        others = ", ".join(name for name in names if refusal(name, request) is None)
        raise ConfigError(f"grouped matmul: kernel {kernel!r} {reason}; use {others}")
    return kernel


def refusal(kernel: str, request: Request) -> str | None:
    """Why a kernel cannot serve; None where it can."""
    if kernel == "megablox":
        if request.platform not in ("cpu", "tpu"):
            return f"runs on TPU, and interpreted on CPU, got {request.platform}"
        if request.dtype not in ("float32", "bfloat16"):
            return f"computes in float32 and bfloat16, got {request.dtype}"
    if kernel == "tokamax":
        if not request.tokamax:
            return "is not installed: pip install 'posttrain[kernels]'"
        if request.platform != "gpu":
            return f"runs on GPU, got {request.platform}"
    return None


def reference(x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Sizes) -> Float[Array, "M F"]:
    """Every row through every group, one of them kept."""
    groups = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
    every = jnp.einsum("md,edf->emf", x, w, preferred_element_type=jnp.float32)
    chosen = jax.nn.one_hot(groups, w.shape[0], axis=0)
    return jnp.sum(every * chosen[..., None], axis=0).astype(x.dtype)


def ragged_dot(x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Sizes) -> Float[Array, "M F"]:
    """XLA's own. On CPU it does the work of the reference."""
    return lax.ragged_dot(x, w, group_sizes, preferred_element_type=jnp.float32).astype(x.dtype)


# --- buckets ---------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def buckets(x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Sizes) -> Float[Array, "M F"]:
    """Each group cut into buckets of a fixed number of rows, the last one partly empty; one product for each.

    No group is too large, none costs anything when it is empty, and besides operands and result nothing is held.
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
        # Rows of other groups have no gradient in `d`.
        added = jnp.einsum("md,mf->df", plan.take(x_more, i), d, preferred_element_type=jnp.float32)
        return dx, dw.at[group].add(added)

    dx, dw = lax.fori_loop(0, plan.count, step, (jnp.zeros_like(x_more), jnp.zeros(w.shape)))
    return dx[: x.shape[0]], dw.astype(w.dtype), None


buckets.defvjp(_buckets_forward, _buckets_backward)


class _Buckets:
    """Which rows each bucket holds: `size` of them from `first` on, of which the first `filled` are of its group."""

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
        """With room for the last bucket."""
        return jnp.pad(x, ((0, self.size), (0, 0)))

    def take(self, x: Array, i: Array) -> Array:
        block = lax.dynamic_slice_in_dim(x, self.first[i], self.size)
        return jnp.where((jnp.arange(self.size) < self.filled[i])[:, None], block, 0)

    def put(self, x: Array, i: Array, block: Array) -> Array:
        # The zeros after the filled rows fall where later buckets write, or where no group is.
        return lax.dynamic_update_slice_in_dim(x, block.astype(x.dtype), self.first[i], axis=0)


# --- megablox --------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def megablox(
    interpret: bool, x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Sizes
) -> Float[Array, "M F"]:
    """JAX's TPU kernel."""
    return _megablox_forward(interpret, x, w, group_sizes)[0]


def _megablox_forward(interpret: bool, x: Array, w: Array, group_sizes: Array) -> tuple[Array, Saved]:
    tiles = _tiles(x, w, w.shape[1], w.shape[2])
    out = gmm(_padded(x, tiles), w, group_sizes, x.dtype, tiles, interpret=interpret)
    return _in_groups(out[: x.shape[0]], group_sizes), (x, w, group_sizes)


def _megablox_backward(interpret: bool, saved: Saved, d_out: Array) -> Gradients:
    x, w, group_sizes = saved
    tiles = _tiles(x, w, w.shape[2], w.shape[1])
    dx = gmm(_padded(d_out, tiles), w, group_sizes, x.dtype, tiles, transpose_rhs=True, interpret=interpret)
    tiles = _tiles(x, w, w.shape[1], w.shape[2])
    dw = tgmm(_padded(x, tiles).T, _padded(d_out, tiles), group_sizes, w.dtype, tiles, interpret=interpret)
    return _in_groups(dx[: x.shape[0]], group_sizes), dw, None


megablox.defvjp(_megablox_forward, _megablox_backward)


def _tiles(x: Array, w: Array, contracted: int, kept: int) -> tuple[int, int, int]:
    """Rows, contracted and kept dimension of a tile; operands and result of one fit a TPU's vector memory twice."""
    rows = 512 if x.shape[0] >= 512 * w.shape[0] else 128
    most = 1024 if x.dtype.itemsize == 2 else 512
    return rows, min(most, -(-contracted // 128) * 128), min(most, -(-kept // 128) * 128)


def _padded(x: Array, tiles: tuple[int, int, int]) -> Array:
    return jnp.pad(x, ((0, -x.shape[0] % tiles[0]), (0, 0)))


def _in_groups(x: Array, group_sizes: Array) -> Array:
    """With 0 in the rows after the last group, which kernels leave as they find them."""
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(group_sizes))[:, None], x, 0)


# --- tokamax ---------------------------------------------------------------------------------------------------------


def tokamax(
    x: Float[Array, "M D"],
    w: Float[Array, "E D F"],
    group_sizes: Sizes,
    *,
    implementation: str | tuple[str, ...] = ("mosaic", "triton"),
) -> Float[Array, "M F"]:
    """An extra of the installation, imported only here. Without a fused implementation it raises."""
    out = tokamax_library().ragged_dot(x, w, group_sizes, implementation=implementation)
    return _in_groups(out, group_sizes)


KERNELS: Mapping[str, Callable[[Array, Array, Array], Array]] = {
    "reference": reference,
    "ragged_dot": ragged_dot,
    "buckets": buckets,
    "tokamax": tokamax,
}
