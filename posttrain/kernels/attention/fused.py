"""Fused attention: splash on TPU, of which a variant returns the largest logits; on GPU cuDNN, which takes packed
sequences by their places, and tokamax."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int

from posttrain.kernels.attention.blockwise import blockwise
from posttrain.kernels.attention.call import (
    MASKED,
    SAVED,
    Attended,
    AttentionCall,
    Operands,
    Variant,
    capped,
    folded_parts,
    visible,
)
from posttrain.kernels.platform import tokamax_library
from posttrain.mesh import TOKEN_AXIS

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


SegmentIds: TypeAlias = splash_attention_kernel.SegmentIds
Options: TypeAlias = tuple[tuple[str, Any], ...]
"""Options of a splash kernel."""
Tables: TypeAlias = tuple[Any, Any, Any]
"""Masks of the forward pass and of the two backward ones."""
QKV: TypeAlias = tuple[Array, Array, Array]
Sees: TypeAlias = Literal["past", "ahead", "all"]
"""Keys of a query's segment: up to its own, those of its image ahead, or all."""


def splash_refusal(call: AttentionCall) -> str | None:
    if call.platform not in ("cpu", "tpu"):
        return f"runs on TPU (interpreted on CPU), got {call.platform}"
    refusal = call.rows_refusal()
    if refusal is None and call.images and not call.whole and (call.sinks or call.largest):
        refusal = f"supports no {'sinks' if call.sinks else 'largest logits'} where tokens of an image see one another"
    if refusal is None and call.token_shards > 1 and call.num_queries % SPLASH_LANES:
        shards = call.token_shards
        refusal = f"needs a row length that is a multiple of {SPLASH_LANES * shards}, got {call.num_queries * shards}"
    return refusal


def splash(
    operands: Operands, kernel: splash_attention_kernel.SplashAttentionKernel, *, variant: Variant, padding: int
) -> Attended:
    """Splash attention by `make_splash`; blocks emptied by the causal mask or the window are skipped. Rows get
    `padding` more tokens.

    The mask uses row indices, which equal positions up to a constant within a segment.
    """
    length, sinks, of = operands.q.shape[1], operands.sinks, operands.mask_inputs
    # Padding comes last, where causal queries do not see it.
    q = jnp.pad(operands.q * variant.scale, ((0, 0), (0, padding), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (operands.k, operands.v))
    q_segments, k_segments = (jnp.pad(x, ((0, 0), (0, padding))) for x in (of.q_segments, of.k_segments))

    def row(q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array) -> tuple[Array, Array | None]:
        ids = splash_attention_kernel.SegmentIds(q=q_segments, kv=k_segments)
        if not variant.largest:
            heads: Any = kernel(q, k, v, ids) if sinks is None else kernel(q, k, v, ids, sinks)
            return heads, None
        tables = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
        out, largest = _with_largest(tuple(sorted(kernel.kwargs.items())), tables, (q, k, v), ids, sinks)
        return out, jnp.max(jnp.where(q_segments[None] > 0, jax.lax.stop_gradient(largest), MASKED), axis=-1)

    out, largest = jax.vmap(row)(q.swapaxes(1, 2), k, v, q_segments, k_segments)
    return Attended(out.swapaxes(1, 2)[:, :length], largest)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_largest(options: Options, tables: Tables, qkv: QKV, ids: SegmentIds, sinks: Any) -> tuple[Array, Array]:
    """Splash attention of a row, as the kernel with these options, and the largest logit of each query [N, T]."""
    return _largest_forward(options, tables, qkv, ids, sinks)[0]


def _largest_forward(
    options: Options, tables: Tables, qkv: QKV, ids: SegmentIds, sinks: Any
) -> tuple[tuple[Array, Array], Any]:
    """One pass of jax's forward kernel with one more number a query. The backward pass is jax's."""
    (q, k, v), (heads, length, width), given = qkv, qkv[0].shape, dict(options)
    kv_heads, keys, value_dim = v.shape
    blocks, info = given["block_sizes"], tables[0]
    block_q, block_kv = blocks.block_q, blocks.block_kv
    assert info.q_sequence is not None and info.partial_mask_blocks is None, "masks are functions of the places"

    def key_block(h: Any, i: Any, j: Any, *prefetched: Any) -> Any:
        return splash_attention_kernel._next_nonzero(h, i, j, *prefetched)[0]

    def of_queries(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda h, i, j, *_: (h, i, 0))

    def of_keys(size: int) -> pl.BlockSpec:
        groups = heads // kv_heads
        return pl.BlockSpec(
            (None, block_kv, size), lambda h, i, j, *p: (jax.lax.div(h, groups), key_block(h, i, j, *p), 0)
        )

    lanes, sublanes = splash_attention_kernel.NUM_LANES, splash_attention_kernel.NUM_SUBLANES
    by_query = pl.BlockSpec((block_q, lanes), lambda h, i, j, *_: (i, 0))
    specs = [of_queries(block_q, width), of_keys(width), of_keys(value_dim), by_query]
    specs += [pl.BlockSpec((sublanes, block_kv), lambda h, i, j, *p: (0, key_block(h, i, j, *p))), by_query]
    inputs = [q, k, v, jnp.broadcast_to(ids.q[:, None], (length, lanes))]
    inputs += [jnp.broadcast_to(ids.kv[None], (sublanes, keys))]
    inputs += [jnp.broadcast_to(info.q_sequence[:, None], (length, lanes))]
    if sinks is not None:
        specs.append(pl.BlockSpec((sublanes, heads), lambda *_: (0, 0), memory_space=pltpu.SMEM))
        inputs.append(jnp.broadcast_to(sinks.astype(jnp.float32)[None], (sublanes, heads)))
    grid_width = keys // block_kv if info.data_next is None else info.data_next.shape[-1]
    out, stats = pl.pallas_call(
        partial(_largest_kernel, options=given, width=grid_width, sinks=sinks is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            in_specs=specs,
            out_specs=[of_queries(block_q, value_dim), of_queries(block_q, lanes)],
            scratch_shapes=[pltpu.VMEM((block_q, n), jnp.float32) for n in (lanes, lanes, lanes, value_dim)],
            grid=(heads, length // block_q, grid_width),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        out_shape=[
            jax.ShapeDtypeStruct((heads, length, value_dim), q.dtype),
            jax.ShapeDtypeStruct((heads, length, lanes), jnp.float32),
        ],
        name="splash_mha_fwd_largest",
        interpret=given["interpret"],
    )(info.data_next, info.block_mask, info.mask_next, *inputs)
    out, log_total = (checkpoint_name(x, SAVED) for x in (out, stats[..., 0]))
    return (out, stats[..., -1]), (q, k, v, ids, sinks, out, log_total, *tables[1:])


def _largest_kernel(*refs: Any, options: dict[str, Any], width: int, sinks: bool) -> None:
    """Forward kernel: an online softmax over blocks of keys, and the largest logit before mask and cap."""
    *tables, q, k, v, q_ids, k_ids, places = refs[:9]
    *rest, out, stats, top, total, largest, sums = refs[9:]
    h, i, j = (pl.program_id(axis) for axis in range(3))
    blocks, masked, lanes = options["block_sizes"], options["mask_value"], stats.shape[-1]
    size, soft_cap = blocks.block_kv_compute, options["attn_logits_soft_cap"]
    block, _, runs, unmasked = splash_attention_kernel._next_nonzero(h, i, j, *tables)

    @pl.when(j == 0)
    def _start() -> None:
        top[...] = jnp.full(top.shape, rest[0][0, h] if sinks else masked, jnp.float32)
        total[...] = jnp.full(total.shape, float(sinks), jnp.float32)
        largest[...] = jnp.full(largest.shape, MASKED, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def step(n: Array, _: Any) -> None:
        part = pl.ds(n * size, size)
        products = jax.lax.dot_general(q[...], k[part, :], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        of: dict[str, Any] = {"k_slice": part, "k_offset": block * blocks.block_kv + n * size, "bq": blocks.block_q}
        of |= {"attn_logits_soft_cap": None, "mask_function": options["mask_function"]}
        arrays = products, masked, unmasked, None, places, q_ids, k_ids
        products = splash_attention_kernel._apply_mask_and_soft_cap(*arrays, **of)
        highest = products.max(axis=-1)[:, None]
        largest[...] = jnp.maximum(largest[...], highest)
        logits = products
        if soft_cap is not None:
            logits = jnp.where(products > masked / 2, capped(products, soft_cap), masked)
            highest = logits.max(axis=-1)[:, None]
        before = top[...]
        after = jnp.maximum(before, highest)
        exps = jnp.exp(logits - jnp.tile(after, (1, size // lanes)))
        shrink = jnp.exp(before - after)
        top[...] = after
        total[...] = total[...] * shrink + exps.sum(axis=-1)[:, None]
        new = jnp.dot(exps, v[part, :].astype(jnp.float32), preferred_element_type=jnp.float32)
        sums[...] = sums[...] * _lanes_of(shrink, sums.shape[1]) + new

    @pl.when(runs)
    def _run() -> None:
        jax.lax.fori_loop(0, blocks.block_kv // size, step, None, unroll=True)

    @pl.when(j == width - 1)
    def _end() -> None:
        out[...] = (sums[...] * _lanes_of(1.0 / total[...], sums.shape[1])).astype(out.dtype)
        lane = jax.lax.broadcasted_iota(jnp.int32, stats.shape, 1)
        stats[...] = jnp.where(lane < lanes // 2, jnp.log(total[...]) + top[...], largest[...])


def _lanes_of(x: Array, width: int) -> Array:
    """Equal lanes of a vector register, as many as another array has."""
    return jnp.tile(x, (1, -(-width // x.shape[1])))[:, :width]


def _largest_backward(options: Options, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    given = dict(options)
    *tables, dq, dk, dv, _, d_sinks = splash_attention_kernel._splash_attention_bwd(
        **given, res=saved, do=cotangents[0]
    )
    return tuple(tables), (dq, dk, dv), None, d_sinks


_with_largest.defvjp(_largest_forward, _largest_backward)


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
    past = variant.window is None and not call.images
    return call.token_shards > 1 and past and call.num_queries % (2 * SPLASH_LANES) == 0


def make_splash(
    length: int,
    num_heads: int,
    head_dim: int,
    variant: Variant,
    *,
    shards: int,
    interpret: bool,
    folded: bool = False,
    sees: Sees = "past",
    merged: bool = False,
) -> splash_attention_kernel.SplashAttentionKernel:
    """The kernel of one device's heads, with tables for all queries of a padded row, which `shards` devices split;
    `folded`: in the order of `with_folded_queries`; `merged`: it returns log-sum-exps, with which others are merged."""
    shape, window = (length, length), {"past": variant.window, "ahead": variant.ahead, "all": None}[sees]
    if sees == "all":
        mask: splash_attention_mask.Mask = splash_attention_mask.FullMask(shape)
    elif sees == "ahead":
        mask = splash_attention_mask.LocalMask(shape, window_size=(-1, variant.ahead), offset=0)
    elif variant.window is None:
        causal = splash_attention_mask.CausalMask(shape)
        if folded:
            parts = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
            causal.q_sequence = parts[[n for pair in folded_parts(shards) for n in pair]].ravel()
        mask = causal
    else:
        mask = splash_attention_mask.LocalMask(shape, window_size=(variant.window - 1, 0), offset=0)
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * num_heads),
        block_sizes=splash_blocks(length, head_dim, window, shards=shards, folded=folded),
        attn_logits_soft_cap=variant.soft_cap,
        save_residuals=merged,
        residual_checkpoint_name=None if merged else SAVED,
        interpret=interpret,
        head_shards=1,
        q_seq_shards=shards,
    )


CUDNN_HEAD_DIM = 128
"""Largest head dimension that all GPU generations support in training; Hopper supports up to 256."""

CUDNN_PACKED_CAPABILITY = 9.0
"""Compute capability from which cuDNN takes packed sequences by their places, without a mask."""

TOKENS_PER_SEGMENT = 128
"""Tokens of a row for each sequence that cuDNN makes room for."""


def cudnn_refusal(call: AttentionCall) -> str | None:
    width = max(call.head_dim, call.value_dim)
    if call.platform != "gpu":
        return f"runs on GPU, got {call.platform}"
    if call.soft_cap is not None or call.sinks:
        return "supports neither soft_cap nor sinks"
    if call.dtype not in ("bfloat16", "float16"):
        return f"supports bfloat16 and float16, got {call.dtype}"
    if width > CUDNN_HEAD_DIM or width % 8:
        return f"needs a head_dim that is a multiple of 8 and at most {CUDNN_HEAD_DIM}, got {width}"
    if call.kind == "decode":
        return call.split_refusal()
    refusal = call.rows_refusal()
    if refusal is None and not cudnn_packs(call):
        refusal = call.mask_refusal()
        if refusal is None and call.num_queries % 2:
            refusal = f"needs an even row length, got {call.num_queries}"
    return refusal


def cudnn_packs(call: AttentionCall) -> bool:
    """True if packed sequences are given by their places: no mask is made, and other sequences' blocks are skipped."""
    capable = call.compute_capability is not None and call.compute_capability >= CUDNN_PACKED_CAPABILITY
    return call.kind == "rows" and call.token_shards == 1 and not call.parents and capable


def cudnn(operands: Operands, variant: Variant, *, packed: bool, block: int) -> Float[Array, "B T N Hv"]:
    if not packed:
        return jax.nn.dot_product_attention(**cudnn_arguments(operands, variant), implementation="cudnn")[
            ..., : operands.v.shape[3]
        ]
    length = operands.q.shape[1]
    places = segment_places(operands.mask_inputs.q_segments, max(2, length // TOKENS_PER_SEGMENT))

    def by_blocks(operands: Operands) -> Array:
        return blockwise(operands, variant=variant, same_tokens=True, block=block, short=False).heads

    return jax.lax.cond(places.fit, partial(cudnn_packed, places=places, variant=variant), by_blocks, operands)


class SegmentPlaces(NamedTuple):
    """Places of the sequences of packed rows, of at most M in each; padding counts as one."""

    starts: Int[Array, "B M1"]
    """-1: there is none."""
    lengths: Int[Array, "B M"]
    fit: Bool[Array, ""]
    """No row has more than M."""


def segment_places(segments: Int[Array, "B T"], limit: int) -> SegmentPlaces:
    changes = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    number = jnp.cumsum(changes, axis=1, dtype=jnp.int32)
    wanted = jnp.arange(limit + 1, dtype=jnp.int32)[None]
    edges = jnp.sum(number[:, :, None] < wanted[None], axis=1, dtype=jnp.int32)
    there = wanted <= number[:, -1:]
    lengths = jnp.where(there[:, :-1], edges[:, 1:] - edges[:, :-1], -1)
    return SegmentPlaces(jnp.where(there, edges, -1), lengths, jnp.all(number[:, -1] < limit))


def cudnn_packed(operands: Operands, *, places: SegmentPlaces, variant: Variant) -> Float[Array, "B T N Hv"]:
    """cuDNN's attention within each sequence. `jax.nn.dot_product_attention` does not pass the sequences' places on."""
    width = max(operands.q.shape[3], operands.v.shape[3])
    q, k, v = operands.q, operands.k.swapaxes(1, 2), operands.v.swapaxes(1, 2)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[3]))) for x in (q, k, v))
    out: Array = fused_attention_stablehlo.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=places.lengths,
        kv_seqlen=places.lengths,
        q_offsets=places.starts,
        kv_offsets=places.starts,
        scale=variant.scale,
        mask_type=fused_attention_stablehlo.MaskType.PADDING_CAUSAL,
        sliding_window_length=variant.window,
    )
    return out[..., : operands.v.shape[3]]


def cudnn_arguments(operands: Operands, variant: Variant) -> dict[str, Any]:
    """Arguments of `jax.nn.dot_product_attention` for any implementation.

    Heads are zero-padded to one size for queries, keys and values; zeros change neither the logits nor the first
    values.
    """
    q, k, v, mask_inputs, _ = operands
    width = max(q.shape[3], v.shape[3])
    mask: Array | None = visible(*mask_inputs, variant.window)[:, None]
    if q.shape[1] == 1:
        # Decoding from a cache without a window: the visible keys of a query are the first ones.
        beside: dict[str, Any] = {} if variant.window else {"key_value_seq_lengths": mask_inputs.q_positions[:, 0] + 1}
        mask = mask if variant.window else None
    else:
        # The mask is complete; these arguments let the kernel skip blocks by row index, which a part of a row lacks.
        whole = q.shape[1] == k.shape[2]
        windowed = whole and variant.window is not None and mask_inputs.q_parents is None
        beside = {
            "is_causal": whole,
            "local_window_size": (variant.window - 1, 0) if windowed and variant.window else None,
        }
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[3]))) for x in (q, k, v))
    return {
        "query": q,
        "key": k.swapaxes(1, 2),
        "value": v.swapaxes(1, 2),
        "mask": mask,
        "scale": variant.scale,
        **beside,
    }


TOKAMAX_IMPLEMENTATIONS = ("mosaic", "triton")
"""Fused implementations. The others materialize T x S or are no faster than ours: raise without a fused one."""

TOKAMAX_TOO_NEW = (0, 11)
"""Version of jax from which tokamax's attention raises on GPU (seen with jax 0.11.2)."""
TOKAMAX_CAPABILITY = 8.0
TOKAMAX_HEAD_DIM = 256
TOKAMAX_BLOCK = 64
"""Queries and keys per kernel block; rows must be a multiple of it."""


def tokamax_refusal(call: AttentionCall) -> str | None:
    if not call.tokamax:
        return "is not installed: pip install 'posttrain[kernels]'"
    if call.platform != "gpu":
        return f"runs on GPU, got {call.platform}"
    if jax.__version_info__ >= TOKAMAX_TOO_NEW:
        return f"0.0.12 needs functions that jax no longer has, got jax {jax.__version__}"
    if call.sinks:
        return "does not support sinks"
    if call.dtype not in ("bfloat16", "float16"):
        return f"supports bfloat16 and float16, got {call.dtype}"
    if call.compute_capability is None or call.compute_capability < TOKAMAX_CAPABILITY:
        return f"needs a GPU of compute capability {TOKAMAX_CAPABILITY} or more, got {call.compute_capability}"
    width = max(call.head_dim, call.value_dim)
    if width > TOKAMAX_HEAD_DIM or width % 8:
        return f"needs a head_dim that is a multiple of 8 and at most {TOKAMAX_HEAD_DIM}, got {width}"
    if call.num_queries % TOKAMAX_BLOCK:
        return f"needs a row length that is a multiple of {TOKAMAX_BLOCK}, got {call.num_queries}"
    return call.rows_refusal() or call.mask_refusal()


def tokamax(
    operands: Operands, variant: Variant, *, implementation: str | tuple[str, ...] = TOKAMAX_IMPLEMENTATIONS
) -> Float[Array, "B T N Hv"]:
    q, k, v, mask_inputs, _ = operands
    whole = q.shape[1] == k.shape[2]
    return tokamax_library().dot_product_attention(
        q,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        mask=visible(*mask_inputs, variant.window)[:, None],
        scale=variant.scale,
        logits_soft_cap=variant.soft_cap,
        # The mask is complete; these arguments let the kernel skip blocks by row index, which a part of a row lacks.
        is_causal=whole,
        local_window_size=(variant.window - 1, 0) if whole and variant.window is not None else None,
        implementation=implementation,
    )
