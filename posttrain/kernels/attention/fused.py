"""Fused attention kernels of libraries: splash from JAX Pallas on TPU, cuDNN and tokamax on GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from posttrain.kernels.attention.call import AttentionCall, Operands, Variant, visible
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
    length: int, head_dim: int, window: int | None, *, shards: int = 1
) -> splash_attention_kernel.BlockSizes:
    """Block sizes for a row length whose part on each of `shards` devices is a multiple of `SPLASH_LANES`."""
    limit, queries = SPLASH_BLOCK if head_dim <= SPLASH_WIDE_HEAD else SPLASH_WIDE_BLOCK, length // shards
    block = next(size for size in range(limit, 0, -SPLASH_LANES) if queries % size == 0)
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


def make_splash(
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
        block_sizes=splash_blocks(length, head_dim, variant.window, shards=shards),
        attn_logits_soft_cap=variant.soft_cap,
        interpret=interpret,
        head_shards=1,
        q_seq_shards=shards,
    )


CUDNN_HEAD_DIM = 128
"""Largest head dimension that all GPU generations support in training; Hopper supports up to 256."""


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
    refusal = call.rows_refusal() or call.mask_refusal()
    if refusal is None and call.num_queries % 2:
        refusal = f"needs an even row length, got {call.num_queries}"
    return refusal


def cudnn(operands: Operands, variant: Variant) -> Float[Array, "B T N Hv"]:
    return jax.nn.dot_product_attention(**cudnn_arguments(operands, variant), implementation="cudnn")[
        ..., : operands.v.shape[3]
    ]


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
        # The mask is complete; these arguments let the kernel skip blocks by row index.
        beside = {
            "is_causal": True,
            "local_window_size": (variant.window - 1, 0) if variant.window and mask_inputs.q_parents is None else None,
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

TOKAMAX_CAPABILITY = 8.0
TOKAMAX_HEAD_DIM = 256
TOKAMAX_BLOCK = 64
"""Queries and keys per kernel block; rows must be a multiple of it."""


def tokamax_refusal(call: AttentionCall) -> str | None:
    if not call.tokamax:
        return "is not installed: pip install 'posttrain[kernels]'"
    if call.platform != "gpu":
        return f"runs on GPU, got {call.platform}"
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
    return tokamax_library().dot_product_attention(
        q,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        mask=visible(*mask_inputs, variant.window)[:, None],
        scale=variant.scale,
        logits_soft_cap=variant.soft_cap,
        # The mask is complete; these arguments let the kernel skip blocks by row index.
        is_causal=True,
        local_window_size=None if variant.window is None else (variant.window - 1, 0),
        implementation=implementation,
    )
