"""Fused attention on GPU: cuDNN, which takes packed sequences by their places, and tokamax."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo
from jaxtyping import Bool, Float, Int

from posttrain.kernels.attention.blockwise import blockwise
from posttrain.kernels.attention.call import AttentionCall, Operands, Variant, visible
from posttrain.kernels.platform import tokamax_library

CUDNN_HEAD_DIM = 128
"""Largest head dimension that all GPU generations support in training; Hopper supports up to 256."""

CUDNN_PACKED_CAPABILITY = 9.0
"""Compute capability from which cuDNN takes packed sequences by their places, without a mask."""

TOKENS_PER_SEGMENT = 128
"""Tokens of a row for each sequence that cuDNN makes room for."""


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
    refusal = call.rows_refusal()
    if refusal is None and not cudnn_packs(call):
        refusal = call.mask_refusal()
        if refusal is None and call.num_queries % 2:
            refusal = f"needs an even row length, got {call.num_queries}"
    return refusal


def cudnn_packs(call: AttentionCall) -> bool:
    """True if packed sequences are given by their places: no mask is made, and other sequences' blocks are skipped."""
    capable = call.compute_capability is not None and call.compute_capability >= CUDNN_PACKED_CAPABILITY
    return call.kind == "rows" and call.token_shards == 1 and not call.parents and capable


def cudnn(operands: Operands, variant: Variant, *, packed: bool, block: int) -> Float[Array, "B T N Hv"]:
    if not packed:
        return jax.nn.dot_product_attention(**cudnn_arguments(operands, variant), implementation="cudnn")[
            ..., : operands.v.shape[3]
        ]
    length = operands.q.shape[1]
    places = segment_places(operands.mask_inputs.q_segments, max(2, length // TOKENS_PER_SEGMENT))

    def by_blocks(operands: Operands) -> Array:
        return blockwise(operands, variant=variant, same_tokens=True, block=block, short=False)

    return jax.lax.cond(places.fit, partial(cudnn_packed, places=places, variant=variant), by_blocks, operands)


class SegmentPlaces(NamedTuple):
    """Places of the sequences of packed rows, of at most M in each; padding counts as one."""

    starts: Int[Array, "B M1"]
    """-1: there is none."""
    lengths: Int[Array, "B M"]
    fit: Bool[Array, ""]
    """No row has more than M."""


def segment_places(segments: Int[Array, "B T"], limit: int) -> SegmentPlaces:
    changes = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    number = jnp.cumsum(changes, axis=1, dtype=jnp.int32)
    wanted = jnp.arange(limit + 1, dtype=jnp.int32)[None]
    edges = jnp.sum(number[:, :, None] < wanted[None], axis=1, dtype=jnp.int32)
    there = wanted <= number[:, -1:]
    lengths = jnp.where(there[:, :-1], edges[:, 1:] - edges[:, :-1], -1)
    return SegmentPlaces(jnp.where(there, edges, -1), lengths, jnp.all(number[:, -1] < limit))


def cudnn_packed(operands: Operands, *, places: SegmentPlaces, variant: Variant) -> Float[Array, "B T N Hv"]:
    """cuDNN's attention within each sequence. `jax.nn.dot_product_attention` does not pass the sequences' places on."""
    width = max(operands.q.shape[3], operands.v.shape[3])
    q, k, v = operands.q, operands.k.swapaxes(1, 2), operands.v.swapaxes(1, 2)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[3]))) for x in (q, k, v))
    out: Array = fused_attention_stablehlo.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=places.lengths,
        kv_seqlen=places.lengths,
        q_offsets=places.starts,
        kv_offsets=places.starts,
        scale=variant.scale,
        mask_type=fused_attention_stablehlo.MaskType.PADDING_CAUSAL,
        sliding_window_length=variant.window,
    )
    return out[..., : operands.v.shape[3]]


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
        # The mask is complete; these arguments let the kernel skip blocks by row index, which a part of a row lacks.
        whole = q.shape[1] == k.shape[2]
        windowed = whole and variant.window is not None and mask_inputs.q_parents is None
        beside = {
            "is_causal": whole,
            "local_window_size": (variant.window - 1, 0) if windowed and variant.window else None,
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

TOKAMAX_TOO_NEW = (0, 11)
"""Version of jax from which tokamax's attention raises on GPU (seen with jax 0.11.2)."""
TOKAMAX_CAPABILITY = 8.0
TOKAMAX_HEAD_DIM = 256
TOKAMAX_BLOCK = 64
"""Queries and keys per kernel block; rows must be a multiple of it."""


def tokamax_refusal(call: AttentionCall) -> str | None:
    if not call.tokamax:
        return "is not installed: pip install 'posttrain[kernels]'"
    if call.platform != "gpu":
        return f"runs on GPU, got {call.platform}"
    if jax.__version_info__ >= TOKAMAX_TOO_NEW:
        return f"0.0.12 needs functions that jax no longer has, got jax {jax.__version__}"
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
    whole = q.shape[1] == k.shape[2]
    return tokamax_library().dot_product_attention(
        q,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        mask=visible(*mask_inputs, variant.window)[:, None],
        scale=variant.scale,
        logits_soft_cap=variant.soft_cap,
        # The mask is complete; these arguments let the kernel skip blocks by row index, which a part of a row lacks.
        is_causal=whole,
        local_window_size=(variant.window - 1, 0) if whole and variant.window is not None else None,
        implementation=implementation,
    )
