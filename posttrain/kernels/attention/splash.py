"""Splash attention from JAX Pallas: compiled on TPU, interpreted on CPU."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jaxtyping import Float

from posttrain.kernels.attention.call import AttentionCall, Operands, Variant

LANES = 128
"""Alignment of block sizes."""

MAX_FUSED_BLOCKS = 8
"""Maximum number of key blocks for the fused backward kernel, which writes a query gradient per block."""


def refusal(call: AttentionCall) -> str | None:
    if call.platform not in ("cpu", "tpu"):
        return f"runs on TPU (interpreted on CPU), got {call.platform}"
    refusal = call.rows_refusal()
    if refusal is None and call.num_queries % LANES:
        refusal = f"needs a row length that is a multiple of {LANES}, got {call.num_queries}"
    return refusal


def splash(operands: Operands, variant: Variant, *, interpret: bool) -> Float[Array, "B T N Hv"]:
    """Splash attention; blocks emptied by the causal mask or the window are skipped.

    The mask uses row indices, which equal positions up to a constant within a segment.
    """
    q, k, v, mask_inputs, sinks = operands
    _, length, num_heads, head_dim = q.shape
    kernel = _kernel(length, num_heads, max(head_dim, v.shape[3]), variant, interpret=interpret)

    def row(q: Array, k: Array, v: Array, segments: Array) -> Array:
        ids = splash_attention_kernel.SegmentIds(q=segments, kv=segments)
        out: Any = kernel(q, k, v, ids) if sinks is None else kernel(q, k, v, ids, sinks)
        return out

    out = jax.vmap(row)((q * variant.scale).swapaxes(1, 2), k, v, mask_inputs.q_segments)
    return out.swapaxes(1, 2)


def _kernel(
    length: int, num_heads: int, head_dim: int, variant: Variant, *, interpret: bool
) -> splash_attention_kernel.SplashAttentionKernel:
    shape = (length, length)
    if variant.window is None:
        mask: splash_attention_mask.Mask = splash_attention_mask.CausalMask(shape)
    else:
        mask = splash_attention_mask.LocalMask(shape, window_size=(variant.window - 1, 0), offset=0)
    # Wider heads leave less TPU vector memory for blocks.
    block = next(size for size in ((512, 256, 128) if head_dim <= 256 else (256, 128)) if length % size == 0)
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
    return splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([mask] * num_heads),
        block_sizes=sizes,
        attn_logits_soft_cap=variant.soft_cap,
        interpret=interpret,
    )
