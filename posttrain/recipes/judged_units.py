"""95 % intervals of the metrics of held-out judged answers: rows of the dataset are independent, their tokens not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from posttrain.batch import Batch, ScoreStats, TokenStats
from posttrain.statistics import difference_of_ratios, ratio_interval
from posttrain.tree import Mean, replace

Stats = TokenStats | ScoreStats


class Sums(NamedTuple):
    """Of N units: of which row of the dataset they are, and by name of the metric its totals and weights."""

    examples: Int[np.ndarray, " N"]
    metrics: Mapping[str, Float[np.ndarray, "2 N"]]


class UnitSums:
    """What each unit adds to the metrics of a loss: those of a batch in which only this unit has weights.

    `only`: what names of metrics begin with that are sums over units.
    """

    def __init__(self, loss: Any, only: tuple[str, ...]):
        self._loss, self._only = loss, only
        self._at = jax.jit(self._at_place)

    def __call__(
        self, stats: Stats, batch: Batch, examples: Int[np.ndarray, "B T"], units: Int[np.ndarray, "B T"]
    ) -> Sums:
        """Of all units of a batch, by one program whatever their number; `examples` and `units` number them."""
        real = np.asarray(batch.segments) > 0
        places = np.cumsum((np.diff(units, axis=1, prepend=-1) != 0) & real, axis=1) * real
        found = []
        for place in range(1, int(places.max()) + 1):
            there = (places == place).any(axis=1)
            first = (places == place).argmax(axis=1)
            means = jax.device_get(self._at(stats, batch, places, place))
            sums = {name: np.stack([mean.total, mean.weight])[:, there] for name, mean in means.items()}
            found.append(Sums(examples[there, first[there]], sums))
        return joined(found)

    def _at_place(
        self, stats: Stats, batch: Batch, places: Int[Array, "B T"], place: Int[Array, ""]
    ) -> dict[str, Mean]:
        """Of the unit with this place in each row."""
        weight = jnp.where(places == place, jnp.asarray(batch.loss_weight), 0.0)

        def of_row(row_stats: Stats, row: Batch) -> dict[str, Mean]:
            output = self._loss(*jax.tree.map(lambda x: jnp.asarray(x)[None], (row_stats, row)))
            named = {"loss": output.loss, **output.metrics}
            return {name: mean for name, mean in named.items() if name.startswith(self._only)}

        return jax.vmap(of_row)(stats, replace(batch, loss_weight=weight))


def joined(parts: Sequence[Sums]) -> Sums:
    metrics = {name: np.concatenate([part.metrics[name] for part in parts], axis=1) for name in parts[0].metrics}
    return Sums(np.concatenate([part.examples for part in parts]), metrics)


def intervals(sums: Sums) -> dict[str, float]:
    """The ends of the interval of each metric; of `rewards/margins` also where it is a difference of two means."""
    _, rows = np.unique(sums.examples, return_inverse=True)
    by_row = {name: np.stack([np.bincount(rows, x) for x in both]) for name, both in sums.metrics.items()}
    # A run that has diverged has no interval.
    known = {name: both for name, both in by_row.items() if both[1].any() and np.isfinite(both).all()}
    found = {name: ratio_interval(*both) for name, both in known.items()}
    sides = [known[name] for name in ("rewards/chosen", "rewards/rejected") if name in known]
    if "rewards/margins" not in by_row and len(sides) == 2:
        found["rewards/margins"] = difference_of_ratios(*sides[0], *sides[1])
    return {
        f"eval/{name}_{end}": value
        for name, interval in found.items()
        for end, value in (("low", interval.low), ("high", interval.high))
    }
