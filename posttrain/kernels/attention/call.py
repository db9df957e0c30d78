"""Attention call: operands, mask inputs, properties that selection depends on, and the reference implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int

from posttrain.mesh import HEAD_AXIS, TOKEN_AXIS, row_axes

MASK_BYTES = 256 << 20
"""Maximum size of a materialized mask; beyond it, kernels that compute the mask per block need no memory for it."""

SAVED = "attention"
"""Checkpoint name of a kernel's output and of the softmax's statistics that its backward pass reads."""


class MaskInputs(NamedTuple):
    """Positions, segments and parents from which the attention mask is computed."""

    q_positions: Int[Array, "B T"]
    k_positions: Int[Array, "B S"]
    q_segments: Int[Array, "B T"]
    k_segments: Int[Array, "B S"]
    q_parents: Int[Array, "B T"] | None
    """Parent segment of the query's segment, as `Batch.parents`; 0 for none."""
    q_images: Int[Array, "B T"] | None = None
    """Image of each query, as `Batch.images`: it sees the keys of its image ahead too; 0 for none."""
    k_images: Int[Array, "B S"] | None = None


class Operands(NamedTuple):
    """Arrays of one attention call."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S Hv"]
    mask_inputs: MaskInputs
    sinks: Float[Array, " N"] | None


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Logit transform and window of one attention call."""

    window: int | None
    scale: float
    soft_cap: float | None
    ahead: int = 0
    """Greatest number of keys ahead of a query that its image has; 0: causal."""
    largest: bool = False
    """Return the largest logit of each head too."""


class Attended(NamedTuple):
    """Output of attention."""

    heads: Float[Array, "B T N Hv"]
    largest: Float[Array, "B N"] | None = None
    """Largest logit q k * scale of each head in each row, before a soft cap and without sinks, over the keys that
    tokens see; `MASKED` in a row of padding alone. None without `Variant.largest`."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Static properties of one attention call."""

    platform: str
    rows: int
    num_queries: int
    """Queries of a row on one device."""
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    soft_cap: float | None
    sinks: bool
    parents: bool
    """Some segments have a parent segment."""
    same_tokens: bool
    """Queries and keys are the same tokens in the same order: no KV cache."""
    row_shards: int
    head_shards: int
    token_shards: int
    """Number of devices that split the queries of a row; more than 1 only without a KV cache."""
    tokamax: bool
    """True if the `tokamax` package is installed."""
    compute_capability: float | None
    """GPU compute capability, such as 9.0."""
    images: bool = False
    """Tokens of an image see one another."""
    whole: bool = False
    """Each image is a segment, so that all of a segment see one another."""
    largest: bool = False
    """The largest logits are returned too."""

    @property
    def kind(self) -> Literal["decode", "prefill", "rows"]:
        if self.same_tokens and self.token_shards > 1:
            return "rows"
        if self.num_queries == 1:
            return "decode"
        return "rows" if self.same_tokens else "prefill"

    @property
    def num_logits(self) -> int:
        return self.rows * self.num_heads * self.num_queries * self.num_keys

    @property
    def mask_bytes(self) -> int:
        """Bytes of a materialized mask on the device with the most rows."""
        return -(-self.rows // self.row_shards) * self.num_queries * self.num_keys

    @property
    def split_kv_heads(self) -> int:
        """Number of KV heads after repeating each until they split evenly over devices."""
        return math.lcm(self.num_kv_heads, self.head_shards)

    def mask_refusal(self) -> str | None:
        """Return why a kernel that needs a materialized mask of packed rows (T^2 bytes per row) cannot serve; None if
        it can."""
        if self.mask_bytes <= MASK_BYTES:
            return None
        return f"needs a materialized mask, here of {self.mask_bytes >> 20:,} MiB, maximum {MASK_BYTES >> 20} MiB"

    def rows_refusal(self) -> str | None:
        """Return why a kernel without KV cache support that runs under `jax.shard_map` cannot serve; None if it can."""
        if self.kind != "rows":
            return (
                f"needs packed rows without a KV cache, got {self.num_queries} queries on {self.num_keys} cached keys"
            )
        return self.split_refusal()

    def split_refusal(self) -> str | None:
        """Return why `jax.shard_map` cannot split the call over devices; None if it can."""
        if self.rows % self.row_shards:
            return f"splits rows over devices: the mesh's {self.row_shards} row shards do not divide {self.rows} rows"
        if self.num_heads % self.split_kv_heads:
            heads = f"{self.num_heads} heads in {self.num_kv_heads} groups"
            return f"splits heads over devices: mesh.tensor={self.head_shards} does not divide {heads}"
        return None


MASKED = -1e30
"""Logit of a masked key: finite, so that a fully masked query stays finite."""


def visible(
    q_positions: Int[Array, "B T"],
    k_positions: Int[Array, "B S"],
    q_segments: Int[Array, "B T"],
    k_segments: Int[Array, "B S"],
    q_parents: Int[Array, "B T"] | None,
    q_images: Int[Array, "B T"] | None,
    k_images: Int[Array, "B S"] | None,
    window: int | None,
) -> Bool[Array, "B T S"]:
    """Causal mask over the query's own segment and its parent segment, if that is not 0, and all of its image; a window
    cuts what is past, of the image too."""
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    same = q_segments[:, :, None] == k_segments[:, None, :]
    if q_parents is not None:
        same |= (q_parents[:, :, None] == k_segments[:, None, :]) & (q_parents[:, :, None] > 0)
    seen = distance >= 0
    if q_images is not None and k_images is not None:
        seen |= (q_images[:, :, None] == k_images[:, None, :]) & (q_images[:, :, None] > 0)
    mask = same & seen
    return mask if window is None else mask & (distance < window)


def full_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    mask: Bool[Array, "B T S"],
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
    tokens: Bool[Array, "B T"] | None = None,
) -> Attended:
    """Full logits, softmax, product with the values. `tokens`: queries that are no padding, for the largest logits."""
    rows, length, num_heads, head_dim = q.shape
    num_kv_heads, keys, value_dim = v.shape[1:]
    groups = num_heads // num_kv_heads
    # Queries of a group are merged into one axis: plain batched products in the layout of the keys.
    q = q.reshape(rows, length, num_kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(rows, num_kv_heads, groups * length, head_dim)
    # The order of a cache's keys, which XLA:CPU would transpose otherwise.
    products = jnp.einsum("bkth,bkhs->bkts", q, k.swapaxes(2, 3), preferred_element_type=jnp.float32) * scale
    logits, shape = capped(products, soft_cap), (rows, num_kv_heads, groups, length, keys)
    logits = jnp.where(mask[:, None, None], logits.reshape(shape), MASKED)
    per_head = None if sinks is None else sinks.reshape(1, num_kv_heads, groups, 1, 1)
    probs = softmax(logits, per_head).astype(v.dtype).reshape(rows, num_kv_heads, groups * length, keys)
    # XLA:CPU has no BF16 x BF16 = F32 for this product; other platforms accumulate in float32 anyway.
    out = jnp.einsum("bkts,bksh->bkth", probs, v)
    out = out.reshape(rows, num_kv_heads, groups, length, value_dim).transpose(0, 3, 1, 2, 4)
    out = out.reshape(rows, length, num_heads, value_dim)
    if tokens is None:
        return Attended(out)
    counted = jnp.where((mask & tokens[:, :, None])[:, None, None], products.reshape(shape), MASKED)
    return Attended(out, jax.lax.stop_gradient(jnp.max(counted, axis=(3, 4)).reshape(rows, num_heads)))


def single_query(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Hv"],
    mask: Bool[Array, "B S"],
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B 1 N Hv"]:
    """Attention of one decoded token, with both products' operands in the order that CPUs read fastest.

    Keys as wide as the values come from a cache stored as [K, H, S]; those of latent attention (MLA), whose values are
    a part of them, are stored as [K, S, H].
    """
    rows, _, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v.shape[1], v.shape[3]
    groups = num_heads // num_kv_heads
    q = q.reshape(rows, num_kv_heads, groups, head_dim)
    if head_dim == value_dim:
        logits = jnp.einsum("bkgh,bkhs->bkgs", q, k.swapaxes(2, 3), preferred_element_type=jnp.float32) * scale
    else:
        # Scaled before the transpose: after it, XLA:CPU takes a fifth longer for a whole decoding step.
        logits = jnp.einsum("bksh,bkgh->bksg", k, q, preferred_element_type=jnp.float32) * scale
        logits = logits.swapaxes(2, 3)
    logits = jnp.where(mask[:, None, None], capped(logits, soft_cap), MASKED)
    exps, total = exponentials(logits, None if sinks is None else sinks.reshape(1, num_kv_heads, groups, 1))
    out = jnp.einsum("bkgs,bksh->bkgh", exps.astype(v.dtype), v) / total
    return out.astype(v.dtype).reshape(rows, 1, num_heads, value_dim)


def capped(logits: Float[Array, "*B"], soft_cap: float | None) -> Float[Array, "*B"]:
    """cap tanh(logits / cap): Gemma 2, arXiv:2408.00118, section 2."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def softmax(logits: Float[Array, "*B S"], sinks: Float[Array, "*#B 1"] | None) -> Float[Array, "*B S"]:
    """Softmax over the last dimension; a sink is one more logit whose probability goes to no value."""
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1)
    exps, total = exponentials(logits, sinks)
    return exps / total


def exponentials(
    logits: Float[Array, "*B S"], sinks: Float[Array, "*#B 1"] | None
) -> tuple[Float[Array, "*B S"], Float[Array, "*B 1"]]:
    """Numerator and denominator of `softmax`, shifted so that the largest exponential is 1."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(logits.dtype)
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(top)
    exps = jnp.exp(logits - top)
    total = jnp.sum(exps, axis=-1, keepdims=True)
    return exps, total if sinks is None else total + jnp.exp(sinks - top)


def attend_on_devices(
    kernel: Callable[..., Attended],
    operands: Operands,
    call: AttentionCall,
    mesh: Mesh | None,
    tables: Any = None,
    table_specs: Any = None,
) -> Attended:
    """Run a kernel that the compiler cannot partition.

    Where `call` splits the tokens of a row, keys and values of the whole row are gathered, and their gradients
    reduce-scattered. `tables`: second argument of the kernel, laid out by `table_specs`.
    """
    arguments = (operands,) if tables is None else (operands, tables)
    if mesh is None or mesh.size == 1:
        return kernel(*arguments)
    repeats = call.split_kv_heads // call.num_kv_heads
    if repeats > 1:
        k, v = (jnp.repeat(x, repeats, axis=1) for x in (operands.k, operands.v))
        operands = operands._replace(k=k, v=v)
    rows, heads = row_axes(mesh), HEAD_AXIS if HEAD_AXIS in mesh.axis_names else None
    tokens = TOKEN_AXIS if call.token_shards > 1 else None
    queries, keys = PartitionSpec(rows, tokens, heads), PartitionSpec(rows, heads, tokens)
    specs = queries, keys, keys, PartitionSpec(rows, tokens), PartitionSpec(heads)

    layouts: list[Any] = [queries, PartitionSpec(rows, heads) if call.largest else None]

    def local(parts: tuple[Any, ...], *tables: Any) -> Attended:
        operands = Operands(*parts)
        if tokens is None:
            return kernel(operands, *tables)
        out = kernel(_with_all_keys(operands, tokens), *tables)
        if out.largest is None:
            return out
        return out._replace(largest=jax.lax.pmax(jax.lax.stop_gradient(out.largest), tokens))

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, table_specs)[: len(arguments)],
        out_specs=Attended(*layouts),
        check_vma=False,
    )
    return split(tuple(operands), *arguments[1:])


def _with_all_keys(operands: Operands, axis: str) -> Operands:
    """Keys and values of whole rows, for a device's own queries."""
    k, v = (jax.lax.all_gather(x, axis, axis=2, tiled=True) for x in (operands.k, operands.v))
    of = operands.mask_inputs
    positions, segments = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (of.k_positions, of.k_segments))
    images = None if of.k_images is None else jax.lax.all_gather(of.k_images, axis, axis=1, tiled=True)
    mask_inputs = of._replace(k_positions=positions, k_segments=segments, k_images=images)
    return operands._replace(k=k, v=v, mask_inputs=mask_inputs)


def folded_parts(shards: int) -> list[tuple[int, int]]:
    """Parts of a row, of 2 x `shards`, for each device: the n-th from the front and from the end, the even one first.

    >>> folded_parts(2)
    [(0, 3), (2, 1)]
    """
    last = 2 * shards - 1
    return [(n, last - n) if n % 2 == 0 else (last - n, n) for n in range(shards)]


def with_folded_queries(kernel: Callable[..., Attended], shards: int, operands: Operands, *arguments: Any) -> Attended:
    """Run a kernel with the queries of `folded_parts` on each device, inside `jax.shard_map`: under a causal mask all
    devices then see as many keys. Queries are sent there, outputs back."""
    there = [[(pair[half] // 2, device) for device, pair in enumerate(folded_parts(shards))] for half in (0, 1)]
    back = [[(device, source) for source, device in pairs] for pairs in there]

    def sent(x: Array, by_half: list[list[tuple[int, int]]]) -> Array:
        # A device has an even and an odd part both times.
        halves = zip(jnp.split(x, 2, axis=1), by_half, strict=True)
        return jnp.concatenate([jax.lax.ppermute(half, TOKEN_AXIS, pairs) for half, pairs in halves], axis=1)

    q, of = sent(operands.q, there), operands.mask_inputs
    of = of._replace(q_positions=sent(of.q_positions, there), q_segments=sent(of.q_segments, there))
    out = kernel(operands._replace(q=q, mask_inputs=of), *arguments)
    return out._replace(heads=sent(out.heads, back))
