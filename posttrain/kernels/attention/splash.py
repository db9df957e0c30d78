"""Splash attention from JAX Pallas: compiled on TPU, interpreted on CPU."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from posttrain.kernels.attention.call import AttentionCall, Operands, Variant
from posttrain.kernels.platform import TOKEN_AXIS

LANES = 128
"""Alignment of block sizes."""

MAX_FUSED_BLOCKS = 8
"""Maximum number of key blocks for the fused backward kernel, which writes a query gradient per block."""


def refusal(call: AttentionCall) -> str | None:
    if call.platform not in ("cpu", "tpu"):
        return f"runs on TPU (interpreted on CPU), got {call.platform}"
    refusal = call.rows_refusal()
    if refusal is None and call.num_queries % LANES:
        shards = call.token_shards
        refusal = f"needs a row length that is a multiple of {LANES * shards}, got {call.num_queries * shards}"
    return refusal


def splash(
    operands: Operands, kernel: splash_attention_kernel.SplashAttentionKernel, *, variant: Variant
) -> Float[Array, "B T N Hv"]:
    """Splash attention by `make_kernel`; blocks emptied by the causal mask or the window are skipped.

    The mask uses row indices, which equal positions up to a constant within a segment.
    """
    q, k, v, mask_inputs, sinks = operands

    def row(q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array) -> Array:
        ids = splash_attention_kernel.SegmentIds(q=q_segments, kv=k_segments)
        out: Any = kernel(q, k, v, ids) if sinks is None else kernel(q, k, v, ids, sinks)
        return out

    queries = (q * variant.scale).swapaxes(1, 2)
    return jax.vmap(row)(queries, k, v, mask_inputs.q_segments, mask_inputs.k_segments).swapaxes(1, 2)


def by_tokens(kernel: splash_attention_kernel.SplashAttentionKernel, mesh: Mesh | None) -> Any:
    """Layout of a kernel's tables, of which each device has those of its own queries."""
    if mesh is None or TOKEN_AXIS not in mesh.axis_names:
        return PartitionSpec()
    return kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, TOKEN_AXIS)))


def make_kernel(
    call: AttentionCall, variant: Variant, *, interpret: bool
) -> splash_attention_kernel.SplashAttentionKernel:
    """The kernel of one device's heads, with tables for the queries of a whole row."""
    length, queries = call.num_keys, call.num_queries
    num_heads, head_dim = call.num_heads // call.head_shards, max(call.head_dim, call.value_dim)
    shape = (length, length)
    if variant.window is None:
        mask: splash_attention_mask.Mask = splash_attention_mask.CausalMask(shape)
    else:
        mask = splash_attention_mask.LocalMask(shape, window_size=(variant.window - 1, 0), offset=0)
    # Wider heads leave less TPU vector memory for blocks.
    block = next(size for size in ((512, 256, 128) if head_dim <= 256 else (256, 128)) if queries % size == 0)
    fused = length // block <= MAX_FUSED_BLOCKS
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=None if fused else block,
        block_kv_dq=None if fused else block,
        use_fused_bwd_kernel=fused,
    )
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * num_heads),
        block_sizes=sizes,
        attn_logits_soft_cap=variant.soft_cap,
        interpret=interpret,
        head_shards=1,
        q_seq_shards=call.token_shards,
    )
