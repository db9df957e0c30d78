"""Pytree dataclasses, and metrics that merge over micro-batches, steps and hosts: `Mean`, `Max` and `Quantile`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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


EDGES = np.geomspace(1e-8, 1e2, 121, dtype=np.float32)
"""Numbers between which `Quantile` counts: 12 to a decade."""


@pytree
class Quantile:
    """Quantile of numbers that are not negative, by their counts above each of `EDGES`: adds exactly, and is read
    between two edges, so within a factor of 1.21 of a number of the sample. Below the first edge it is 0, and NaN
    counts as the largest number.

    >>> Quantile.of(jnp.asarray([1e-3, 2e-3, 5.0]), jnp.ones(3, bool), share=0.99).value() > 4
    True
    """

    above: Float[Array | np.ndarray, " K"]
    """Count above each edge."""
    count: Array | float
    share: float = static()

    @classmethod
    def of(cls, values: Float[Array, "*N"], counts: Bool[Array, "*N"], share: float) -> Quantile:
        """Quantile `share` of the values that count."""
        edges = EDGES.reshape((1,) * values.ndim + (-1,))
        above = jnp.sum(counts[..., None] & ~(values[..., None] <= edges), axis=range(values.ndim), dtype=jnp.float32)
        return cls(above=above, count=jnp.sum(counts, dtype=jnp.float32), share=share)

    def __add__(self, other: Quantile) -> Quantile:
        return Quantile(above=self.above + other.above, count=self.count + other.count, share=self.share)

    def value(self) -> float:
        """The quantile as a Python float (reads the device); NaN if nothing was counted."""
        above, count = np.asarray(self.above, np.float64), float(self.count)
        if not count:
            return float("nan")
        beyond = (1 - self.share) * count
        if above[-1] > beyond:
            return float(EDGES[-1])
        first = int(np.argmax(above <= beyond))
        if first == 0:
            return 0.0
        inside = np.clip((above[first - 1] - beyond) / max(above[first - 1] - above[first], 1.0), 0.0, 1.0)
        return float(EDGES[first - 1] * (EDGES[first] / EDGES[first - 1]) ** inside)


Metric = Mean | Max | Quantile
"""A number that a loss gives beside itself; `+` merges those of two micro-batches."""


def added(one: Any, other: Any) -> Any:
    """Merge two trees of one structure: arrays by their sum, `Max` by the larger."""
    return jax.tree.map(lambda a, b: a + b, one, other, is_leaf=lambda node: isinstance(node, Max))


def added_up(stacked: Any) -> Any:
    """Merge what a tree of arrays [M, ...] holds along M, as `added` would one after the other."""

    def all_of(node: Any) -> Any:
        return Max(largest=jnp.max(node.largest, axis=0)) if isinstance(node, Max) else jnp.sum(node, axis=0)

    return jax.tree.map(all_of, stacked, is_leaf=lambda node: isinstance(node, Max))


def path_str(path: tuple[Any, ...]) -> str:
    """Key path as a dotted string: `stages.0.blocks.0.attention.q.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` with the dotted path as the function's first argument."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_str(path), *leaves), tree, *rest)
