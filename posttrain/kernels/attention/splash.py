"""Splash attention from JAX Pallas: compiled on TPU, interpreted on CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jaxtyping import Float

from posttrain.kernels.attention.call import AttentionCall, Operands, Variant

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


def refusal(call: AttentionCall) -> str | None:
    if call.platform not in ("cpu", "tpu"):
        return f"runs on TPU (interpreted on CPU), got {call.platform}"
    return call.rows_refusal()


def splash(operands: Operands, variant: Variant, *, interpret: bool) -> Float[Array, "B T N Hv"]:
    """Splash attention; blocks emptied by the causal mask or the window are skipped. Rows are padded to whole blocks.

    The mask uses row indices, which equal positions up to a constant within a segment.
    """
    length, sinks = operands.q.shape[1], operands.sinks
    padding = padded_length(length) - length
    # Padding comes last, where causal queries do not see it.
    q = jnp.pad(operands.q * variant.scale, ((0, 0), (0, padding), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (operands.k, operands.v))
    segments = jnp.pad(operands.mask_inputs.q_segments, ((0, 0), (0, padding)))
    kernel = _kernel(length + padding, q.shape[2], max(q.shape[3], v.shape[3]), variant, interpret=interpret)

    def row(q: Array, k: Array, v: Array, segments: Array) -> Array:
        ids = splash_attention_kernel.SegmentIds(q=segments, kv=segments)
        out: Any = kernel(q, k, v, ids) if sinks is None else kernel(q, k, v, ids, sinks)
        return out

    out = jax.vmap(row)(q.swapaxes(1, 2), k, v, segments)
    return out.swapaxes(1, 2)[:, :length]


def padded_length(length: int) -> int:
    """Row length padded to whole blocks of more than `LANES` if that adds an eighth at most, else to `LANES`."""
    shortest = min(-(-length // block) * block for block in range(BLOCK, LANES, -LANES))
    return shortest if 8 * (shortest - length) <= length else -(-length // LANES) * LANES


def block_sizes(length: int, head_dim: int, window: int | None) -> splash_attention_kernel.BlockSizes:
    """Block sizes for a row length that is a multiple of `LANES`."""
    limit = BLOCK if head_dim <= WIDE_HEAD else WIDE_BLOCK
    block = next(size for size in range(limit, 0, -LANES) if length % size == 0)
    keys = block
    if window is None and head_dim <= LANES:
        keys = next(n * block for n in range(KEYS_PER_GRADIENT // block, 0, -1) if length % (n * block) == 0)
    fused = length * (length // keys) <= MAX_GRADIENTS
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


def _kernel(
    length: int, num_heads: int, head_dim: int, variant: Variant, *, interpret: bool
) -> splash_attention_kernel.SplashAttentionKernel:
    shape = (length, length)
    if variant.window is None:
        mask: splash_attention_mask.Mask = splash_attention_mask.CausalMask(shape)
    else:
        mask = splash_attention_mask.LocalMask(shape, window_size=(variant.window - 1, 0), offset=0)
    return splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([mask] * num_heads),
        block_sizes=block_sizes(length, head_dim, variant.window),
        attn_logits_soft_cap=variant.soft_cap,
        interpret=interpret,
    )
