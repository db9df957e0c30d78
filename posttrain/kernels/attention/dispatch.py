"""Attention entry point: selection of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import Mesh
from jaxtyping import Float, Int

from posttrain.config import AttentionKernel
from posttrain.errors import ConfigError
from posttrain.kernels.attention.blockwise import block_size, blockwise, even_block
from posttrain.kernels.attention.call import (
    SAVED,
    Attended,
    AttentionCall,
    MaskInputs,
    Operands,
    Variant,
    attend_on_devices,
    full_attention,
    single_query,
    visible,
    with_folded_queries,
)
from posttrain.kernels.attention.fused import (
    QKV,
    SPLASH_LANES,
    SegmentIds,
    cudnn,
    cudnn_packs,
    cudnn_refusal,
    make_splash,
    splash,
    splash_folds,
    splash_layout,
    splash_padding,
    splash_refusal,
    tokamax,
    tokamax_refusal,
)
from posttrain.kernels.platform import compute_capability, installed, log_choice, platform_of, warn_once
from posttrain.mesh import head_shards, row_shards, token_shards

Kernel: TypeAlias = Callable[[Operands], Attended]
Kernels: TypeAlias = tuple[splash_attention_kernel.SplashAttentionKernel, ...]


@dataclass(frozen=True, kw_only=True)
class Support:
    """Supported features of an attention kernel."""

    parents: bool
    """Supports parent segments (sequences that continue another segment)."""
    images: bool
    """Supports images whose tokens see one another."""
    largest: bool
    """Returns the largest logits."""
    other: Callable[[AttentionCall], str | None]
    """Reason why the kernel cannot serve a call, parents and images aside; None if it can."""

    def refusal(self, call: AttentionCall) -> str | None:
        if call.parents and not self.parents:
            return "does not support parent segments"
        if call.images and not self.images:
            return "does not support images whose tokens see one another"
        if call.largest and not self.largest:
            return "does not return the largest logits, which optimizer.qk_clip needs"
        return self.other(call)


SUPPORT: Mapping[str, Support] = {
    "reference": Support(parents=True, images=True, largest=True, other=lambda _: None),
    "blockwise": Support(parents=True, images=True, largest=True, other=lambda _: None),
    "splash": Support(parents=False, images=True, largest=True, other=splash_refusal),
    "tokamax": Support(parents=True, images=False, largest=False, other=tokamax_refusal),
    "cudnn": Support(parents=True, images=False, largest=False, other=cudnn_refusal),
}

PREFERRED: Mapping[str, tuple[str, ...]] = {"tpu": ("splash",), "gpu": ("cudnn", "tokamax")}
"""Fused kernels per platform, in order of preference. On CPU, blockwise XLA takes half the time of splash, or less."""

WHOLE_LENGTH = 128
"""Maximum number of queries for which one block is used anyway."""

WHOLE_LOGITS = 1 << 24
"""Maximum number of logits over all rows and heads to materialize at once: 64 MiB in float32."""


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    *,
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    q_parents: Int[Array, "B T"] | None,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
    kernel: AttentionKernel,
    mesh: Mesh | None,
    images: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    ahead: int = 0,
    largest: bool = False,
) -> Attended:
    """softmax(scale q k) v over keys of the same segment at positions <= the query's, at most `window` of them.

    With `q_parents`, keys of the parent segment are visible too; with `images` of queries and keys (0: none) those of
    the query's image too, of which at most `ahead` are ahead of it; images that are the segments are known by identity.

    Logits and softmax are float32. `soft_cap` turns logits into cap tanh(logits / cap); `sinks` add one logit per head
    whose probability goes to no value. Queries of segment 0 (padding) return finite numbers. Keys have the layout [B,
    K, S, H]: CPU decoding reads it twice as fast as [B, S, K, H].

    Packed rows are distinguished from a KV cache by identity: `q_positions is k_positions` and `q_segments is
    k_segments`. Positions are then consecutive within a segment, and kernels may use row indices instead. Raises
    ConfigError if an explicit `kernel` cannot serve the call.
    """
    call = _call(
        AttentionCall(
            platform=platform_of(mesh),
            rows=q.shape[0],
            num_queries=q.shape[1],
            num_keys=k.shape[2],
            num_heads=q.shape[2],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            dtype=str(q.dtype),
            soft_cap=soft_cap,
            sinks=sinks is not None,
            parents=q_parents is not None,
            same_tokens=q_positions is k_positions and q_segments is k_segments,
            row_shards=row_shards(mesh),
            head_shards=head_shards(mesh),
            token_shards=1,
            tokamax=installed("tokamax"),
            compute_capability=compute_capability(mesh),
            images=images is not None,
            whole=images is not None and images[0] is q_segments and images[1] is k_segments,
            largest=largest,
        ),
        token_shards(mesh),
    )
    name = select_attention(kernel, call)
    log_choice("attention", name, call.kind, call.platform)
    mask_inputs = MaskInputs(q_positions, k_positions, q_segments, k_segments, q_parents, *(images or ()))
    variant = Variant(window=window, scale=scale, soft_cap=soft_cap, ahead=ahead, largest=largest)
    return run_attention(name, Operands(q, k, v, mask_inputs, sinks), variant, call, mesh)


def _call(call: AttentionCall, token_shards: int) -> AttentionCall:
    """The call with queries split over `token_shards` devices, where it can be."""
    if not call.same_tokens or call.num_queries % token_shards or call.split_refusal() is not None:
        return call
    return replace(call, num_queries=call.num_queries // token_shards, token_shards=token_shards)


def supports_parents(kernel: str, platform: str) -> bool:
    """Return True if rows with parent segments use the same kernel as other rows."""
    names = PREFERRED.get(platform, ()) if kernel == "auto" else (kernel,)
    return all(SUPPORT[name].parents for name in names)


def choose_attention(call: AttentionCall) -> str:
    """Select the kernel for "auto"."""
    small = call.num_logits <= WHOLE_LOGITS
    if call.kind == "decode":
        return "cudnn" if SUPPORT["cudnn"].refusal(call) is None else "reference"
    if call.kind != "rows":
        return "reference" if small else "blockwise"
    short = small and call.num_queries <= WHOLE_LENGTH
    if short and call.platform == "tpu" and call.num_queries < SPLASH_LANES:
        return "reference"
    preferred = PREFERRED.get(call.platform, ())
    refusals = {name: SUPPORT[name].refusal(call) for name in preferred}
    chosen = next((name for name in preferred if refusals[name] is None), "reference" if short else "blockwise")
    if call.platform == "tpu" and chosen not in preferred:
        warn_once(
            f"attention: {chosen} XLA code, which is slow on TPU: " + "; ".join(f"{n} {r}" for n, r in refusals.items())
        )
    return chosen


def select_attention(kernel: str, call: AttentionCall) -> str:
    """Validate or select the kernel. Raises ConfigError listing the alternatives if the requested kernel cannot
    serve."""
    if kernel == "auto":
        return choose_attention(call)
    if kernel not in SUPPORT:
        raise ConfigError(f"attention: unknown kernel {kernel!r}; use one of {', '.join(get_args(AttentionKernel))}")
    refusal = SUPPORT[kernel].refusal(call)
    if refusal is not None:
        others = ", ".join(name for name, serves in SUPPORT.items() if serves.refusal(call) is None)
        raise ConfigError(f"attention: kernel {kernel!r} {refusal}; use auto, {others}")
    return kernel


def run_attention(name: str, operands: Operands, variant: Variant, call: AttentionCall, mesh: Mesh | None) -> Attended:
    interpret = call.platform == "cpu"
    match name:
        case "reference":
            kernel: Kernel = partial(_reference, variant=variant)
            return kernel(operands) if call.token_shards == 1 else attend_on_devices(kernel, operands, call, mesh)
        case "blockwise":
            even = even_block(call)
            block, short = block_size(call) if even is None else even, even is not None
            same = call.same_tokens and call.token_shards == 1
            kernel = partial(blockwise, variant=variant, same_tokens=same, block=block, short=short)
            return kernel(operands) if call.token_shards == 1 else attend_on_devices(kernel, operands, call, mesh)
        case "splash":
            padding, head_dim = splash_padding(call), max(call.head_dim, call.value_dim)
            sizes = call.num_keys + padding, call.num_heads // call.head_shards, head_dim
            shards, folded = call.token_shards, splash_folds(call, variant)
            several = call.images and not call.whole and variant.ahead > 0
            make = partial(make_splash, *sizes, variant, shards=shards, interpret=interpret, merged=several)
            if several:
                both = make(sees="past"), make(sees="ahead")
                layouts = tuple(splash_layout(kernel, mesh) for kernel in both)
                served: Callable[..., Attended] = partial(splash_images, variant=variant, padding=padding)
                return attend_on_devices(served, operands, call, mesh, both, layouts)
            tables = make(folded=folded, sees="all" if call.whole else "past")
            served = partial(splash, variant=variant, padding=padding)
            if folded:
                served = partial(with_folded_queries, served, shards)
            return attend_on_devices(served, operands, call, mesh, tables, splash_layout(tables, mesh))
        case "tokamax":
            return attend_on_devices(lambda given: Attended(tokamax(given, variant)), operands, call, mesh)
        case _:
            packed, block = cudnn_packs(call), block_size(call)

            def fused(given: Operands) -> Attended:
                return Attended(cudnn(given, variant, packed=packed, block=block))

            return attend_on_devices(fused, operands, call, mesh)


def splash_images(operands: Operands, kernels: Kernels, *, variant: Variant, padding: int) -> Attended:
    """`splash` with the tokens of an image seeing one another: by a kernel of the past and one of the keys ahead."""
    length, of = operands.q.shape[1], operands.mask_inputs
    assert of.q_images is not None and of.k_images is not None
    q = jnp.pad(operands.q * variant.scale, ((0, 0), (0, padding), (0, 0), (0, 0))).swapaxes(1, 2)
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (operands.k, operands.v))
    # Text sees nothing ahead.
    ahead = jnp.where(of.q_images > 0, of.q_images, -1), jnp.where(of.k_images > 0, of.k_images, -2)
    ids = tuple(
        SegmentIds(*(jnp.pad(x, ((0, 0), (0, padding))) for x in group))
        for group in ((of.q_segments, of.k_segments), ahead)
    )
    out = jax.vmap(_merged, in_axes=(None, 0, 0))(kernels, (q, k, v), ids)
    return Attended(out.swapaxes(1, 2)[:, :length], None)


@jax.custom_vjp
def _merged(kernels: Kernels, qkv: QKV, ids: tuple[SegmentIds, ...]) -> Float[Array, "N T Hv"]:
    """Attention of a row over the keys of masks that have none in common: sum_i o_i e^(l_i) / sum_i e^(l_i), with their
    outputs o_i and log-sum-exps l_i. A query without keys in a mask has a log-sum-exp there that is next to nothing."""
    return _merged_forward(kernels, qkv, ids)[0]


def _merged_forward(kernels: Kernels, qkv: QKV, ids: tuple[SegmentIds, ...]) -> tuple[Array, Any]:
    found: list[Any] = [kernel(*qkv, of) for kernel, of in zip(kernels, ids, strict=True)]
    sums = jnp.stack([log_sum for _, (log_sum,) in found])
    total = jax.nn.logsumexp(sums, axis=0)
    shares = jnp.exp(sums - total[None])[..., None]
    whole = jnp.sum(jnp.stack([out.astype(jnp.float32) for out, _ in found]) * shares, axis=0)
    out, total = (checkpoint_name(x, SAVED) for x in (whole.astype(qkv[0].dtype), total))
    return out, (kernels, qkv, ids, out, total)


def _merged_backward(saved: Any, d_out: Array) -> tuple[None, QKV, None]:
    """Sum of the gradients of the masks, in each of which a probability is that by the log-sum-exp of all."""
    kernels, qkv, ids, out, total = saved
    parts = []
    for kernel, of in zip(kernels, ids, strict=True):
        inputs = *qkv, of, None, out, total, kernel.dq_mask_info, kernel.dkv_mask_info
        *_, dq, dk, dv, _, _ = splash_attention_kernel._splash_attention_bwd(**kernel.kwargs, res=inputs, do=d_out)
        parts.append((dq, dk, dv))
    dq, dk, dv = (first + second for first, second in zip(*parts, strict=True))
    return None, (dq, dk, dv), None


_merged.defvjp(_merged_forward, _merged_backward)


def _reference(operands: Operands, *, variant: Variant) -> Attended:
    q, k, v, mask_inputs, sinks = operands
    mask = visible(*mask_inputs, variant.window)
    options: dict[str, Any] = {"scale": variant.scale, "soft_cap": variant.soft_cap, "sinks": sinks}
    if q.shape[1] == 1 and not variant.largest:
        return Attended(single_query(q, k, v, mask[:, 0], **options))
    tokens = mask_inputs.q_segments > 0 if variant.largest else None
    return full_attention(q, k, v, mask, **options, tokens=tokens)
