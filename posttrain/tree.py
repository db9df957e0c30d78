"""Pytree dataclasses, metrics that merge over micro-batches, steps and hosts (`Mean`, `Max` and `Quantile`), functions
over micro-batches, and exact digests of arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

T = TypeVar("T")

field = dataclasses.field
replace = dataclasses.replace


def static(**kwargs: Any) -> Any:
    """Dataclass field that is part of the tree structure (hashed and compared, never traced)."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, static))
def pytree(cls: type[T]) -> type[T]:
    """Decorator: frozen keyword-only dataclass registered as a JAX pytree; unflattening skips `__init__`.

    Skipping `__init__` lets `jax.tree.map` store shardings, shapes or None in place of arrays, also while jaxtyping
    checks constructors in tests.
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(cast(Any, cls))
    names = [f.name for f in fields]
    statics = [f.name for f in fields if f.metadata.get("static")]
    leaves = [n for n in names if n not in statics]

    def flatten_with_keys(node: Any) -> tuple[Any, Any]:
        children = [(jax.tree_util.GetAttrKey(n), getattr(node, n)) for n in leaves]
        return children, tuple(getattr(node, n) for n in statics)

    def flatten(node: Any) -> tuple[Any, Any]:
        return [getattr(node, n) for n in leaves], tuple(getattr(node, n) for n in statics)

    def unflatten(aux: Any, children: Any) -> Any:
        node = object.__new__(cls)
        for name, value in zip(leaves, children, strict=True):
            object.__setattr__(node, name, value)
        for name, value in zip(statics, aux, strict=True):
            object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


@pytree
class Mean:
    """Sum with its weight, divided at the end: adds exactly over micro-batches, steps and hosts.

    >>> (Mean(total=3.0, weight=2.0) + Mean(total=1.0, weight=2.0)).value()
    1.0
    """

    total: Array | float
    weight: Array | float

    def __add__(self, other: Mean) -> Mean:
        return Mean(total=self.total + other.total, weight=self.weight + other.weight)

    def value(self) -> float:
        """Quotient as a Python float (reads the device); NaN if nothing was counted."""
        weight = float(self.weight)
        return float(self.total) / weight if weight else float("nan")


@pytree
class Max:
    """The largest of some numbers that are not negative: merges by the larger one; a NaN stays.

    >>> (Max(largest=3.0) + Max(largest=1.0)).value()
    3.0
    """

    largest: Array | float

    def __add__(self, other: Max) -> Max:
        return Max(largest=jnp.maximum(self.largest, other.largest))

    def value(self) -> float:
        """The number as a Python float (reads the device)."""
        return float(self.largest)


EDGES = np.geomspace(1e-8, 1e2, 121)
"""Bounds between the buckets of `Quantile`: 12 to a decade."""


@pytree
class Quantile:
    """Quantile of numbers that are not negative, from their counts in buckets between `EDGES`: adds exactly, and is
    read within a bucket, so up to a factor of 1.21. Below the first edge it is 0, and NaN counts as the largest number.

    >>> Quantile.of(jnp.asarray([[1e-3, 2e-3, 5.0]]), jnp.ones((1, 3), bool), share=0.99).value() > 4
    True
    """

    counts: Float[Array | np.ndarray, " K"]
    """Count in each bucket: below the first edge, between two, above the last."""
    share: float = static()

    @classmethod
    def of(cls, values: Float[Array, "B T"], counted: Bool[Array, "B T"], share: float) -> Quantile:
        """Quantile `share` of the values that are counted."""
        last = len(EDGES)
        edge = jnp.clip(jnp.floor(12 * (jnp.log10(values) + 8)) + 1, 0, last)
        buckets = jnp.where(jnp.isnan(values), last, edge).astype(jnp.int32)
        of_rows = jax.vmap(lambda x, bucket: jax.ops.segment_sum(x, bucket, num_segments=last + 1))
        return cls(counts=of_rows(counted.astype(jnp.float32), buckets).sum(axis=0), share=share)

    def __add__(self, other: Quantile) -> Quantile:
        return Quantile(counts=self.counts + other.counts, share=self.share)

    def value(self) -> float:
        """The quantile as a Python float (reads the device); NaN if nothing was counted."""
        counts = np.asarray(self.counts, np.float64)
        below, total = np.cumsum(counts), counts.sum()
        if not total:
            return float("nan")
        bucket = int(np.argmax(below >= self.share * total))
        if bucket in (0, len(EDGES)):
            return 0.0 if bucket == 0 else float(EDGES[-1])
        inside = 1 - (below[bucket] - self.share * total) / counts[bucket]
        return float(EDGES[bucket - 1] * (EDGES[bucket] / EDGES[bucket - 1]) ** inside)


@pytree
class EffectiveShare:
    """Effective sample size of weights as a share of their number, (sum w)^2 / (n sum w^2): 1 for equal weights, 1 / n
    where one has all; adds exactly. Kish, Survey Sampling (1965), section 11.7.

    >>> (EffectiveShare.of(jnp.asarray([2.0]), jnp.ones(1)) + EffectiveShare.of(jnp.zeros(1), jnp.ones(1))).value()
    0.5
    """

    total: Array | float
    squares: Array | float
    count: Array | float

    @classmethod
    def of(cls, weights: Array, counted: Array) -> EffectiveShare:
        """Sums over the weights where `counted` is 1; others may hold any value."""
        weights = jnp.where(counted > 0, weights, 0.0)
        return cls(total=weights.sum(), squares=jnp.square(weights).sum(), count=counted.sum())

    def __add__(self, other: EffectiveShare) -> EffectiveShare:
        return EffectiveShare(
            total=self.total + other.total, squares=self.squares + other.squares, count=self.count + other.count
        )

    def value(self) -> float:
        """The share as a Python float (reads the device); NaN if nothing was counted, 0 if every weight is 0."""
        if not float(self.count):
            return float("nan")
        return float(self.total) ** 2 / (float(self.count) * float(self.squares)) if float(self.squares) else 0.0


@pytree
class Perplexity:
    """Exponential of a mean, of which sum and weight add exactly: perplexity, of -log p.

    >>> (Perplexity(total=2.0, weight=1.0) + Perplexity(total=0.0, weight=0.0)).value() == math.exp(2.0)
    True
    """

    total: Array | float
    weight: Array | float

    def __add__(self, other: Perplexity) -> Perplexity:
        return Perplexity(total=self.total + other.total, weight=self.weight + other.weight)

    def value(self) -> float:
        """The number as a Python float (reads the device); NaN if nothing was counted, inf beyond the range."""
        weight = float(self.weight)
        mean = float(self.total) / weight if weight else math.nan
        return math.inf if mean > MAX_EXPONENT else math.exp(mean)


MAX_EXPONENT = math.log(np.finfo(np.float64).max)

Metric = Mean | Max | Quantile | EffectiveShare | Perplexity
"""A number that a loss gives beside itself; `+` merges those of two micro-batches."""


def added(one: Any, other: Any) -> Any:
    """Merge two trees of one structure: arrays by their sum, `Max` by the larger."""
    return jax.tree.map(lambda a, b: a + b, one, other, is_leaf=lambda node: isinstance(node, Max))


def added_up(stacked: Any) -> Any:
    """Merge what a tree of arrays [M, ...] holds along M, as `added` would one after the other."""

    def all_of(node: Any) -> Any:
        return Max(largest=jnp.max(node.largest, axis=0)) if isinstance(node, Max) else jnp.sum(node, axis=0)

    return jax.tree.map(all_of, stacked, is_leaf=lambda node: isinstance(node, Max))


def added_over(tree: Any, axes: tuple[str, ...]) -> Any:
    """Merge the trees of all devices along mesh axes, inside `jax.shard_map`, as `added` would."""

    def merge(node: Any) -> Any:
        # A NaN stays, which a maximum over devices may lose.
        return added_up(jax.lax.all_gather(node, axes)) if isinstance(node, Max) else jax.lax.psum(node, axes)

    return jax.tree.map(merge, tree, is_leaf=lambda node: isinstance(node, Max))


Micro = Any
"""Pytree of arrays [M, ...]: M micro-batches."""


def sum_over(function: Callable[[Any], Any], micro: Micro, count: Array) -> Any:
    """Sum a pytree-valued function over the first `count` micro-batches; `Max` metrics keep the largest.

    Sums of several are float32, also of bfloat16 values.
    """
    if num_micro(micro) == 1:
        return function(_at(micro, 0))
    function = jax.jit(function)
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, _wide(s.dtype)), jax.eval_shape(function, _at(micro, 0)))

    def body(index: Array, total: Any) -> Any:
        return added(total, function(_at(micro, index)))

    return jax.lax.fori_loop(0, count, body, start)


def stack_over(function: Callable[[Any], Any], micro: Micro, count: Array) -> Any:
    """Stack the values of a pytree-valued function into arrays [M, ...]; 0 beyond the first `count` micro-batches."""
    function = jax.jit(function)
    shapes = jax.eval_shape(function, _at(micro, 0))
    start = jax.tree.map(lambda s: jnp.zeros((num_micro(micro), *s.shape), s.dtype), shapes)

    def body(index: Array, out: Any) -> Any:
        return jax.tree.map(lambda all, one: all.at[index].set(one), out, function(_at(micro, index)))

    return jax.lax.fori_loop(0, count, body, start)


def _wide(dtype: np.dtype) -> np.dtype:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def num_micro(micro: Micro) -> int:
    return int(jax.tree.leaves(micro)[0].shape[0])


def flatten_micro(micro: Micro) -> Any:
    """Reshape [M, rows, ...] to one batch [M * rows, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), micro)


def concatenated(parts: Sequence[Any]) -> Any:
    """Concatenate pytrees of host rows, in order."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def _at(micro: Micro, index: int | Array) -> Any:
    return jax.tree.map(lambda x: x[index], micro)


def path_str(path: tuple[Any, ...]) -> str:
    """Key path as a dotted string: `stages.0.blocks.0.attention.q.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` with the dotted path as the function's first argument."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_str(path), *leaves), tree, *rest)


def digests(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Digest of every array: its bits as integers, each times an odd number of its place, summed modulo 2^32. Equal
    bits give equal digests on any mesh; another order or another bit does not, but for one chance in billions."""
    # One after the other: those of the host's memory are copied.
    return {path: int(jax.device_get(_digest(_on_device(array)))) for path, array in arrays.items()}


def _on_device(array: Array) -> Array:
    """The array in the memory that its devices compute on."""
    place = array.sharding
    device: Any = next(iter(place.device_set))
    memory = device.default_memory().kind
    return array if place.memory_kind in (None, memory) else jax.device_put(array, place.with_memory_kind(memory))


@jax.jit
def _digest(array: Array) -> Array:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    unsigned = np.dtype(f"uint{8 * min(array.dtype.itemsize, 4)}")
    bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    # An avalanche of place and bits, so that exchanged or shifted values do not cancel.
    mixed = (bits ^ (place * jnp.uint32(0x9E3779B1))) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
