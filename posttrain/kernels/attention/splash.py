"""Splash attention of JAX: compiled for TPU, interpreted on CPU."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jaxtyping import Float

from posttrain.kernels.attention.request import Operands, Request, Variant

LANES = 128
"""Blocks are a multiple of it."""

MAX_FUSED_BLOCKS = 8
"""Blocks of keys up to which the backward pass is one kernel: it writes a gradient of the queries for each block."""


def refusal(request: Request) -> str | None:
    if request.platform not in ("cpu", "tpu"):
        return f"runs on TPU, and interpreted on CPU, got {request.platform}"
    refusal = request.refusal_of_rows()
    if refusal is None and request.num_queries % LANES:
        refusal = f"takes rows of a multiple of {LANES} tokens, got {request.num_queries}"
    return refusal


def splash(operands: Operands, variant: Variant, *, interpret: bool) -> Float[Array, "B T N Hv"]:
    """Blocks that the causal mask or the window empties are skipped.

    The mask counts by place in the row, which equals positions inside a segment.
    """
    q, k, v, places, sinks = operands
    _, length, num_heads, head_dim = q.shape
    kernel = _kernel(length, num_heads, max(head_dim, v.shape[3]), variant, interpret=interpret)

    def row(q: Array, k: Array, v: Array, segments: Array) -> Array:
        ids = splash_attention_kernel.SegmentIds(q=segments, kv=segments)
        out: Any = kernel(q, k, v, ids) if sinks is None else kernel(q, k, v, ids, sinks)
        return out

    out = jax.vmap(row)((q * variant.scale).swapaxes(1, 2), k, v, places.q_segments)
    return out.swapaxes(1, 2)


def _kernel(
    length: int, num_heads: int, head_dim: int, variant: Variant, *, interpret: bool
) -> splash_attention_kernel.SplashAttentionKernel:
    shape = (length, length)
    if variant.window is None:
        mask: splash_attention_mask.Mask = splash_attention_mask.CausalMask(shape)
    else:
        mask = splash_attention_mask.LocalMask(shape, window_size=(variant.window - 1, 0), offset=0)
    # Wider heads leave less room for blocks in a TPU's vector memory.
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
