"""Attention of tokamax on GPU; an extra of the installation, imported only where it is chosen."""

from __future__ import annotations

from jax import Array
from jaxtyping import Float

from posttrain.kernels.attention.reference import visible
from posttrain.kernels.attention.request import Operands, Request, Variant
from posttrain.kernels.platform import tokamax_library

IMPLEMENTATIONS = ("mosaic", "triton")
"""Its others hold all of T x S, or are no faster than ours: without a fused one we raise."""

MIN_CAPABILITY = 8.0
MAX_HEAD_DIM = 256
BLOCK = 64
"""Queries and keys that its kernels take at once; none serves a row that ends within a block."""


def refusal(request: Request) -> str | None:
    if not request.tokamax:
        return "is not installed: pip install 'posttrain[kernels]'"
    if request.platform != "gpu":
        return f"runs on GPU, got {request.platform}"
    if request.sinks:
        return "does not know sinks"
    if request.dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 and float16, got {request.dtype}"
    if request.compute_capability is None or request.compute_capability < MIN_CAPABILITY:
        return f"needs a GPU of compute capability {MIN_CAPABILITY} or more, got {request.compute_capability}"
    width = max(request.head_dim, request.value_dim)
    if width > MAX_HEAD_DIM or width % 8:
        return f"takes heads of a multiple of 8 and at most {MAX_HEAD_DIM} numbers, got {width}"
    if request.num_queries % BLOCK:
        return f"takes rows of a multiple of {BLOCK} tokens, got {request.num_queries}"
    return request.refusal_of_rows() or request.refusal_of_mask()


def tokamax(
    operands: Operands, variant: Variant, *, implementation: str | tuple[str, ...] = IMPLEMENTATIONS
) -> Float[Array, "B T N Hv"]:
    q, k, v, places, _ = operands
    return tokamax_library().dot_product_attention(
        q,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        mask=visible(*places, variant.window)[:, None],
        scale=variant.scale,
        logits_soft_cap=variant.soft_cap,
        # The mask says it all; these let a kernel skip what they exclude by place in the row.
        is_causal=True,
        local_window_size=None if variant.window is None else (variant.window - 1, 0),
        implementation=implementation,
    )
