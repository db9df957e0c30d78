"""Fused attention on GPU: cuDNN through `jax.nn.dot_product_attention`, and tokamax, an optional dependency."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.kernels.attention.call import AttentionCall, Operands, Variant
from posttrain.kernels.attention.reference import visible
from posttrain.kernels.platform import tokamax_library

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
