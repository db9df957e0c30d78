"""Fused attention of cuDNN, through JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.kernels.attention.reference import visible
from posttrain.kernels.attention.request import Operands, Request, Variant

MAX_HEAD_DIM = 128
"""What every generation takes in training; Hopper also takes up to 256."""


def refusal(request: Request) -> str | None:
    width = max(request.head_dim, request.value_dim)
    if request.platform != "gpu":
        return f"runs on GPU, got {request.platform}"
    if request.soft_cap is not None or request.sinks:
        return "knows neither soft-cap nor sinks"
    if request.dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 and float16, got {request.dtype}"
    if width > MAX_HEAD_DIM or width % 8:
        return f"takes heads of a multiple of 8 and at most {MAX_HEAD_DIM} numbers, got {width}"
    if request.kind == "decode":
        return request.refusal_of_split()
    refusal = request.refusal_of_rows() or request.refusal_of_mask()
    if refusal is None and request.num_queries % 2:
        refusal = f"takes rows of an even number of tokens, got {request.num_queries}"
    return refusal


def cudnn(operands: Operands, variant: Variant) -> Float[Array, "B T N Hv"]:
    return jax.nn.dot_product_attention(**arguments(operands, variant), implementation="cudnn")[
        ..., : operands.v.shape[3]
    ]


def arguments(operands: Operands, variant: Variant) -> dict[str, Any]:
    """Arguments of `jax.nn.dot_product_attention`, whatever its implementation.

    It wants heads of one size; zeros beyond the true one change neither logits nor the first values.
    """
    q, k, v, places, _ = operands
    width = max(q.shape[3], v.shape[3])
    mask: Array | None = visible(*places, variant.window)[:, None]
    if q.shape[1] == 1:
        # Of a cache, where the keys that one query sees are the first ones, unless there is a window.
        beside: dict[str, Any] = {} if variant.window else {"key_value_seq_lengths": places.q_positions[:, 0] + 1}
        mask = mask if variant.window else None
    else:
        # The mask says it all; these let a kernel skip what they exclude by place in the row.
        beside = {
            "is_causal": True,
            "local_window_size": (variant.window - 1, 0) if variant.window and places.q_parents is None else None,
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
