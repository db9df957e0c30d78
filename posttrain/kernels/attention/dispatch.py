"""Attention entry point: selection of a kernel and its run on devices; masks are positions, segments and window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from posttrain.config import AttentionKernel
from posttrain.errors import ConfigError
from posttrain.kernels.attention.blockwise import blockwise
from posttrain.kernels.attention.call import (
    AttentionCall,
    MaskInputs,
    Operands,
    Variant,
    full_attention,
    single_query,
    visible,
)
from posttrain.kernels.attention.fused import (
    SPLASH_LANES,
    cudnn,
    cudnn_refusal,
    make_splash,
    splash,
    splash_layout,
    splash_padding,
    splash_refusal,
    tokamax,
    tokamax_refusal,
)
from posttrain.kernels.platform import compute_capability, installed, log_choice, platform_of, warn_once
from posttrain.mesh import HEAD_AXIS, TOKEN_AXIS, head_shards, row_axes, row_shards, token_shards

Kernel: TypeAlias = Callable[[Operands], Float[Array, "B T N Hv"]]


@dataclass(frozen=True, kw_only=True)
class Support:
    """Supported features of an attention kernel."""

    parents: bool
    """Supports parent segments (sequences that continue another segment)."""
    other: Callable[[AttentionCall], str | None]
    """Reason why the kernel cannot serve a call, parents aside; None if it can."""

    def refusal(self, call: AttentionCall) -> str | None:
        if call.parents and not self.parents:
            return "does not support parent segments"
        return self.other(call)


SUPPORT: Mapping[str, Support] = {
    "reference": Support(parents=True, other=lambda _: None),
    "blockwise": Support(parents=True, other=lambda _: None),
    "splash": Support(parents=False, other=splash_refusal),
    "tokamax": Support(parents=True, other=tokamax_refusal),
    "cudnn": Support(parents=True, other=cudnn_refusal),
}

PREFERRED: Mapping[str, tuple[str, ...]] = {"tpu": ("splash",), "gpu": ("tokamax", "cudnn")}
"""Fused kernels per platform, in order of preference. On CPU, blockwise XLA takes half the time of splash, or less."""

WHOLE_LENGTH = 128
"""Maximum number of queries for which one block is used anyway."""

WHOLE_LOGITS = 1 << 24
"""Maximum number of logits over all rows and heads to materialize at once: 64 MiB in float32."""

BLOCK, CPU_BLOCKS = 512, (128, 64)
"""Queries and keys per block of logits. On CPU, packed rows use the smaller size if the larger block over all rows and
heads does not fit the cache."""

SHORT_ROW, SHORT_BLOCK = 4, 128
"""Maximum number of blocks of `block_size` for which CPU attention is unrolled, and the block size then, regardless of
the cache: two blocks of 128 instead of four of 64 make the first step 10 % shorter and others 3 % longer."""

LANES = 8
"""Alignment of equal blocks of a short row."""

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
    """softmax(scale q k) v over keys of the same segment at positions <= the query's, at most `window` of them.

    With `q_parents`, keys of the parent segment are visible too.

    Logits and softmax are float32. `soft_cap` turns logits into cap tanh(logits / cap); `sinks` add one logit per head
    whose probability goes to no value. Queries of segment 0 (padding) return finite numbers. Keys have the layout [B,
    K, S, H]: CPU decoding reads it twice as fast as [B, S, K, H].

    Packed rows are distinguished from a KV cache by identity: `q_positions is k_positions` and `q_segments is
    k_segments`. Positions are then consecutive within a segment, and kernels may use row indices instead. Raises
    ConfigError if an explicit `kernel` cannot serve the call.
    """
    call = _call(
        AttentionCall(
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
            token_shards=1,
            tokamax=installed("tokamax"),
            compute_capability=compute_capability(mesh),
        ),
        token_shards(mesh),
    )
    name = select_attention(kernel, call)
    log_choice("attention", name, call.kind, call.platform)
    operands = Operands(q, k, v, MaskInputs(q_positions, k_positions, q_segments, k_segments, q_parents), sinks)
    return run_attention(name, operands, Variant(window=window, scale=scale, soft_cap=soft_cap), call, mesh)


def _call(call: AttentionCall, token_shards: int) -> AttentionCall:
    """The call with queries split over `token_shards` devices, where it can be."""
    if not call.same_tokens or call.num_queries % token_shards or call.split_refusal() is not None:
        return call
    return replace(call, num_queries=call.num_queries // token_shards, token_shards=token_shards)


def supports_parents(kernel: str, platform: str) -> bool:
    """Return True if rows with parent segments use the same kernel as other rows."""
    names = PREFERRED.get(platform, ()) if kernel == "auto" else (kernel,)
    return all(SUPPORT[name].parents for name in names)


def choose_attention(call: AttentionCall) -> str:
    """Select the kernel for "auto"."""
    small = call.num_logits <= WHOLE_LOGITS
    if call.kind == "decode":
        return "cudnn" if SUPPORT["cudnn"].refusal(call) is None else "reference"
    if call.kind != "rows":
        return "reference" if small else "blockwise"
    short = small and call.num_queries <= WHOLE_LENGTH
    if short and call.platform == "tpu" and call.num_queries < SPLASH_LANES:
        return "reference"
    preferred = PREFERRED.get(call.platform, ())
    refusals = {name: SUPPORT[name].refusal(call) for name in preferred}
    chosen = next((name for name in preferred if refusals[name] is None), "reference" if short else "blockwise")
    if call.platform == "tpu" and chosen not in preferred:
        warn_once(
            f"attention: {chosen} XLA code, which is slow on TPU: " + "; ".join(f"{n} {r}" for n, r in refusals.items())
        )
    return chosen


def select_attention(kernel: str, call: AttentionCall) -> str:
    """Validate or select the kernel. Raises ConfigError listing the alternatives if the requested kernel cannot
    serve."""
    if kernel == "auto":
        return choose_attention(call)
    if kernel not in SUPPORT:
        raise ConfigError(f"attention: unknown kernel {kernel!r}; use one of {', '.join(get_args(AttentionKernel))}")
    refusal = SUPPORT[kernel].refusal(call)
    if refusal is not None:
        others = ", ".join(name for name, serves in SUPPORT.items() if serves.refusal(call) is None)
        raise ConfigError(f"attention: kernel {kernel!r} {refusal}; use auto, {others}")
    return kernel


def run_attention(name: str, operands: Operands, variant: Variant, call: AttentionCall, mesh: Mesh | None) -> Array:
    interpret = call.platform == "cpu"
    match name:
        case "reference":
            kernel: Kernel = partial(_reference, variant=variant)
            return kernel(operands) if call.token_shards == 1 else attend_on_devices(kernel, operands, call, mesh)
        case "blockwise":
            even = even_block(call)
            block, short = block_size(call) if even is None else even, even is not None
            same = call.same_tokens and call.token_shards == 1
            kernel = partial(blockwise, variant=variant, same_tokens=same, block=block, short=short)
            return kernel(operands) if call.token_shards == 1 else attend_on_devices(kernel, operands, call, mesh)
        case "splash":
            padding, head_dim = splash_padding(call), max(call.head_dim, call.value_dim)
            sizes = call.num_keys + padding, call.num_heads // call.head_shards, head_dim
            tables = make_splash(*sizes, variant, shards=call.token_shards, interpret=interpret)
            kernel = partial(splash, variant=variant, padding=padding)
            return attend_on_devices(kernel, operands, call, mesh, tables, splash_layout(tables, mesh))
        case "tokamax":
            return attend_on_devices(partial(tokamax, variant=variant), operands, call, mesh)
        case _:
            return attend_on_devices(partial(cudnn, variant=variant), operands, call, mesh)


def block_size(call: AttentionCall) -> int:
    """Queries and keys per block of logits in `blockwise`."""
    if call.platform != "cpu":
        return BLOCK
    large, small = CPU_BLOCKS
    if call.kind != "rows":
        return large
    rows, heads = -(-call.rows // call.row_shards), -(-call.num_heads // call.head_shards)
    return large if 4 * rows * heads * large * large <= CPU_CACHE else small


def even_block(call: AttentionCall) -> int | None:
    """Block size for unrolled attention of a short row on CPU; None if a loop is used.

    The fewest equal blocks, at least two, with no more logits than blocks of `SHORT_BLOCK` have; a row of at most that
    length is one block. Unrolled blocks are compiled one by one.
    """
    length = call.num_queries
    if call.platform != "cpu" or call.kind != "rows" or call.token_shards > 1 or length > SHORT_ROW * block_size(call):
        return None

    def num_logits(size: int) -> int:
        count = -(-length // size)
        return count * (count + 1) // 2 * size**2

    sizes = (-(-length // (LANES * count)) * LANES for count in range(2, -(-length // SHORT_BLOCK) + 1))
    return next((size for size in sizes if num_logits(size) <= num_logits(SHORT_BLOCK)), SHORT_BLOCK)


def _reference(operands: Operands, *, variant: Variant) -> Array:
    q, k, v, mask_inputs, sinks = operands
    mask = visible(*mask_inputs, variant.window)
    if q.shape[1] == 1:
        return single_query(q, k, v, mask[:, 0], scale=variant.scale, soft_cap=variant.soft_cap, sinks=sinks)
    return full_attention(q, k, v, mask, scale=variant.scale, soft_cap=variant.soft_cap, sinks=sinks)


def attend_on_devices(
    kernel: Callable[..., Array],
    operands: Operands,
    call: AttentionCall,
    mesh: Mesh | None,
    tables: Any = None,
    table_specs: Any = None,
) -> Array:
    """Run a kernel that the compiler cannot partition.

    Where `call` splits the tokens of a row, keys and values of the whole row are gathered, and their gradients
    reduce-scattered. `tables`: second argument of the kernel, laid out by `table_specs`.
    """
    arguments = (operands,) if tables is None else (operands, tables)
    if mesh is None or mesh.size == 1:
        return kernel(*arguments)
    repeats = call.split_kv_heads // call.num_kv_heads
    if repeats > 1:
        k, v = (jnp.repeat(x, repeats, axis=1) for x in (operands.k, operands.v))
        operands = operands._replace(k=k, v=v)
    rows, heads = row_axes(mesh), HEAD_AXIS if HEAD_AXIS in mesh.axis_names else None
    tokens = TOKEN_AXIS if call.token_shards > 1 else None
    queries, keys = PartitionSpec(rows, tokens, heads), PartitionSpec(rows, heads, tokens)
    specs = queries, keys, keys, PartitionSpec(rows, tokens), PartitionSpec(heads)

    def local(parts: tuple[Any, ...], *tables: Any) -> Array:
        operands = Operands(*parts)
        return kernel(operands if tokens is None else _with_all_keys(operands, tokens), *tables)

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, table_specs)[: len(arguments)],
        out_specs=queries,
        check_vma=False,
    )
    return split(tuple(operands), *arguments[1:])


def _with_all_keys(operands: Operands, axis: str) -> Operands:
    """Keys and values of whole rows, for a device's own queries."""
    k, v = (jax.lax.all_gather(x, axis, axis=2, tiled=True) for x in (operands.k, operands.v))
    of = operands.mask_inputs
    positions, segments = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (of.k_positions, of.k_segments))
    mask_inputs = MaskInputs(of.q_positions, positions, of.q_segments, segments, of.q_parents)
    return operands._replace(k=k, v=v, mask_inputs=mask_inputs)
