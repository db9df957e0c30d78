"""Splash attention from JAX Pallas: compiled on TPU, interpreted on CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from posttrain.kernels.attention.call import AttentionCall, Operands, Variant
from posttrain.kernels.platform import TOKEN_AXIS

LANES = 128
"""Alignment of row lengths and blocks."""

BLOCK, WIDE_BLOCK = 512, 256
"""Queries and keys per block of logits; of heads wider than `WIDE_HEAD`, which leave less TPU vector memory."""
WIDE_HEAD = 256

KEYS_PER_GRADIENT = 1024
"""Keys per block of the backward kernel without a window: it writes a query gradient for each of these blocks. A causal
row of 4096 then has 4 gradients to hold and add, not 8, and 11 % more logits."""

MAX_GRADIENTS = 8 * 4096
"""Maximum number of queries times key blocks for the fused backward kernel, which holds that many query gradients."""


def splash_refusal(call: AttentionCall) -> str | None:
    if call.platform not in ("cpu", "tpu"):
        return f"runs on TPU (interpreted on CPU), got {call.platform}"
    refusal = call.rows_refusal()
    if refusal is None and call.token_shards > 1 and call.num_queries % LANES:
        shards = call.token_shards
        refusal = f"needs a row length that is a multiple of {LANES * shards}, got {call.num_queries * shards}"
    return refusal


def splash(
    operands: Operands, kernel: splash_attention_kernel.SplashAttentionKernel, *, variant: Variant, padding: int
) -> Float[Array, "B T N Hv"]:
    """Splash attention by `make_kernel`; blocks emptied by the causal mask or the window are skipped. Rows get
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


def padded_length(length: int) -> int:
    """Row length padded to whole blocks of more than `LANES` if that adds an eighth at most, else to `LANES`."""
    shortest = min(-(-length // block) * block for block in range(BLOCK, LANES, -LANES))
    return shortest if 8 * (shortest - length) <= length else -(-length // LANES) * LANES


def row_padding(call: AttentionCall) -> int:
    """Tokens that rows are padded by; none where several devices split a row."""
    return padded_length(call.num_queries) - call.num_queries if call.token_shards == 1 else 0


def block_sizes(
    length: int, head_dim: int, window: int | None, *, shards: int = 1
) -> splash_attention_kernel.BlockSizes:
    """Block sizes for a row length whose part on each of `shards` devices is a multiple of `LANES`."""
    limit, queries = BLOCK if head_dim <= WIDE_HEAD else WIDE_BLOCK, length // shards
    block = next(size for size in range(limit, 0, -LANES) if queries % size == 0)
    keys = block
    if window is None and head_dim <= LANES:
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


def by_tokens(kernel: splash_attention_kernel.SplashAttentionKernel, mesh: Mesh | None) -> Any:
    """Layout of a kernel's tables, of which each device has those of its own queries."""
    if mesh is None or TOKEN_AXIS not in mesh.axis_names:
        return PartitionSpec()
    return kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, TOKEN_AXIS)))


def make_kernel(
    length: int, num_heads: int, head_dim: int, variant: Variant, *, shards: int, interpret: bool
) -> splash_attention_kernel.SplashAttentionKernel:
    """The kernel of one device's heads, with tables for all queries of a padded row, which `shards` devices split."""
    shape = (length, length)
    if variant.window is None:
        mask: splash_attention_mask.Mask = splash_attention_mask.CausalMask(shape)
    else:
        mask = splash_attention_mask.LocalMask(shape, window_size=(variant.window - 1, 0), offset=0)
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * num_heads),
        block_sizes=block_sizes(length, head_dim, variant.window, shards=shards),
        attn_logits_soft_cap=variant.soft_cap,
        interpret=interpret,
        head_shards=1,
        q_seq_shards=shards,
    )
