"""Fused attention of tokamax on GPU: an optional dependency, imported only when selected."""

from __future__ import annotations

from jax import Array
from jaxtyping import Float

from posttrain.kernels.attention.call import AttentionCall, Operands, Variant
from posttrain.kernels.attention.reference import visible
from posttrain.kernels.platform import tokamax_library

IMPLEMENTATIONS = ("mosaic", "triton")
"""Fused implementations. The others materialize T x S or are no faster than ours: raise without a fused one."""

MIN_CAPABILITY = 8.0
MAX_HEAD_DIM = 256
BLOCK = 64
"""Queries and keys per kernel block; rows must be a multiple of it."""


def refusal(call: AttentionCall) -> str | None:
    if not call.tokamax:
        return "is not installed: pip install 'posttrain[kernels]'"
    if call.platform != "gpu":
        return f"runs on GPU, got {call.platform}"
    if call.sinks:
        return "does not support sinks"
    if call.dtype not in ("bfloat16", "float16"):
        return f"supports bfloat16 and float16, got {call.dtype}"
    if call.compute_capability is None or call.compute_capability < MIN_CAPABILITY:
        return f"needs a GPU of compute capability {MIN_CAPABILITY} or more, got {call.compute_capability}"
    width = max(call.head_dim, call.value_dim)
    if width > MAX_HEAD_DIM or width % 8:
        return f"needs a head_dim that is a multiple of 8 and at most {MAX_HEAD_DIM}, got {width}"
    if call.num_queries % BLOCK:
        return f"needs a row length that is a multiple of {BLOCK}, got {call.num_queries}"
    return call.rows_refusal() or call.mask_refusal()


def tokamax(
    operands: Operands, variant: Variant, *, implementation: str | tuple[str, ...] = IMPLEMENTATIONS
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
