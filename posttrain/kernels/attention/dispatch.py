"""Attention behind one function whose only mask language is positions, segments and window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from posttrain.config import AttentionKernel
from posttrain.errors import ConfigError
from posttrain.kernels.attention import cudnn, splash, tokamax
from posttrain.kernels.attention.blockwise import blockwise
from posttrain.kernels.attention.reference import single_query, visible, whole
from posttrain.kernels.attention.request import Operands, Places, Request, Variant
from posttrain.kernels.platform import (
    HEAD_AXIS,
    compute_capability,
    head_shards,
    installed,
    log_choice,
    platform_of,
    row_axes,
    row_shards,
)

Kernel: TypeAlias = Callable[[Operands], Float[Array, "B T N Hv"]]


@dataclass(frozen=True, kw_only=True)
class Serves:
    """What a kernel serves."""

    parents: bool
    """Segments that go on from others."""
    other: Callable[[Request], str | None]
    """Why it cannot serve a request, parents aside; None where it can."""

    def refusal(self, request: Request) -> str | None:
        if request.parents and not self.parents:
            return "knows no sequence that goes on from another"
        return self.other(request)


SERVES: Mapping[str, Serves] = {
    "reference": Serves(parents=True, other=lambda _: None),
    "blockwise": Serves(parents=True, other=lambda _: None),
    "splash": Serves(parents=False, other=splash.refusal),
    "tokamax": Serves(parents=True, other=tokamax.refusal),
    "cudnn": Serves(parents=True, other=cudnn.refusal),
}

PREFERRED: Mapping[str, tuple[str, ...]] = {"tpu": ("splash",), "gpu": ("tokamax", "cudnn")}
"""Fused kernels of a platform, the first that serves. On CPU blocks of XLA take half the time of splash, or less."""

WHOLE_LENGTH = 128
"""Queries up to which there is but one block anyway."""

WHOLE_LOGITS = 1 << 24
"""Logits of all rows and heads that may exist at once: 64 MiB."""

BLOCK, CPU_BLOCKS = 512, (128, 64)
"""Queries and keys of a block of logits. Of whole rows on a CPU the smaller, where the larger block of all rows and
heads does not fit its cache."""

SHORT_ROW, SHORT_BLOCK = 4, 128
"""Blocks of `block_size` up to which a CPU computes a row without a loop; and the size that blocks have there, whether
it fits the cache or not: two of 128 in place of four of 64 make a first step a tenth shorter, others 3 % longer."""

LANES = 8
"""The size of equal blocks of a short row is a multiple of them."""

CPU_CACHE = 2 << 20
"""Bytes of the second-level caches of two cores."""


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    *,
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    q_parents: Int[Array, "B T"] | None,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
    kernel: AttentionKernel,
    mesh: Mesh | None,
) -> Float[Array, "B T N Hv"]:
    """softmax(scale q k) v over the keys of the same segment at positions <= the query's, at most `window` of them.

    With `q_parents` over those of another segment as well, which the query's own goes on from.

    Logits and softmax in float32. `soft_cap` makes logits cap tanh(logits / cap); `sinks` are one more logit per head
    that takes its share of the softmax to no value. A query of segment 0 (padding) yields finite numbers.
    Keys stand as [B, K, S, H]: on CPU decoding reads them twice as fast as [B, S, K, H].

    Whole rows are told from a cache by identity: `q_positions is k_positions` and `q_segments is k_segments`. Positions
    are then consecutive within a segment, and kernels may count by place in the row. `kernel` other than "auto" raises
    ConfigError where it cannot serve.
    """
    request = Request(
        platform=platform_of(mesh),
        rows=q.shape[0],
        num_queries=q.shape[1],
        num_keys=k.shape[2],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=str(q.dtype),
        soft_cap=soft_cap,
        sinks=sinks is not None,
        parents=q_parents is not None,
        same_tokens=q_positions is k_positions and q_segments is k_segments,
        row_shards=row_shards(mesh),
        head_shards=head_shards(mesh),
        tokamax=installed("tokamax"),
        compute_capability=compute_capability(mesh),
    )
    name = select(kernel, request)
    log_choice("attention", name, request.kind, request.platform)
    operands = Operands(q, k, v, Places(q_positions, k_positions, q_segments, k_segments, q_parents), sinks)
    return run(name, operands, Variant(window=window, scale=scale, soft_cap=soft_cap), request, mesh)


def serves_parents(kernel: str, platform: str) -> bool:
    """Whether segments that go on from others have the kernel that other rows have."""
    names = PREFERRED.get(platform, ()) if kernel == "auto" else (kernel,)
    return all(SERVES[name].parents for name in names)


def choose(request: Request) -> str:
    """The kernel of "auto"."""
    small = request.num_logits <= WHOLE_LOGITS
    if request.kind == "decode":
        return "cudnn" if SERVES["cudnn"].refusal(request) is None else "reference"
    if request.kind == "rows":
        for name in PREFERRED.get(request.platform, ()):
            if SERVES[name].refusal(request) is None:
                return name
        small = small and request.num_queries <= WHOLE_LENGTH
    return "reference" if small else "blockwise"


def select(kernel: str, request: Request) -> str:
    """The kernel to run. ConfigError where the one that is asked for cannot serve, with those that can."""
    if kernel == "auto":
        return choose(request)
    if kernel not in SERVES:
        raise ConfigError(f"attention: no kernel {kernel!r}; use one of {', '.join(get_args(AttentionKernel))}")
    refusal = SERVES[kernel].refusal(request)
    if refusal is not None:
        others = ", ".join(name for name, serves in SERVES.items() if serves.refusal(request) is None)
        raise ConfigError(f"attention: kernel {kernel!r} {refusal}; use auto, {others}")
    return kernel


def run(name: str, operands: Operands, variant: Variant, request: Request, mesh: Mesh | None) -> Array:
    interpret = request.platform == "cpu"
    match name:
        case "reference":
            return _reference(operands, variant)
        case "blockwise":
            even = even_block(request)
            block = block_size(request) if even is None else even
            return blockwise(operands, variant, same_tokens=request.same_tokens, block=block, short=even is not None)
        case "splash":
            return _split(partial(splash.splash, variant=variant, interpret=interpret), operands, request, mesh)
        case "tokamax":
            return _split(partial(tokamax.tokamax, variant=variant), operands, request, mesh)
        case _:
            return _split(partial(cudnn.cudnn, variant=variant), operands, request, mesh)


def block_size(request: Request) -> int:
    """Queries and keys of a block of logits of `blockwise`."""
    if request.platform != "cpu":
        return BLOCK
    large, small = CPU_BLOCKS
    if request.kind != "rows":
        return large
    rows, heads = -(-request.rows // request.row_shards), -(-request.num_heads // request.head_shards)
    return large if 4 * rows * heads * large * large <= CPU_CACHE else small


def even_block(request: Request) -> int | None:
    """The size of the blocks of a row that a CPU computes without a loop; None where it takes a loop.

    The fewest equal ones, two at least, with no more logits than blocks of `SHORT_BLOCK` have; a row no longer than
    that is one. What runs without a loop is compiled for every block.
    """
    length = request.num_queries
    if request.platform != "cpu" or request.kind != "rows" or length > SHORT_ROW * block_size(request):
        return None

    def num_logits(size: int) -> int:
        count = -(-length // size)
        return count * (count + 1) // 2 * size**2

    sizes = (-(-length // (LANES * count)) * LANES for count in range(2, -(-length // SHORT_BLOCK) + 1))
    return next((size for size in sizes if num_logits(size) <= num_logits(SHORT_BLOCK)), SHORT_BLOCK)


def _reference(operands: Operands, variant: Variant) -> Array:
    q, k, v, places, sinks = operands
    mask = visible(*places, variant.window)
    if q.shape[1] == 1:
        return single_query(q, k, v, mask[:, 0], scale=variant.scale, soft_cap=variant.soft_cap, sinks=sinks)
    return whole(q, k, v, mask, scale=variant.scale, soft_cap=variant.soft_cap, sinks=sinks)


def _split(kernel: Kernel, operands: Operands, request: Request, mesh: Mesh | None) -> Array:
    """Runs a kernel that the compiler cannot partition on each device's own rows and heads."""
    if mesh is None or mesh.size == 1:
        return kernel(operands)
    repeats = request.split_kv_heads // request.num_kv_heads
    if repeats > 1:
        k, v = (jnp.repeat(x, repeats, axis=1) for x in (operands.k, operands.v))
        operands = operands._replace(k=k, v=v)
    rows, heads = row_axes(mesh), HEAD_AXIS if HEAD_AXIS in mesh.axis_names else None
    queries, keys = PartitionSpec(rows, None, heads), PartitionSpec(rows, heads)
    split = jax.shard_map(
        lambda *parts: kernel(Operands(*parts)),
        mesh=mesh,
        in_specs=(queries, keys, keys, PartitionSpec(rows), PartitionSpec(heads)),
        out_specs=queries,
        check_vma=False,
    )
    return split(*operands)
