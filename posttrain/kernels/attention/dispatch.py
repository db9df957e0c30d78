"""Attention entry point: selection of a kernel, and the fused kernel on TPU, splash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from posttrain.config import AttentionKernel
from posttrain.errors import ConfigError
from posttrain.kernels.attention.blockwise import blockwise
from posttrain.kernels.attention.call import (
    SAVED,
    AttentionCall,
    MaskInputs,
    Operands,
    Variant,
    attend_on_devices,
    folded_parts,
    full_attention,
    single_query,
    visible,
    with_folded_queries,
)
from posttrain.kernels.attention.gpu import cudnn, cudnn_packs, cudnn_refusal, tokamax, tokamax_refusal
from posttrain.kernels.platform import compute_capability, installed, log_choice, platform_of, warn_once
from posttrain.mesh import TOKEN_AXIS, head_shards, row_shards, token_shards

SPLASH_LANES = 128
"""Alignment of row lengths and blocks."""

SPLASH_BLOCK, SPLASH_WIDE_BLOCK = 512, 256
"""Queries and keys per block of logits; of heads wider than `SPLASH_WIDE_HEAD`, which leave less TPU vector memory."""
SPLASH_WIDE_HEAD = 256

KEYS_PER_GRADIENT = 1024
"""Keys per block of the backward kernel without a window: it writes a query gradient for each of these blocks. A causal
row of 4096 then has 4 gradients to hold and add, not 8, and 11 % more logits."""

MAX_GRADIENTS = 8 * 4096
"""Maximum number of queries times key blocks for the fused backward kernel, which holds that many query gradients."""


def splash_refusal(call: AttentionCall) -> str | None:
    if call.platform not in ("cpu", "tpu"):
        return f"runs on TPU (interpreted on CPU), got {call.platform}"
    refusal = call.rows_refusal()
    if refusal is None and call.token_shards > 1 and call.num_queries % SPLASH_LANES:
        shards = call.token_shards
        refusal = f"needs a row length that is a multiple of {SPLASH_LANES * shards}, got {call.num_queries * shards}"
    return refusal


def splash(
    operands: Operands, kernel: splash_attention_kernel.SplashAttentionKernel, *, variant: Variant, padding: int
) -> Float[Array, "B T N Hv"]:
    """Splash attention by `make_splash`; blocks emptied by the causal mask or the window are skipped. Rows get
    `padding` more tokens.

    The mask uses row indices, which equal positions up to a constant within a segment.
    """
    length, sinks, of = operands.q.shape[1], operands.sinks, operands.mask_inputs
    # Padding comes last, where causal queries do not see it.
    q = jnp.pad(operands.q * variant.scale, ((0, 0), (0, padding), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (operands.k, operands.v))
    q_segments, k_segments = (jnp.pad(x, ((0, 0), (0, padding))) for x in (of.q_segments, of.k_segments))

    def row(q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array) -> Array:
        ids = splash_attention_kernel.SegmentIds(q=q_segments, kv=k_segments)
        out: Any = kernel(q, k, v, ids) if sinks is None else kernel(q, k, v, ids, sinks)
        return out

    out = jax.vmap(row)(q.swapaxes(1, 2), k, v, q_segments, k_segments)
    return out.swapaxes(1, 2)[:, :length]


def splash_length(length: int) -> int:
    """Row length padded to whole blocks if that adds an eighth at most, else to `SPLASH_LANES`."""
    shortest = min(-(-length // block) * block for block in range(SPLASH_BLOCK, SPLASH_LANES, -SPLASH_LANES))
    return shortest if 8 * (shortest - length) <= length else -(-length // SPLASH_LANES) * SPLASH_LANES


def splash_padding(call: AttentionCall) -> int:
    """Tokens that rows are padded by; none where several devices split a row."""
    return splash_length(call.num_queries) - call.num_queries if call.token_shards == 1 else 0


def splash_blocks(
    length: int, head_dim: int, window: int | None, *, shards: int = 1, folded: bool = False
) -> splash_attention_kernel.BlockSizes:
    """Block sizes for a row length whose part on each of `shards` devices is a multiple of `SPLASH_LANES`; so is each
    half of it if `folded`."""
    limit, queries = SPLASH_BLOCK if head_dim <= SPLASH_WIDE_HEAD else SPLASH_WIDE_BLOCK, length // shards
    part = queries // 2 if folded else queries
    block = next(size for size in range(limit, 0, -SPLASH_LANES) if part % size == 0)
    keys = block
    if window is None and head_dim <= SPLASH_LANES:
        keys = next(n * block for n in range(KEYS_PER_GRADIENT // block, 0, -1) if length % (n * block) == 0)
    fused = queries * (length // keys) <= MAX_GRADIENTS
    if not fused:
        keys = block
    return splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=keys,
        block_kv_dkv_compute=block,
        block_q_dq=None if fused else block,
        block_kv_dq=None if fused else block,
        use_fused_bwd_kernel=fused,
    )


def splash_layout(kernel: splash_attention_kernel.SplashAttentionKernel, mesh: Mesh | None) -> Any:
    """Layout of a kernel's tables, of which each device has those of its own queries."""
    if mesh is None or TOKEN_AXIS not in mesh.axis_names:
        return PartitionSpec()
    return kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, TOKEN_AXIS)))


def splash_folds(call: AttentionCall, variant: Variant) -> bool:
    """True if devices exchange queries so that each has as much to compute: without a window those at the end of a row
    see the most keys."""
    return call.token_shards > 1 and variant.window is None and call.num_queries % (2 * SPLASH_LANES) == 0


def make_splash(
    length: int,
    num_heads: int,
    head_dim: int,
    variant: Variant,
    *,
    shards: int,
    interpret: bool,
    folded: bool = False,
) -> splash_attention_kernel.SplashAttentionKernel:
    """The kernel of one device's heads, with tables for all queries of a padded row, which `shards` devices split;
    `folded`: in the order of `with_folded_queries`."""
    shape = (length, length)
    if variant.window is None:
        causal = splash_attention_mask.CausalMask(shape)
        if folded:
            parts = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
            causal.q_sequence = parts[[n for pair in folded_parts(shards) for n in pair]].ravel()
        mask: splash_attention_mask.Mask = causal
    else:
        mask = splash_attention_mask.LocalMask(shape, window_size=(variant.window - 1, 0), offset=0)
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * num_heads),
        block_sizes=splash_blocks(length, head_dim, variant.window, shards=shards, folded=folded),
        attn_logits_soft_cap=variant.soft_cap,
        residual_checkpoint_name=SAVED,
        interpret=interpret,
        head_shards=1,
        q_seq_shards=shards,
    )


Kernel: TypeAlias = Callable[[Operands], Float[Array, "B T N Hv"]]


@dataclass(frozen=True, kw_only=True)
class Support:
    """Supported features of an attention kernel."""

    parents: bool
    """Supports parent segments (sequences that continue another segment)."""
    images: bool
    """Supports images whose tokens see one another."""
    other: Callable[[AttentionCall], str | None]
    """Reason why the kernel cannot serve a call, parents and images aside; None if it can."""

    def refusal(self, call: AttentionCall) -> str | None:
        if call.parents and not self.parents:
            return "does not support parent segments"
        if call.images and not self.images:
            return "does not support images whose tokens see one another"
        return self.other(call)


SUPPORT: Mapping[str, Support] = {
    "reference": Support(parents=True, images=True, other=lambda _: None),
    "blockwise": Support(parents=True, images=True, other=lambda _: None),
    "splash": Support(parents=False, images=False, other=splash_refusal),
    "tokamax": Support(parents=True, images=False, other=tokamax_refusal),
    "cudnn": Support(parents=True, images=False, other=cudnn_refusal),
}

PREFERRED: Mapping[str, tuple[str, ...]] = {"tpu": ("splash",), "gpu": ("cudnn", "tokamax")}
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
    images: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    ahead: int = 0,
) -> Float[Array, "B T N Hv"]:
    """softmax(scale q k) v over keys of the same segment at positions <= the query's, at most `window` of them.

    With `q_parents`, keys of the parent segment are visible too; with `images` of queries and keys (0: none) those of
    the query's image too, of which at most `ahead` are ahead of it.

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
            images=images is not None,
        ),
        token_shards(mesh),
    )
    name = select_attention(kernel, call)
    log_choice("attention", name, call.kind, call.platform)
    mask_inputs = MaskInputs(q_positions, k_positions, q_segments, k_segments, q_parents, *(images or ()))
    variant = Variant(window=window, scale=scale, soft_cap=soft_cap, ahead=ahead)
    return run_attention(name, Operands(q, k, v, mask_inputs, sinks), variant, call, mesh)


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
            shards, folded = call.token_shards, splash_folds(call, variant)
            tables = make_splash(*sizes, variant, shards=shards, interpret=interpret, folded=folded)
            served: Callable[..., Array] = partial(splash, variant=variant, padding=padding)
            if folded:
                served = partial(with_folded_queries, served, shards)
            return attend_on_devices(served, operands, call, mesh, tables, splash_layout(tables, mesh))
        case "tokamax":
            return attend_on_devices(partial(tokamax, variant=variant), operands, call, mesh)
        case _:
            kernel = partial(cudnn, variant=variant, packed=cudnn_packs(call), block=block_size(call))
            return attend_on_devices(kernel, operands, call, mesh)


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
