"""Activations: the sharding of the residual stream, what is saved for the backward pass, and taps that collect them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from posttrain.batch import Batch
from posttrain.config import Remat, RematName, SavedActivations
from posttrain.errors import ConfigError
from posttrain.mesh import HEAD_AXIS, TOKEN_AXIS, row_axes, row_shards
from posttrain.models.config import AttentionConfig, BlockConfig, ModelConfig, MoEConfig, same_pairs

Axes = tuple[str, ...]
SPLIT: Axes = (TOKEN_AXIS, HEAD_AXIS)
"""Mesh axes of tokens in the residual stream (sequence parallelism, arXiv:2205.05198): sums over `tensor` become a
reduce-scatter, inputs of products an all-gather."""
GATHERED: Axes = (TOKEN_AXIS,)
"""Inputs of products whose outputs `tensor` splits, and gradients of what such products add up to."""


def split_tokens(x: Float[Array, "B T D"], mesh: Mesh | None) -> Float[Array, "B T D"]:
    """Outputs of a layer in the residual stream: tokens over `context` and, where they divide, `tensor`."""
    return _laid_out(x, mesh, SPLIT, GATHERED)


def product_inputs(x: Float[Array, "B T D"], mesh: Mesh | None) -> Float[Array, "B T D"]:
    """Inputs of a layer: tokens over `context` only."""
    return _laid_out(x, mesh, GATHERED, SPLIT)


def whole_rows(x: Float[Array, "B T D"], mesh: Mesh | None) -> Float[Array, "B T D"]:
    """Hidden states of whole rows on each device."""
    return _laid_out(x, mesh, (), SPLIT)


def _laid_out(x: Array, mesh: Mesh | None, forward: Axes, backward: Axes) -> Array:
    """Unchanged on a mesh that splits no tokens, and where its axes do not divide the rows."""
    if mesh is None or x.shape[0] % row_shards(mesh) or all(mesh.shape[axis] == 1 for axis in SPLIT):
        return x
    return _with_gradient(x, mesh, forward, backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _with_gradient(x: Array, mesh: Mesh, forward: Axes, backward: Axes) -> Array:
    """Layouts of values and gradients differ: one that is given by the other's would move weights or hidden widths."""
    return _constrained(x, mesh, forward)


def _forward(x: Array, mesh: Mesh, forward: Axes, backward: Axes) -> tuple[Array, None]:
    return _constrained(x, mesh, forward), None


def _backward(mesh: Mesh, forward: Axes, backward: Axes, saved: None, gradient: Array) -> tuple[Array]:
    return (_constrained(gradient, mesh, backward),)


_with_gradient.defvjp(_forward, _backward)


def _constrained(x: Array, mesh: Mesh, axes: Axes) -> Array:
    while axes and x.shape[1] % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(row_axes(mesh), axes)))


BLOCK_INPUT: RematName = "block_input"
QKV: RematName = "qkv"
ATTENTION: RematName = "attention"
PROJECTION: RematName = "projection"
GATE: RematName = "gate"
UP: RematName = "up"
DOWN: RematName = "down"
"""Checkpoint names of a block's activations: its input; queries, keys and values as far as they are products; the
attention kernel's output with the statistics of its softmax; what it is projected to; products of the MLP or of the
experts, of which `down` is read by norms after it, and by the gradients of routers."""

CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
"""JAX's primitive of the cuDNN kernel, whose statistics have no checkpoint name."""


SAVED_BY: Mapping[str, SavedActivations] = {
    "full": SavedActivations(),
    "dots": SavedActivations(save=(QKV, PROJECTION, GATE, UP, DOWN)),
    "offload": SavedActivations(offload=(BLOCK_INPUT,)),
}
"""Activations that the words of `remat` save; `none` has no list: everything is."""


def shown_remat(remat: Remat) -> str:
    """Word, or lists of activations: `save attention, qkv`."""
    if isinstance(remat, str):
        return remat
    return "; ".join(f"{kind} {', '.join(names)}" for kind, names in remat if names) or "full"


def saved_names(remat: Remat) -> tuple[RematName, ...]:
    """Activations that `remat`, but for `none`, saves."""
    names = SAVED_BY[remat] if isinstance(remat, str) else remat
    return (*names.save, *names.offload)


def rematerialized(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Wrap `function` so that its backward pass saves its inputs and the activations of `remat`, and computes all else
    again."""
    if remat == "none":
        return function
    names = SAVED_BY[remat] if isinstance(remat, str) else remat
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=names.save,
        names_which_can_be_offloaded=names.offload,
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive: Any, *inputs: Any, **parameters: Any) -> Any:
        if primitive.name == CUDNN_FORWARD:
            return ATTENTION in names.save
        return named(primitive, *inputs, **parameters)

    return jax.checkpoint(function, policy=policy)


@dataclass(frozen=True, kw_only=True)
class SavedCost:
    """Cost of an activation in all layers of one batch."""

    bytes: float
    flops: float
    """Operations that it spares the backward pass."""

    def __add__(self, other: SavedCost) -> SavedCost:
        return SavedCost(bytes=self.bytes + other.bytes, flops=self.flops + other.flops)


def saved_costs(
    config: ModelConfig, itemsize: int, rows: int, length: int, slack: float = 1.0
) -> dict[RematName, SavedCost]:
    """Costs of the activations that the backward pass reads, by name. `slack`: rows of the experts' buffers per row
    used."""
    total: dict[RematName, SavedCost] = {}
    for block in config.blocks:
        costs = _attention_costs(block, config, length) | _mlp_costs(block, config, slack)
        for name, (values, flops) in costs.items():
            size = values * itemsize + (4 * block.attention.num_heads if name == ATTENTION else 0)
            cost = SavedCost(bytes=rows * length * size, flops=rows * length * flops)
            total[name] = total[name] + cost if name in total else cost
    return total


Costs = dict[RematName, tuple[float, float]]
"""Numbers and operations per token."""


def _attention_costs(block: BlockConfig, config: ModelConfig, length: int) -> Costs:
    c, embed = block.attention, config.embed_dim
    key_dim, value_dim = c.head_dims
    span = min(c.window or length, length / 2)
    if isinstance(c, AttentionConfig):
        products = 0 if c.reuses else 1 if c.keys_as_values else 2
        named = 2 * products if c.keys_as_values and c.qk_norm is None else products
        qkv = (c.num_heads + named * c.num_kv_heads) * c.head_dim
        qkv_flops = 2.0 * embed * (c.num_heads + products * c.num_kv_heads) * c.head_dim
    else:
        queries, latents = c.num_heads * key_dim, c.kv_rank + c.rope_dim
        expanded = c.num_heads * (c.nope_dim + value_dim)
        qkv = queries + (c.q_rank or 0) + latents + expanded
        of_queries = embed * queries if c.q_rank is None else c.q_rank * (embed + queries)
        qkv_flops = 2.0 * (of_queries + embed * latents + c.kv_rank * expanded)
    out = c.num_heads * value_dim
    return {
        QKV: (float(qkv), qkv_flops),
        ATTENTION: (float(out), 2.0 * c.num_heads * (key_dim + value_dim) * span),
        PROJECTION: (float(embed), 2.0 * out * embed),
    }


def _mlp_costs(block: BlockConfig, config: ModelConfig, slack: float) -> Costs:
    mlp, embed = block.mlp, config.embed_dim
    if isinstance(mlp, MoEConfig):
        rows, hidden, shared = slack * mlp.top_k, mlp.expert.dim, 0 if mlp.shared is None else mlp.shared.dim
        down: tuple[float, float] | None = rows * embed, 2.0 * embed * rows * hidden
    else:
        rows, hidden, shared = 0.0, 0, mlp.dim
        down = (float(embed), 2.0 * embed * shared) if block.norms in ("post", "sandwich") else None
    wide = float(rows * hidden + shared)
    return {GATE: (wide, 2.0 * embed * wide), UP: (wide, 2.0 * embed * wide), **({} if down is None else {DOWN: down})}


def recomputed_flops(config: ModelConfig, remat: Remat, rows: int, length: int) -> float:
    """Operations of products and attention that the backward pass computes again."""
    if remat == "none":
        return 0.0
    costs = saved_costs(config, 1, rows, length)
    return sum(cost.flops for name, cost in costs.items() if name not in saved_names(remat))


def check_saved(config: ModelConfig, remat: Remat) -> None:
    """Raises ConfigError if the backward pass reads none of an activation that `remat` names."""
    if isinstance(remat, str):
        return
    known = [*saved_costs(config, 1, 1, 2), BLOCK_INPUT]
    if unread := [name for name in (*remat.save, *remat.offload) if name not in known]:
        raise ConfigError(
            f"model.remat: the backward pass of {config.model_type} does not read {', '.join(unread)}; it reads "
            f"{', '.join(known)}"
        )


HIDDEN = "hidden"

TapArrays = dict[str, Array]
"""Activations [B, T, W] of one layer by name: `HIDDEN`, the layer's output; `q`, `k` and `v`, projections after their
norms and before RoPE, all heads concatenated."""

Features = dict[int, TapArrays]
"""Collected activations by layer."""


@dataclass(frozen=True, kw_only=True)
class Taps:
    """Layers to collect, by activation name; counted from 0."""

    layers: Mapping[str, frozenset[int]]


class _Slots:
    """Slot of each repeat's array: requested repeats in order, all others share one slot after them."""

    def __init__(self, requested: np.ndarray):
        self.repeats = np.flatnonzero(requested)
        self.slot_of_repeat = np.where(requested, np.cumsum(requested) - 1, len(self.repeats)).astype(np.int32)
        self.size = int(self.slot_of_repeat.max()) + 1


class StageTaps:
    """Taps of one stage. The scan over repeats carries one array [n, B, T, W] per requested activation, so nothing is
    saved for other layers."""

    def __init__(self, taps: Taps, blocks: Sequence[BlockConfig], repeats: int, first: int):
        self._blocks, self._first = blocks, first
        layers = first + np.arange(len(blocks))[:, None] + len(blocks) * np.arange(repeats)
        result = [{name: np.isin(row, list(requested)) for name, requested in taps.layers.items()} for row in layers]
        self._slots = [{name: _Slots(w) for name, w in requested.items() if w.any()} for requested in result]

    def names(self, index: int) -> tuple[str, ...]:
        """Names requested of any repeat of a block."""
        return tuple(self._slots[index])

    def empty(self, x: Float[Array, "B T D"]) -> list[TapArrays]:
        """Allocate the arrays of each block in the pattern."""
        arrays = []
        for block, slots in zip(self._blocks, self._slots, strict=True):
            widths = {HIDDEN: x.shape[-1], **{name: n * h for name, (n, h) in block.attention.projections.items()}}
            arrays.append({name: jnp.zeros((s.size, *x.shape[:2], widths[name]), x.dtype) for name, s in slots.items()})
        return arrays

    def put(self, collected: list[TapArrays], index: int, repeat: int | Array, tapped: TapArrays) -> list[TapArrays]:
        """Store a block's activations."""
        new = {}
        for name, slots in self._slots[index].items():
            slot = jnp.asarray(slots.slot_of_repeat)[repeat]
            new[name] = jax.lax.dynamic_update_index_in_dim(collected[index][name], tapped[name], slot, 0)
        return [new if at == index else old for at, old in enumerate(collected)]

    def by_layer(self, collected: list[TapArrays]) -> Features:
        """Collected activations by layer."""
        result: Features = {}
        for index, block_slots in enumerate(self._slots):
            for name, slots in block_slots.items():
                for place, repeat in enumerate(slots.repeats):
                    layer = self._first + index + len(self._slots) * int(repeat)
                    result.setdefault(layer, {})[name] = collected[index][name][place]
        return result


def attention_flops(config: ModelConfig, rows: int, length: int) -> float:
    """Operations of causal attention in a forward pass over rows of one sequence: 2 (N H + N Hv) per visible pair of
    tokens."""
    heads = ((_pair_width(block), block.attention.window or length) for block in config.blocks)
    return sum((2.0 * width * rows * length * min(window, length / 2) for width, window in heads), 0.0)


def _pair_width(block: BlockConfig) -> int:
    """N H + N Hv: numbers of a pair of tokens in attention."""
    return block.attention.num_heads * sum(block.attention.head_dims)


def batch_flops(config: ModelConfig, active: float, batch: Batch) -> tuple[float, float]:
    """Operations of a forward pass over host rows: of products, 2 for each of the parameters that a token meets, and of
    attention, for the pairs that their masks leave."""
    there = np.asarray(batch.segments) > 0
    before = np.asarray(batch.positions)[there].astype(np.float64) + 1
    attention = 0.0
    for (width, window, ahead), layers in Counter(map(_mask_of, config.blocks)).items():
        pairs = float(np.minimum(before, window or np.inf).sum())
        if ahead and batch.images is not None:
            pairs += ahead_pairs(np.asarray(batch.images))
        attention += 2.0 * layers * width * pairs
    return 2.0 * active * int(there.sum()), attention


def _mask_of(block: BlockConfig) -> tuple[int, int | None, bool]:
    c = block.attention
    return _pair_width(block), c.window, isinstance(c, AttentionConfig) and c.image_ahead > 0


def ahead_pairs(images: Int[np.ndarray, "B T"]) -> float:
    """Pairs of a token and one that follows it in its image."""
    return (same_pairs(images) - float((images > 0).sum())) / 2
