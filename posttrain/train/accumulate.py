"""Gradient accumulation: functions of micro-batches, summed or stacked inside one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from posttrain.batch import Batch, LossOutput
from posttrain.tree import Mean, added

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


@dataclass(frozen=True)
class CotangentLoss:
    """Linear loss sum(statistics * cotangents), given the gradient with respect to the statistics.

    It evaluates a whole-batch loss by micro-batches: first its gradient with respect to all statistics, then the
    gradient of each micro-batch's statistics with respect to the parameters (GradCache, arXiv:2101.06983).
    """

    cotangents: Any

    def __call__(self, stats: Any, batch: Batch) -> LossOutput:
        products = jax.tree.map(lambda s, c: jnp.sum(s * c), stats, self.cotangents)
        return LossOutput(loss=Mean(total=sum(jax.tree.leaves(products)), weight=jnp.zeros(())), metrics={})


def _at(micro: Micro, index: int | Array) -> Any:
    return jax.tree.map(lambda x: x[index], micro)
