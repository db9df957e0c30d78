"""Attention of tokamax on GPU; an extra of the installation, imported only where it is chosen."""

from __future__ import annotations

from jax import Array
from jaxtyping import Float

from posttrain.kernels.attention.reference import visible
from posttrain.kernels.attention.request import Operands, Request, Variant
from posttrain.kernels.platform import tokamax_library

IMPLEMENTATIONS = ("mosaic", "triton")
"""Its others hold all of T x S, or are no faster than ours: without a fused one we raise."""


def refusal(request: Request) -> str | None:
    if not request.tokamax:
        return "is not installed: pip install 'posttrain[kernels]'"
    if request.platform != "gpu":
        return f"runs on GPU, got {request.platform}"
    if request.sinks:
        return "does not know sinks"
    return request.refusal_of_rows()


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
