"""95 % intervals of preference metrics, clustered by prompt: answers to one prompt are dependent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from posttrain.batch import Batch, ScoreStats, TokenStats
from posttrain.metrics import to_host
from posttrain.statistics import Interval, difference_of_ratios, mean_interval, ratio_interval
from posttrain.tree import Mean, replace

Stats = TokenStats | ScoreStats


class Sums(NamedTuple):
    """Numbers of N units, and the totals and weights of each metric."""

    units: Int[np.ndarray, " N"]
    metrics: Mapping[str, Float[np.ndarray, "2 N"]]


class UnitSums:
    """Metrics of a loss for each unit: those of a batch in which only this unit has weights."""

    def __init__(self, loss: Any):
        self._loss = loss
        self._at = jax.jit(self._at_place)

    def __call__(self, stats: Stats, batch: Batch, units: Int[np.ndarray, "B T"]) -> Sums:
        """Sum over each unit of a batch, with one program for any number of units; `units` numbers them."""
        real = np.asarray(batch.segments) > 0
        places = np.cumsum((np.diff(units, axis=1, prepend=-1) != 0) & real, axis=1) * real
        inputs, found = jax.device_put((stats, batch, places)), []
        measured = jax.device_get([self._at(*inputs, place) for place in range(1, int(places.max()) + 1)])
        for place, means in enumerate(measured, start=1):
            there = (places == place).any(axis=1)
            first = (places == place).argmax(axis=1)
            sums = {name: np.stack([mean.total, mean.weight])[:, there] for name, mean in means.items()}
            found.append(Sums(units[there, first[there]], sums))
        return joined(found)

    def _at_place(
        self, stats: Stats, batch: Batch, places: Int[Array, "B T"], place: Int[Array, ""]
    ) -> dict[str, Mean]:
        """Metrics of the unit at this place in each row."""
        weight = jnp.where(places == place, jnp.asarray(batch.loss_weight), 0.0)

        def of_row(row_stats: Stats, row: Batch) -> dict[str, Mean]:
            output = self._loss(*jax.tree.map(lambda x: jnp.asarray(x)[None], (row_stats, row)))
            return {"loss": output.loss, **output.metrics}

        return jax.vmap(of_row)(stats, replace(batch, loss_weight=weight))


def joined(parts: Sequence[Sums]) -> Sums:
    metrics = {name: np.concatenate([part.metrics[name] for part in parts], axis=1) for name in parts[0].metrics}
    return Sums(np.concatenate([part.units for part in parts]), metrics)


def intervals(sums: Sums, prompts: Int[np.ndarray, " N"], totals: Mapping[str, Mean]) -> dict[str, float]:
    """Interval bounds of each metric that is a sum over units, and of `rewards/margins` as a difference of two means.

    `prompts`: prompt number of each unit. `totals`: the metrics of all units at once. Metrics that are no sums over
    units, such as a loss that compares across the batch, have no interval; nor have metrics of a single prompt, or of a
    model that has diverged.
    """
    known = {name: both for name, both in sums.metrics.items() if _adds_up(both, totals[name])}
    found = {name: interval_of(both[0], both[1], prompts) for name, both in known.items()}
    sides = [known[name] for name in ("rewards/chosen", "rewards/rejected") if name in known]
    if "rewards/margins" not in sums.metrics and len(sides) == 2:
        found["rewards/margins"] = difference_of_ratios(*(_by_prompt(x, prompts) for side in sides for x in side))
    return {
        f"eval/{name}_{end}": value
        for name, interval in found.items()
        for end, value in (("low", interval.low), ("high", interval.high))
        if np.isfinite(value)
    }


def interval_of(totals: np.ndarray, weights: np.ndarray, prompts: Int[np.ndarray, " N"]) -> Interval:
    """Interval of sum(totals) / sum(weights): Wilson's for a share of units with prompts of their own."""
    share = np.isin(totals, (0.0, 1.0)).all() and (weights == 1).all()
    if share and len(np.unique(prompts)) in (1, len(prompts)):
        return mean_interval(totals, prompts)
    found = ratio_interval(_by_prompt(totals, prompts), _by_prompt(weights, prompts))
    is_share = ((totals >= 0) & (totals <= weights)).all()
    return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0)) if is_share else found


def _adds_up(parts: Float[np.ndarray, "2 N"], whole: Mean) -> bool:
    total, weight = to_host({"total": whole.total, "weight": whole.weight}).values()
    size = np.abs(parts).sum(axis=1)
    exact = np.abs(parts.sum(axis=1) - (total, weight)) <= 1e-4 * size
    return bool(np.isfinite(parts).all() and (parts[1] >= 0).all() and size[1] > 0 and exact.all())


def _by_prompt(values: np.ndarray, prompts: Int[np.ndarray, " N"]) -> np.ndarray:
    return np.bincount(np.unique(prompts, return_inverse=True)[1], weights=values)
