"""Functions of micro-batches, added up or laid side by side, inside of one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from posttrain.batch import Batch, LossOutput
from posttrain.tree import Mean

Micro = Any
"""A pytree of arrays [M, ...]: M micro-batches."""


def sum_over(function: Callable[[Any], Any], micro: Micro, count: Array) -> Any:
    """The sum of a pytree-valued function over the first `count` micro-batches."""
    if num_micro(micro) == 1:
        return function(_at(micro, 0))
    function = jax.jit(function)
    start = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, _at(micro, 0)))

    def body(index: Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, function(_at(micro, index)))

    return jax.lax.fori_loop(0, count, body, start)


def stack_over(function: Callable[[Any], Any], micro: Micro, count: Array) -> Any:
    """The values of a pytree-valued function as arrays [M, ...]; 0 beyond the first `count` micro-batches."""
    function = jax.jit(function)
    shapes = jax.eval_shape(function, _at(micro, 0))
    start = jax.tree.map(lambda s: jnp.zeros((num_micro(micro), *s.shape), s.dtype), shapes)

    def body(index: Array, out: Any) -> Any:
        return jax.tree.map(lambda all, one: all.at[index].set(one), out, function(_at(micro, index)))

    return jax.lax.fori_loop(0, count, body, start)


def num_micro(micro: Micro) -> int:
    return int(jax.tree.leaves(micro)[0].shape[0])


def as_one(micro: Micro) -> Any:
    """[M, rows, ...] as one batch [M * rows, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), micro)


def concatenated(parts: Sequence[Any]) -> Any:
    """Pytrees of host rows as one, the rows of the first first."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


@dataclass(frozen=True)
class Pulled:
    """A loss with a known gradient with respect to the statistics: sum(statistics * cotangents).

    So a loss over a whole batch goes through micro-batches: its gradient with respect to all statistics first, then
    that of each micro-batch's statistics with respect to the parameters. arXiv:2101.06983.
    """

    cotangents: Any

    def __call__(self, stats: Any, batch: Batch) -> LossOutput:
        products = jax.tree.map(lambda s, c: jnp.sum(s * c), stats, self.cotangents)
        return LossOutput(loss=Mean(total=sum(jax.tree.leaves(products)), weight=jnp.zeros(())), metrics={})


def _at(micro: Micro, index: int | Array) -> Any:
    return jax.tree.map(lambda x: x[index], micro)
